"""The benchmark tools by numbers, and benchmark/run.py as a user runs it."""

import csv
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import acpo_continuous
import envs
from benchmark import report, run, throughput

ROOT = Path(__file__).resolve().parent.parent
BATCH = 256
TINY = {"batch-size": BATCH, "num-envs": 8, "eval-every": 0}
LQR = "ConstrainedLQR__acpo_continuous__"


# run.py: what it plans


@pytest.mark.parametrize(
    ("algorithm", "env_id", "expected"),
    [
        ("acpo_continuous", "PointGather", {"hidden-sizes": (64, 32), "log-std-init": -1.0}),
        ("pcpo_continuous", "Grid", {"hidden-sizes": (16, 16), "log-std-init": -1.0}),
        ("cpo_continuous", "Bottleneck", {"hidden-sizes": (50, 25), "log-std-init": -1.0}),
        ("atrpo_lagrangian", "AntCircle", {"ell": 0.60, "log-std-init": -0.5}),
        ("atrpo_lagrangian", "AntGather", {"ell": 0.45, "log-std-init": -0.5}),
        ("ppo_lagrangian", "PointGather", {"ell": 0.55, "log-std-init": -0.5}),
        ("ppo_lagrangian", "Grid", {"ell": 0.60, "hidden-sizes": (16, 16)}),
    ],
)
def test_the_paper_suite_is_the_papers_tables(algorithm, env_id, expected):
    common = {"batch-size": 2500, "total-timesteps": 100_000, "gae-lambda": 0.95, "delta": 1e-4}
    common |= {"cost-gae-lambda": 0.95, "critic-learning-rate": 2e-4, "backtrack-coef": 0.75}
    common |= {"backtrack-iterations": 10, "cg-iterations": 10, "recovery-t": 0.75, "gamma": 0.999}
    common |= {"hold": "literal", "integral-gain": 0}
    flags = run.SUITES["paper"].flags_of(algorithm, env_id)
    assert {name: flags[name] for name in common | expected} == common | expected
    assert 2500 % flags["num-envs"] == 0


@pytest.mark.parametrize(("suite", "count"), [("paper", 30), ("practical", 24), ("quick", 2)])
def test_suites_have_the_seeds_that_they_promise(suite, count):
    runs = run.plan(run.Args(suite=suite, algorithms=("acpo_continuous",)))
    assert len({r.name for r in runs}) == len(runs) == count


def test_the_practical_suite_knows_the_limit():
    """Its only flag: the multiplier of the Lagrangian scripts is learned, the others have none."""
    for planned in run.plan(run.Args(suite="practical", envs=("PointGather",), seeds=(1,))):
        lagrangian = planned.algorithm in ("atrpo_lagrangian", "ppo_lagrangian")
        assert planned.flags == ({"adaptive": []} if lagrangian else {})


def test_the_practical_suite_gives_bottleneck_a_limit_that_can_be_met():
    for planned in run.plan(run.Args(suite="practical", envs=("Bottleneck",))):
        wanted = {"cost-limit": ["0.2"], "total-timesteps": ["600000"]}
        assert wanted.items() <= planned.flags.items()


def test_set_wins_over_the_suite():
    fixed = (("total-timesteps", "7"), ("cost-limit", "0.3"))
    args = run.Args(algorithms=("acpo_continuous",), envs=("Bottleneck",), seeds=(1,), set=fixed)
    (planned,) = run.plan(args)
    assert planned.flags == {"total-timesteps": ["7"], "cost-limit": ["0.3"]}


def test_flags_of_a_script_are_read_without_running_it():
    fields = dataclasses.fields(acpo_continuous.Args)
    assert run.script_flags("acpo_continuous") == {f.name.replace("_", "-") for f in fields}


def test_every_flag_of_a_suite_belongs_to_some_script():
    if not all((ROOT / f"{name}.py").exists() for name in run.ALGORITHMS):
        pytest.skip("not all six scripts are there")
    known = set().union(*map(run.script_flags, run.ALGORITHMS))
    for name, suite in run.SUITES.items():
        tables = (suite.by_algorithm, suite.by_env, suite.by_both)
        parts = [suite.flags, *(flags for table in tables for flags in table.values())]
        unknown = {flag for flags in parts for flag in flags if not run.has(known, flag)}
        assert not unknown, name


@pytest.fixture
def fake_scripts(tmp_path, monkeypatch):
    """A folder with two scripts: one has --recovery-t, both tell what they were started with."""
    body = """
import os
class Args:
    env_id: str = ""
    delta: float = 1.0
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
print("last 20 %:", cores, os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"])
"""
    extra = "    delta: float = 1.0\n    recovery_t: float = 1.0\n    track: bool = False\n"
    (tmp_path / "cpo_continuous.py").write_text(body)
    (tmp_path / "acpo_continuous.py").write_text(body.replace("    delta: float = 1.0\n", extra))
    monkeypatch.setattr(run, "ROOT", tmp_path)
    return ("cpo_continuous", "acpo_continuous")


