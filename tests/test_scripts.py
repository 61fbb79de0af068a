"""acpo_continuous.py as a user runs it: a command line, an exit code, files in a folder."""

import ast
import csv
import importlib.metadata
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import envs
from acpo_continuous import Agent, evaluate

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "acpo_continuous.py"
BATCH, ITERATIONS, HALF = 256, 10, 4
TINY = {
    "env-id": "ConstrainedLQR",
    "batch-size": BATCH,
    "num-envs": 8,
    "total-timesteps": BATCH * ITERATIONS,
    "eval-every": 2,
    "eval-episodes": 2,
    "eval-steps": 50,
}
CLOCKS = ("time/", "charts/SPS")


def command(where: Path, *switches: str, **flags) -> list[str]:
    """The script with --run-dir where; a flag's value may be a list, and None drops the flag."""
    words = [sys.executable, str(SCRIPT), *switches]
    for name, value in ({"run-dir": where} | flags).items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    return words


def run(where: Path, *switches: str, cwd: Path = ROOT, **flags) -> subprocess.CompletedProcess:
    words = command(where, *switches, **flags)
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300)


def finish(where: Path, *switches: str, cwd: Path = ROOT, **flags) -> Path:
    """Run to the end; returns the folder of the run."""
    done = run(where, *switches, cwd=cwd, **flags)
    assert done.returncode == 0, done.stderr[-2000:]
    (where / "stdout").write_text(done.stdout)
    return folder_in(where)


def resume(folder: Path, total: int | None = None) -> str:
    """Go on with a run; returns what it prints."""
    done = run(folder, **{"run-dir": None, "resume": folder, "total-timesteps": total})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def folder_in(where: Path) -> Path:
    (folder,) = (path for path in where.iterdir() if path.is_dir())
    return folder


def read(folder: Path) -> list[dict[str, str]]:
    with open(folder / "progress.csv") as file:
        return list(csv.DictReader(file))


def without_clocks(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in read(folder)]


def column(rows: list[dict[str, str]], tag: str) -> np.ndarray:
    return np.array([float(row[tag]) for row in rows])