def test_a_sweep_is_a_product_and_leaves_other_scripts_alone(fake_scripts):
    sweep = (("recovery-t", "0", "1"), ("delta", "0.1", "0.2", "0.1"))
    fixed = (("no-track",), ("delta", "9"))
    runs = run.plan(
        run.Args(algorithms=fake_scripts, envs=("X",), seeds=(3,), sweep=sweep, set=fixed)
    )
    assert [r.name for r in runs] == [
        "X__cpo_continuous__3__delta=0.1",
        "X__cpo_continuous__3__delta=0.2",
        "X__acpo_continuous__3__recovery-t=0__delta=0.1",
        "X__acpo_continuous__3__recovery-t=0__delta=0.2",
        "X__acpo_continuous__3__recovery-t=1__delta=0.1",
        "X__acpo_continuous__3__recovery-t=1__delta=0.2",
    ]
    assert runs[1].flags == {"delta": ["0.2"]}
    assert runs[-1].flags == {"no-track": [], "delta": ["0.2"], "recovery-t": ["1"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": -1}, "--workers -1"),
        ({"sweep": (("delta",),)}, "--sweep delta: needs a flag and its values"),
        ({"set": (("seed", "1"),)}, "--set seed: is set by the benchmark"),
        ({"set": (("recover", "1"),)}, "--set recover: no chosen script"),
        (
            {"sweep": (("delta", "1"), ("delta", "2"))},
            "--sweep delta: is given twice; give all its values at once",
        ),
        (
            {"envs": ("a:X", "b:X"), "seeds": (1,)},
            "--envs a:X b:X: both runs would be X__cpo_continuous__1",
        ),
        ({"algorithms": ("bvf_ppo",)}, "bvf_ppo.py does not exist"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(fake_scripts, capsys, change, message):
    with pytest.raises(SystemExit) as stopped:
        run.plan(run.Args(**{"algorithms": fake_scripts} | change))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


# run.py: one run


def make_run(seed: int = 1, **flags) -> run.Run:
    return run.Run("cpo_continuous", "X", seed, {k: [str(v)] for k, v in flags.items()}, {})


def test_a_run_has_one_core_and_one_thread(fake_scripts, tmp_path):
    outcome = run.execute(make_run(), tmp_path)
    assert (outcome.exit_code, outcome.line) == (0, "last 20 %: 1 1 1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"delta": "x"}, "Error parsing --delta: could not convert string to float: 'x'"),
        ({"deltas": "1"}, "Unrecognized options: --deltas, 1"),
        (
            {"hold": "x"},
            "invalid choice 'x' for argument '--hold'. "
            "Expected one of ('a first long name', 'a second long name').",
        ),
    ],
)
def test_the_error_of_a_refused_flag_is_what_tyro_says(
    fake_scripts, tmp_path, monkeypatch, flags, message
):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # would draw another box
    (tmp_path / "cpo_continuous.py").write_text("""
import dataclasses, typing, tyro
@dataclasses.dataclass
class Args:
    env_id: str
    seed: int
    run_dir: str
    delta: float = 1.0  # how long a step is
    hold: typing.Literal["a first long name", "a second long name"] = "a first long name"
tyro.cli(Args)
""")
    outcome = run.execute(make_run(**flags), tmp_path)
    assert (outcome.exit_code, outcome.line) == (2, f"exit code 2: {message}")


@pytest.mark.parametrize("end", ["", "\n", "\n-----\n\n"])
def test_the_error_of_a_script_is_its_last_line(tmp_path, end):
    (tmp_path / "stderr.txt").write_text("Traceback\n  a line\nerror: why" + end)
    assert run.error_in(tmp_path / "stderr.txt") == "error: why"


def test_runs_at_a_time_have_different_cores_while_there_are_any(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # not the locks of other benchmarks
    monkeypatch.setattr(os, "sched_setaffinity", None, raising=False)
    monkeypatch.setattr(run, "usable_cores", lambda: [4, 7])
    with run.own_core() as one:
        with run.own_core() as two, run.own_core() as three:
            assert (one, two) == (4, 7) and three in (4, 7)
        with run.own_core() as again:
            assert again == 7


def test_a_run_is_never_started_twice_at_once(fake_scripts, tmp_path):
    (tmp_path / make_run().name).mkdir()
    with open(tmp_path / make_run().name / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = run.execute(make_run(), tmp_path)
    assert (outcome.exit_code, outcome.line) == (2, "another process is at work on it")
    assert not (tmp_path / make_run().name / "record.json").exists()


def test_the_run_folder_of_an_environment_with_a_namespace_is_found(tmp_path):
    flags = acpo_continuous.Args(env_id="some.module:ns/Env-v0", run_dir=str(tmp_path))
    folder = Path(envs.Log(flags, "acpo_continuous.py").folder)
    assert folder.parent == tmp_path and folder.name.startswith("ns-Env-v0__acpo_continuous__1__")
    assert run.run_folder(tmp_path) == folder
    flags.resume = str(folder)
    assert Path(envs.Log(flags, "acpo_continuous.py").folder) == folder


def test_a_run_does_not_need_git(fake_scripts, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run.execute(make_run(), tmp_path).exit_code == 0
    (attempt,) = record_in(tmp_path, make_run().name)["attempts"]
    assert attempt["commit"] == "" and attempt["uncommitted_changes"] is False


def test_only_changes_of_files_that_git_knows_are_uncommitted(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    (tmp_path / "known.py").write_text("1")
    author = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (["init"], ["add", "."], [*author, "commit", "-m", "x"]):
        run.git(*words)
    (tmp_path / "new.py").write_text("1")
    attempt = run.new_attempt(["python"])
    assert len(attempt["commit"]) == 40 and attempt["uncommitted_changes"] is False
    (tmp_path / "known.py").write_text("2")
    assert run.new_attempt(["python"])["uncommitted_changes"] is True


def test_a_run_that_another_process_has_finished_is_not_started(fake_scripts, tmp_path):
    write_run(tmp_path, "X", "cpo_continuous", 1, [1.0], [0.0])
    outcome = run.execute(make_run(), tmp_path)
    assert (outcome.exit_code, outcome.line) == (0, "another process has finished it")
    assert exit_codes(tmp_path, make_run().name) == [0]


def test_an_error_of_the_disk_is_the_failure_of_one_run(fake_scripts, tmp_path):
    one, two = make_run(1), make_run(2)
    (tmp_path / one.name).write_text("in the way")
    failed, done = (run.execute(each, tmp_path) for each in (one, two))
    assert (failed.name, failed.exit_code, done.exit_code) == (one.name, 1, 0)
    assert one.name in failed.line and "File exists" in failed.line


def test_a_run_with_other_flags_is_not_taken_for_this_one(tmp_path, capsys):
    home = tmp_path / make_run().name
    write_run(tmp_path, "X", "cpo_continuous", 1, [1.0], [0.0], flags={"delta": ["1"]})
    assert run.is_finished(make_run(delta=1), home)
    with pytest.raises(SystemExit) as stopped:
        run.is_finished(make_run(delta=2), home)
    assert stopped.value.code == 2
    assert "was made with another delta: choose another --out" in capsys.readouterr().err


def test_an_out_that_is_a_file_is_refused(fake_scripts, tmp_path, capsys):
    file = tmp_path / "cpo_continuous.py"
    for out in (file, file / "below"):
        with pytest.raises(SystemExit) as stopped:
            run.main(run.Args(algorithms=fake_scripts, envs=("X",), out=out))
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --out {out}: must be a folder")


@pytest.mark.parametrize("text", ["", '{"algorithm": "cpo'])
def test_a_broken_record_is_named(fake_scripts, tmp_path, capsys, text):
    write_run(tmp_path, "X", "cpo_continuous", 1, [1.0], [0.0])
    path = tmp_path / make_run().name / "record.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        run.is_finished(make_run(), path.parent)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: cannot be read (")
    outcome = run.execute(make_run(), tmp_path)
    assert outcome.exit_code == 1 and outcome.line.startswith(f"{path}: cannot be read (")
    assert path.read_text() == text


# run.py: as a user runs it, with the real script


def benchmark(out: Path, total: int, *words: str) -> list[str]:
    command = [sys.executable, str(ROOT / "benchmark" / "run.py"), "--out", str(out)]
    command += ["--algorithms", "acpo_continuous", "--envs", "ConstrainedLQR", *words]
    for flag, value in (TINY | {"total-timesteps": total}).items():
        command += ["--set", flag, str(value)]
    return command


def finish(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def record_in(out: Path, name: str) -> dict:
    return json.loads((out / name / "record.json").read_text())


def exit_codes(out: Path, name: str) -> list[int]:
    return [attempt["exit_code"] for attempt in record_in(out, name)["attempts"]]


def steps_in(out: Path, name: str) -> list[int]:
    with open(out / name / record_in(out, name)["folder"] / "progress.csv") as file:
        return [int(row["global_step"]) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_interrupt_resume_failure_and_skip(tmp_path):
    """Three runs: one is interrupted, one has lost its checkpoint, one cannot work."""
    iterations, values = 30, ("0.01", "0.02", "7")
    stopped, unborn, bad = (f"{LQR}1__delta={value}" for value in values)
    command = benchmark(tmp_path, iterations * BATCH, "--seeds", "1", "--sweep", "delta", *values)
    shown = finish([*command, "--dry-run"])
    assert shown.returncode == 0 and not list(tmp_path.iterdir())
    assert ["--delta 7" in line for line in shown.stdout.splitlines()] == [False, False, True]

    process = subprocess.Popen([*command, "--workers", "1"], stderr=subprocess.PIPE)
    for _ in range(3000):
        if list(tmp_path.glob(f"{stopped}/*/checkpoint.pt")):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"interrupted; the same command goes on" in errors and b"failed: " not in errors
    assert exit_codes(tmp_path, stopped) == [128 + signal.SIGTERM]
    assert 1 <= len(steps_in(tmp_path, stopped)) < iterations
    assert [path.name for path in tmp_path.iterdir()] == [stopped]

    # The second as if it had been killed between its flags and its first checkpoint
    arguments = tmp_path / stopped / record_in(tmp_path, stopped)["folder"] / "args.json"
    record = json.loads(arguments.read_text())
    record["args"]["delta"] = 0.02
    (tmp_path / unborn / "a_folder").mkdir(parents=True)
    (tmp_path / unborn / "a_folder" / "args.json").write_text(json.dumps(record))

    done = finish(command)
    assert done.returncode == 1
    (failure,) = (line for line in done.stderr.splitlines() if line.startswith("failed: "))
    assert failure.startswith(f"failed: {bad}: exit code 2: error: --delta 7.0: must be in")
    assert "3 runs: 0 finished, 2 to resume" in done.stdout
    codes = [exit_codes(tmp_path, name) for name in (stopped, unborn, bad)]
    assert codes == [[128 + signal.SIGTERM, 0], [0], [2]]
    for name in (stopped, unborn):
        assert "--resume" in record_in(tmp_path, name)["attempts"][-1]["command"]
        assert steps_in(tmp_path, name) == [BATCH * i for i in range(1, iterations + 1)]
    assert record_in(tmp_path, unborn)["folder"] == "a_folder"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    attempt = record_in(tmp_path, stopped)["attempts"][0]
    assert attempt["commit"] == head.stdout.strip() and attempt["seconds"] > 0

    again = finish([*command, "--dry-run"]).stdout.splitlines()
    assert again[:2] == [f"# finished: {stopped}", f"# finished: {unborn}"]
    assert "acpo_continuous.py --env-id" in again[2]
    third = finish([word for word in command if word != "7"])
    assert third.returncode == 0 and "2 runs: 2 finished, 0 to resume" in third.stdout
    assert exit_codes(tmp_path, unborn) == [0]

    # The report reads what the script itself has found
    runs, unfinished = report.read_runs((tmp_path,))
    assert (len(runs), unfinished) == (2, 1)
    summary = (tmp_path / stopped / "stdout.txt").read_text().splitlines()[1]
    printed = f"reward {runs[0].reward:.4g} and cost {runs[0].cost:.4g} per step (limit 0.2)"
    assert summary == f"last 20 %: {printed}"


# report.py


def write_run(
    out, env_id, algorithm, seed, rewards, costs, batch=1000, limit=0.1, **changes
) -> None:
    """A finished run with a row for each reward, as run.py and a script leave it."""
    name = f"{env_id}__{algorithm}__{seed}" + "".join(
        f"__{flag}={value}" for flag, value in changes.get("sweep", {}).items()
    )
    attempt = {"exit_code": 0, "commit": "a" * 40, "uncommitted_changes": False}
    record = {"env_id": env_id, "algorithm": algorithm, "seed": seed, "sweep": {}, "flags": {}}
    record |= {"folder": "the_run", "attempts": [attempt]} | changes
    folder = out / name / "the_run"
    folder.mkdir(parents=True)
    (out / name / "record.json").write_text(json.dumps(record))
    (folder / "args.json").write_text(json.dumps({"args": {}, "commit": "a" * 40}))
    with open(folder / "progress.csv", "w") as file:
        tags = "charts/avg_reward charts/avg_cost charts/cost_limit charts/SPS"
        print("global_step", *tags.split(), "eval/avg_reward", "eval/avg_cost", sep=",", file=file)
        for i, (reward, cost) in enumerate(zip(rewards, costs, strict=True)):
            evaluated = (reward + 1, cost + 1) if i == len(rewards) - 2 else ("nan", "")
            speed = 50.0 if i == len(rewards) - 1 else 40.0
            print(batch * (i + 1), reward, cost, limit, speed, *evaluated, sep=",", file=file)


def groups_in(out: Path) -> dict:
    return report.group_runs(report.read_runs((out,))[0])


@pytest.mark.parametrize(
    ("values", "interval"),
    [
        ([7.0], None),
        ([2.0, 2.0, 2.0], (2.0, 2.0)),
        ([0.0, 1.0], (0.0, 1.0)),  # a quarter of all resamples is (0, 0), a quarter (1, 1)
        # The mean of a resample is Binomial(5, 0.2): 33 % are 0, 0.7 % above 3, 5.1 % equal to 3
        ([0.0, 0.0, 0.0, 0.0, 5.0], (0.0, 3.0)),
    ],
)
def test_bootstrap_interval_of_known_cases(values, interval):
    assert report.bootstrap(values) == interval


def test_bootstrap_interval_of_many_values_is_the_normal_one():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = report.bootstrap(values)
    half = 1.96 * values.std() / 20.0
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


def test_a_run_is_read_from_its_files(tmp_path):
    costs = [0.2, 0.1, 0.0, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.15]  # the fifth of 12 is 2
    write_run(tmp_path, "PointGather", "acpo_continuous", 4, range(12), costs)
    unfinished = [{"exit_code": None, "commit": "", "uncommitted_changes": False}]
    write_run(tmp_path, "PointGather", "acpo_continuous", 5, [1], [1], attempts=unfinished)
    (only,), left_out = report.read_runs((tmp_path,))
    assert left_out == 1
    assert (only.reward, only.cost, only.limit) == pytest.approx((10.5, 0.1, 0.1))
    assert only.violation == pytest.approx(0.25)  # 0.2, 0.3, 0.15; a cost at the limit is none
    assert (only.eval_reward, only.eval_cost) == pytest.approx((11.0, 1.05))
    assert (only.steps, only.steps_per_second, only.seconds) == (12_000, 50.0, 240.0)
    assert (only.seed, only.commit) == (4, "aaaaaaa")


def test_runs_of_several_folders_are_compared_at_equal_steps(tmp_path):
    long, short = tmp_path / "long", tmp_path / "short"
    write_run(long, "X", "acpo_continuous", 1, range(10), [0.1] * 10)
    write_run(short, "X", "cpo_continuous", 1, range(5), [0.1] * 5)
    runs, _ = report.read_runs((long, short), steps=5000)
    assert [(run.algorithm, run.steps, run.reward) for run in runs] == [
        ("acpo_continuous", 5000, 4.0),
        ("cpo_continuous", 5000, 4.0),
    ]
    assert [run.steps for run in report.read_runs((long, short))[0]] == [10_000, 5000]


def refusal(capsys, *folders: Path, **options) -> str:
    """The one line with which a report of these folders is refused."""
    with pytest.raises(SystemExit) as stopped:
        report.main(report.Args(folders, **options))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_folder_with_nothing_in_it_is_refused(tmp_path, capsys):
    write_run(tmp_path / "good", "X", "acpo_continuous", 1, [1.0], [0.0])
    (tmp_path / "empty").mkdir()
    for name in ("mistyped", "empty"):
        line = refusal(capsys, tmp_path / "good", tmp_path / name)
        assert line.startswith(f"error: {tmp_path / name}: is no folder with a results.csv or with")
    assert refusal(capsys).startswith("error: no folder is given")


@pytest.mark.parametrize("count", [300, 103])  # 103 and 102 make 51 points each
def test_seeds_of_different_length_are_not_averaged(tmp_path, capsys, count):
    write_run(tmp_path, "X", "acpo_continuous", 1, [1.0] * count, [0.0] * count)
    write_run(tmp_path, "X", "acpo_continuous", 2, [1.0] * 102, [0.0] * 102)
    found = f"steps {count},000 (seed 1) and steps 102,000 (seed 2)"
    line = refusal(capsys, tmp_path)
    assert line == f"error: X, ACPO: {found}: choose --steps N to read all up to N"
    assert not (tmp_path / "report").exists()
    report.check(report.group_runs(report.read_runs((tmp_path,), 102_000)[0]))


def test_seeds_with_different_limits_are_not_averaged(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    for seed in (1, 2):
        write_run(one, "X", "acpo_continuous", seed, [1.0], [0.0])
    report.write_csv(one, groups_in(one))  # an earlier report: it knows of no flag
    write_run(two, "X", "acpo_continuous", 3, [1.0], [0.0], limit=0.2)
    found = "limit 0.1 (seed 1, 2) and limit 0.2 (seed 3)"
    assert refusal(capsys, one, two) == f"error: X, ACPO: {found}: report them apart"


def test_seeds_of_different_batch_size_are_not_averaged(tmp_path, capsys):
    write_run(tmp_path, "X", "acpo_continuous", 1, [1.0] * 4, [0.0] * 4)
    write_run(tmp_path, "X", "acpo_continuous", 2, [1.0] * 2, [0.0] * 2, batch=2000)
    assert "X, ACPO: its seeds differ in --batch-size" in refusal(capsys, tmp_path)


def test_a_report_goes_on_from_an_earlier_one(tmp_path, capsys):
    """The run folders of another day or machine are gone; its report and new runs make the next."""
    old, new, gone = (tmp_path / name for name in ("old", "new", "gone"))
    noise = np.random.default_rng(0).normal(size=(2, 250))
    for seed, sweep in ((1, {"recovery-t": "0.5"}), (2, {})):
        write_run(gone, "X", "acpo_continuous", seed, *noise, sweep=sweep)
    report.main(report.Args(folders=(gone,), out=old))
    first = (old / "results.md").read_text()
    tables = [(old / name).read_bytes() for name in ("results.csv", "curves.csv")]
    report.main(report.Args(folders=(old,), out=old))  # nothing new: nothing changes
    assert (old / "results.md").read_text() == first
    assert [(old / name).read_bytes() for name in ("results.csv", "curves.csv")] == tables
    (plain, swept), _ = report.read_runs((old,))
    assert (swept.values, plain.values) == ({"recovery-t": "0.5"}, {})
    whole = report.read_runs((gone,))[0]
    for one, two in zip((plain, swept), sorted(whole, key=lambda run: -run.seed), strict=True):
        for name in ("reward", "cost"):
            np.testing.assert_allclose(one.curve[name], report.blocks(two.curve[name]), rtol=1e-4)

    write_run(new, "X", "acpo_continuous", 2, [7.0] * 10, [0.0] * 10)  # again: the later counts
    write_run(new, "Y", "cpo_continuous", 1, [1.0] * 10, [0.0] * 10)
    capsys.readouterr()
    runs, _ = report.read_runs((old, new))
    assert "runs of an earlier folder that a later one has replaced: 1\n" in capsys.readouterr().out
    found = {(run.env_id, run.sweep, run.seed): run.reward for run in runs}
    kept = {("X", "recovery-t=0.5", 1): swept.reward}
    assert found == kept | {("X", "", 2): 7.0, ("Y", "", 1): 1.0}
    with pytest.raises(SystemExit):
        report.read_runs((old,), steps=1000)
    (old / "curves.csv").write_text("env_id\n")
    with pytest.raises(SystemExit):
        report.read_runs((old,))
    errors = capsys.readouterr().err
    assert "--steps 1000" in errors and "old: is not a report that can be read" in errors


def test_a_run_without_a_readable_log_is_named(tmp_path, capsys):
    write_run(tmp_path, "X", "acpo_continuous", 1, [1.0], [0.0])
    (tmp_path / "X__acpo_continuous__1" / "the_run" / "progress.csv").write_text("")
    with pytest.raises(SystemExit) as stopped:
        report.read_runs((tmp_path,))
    assert stopped.value.code == 2
    assert "X__acpo_continuous__1" in capsys.readouterr().err


def test_a_run_without_a_folder_counts_as_not_finished(tmp_path):
    write_run(tmp_path, "X", "acpo_continuous", 1, [1.0], [0.0], folder=None)
    assert report.read_runs((tmp_path,)) == ([], 1)


@pytest.mark.parametrize("text", ["", '{"algorithm": "cpo', "[]", "{}"])
def test_a_broken_record_is_named_by_the_report(tmp_path, capsys, text):
    write_run(tmp_path, "X", "acpo_continuous", 1, [1.0], [0.0])
    path = tmp_path / "X__acpo_continuous__1" / "record.json"
    path.write_text(text)
    assert refusal(capsys, tmp_path).startswith(f"error: {path}: cannot be read (")


def test_fewer_steps_than_a_batch_are_refused(tmp_path, capsys):
    write_run(tmp_path, "X", "acpo_continuous", 1, [1.0], [0.0])
    line = refusal(capsys, tmp_path, steps=999)
    assert line.endswith("the_run/progress.csv: has no iteration within --steps 999")


def test_a_report_into_a_file_is_refused(tmp_path, capsys):
    write_run(tmp_path, "X", "acpo_continuous", 1, [1.0], [0.0])
    file = tmp_path / "X__acpo_continuous__1" / "record.json"
    for out in (file, file / "below"):
        line = refusal(capsys, tmp_path, out=out)
        assert line.startswith(f"error: --out {out}: must be a folder")


def test_a_run_that_is_finished_in_one_folder_is_not_left_out(tmp_path):
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    stopped = {"attempts": [{"exit_code": 1, "commit": "", "uncommitted_changes": False}]}
    for out, changes in ((one, {}), (two, stopped), (three, stopped)):
        sweep = {"delta": "1"}
        write_run(out, "a:X", "acpo_continuous", 1, [1.0], [0.0], sweep=sweep, **changes)
    for folders in ((one, two), (two, one)):
        runs, unfinished = report.read_runs(folders)
        assert (len(runs), unfinished) == (1, 0)
    assert report.read_runs((two, three)) == ([], 1)


def test_bold_is_the_best_that_holds_the_limit_on_average(tmp_path):
    for seed, cost in ((1, 0.09), (2, 0.13)):  # 0.11 on average: just within
        write_run(tmp_path, "PointGather", "acpo_continuous", seed, [2.0], [cost])
    for seed, cost in ((1, 0.09), (2, 0.14)):  # 0.115: not
        write_run(tmp_path, "PointGather", "cpo_continuous", seed, [9.0], [cost])
    write_run(tmp_path, "PointGather", "pcpo_continuous", 1, [1.0], [0.0])
    write_run(tmp_path, "Grid", "pcpo_continuous", 1, [1.0], [0.2])
    groups = groups_in(tmp_path)
    assert report.best_feasible(groups) == {("PointGather", "acpo_continuous", "")}
    rows = [line for line in report.markdown(groups, 0, []).splitlines() if line[:2] == "| "][1:]
    assert ["**" in row for row in rows] == [True, False, False, False]
    assert rows[0].startswith("| PointGather | **ACPO** | 2 | 1,000 | 2 [2, 2] | 0.11 [0.09, 0.13]")
    assert rows[3].startswith("| Grid | PCPO | 1 | 1,000 | 1 | 0.2 | 0.1 | 100% | 50 | 0.3 |")


def test_the_table_at_a_glance(tmp_path):
    for seed, reward in ((1, 2.0), (2, 3.0)):
        write_run(tmp_path, "PointGather", "acpo_continuous", seed, [reward], [0.05])
    write_run(tmp_path, "PointGather", "cpo_continuous", 1, [9.0], [0.2])  # beyond the limit
    write_run(tmp_path, "Grid", "cpo_continuous", 1, [1.25], [0.1])
    head, _, *rows = report.glance(groups_in(tmp_path)).splitlines()
    assert head == "| | PointGather: limit 0.1, n = 1 to 2 | Grid: limit 0.1, n = 1 |"
    assert rows[0] == "| ACPO | **2.50 [2.00, 3.00] at 0.05** | - |"
    assert rows[1] == "| CPO | *9.00 at 0.2* | **1.25 at 0.1** |"


def test_nobody_is_best_where_the_limits_of_a_task_differ(tmp_path):
    for limit in (0.1, 0.2):
        sweep = {"cost-limit": str(limit)}
        write_run(tmp_path, "X", "acpo_continuous", 1, [1.0], [limit], limit=limit, sweep=sweep)
    write_run(tmp_path, "Y", "acpo_continuous", 1, [1.0], [0.1])
    groups = groups_in(tmp_path)
    assert report.best_feasible(groups) == {("Y", "acpo_continuous", "")}
    head, _, *rows = report.glance(groups).splitlines()
    assert head == "| | X: limit 0.1 to 0.2, n = 1 | Y: limit 0.1, n = 1 |"
    assert "| ACPO, cost-limit=0.2 | 1.00 at 0.2 | - |" in rows


def test_all_that_are_equally_good_are_best(tmp_path):
    for algorithm, reward in (("acpo_continuous", 2.0), ("cpo_continuous", 2.0), ("bvf_ppo", 1.0)):
        write_run(tmp_path, "X", algorithm, 1, [reward], [0.0])
    best = {algorithm for _, algorithm, _ in report.best_feasible(groups_in(tmp_path))}
    assert best == {"acpo_continuous", "cpo_continuous"}


def test_the_table_states_every_commit(tmp_path):
    commits = ["b" * 40, "a" * 40]
    attempts = [{"exit_code": 0, "commit": x, "uncommitted_changes": False} for x in commits]
    write_run(tmp_path, "Grid", "acpo_continuous", 1, [1], [0])
    write_run(tmp_path, "Grid", "acpo_continuous", 2, [1], [0], attempts=attempts)
    dirty = [{"exit_code": 0, "commit": "a" * 40, "uncommitted_changes": True}]
    write_run(tmp_path, "Grid", "acpo_continuous", 3, [1], [0], attempts=dirty)
    text = report.markdown(groups_in(tmp_path), 7, [])
    assert "Commit: aaaaaaa; aaaaaaa with uncommitted changes; aaaaaaa+bbbbbbb." in text
    assert "not finished: 7." in text


def test_a_curve_is_the_mean_and_spread_over_seeds_of_block_means(tmp_path):
    assert report.blocks(np.arange(5.0), points=5).tolist() == [0, 1, 2, 3, 4]
    assert report.blocks(np.arange(7.0), points=3).tolist() == [1, 4]  # threes; the 6 is dropped
    write_run(tmp_path, "Grid", "acpo_continuous", 1, [1.0, 2.0, 6.0], [0.0] * 3)
    write_run(tmp_path, "Grid", "acpo_continuous", 2, [3.0, 2.0, 0.0], [0.0] * 3)
    (runs,) = groups_in(tmp_path).values()
    steps, mean, spread = report.mean_curve(runs, "reward")
    assert steps.tolist() == [1000, 2000, 3000] and mean.tolist() == [2.0, 2.0, 3.0]
    assert spread == pytest.approx([np.sqrt(2.0), 0.0, np.sqrt(18.0)])
    assert report.mean_curve(runs[:1], "reward")[2].tolist() == [0.0, 0.0, 0.0]


def test_the_report_of_a_sweep(tmp_path, monkeypatch):
    figures = {}
    save = report.save
    monkeypatch.setattr(
        report, "save", lambda f, path: (figures.update({path.name: f}), save(f, path))[1]
    )
    for value, seed in ((v, s) for v in ("1", "0.25", "0") for s in (1, 2)):
        rewards = [float(value) + seed] * 10
        sweep = {"recovery-t": value}
        write_run(
            tmp_path, "PointCircle", "acpo_continuous", seed, rewards, [0.05] * 10, sweep=sweep
        )
    write_run(tmp_path, "PointCircle", "cpo_continuous", 1, [4.0] * 10, [0.2] * 10)
    report.main(report.Args((tmp_path,)))

    names = {"curves_PointCircle", "curves", "scatter", "throughput", "sweep_recovery-t"}
    names = {f"{name}.png" for name in names}
    assert {path.name for path in (tmp_path / "report").glob("*.png")} == names == set(figures)
    text = (tmp_path / "report" / "results.md").read_text()
    assert all(f"]({name})" in text for name in names)
    assert "**ACPO, recovery-t=1**" in text and text.count("**") == 4  # in both tables
    with open(tmp_path / "report" / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["sweep"], row["seed"], float(row["reward"])) for row in rows[:3]] == [
        ("recovery-t=0", "1", 1.0),
        ("recovery-t=0", "2", 2.0),
        ("recovery-t=0.25", "1", 1.25),
    ]

    reward, cost = figures["sweep_recovery-t.png"].axes
    assert reward.lines[0].get_ydata() == pytest.approx([1.5, 1.75, 2.5])
    assert [tick.get_text() for tick in reward.get_xticklabels()] == ["0", "0.25", "1"]
    for axis in (cost, figures["curves_PointCircle.png"].axes[1]):
        limit = axis.lines[-1]
        assert set(limit.get_ydata()) == {0.1} and limit.get_linestyle() == "--"
    assert len(figures["curves_PointCircle.png"].axes[0].lines) == 4
    band = figures["curves_PointCircle.png"].axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((1.5 - np.sqrt(0.5), 1.5 + np.sqrt(0.5)))
    runs, mean = figures["scatter.png"].axes[0].collections[:2]
    assert runs.get_offsets().tolist() == [pytest.approx((0.05, x)) for x in (1.0, 2.0)]
    assert mean.get_offsets().tolist() == [pytest.approx((0.05, 1.5))]
    limit = figures["scatter.png"].axes[0].lines[0]
    assert set(limit.get_xdata()) == {0.1} and limit.get_linestyle() == "--"
    assert [bar.get_width() for bar in figures["throughput.png"].axes[0].patches] == [50.0] * 4


@pytest.mark.parametrize("values", [1, 30])
def test_a_legend_is_never_cut_off(tmp_path, monkeypatch, values):
    """Also where it is wider or higher than the panels of one task."""
    for value in range(values):
        sweep = {"a-flag-with-a-long-name": str(value)}
        write_run(tmp_path, "X", "atrpo_lagrangian", 1, [1.0] * 2, [0.1] * 2, sweep=sweep)
    figures = {}
    monkeypatch.setattr(report.plt, "close", lambda figure: figures.update({len(figures): figure}))
    groups = groups_in(tmp_path)
    colors = report.colors_of(groups)
    report.draw_curves(tmp_path, "X", groups, colors)
    report.draw_all_curves(tmp_path, groups, colors)
    report.draw_scatter(tmp_path, groups, colors)
    monkeypatch.undo()
    for name, figure in zip(("curves_X", "curves", "scatter"), figures.values(), strict=True):
        legend = figure.legends[0].get_window_extent()
        height, width, _ = report.plt.imread(tmp_path / f"{name}.png").shape
        assert height >= legend.height and width >= legend.width
        panels = figure.axes[0].get_window_extent()
        assert panels.width >= 250 and panels.height >= 200
        assert not legend.overlaps(panels)
        report.plt.close(figure)


@pytest.mark.parametrize("count", [10, 20, 40])
def test_no_two_labels_share_a_colour(count):
    groups = {("X", "acpo_continuous", f"delta={i}"): [] for i in range(count)}
    assert len(set(map(tuple, report.colors_of(groups).values()))) == count


# throughput.py


def test_the_speed_of_training_counts_the_steps_that_were_made():
    times = {"time/rollout": "0.5", "time/update": "1.5", "time/eval": "0"}
    rows = [{"global_step": str(batch * 100), **times} for batch in (1, 2, 3)]
    rows[0] |= {"time/rollout": "99"}  # the first iteration warms up
    rates = throughput.training_rates(rows)
    assert rates["rollout + update"] == (50.0, 1.0)
    assert rates["rollout"] == (200.0, 0.25)
    assert rates["update"] == (pytest.approx(66.667, rel=1e-4), 0.75)
    assert rates["eval"] == (0.0, 0.0)