def load(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def assert_same(one, other, path: str = "") -> None:
    """Two trees of tensors, numbers and strings are equal bit for bit."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), path
    else:
        assert one == other or (one != one and other != other), path


def assert_same_training(one: Path, other: Path) -> None:
    """All that the next iteration would depend on, and all that was logged, is equal."""
    assert without_clocks(one) == without_clocks(other)
    first, second = load(one), load(other)
    for state in (first, second):
        del state["seconds"], state["args"]
    assert_same(first, second)


def events(folder: Path) -> dict[str, dict[int, float]]:
    """tag -> {step: value}; a step that TensorBoard would show twice is an error."""
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in log.Tags()["scalars"]:
        points = [(event.step, event.value) for event in log.Scalars(tag)]
        assert len(dict(points)) == len(points), tag
        found[tag] = dict(points)
    return found


def documented_tags() -> set[str]:
    text = (ROOT / "docs" / "metrics.md").read_text()
    return set(re.findall(r"^\| `([a-z]+/\w+)`", text, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def pool():
    """Two at a time: most of a tiny run is the start of Python."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """name -> folder of a finished run. `full` is the one that the others are held against."""
    place = {name: tmp_path_factory.mktemp(name) for name in ("full", "again", "other", "half")}
    jobs = {
        "full": pool.submit(finish, place["full"], "--capture-video", **TINY),
        "again": pool.submit(finish, place["again"], **TINY),
        "other": pool.submit(finish, place["other"], cwd=place["other"], **(TINY | {"seed": 2})),
        "half": pool.submit(finish, place["half"], **(TINY | {"total-timesteps": BATCH * HALF})),
    }
    return {name: job.result() for name, job in jobs.items()}


# --- what a run prints and writes -----------------------------------------------------------------


def test_summary(runs):
    lines = (runs["full"].parent / "stdout").read_text().splitlines()
    assert len(lines) == 3
    steps = f"{BATCH * ITERATIONS:,}"
    assert re.fullmatch(rf"ConstrainedLQR: {steps} steps in \d+ s \([\d,]+ steps/s\)", lines[0])
    last = read(runs["full"])[-ITERATIONS // 5 :]
    reward, cost = (column(last, f"charts/avg_{name}").mean() for name in ("reward", "cost"))
    wanted = f"last 20 %: reward {reward:.4g} and cost {cost:.4g} per step (limit 0.2)"
    assert lines[1] == wanted
    assert Path(lines[2].removeprefix("learning curves: ")) == runs["full"] / "curves.png"


def test_folder_name_and_files(runs):
    assert re.fullmatch(r"ConstrainedLQR__acpo_continuous__2__\d{10}", runs["other"].name)
    names = {path.name.split(".tfevents")[0] for path in runs["full"].iterdir()}
    wanted = {"args.json", "progress.csv", "checkpoint.pt", "curves.png", "events.out"}
    assert names == wanted | {"video.gif"}
    assert {p.name.split(".tfevents")[0] for p in runs["again"].iterdir()} == wanted
    with Image.open(runs["full"] / "curves.png") as picture:
        assert min(picture.size) >= 300 and len(set(picture.convert("L").getdata())) > 10


def test_video_moves(runs):
    with Image.open(runs["full"] / "video.gif") as video:
        assert video.format == "GIF" and video.n_frames >= 50
        first = np.asarray(video.convert("RGB"))
        video.seek(video.n_frames // 2)
        assert (np.asarray(video.convert("RGB")) != first).any()


def test_args_json(runs):
    record = json.loads((runs["full"] / "args.json").read_text())
    given = {name.replace("-", "_"): value for name, value in TINY.items()}
    assert given.items() <= record["args"].items()
    assert record["args"]["capture_video"] is True and record["args"]["seed"] == 1
    for package in ("torch", "numpy", "gymnasium", "mujoco", "libsumo"):
        assert record["versions"][package] == importlib.metadata.version(package)


@pytest.mark.parametrize("name", ["full", "other"])  # `other` was started in another folder
def test_commit_is_that_of_the_script(runs, name):
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    here = subprocess.run(git, capture_output=True, text=True)
    if here.returncode:
        pytest.skip("not a git checkout")
    record = json.loads((runs[name] / "args.json").read_text())
    assert record["commit"] == here.stdout.strip()


def test_every_tag_is_documented_and_every_documented_tag_is_logged(runs):
    tags = set(read(runs["full"])[0]) - {"global_step"}
    assert tags == documented_tags() - {"charts/avg_cost_i"}


def test_tensorboard_holds_what_progress_csv_holds(runs):
    rows, log = read(runs["full"]), events(runs["full"])
    assert set(log) == set(rows[0]) - {"global_step"}
    for tag, points in log.items():
        wanted = {int(row["global_step"]): float(row[tag]) for row in rows if row[tag]}
        assert points.keys() == wanted.keys(), tag
        np.testing.assert_allclose(
            [points[step] for step in wanted], list(wanted.values()), rtol=1e-6, err_msg=tag
        )


def test_progress_has_a_row_an_iteration_of_finite_numbers(runs):
    rows = read(runs["full"])
    assert [int(row["global_step"]) for row in rows] == [BATCH * (i + 1) for i in range(ITERATIONS)]
    for i, row in enumerate(rows):
        for tag, value in row.items():
            if tag.startswith("eval/") and (i + 1) % TINY["eval-every"]:
                assert value == "", (i, tag)
            elif tag in ("dual/predicted_dc", "dual/realised_dc") and i == 0:
                assert math.isnan(float(value))  # there is no update before the first
            elif tag == "dual/lam" and float(row["dual/case"]) == 2:
                assert math.isnan(float(value))  # no multiplier where there is no solution
            else:
                assert math.isfinite(float(value)), (i, tag)


def test_logged_numbers_agree_with_one_another(runs):
    rows = read(runs["full"])
    cost, c = column(rows, "charts/avg_cost"), column(rows, "dual/c")
    assert set(column(rows, "charts/cost_limit")) == {0.2}
    np.testing.assert_allclose(c, cost - 0.2, rtol=1e-12)
    np.testing.assert_allclose(
        column(rows, "charts/cumulative_cost"), BATCH * np.cumsum(cost), rtol=1e-9
    )
    np.testing.assert_allclose(column(rows, "dual/realised_dc")[1:], np.diff(cost), rtol=1e-9)
    predicted = column(rows, "dual/predicted_dc")[1:]
    assert (predicted == column(rows, "losses/surrogate_c")[:-1]).all()
    kl, flags = column(rows, "losses/kl"), load(runs["full"])["args"]
    accepted, tries = column(rows, "linesearch/accepted"), column(rows, "linesearch/backtracks")
    assert (kl <= flags["delta"]).all()
    assert ((kl > 0) == (accepted == 1)).all() and (tries >= 0).all()
    assert ((tries > flags["backtrack_iterations"]) == (accepted == 0)).all()
    assert (column(rows, "losses/surrogate_c") <= np.maximum(0, -c)).all()
    integral = np.zeros(1)
    for violation, logged in zip(c, column(rows, "dual/integral"), strict=True):
        integral = np.clip(integral + flags["integral_gain"] * violation, 0, 0.2)
        assert logged == pytest.approx(integral[0], rel=1e-9)
    assert set(column(rows, "dual/case")) <= {0, 1, 2}
    assert (column(rows, "dual/mu") >= 0).all() and accepted.any()


def test_checkpoint_is_the_policy_that_was_evaluated(runs):
    """Loaded as its documentation says, the agent earns exactly what the last row states."""
    state = load(runs["full"])
    assert state["iteration"] == ITERATIONS and state["args"]["env_id"] == "ConstrainedLQR"
    agent = Agent(1, 1, 1, tuple(state["args"]["hidden_sizes"]), 0.0)
    agent.load_state_dict(state["agent"])
    env = envs.make_vec("ConstrainedLQR", 2)
    last = read(runs["full"])[-1]
    for kind, deterministic in (("eval/avg", True), ("eval/stochastic_avg", False)):
        reward, cost = evaluate(agent, env, 2, 50, 1_000_000 + 500_000, deterministic)
        assert reward.mean() == pytest.approx(float(last[f"{kind}_reward"]), rel=1e-9)
        assert cost.mean() == pytest.approx(float(last[f"{kind}_cost"]), rel=1e-9)
        assert cost.std() == pytest.approx(float(last[f"{kind}_cost_std"]), rel=1e-9)


# --- the same again -------------------------------------------------------------------------------


def test_same_seed_same_run(runs):
    assert_same_training(runs["full"], runs["again"])


def test_other_seed_other_run(runs):
    one, other = without_clocks(runs["full"]), without_clocks(runs["other"])
    for tag in ("charts/avg_reward", "charts/avg_cost", "losses/value_r", "losses/kl"):
        assert not set(column(one, tag)) & set(column(other, tag)), tag
    weights = [load(runs[name])["agent"]["actor_mean.0.weight"] for name in ("full", "other")]
    assert not torch.equal(*weights)


def test_resume_goes_on_bit_for_bit(runs):
    folder = runs["half"]
    assert len(read(folder)) == HALF
    resume(folder, total=BATCH * ITERATIONS)
    assert_same_training(folder, runs["full"])
    assert len(events(folder)["charts/avg_cost"]) == ITERATIONS
    seconds = column(read(folder), "global_step") / column(read(folder), "charts/SPS")
    assert (np.diff(seconds) > 0).all()  # the clock goes on too


def test_resume_after_kill_goes_on_bit_for_bit(runs, tmp_path):
    """Killed between two checkpoints, in the middle of writing a row."""
    words = command(tmp_path, **(TINY | {"save-every": 3}))
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        written, deadline = 0, time.monotonic() + 120
        while written < 1 + 5 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
            for path in tmp_path.glob("*/progress.csv"):
                written = path.read_text().count("\n")
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it had ended before the kill"
    folder = folder_in(tmp_path)
    stood = load(folder)["iteration"]
    assert stood % 3 == 0 and 0 < stood < ITERATIONS and len(read(folder)) >= 5
    with open(folder / "progress.csv", "a") as file:
        file.write("99999,1.0,")
    resume(folder)
    assert_same_training(folder, runs["full"])
    assert set(events(folder)["charts/avg_cost"]) == set(events(runs["full"])["charts/avg_cost"])


def test_resume_of_a_finished_run_changes_nothing(runs):
    folder = runs["again"]
    before = (folder / "progress.csv").read_bytes()
    assert len(resume(folder).splitlines()) == 3
    assert (folder / "progress.csv").read_bytes() == before
    assert_same_training(folder, runs["full"])


# --- what cannot work is refused ------------------------------------------------------------------

BAD = {
    "--delta": [{"delta": 0}, {"delta": -1}, {"delta": "inf"}],
    "--recovery-t": [{"recovery-t": 1.5}],
    "--gae-lambda": [{"gae-lambda": 1.0}],
    "--batch-size": [{"batch-size": 100}],
    "--num-envs": [{"num-envs": -1}],
    "--total-timesteps": [{"total-timesteps": BATCH - 1}],
    "--cost-limit": [{"cost-limit": -1}, {"cost-limit": "nan"}, {"cost-limit": [0.1, 0.2]}],
    "--critic-epochs": [{"critic-epochs": 0}],
    "--hidden-sizes": [{"hidden-sizes": -4}],
    "--seed": [{"seed": -1}],
    "--env-id": [{"env-id": "PointCircel"}, {"env-id": "Pendulum-v1", "cost-limit": 0.1}],
    "--resume": [{"resume": "no/such/run"}],
}
BAD = [(flag, values) for flag, cases in BAD.items() for values in cases]


@pytest.fixture(scope="module")
def refusals(pool, tmp_path_factory):
    """(folder, job) per bad command line; started in an empty folder, which must stay empty."""
    jobs = []
    for _, values in BAD:
        where = tmp_path_factory.mktemp("bad")
        jobs.append((where, pool.submit(run, where / "runs", cwd=where, **(TINY | values))))
    return jobs


@pytest.mark.parametrize("i", range(len(BAD)), ids=[" ".join(map(str, bad)) for bad in BAD])
def test_bad_value_is_refused_in_one_line(refusals, i):
    (flag, values), (where, job) = BAD[i], refusals[i]
    done = job.result()
    assert done.returncode == 2, done.stderr[-1000:]
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and done.stdout == "", done.stderr[-1000:]
    name = flag.removeprefix("--")
    first = values[name][0] if isinstance(values[name], list) else values[name]
    assert flag in lines[0] and str(first) in lines[0]
    assert list(where.rglob("*")) == []


def test_unknown_environment_suggests_a_known_one(refusals):
    (i,) = (i for i, (_, values) in enumerate(BAD) if values.get("env-id") == "PointCircel")
    assert "PointCircle" in refusals[i][1].result().stderr


def test_environment_without_cost_is_told_so(refusals):
    (i,) = (i for i, (_, values) in enumerate(BAD) if values.get("env-id") == "Pendulum-v1")
    assert "info['cost']" in refusals[i][1].result().stderr


# --- environments ---------------------------------------------------------------------------------

SHORT = {"total-timesteps": 512, "batch-size": 256, "eval-every": 0}
SUMO = {"total-timesteps": 128, "batch-size": 64, "eval-every": 2} | {
    "eval-episodes": 1,
    "eval-steps": 5,
}
LIMITS = {"PointCircle": 0.1, "PointGather": 0.01, "AntCircle": 0.1, "AntGather": 0.002}
LIMITS |= {"ConstrainedLQR": 0.2, "Grid": 0.1, "Bottleneck": 0.1}


@pytest.fixture(scope="module")
def short_runs(pool, tmp_path_factory):
    jobs = {}
    for env_id in envs.IDS:
        flags = (SUMO if env_id in envs.SUMO else SHORT) | {"env-id": env_id}
        jobs[env_id] = pool.submit(finish, tmp_path_factory.mktemp(env_id), **flags)
    return jobs


@pytest.mark.parametrize("env_id", envs.IDS)
def test_two_iterations_of_each_environment(short_runs, env_id):
    folder = short_runs[env_id].result()
    rows = read(folder)
    assert len(rows) == 2 and set(column(rows, "charts/cost_limit")) == {LIMITS[env_id]}
    for tag in ("charts/avg_reward", "charts/avg_cost", "losses/value_r", "dual/q", "dual/s"):
        assert np.isfinite(column(rows, tag)).all(), tag
    assert (column(rows, "charts/avg_cost") >= 0).all() and (column(rows, "dual/q") > 0).all()
    policy = {k: v for k, v in load(folder)["agent"].items() if k.startswith("actor_mean")}
    assert all(torch.isfinite(weight).all() for weight in policy.values())
    assert column(rows, "linesearch/accepted").any() == any(
        policy[name].any() for name in policy if name.endswith("bias")
    )  # the biases start at zero and move with the first update that is accepted


def test_third_party_environment_with_terminations(tmp_path):
    flags = SHORT | {"env-id": "tests.thirdparty_env:Fuse-v0", "num-envs": 4, "batch-size": 160}
    flags |= {"total-timesteps": 320, "eval-every": 2, "eval-episodes": 2, "eval-steps": 50}
    folder = finish(tmp_path, **flags)
    assert folder.name.startswith("Fuse-v0__acpo_continuous__1__")
    rows = read(folder)
    # No step is lost or counted twice at an end.
    assert column(rows, "charts/avg_cost") == pytest.approx([0.2, 0.2], rel=1e-12)
    assert column(rows, "charts/avg_reward") == pytest.approx([1.2, 1.2], rel=1e-12)
    assert float(rows[-1]["eval/avg_cost"]) == pytest.approx(0.2, rel=1e-12)
    # It has no get_state: a resume says so and starts new episodes.
    printed = resume(folder, total=640)
    assert "new episodes" in printed and len(read(folder)) == 4


def test_third_party_environment_with_two_constraints(tmp_path):
    flags = SHORT | {"env-id": "tests.thirdparty_env:TwoCosts-v0", "num-envs": 8}
    rows = read(finish(tmp_path, **flags))
    assert set(rows[0]) - {"global_step"} - documented_tags() == {"charts/avg_cost_2"}
    assert "charts/avg_cost_i" in documented_tags()
    assert set(column(rows, "charts/cost_limit")) == {0.1}
    assert (column(rows, "charts/avg_cost_2") > column(rows, "charts/avg_cost")).all()


# --- the source -----------------------------------------------------------------------------------


def test_every_flag_is_read():
    """Outside `check`, which looks at all of them and uses none."""
    tree = ast.parse(SCRIPT.read_text())
    (fields,) = (
        {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Args"
    )
    read_somewhere = {
        node.attr
        for part in tree.body
        if getattr(part, "name", "") != "check"
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id == "args"
    }
    assert len(fields) > 20 and fields == read_somewhere & fields
    assert read_somewhere <= fields  # nothing is read that is not a flag


def test_help_explains_every_flag():
    width = os.environ | {"COLUMNS": "400"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, env=width, cwd=ROOT
    )
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            lines = SCRIPT.read_text().splitlines()
            for item in node.body:
                if isinstance(item, ast.AnnAssign):
                    line = lines[item.lineno - 1]
                    assert "  # " in line, line
                    assert f"--{item.target.id.replace('_', '-')}" in text
                    assert line.split("  # ", 1)[1].split(" (")[0] in text, line
