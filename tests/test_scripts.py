"""The scripts as a user runs them: a command line, an exit code, files in a folder."""

import ast
import importlib
import importlib.metadata
import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from launcher import (
    ROOT,
    SCRIPTS,
    assert_logs_agree,
    assert_same_training,
    column,
    documented_tags,
    events,
    finish,
    load,
    read,
    resume,
    run,
    without_clocks,
    words,
)
from PIL import Image

import envs

BATCH, ITERATIONS, HALF = 256, 8, 4
TINY = {"env_id": "ConstrainedLQR", "batch_size": BATCH, "num_envs": 8}
TINY |= {"total_timesteps": BATCH * ITERATIONS}
TINY |= {"eval_every": 2, "eval_episodes": 2, "eval_steps": 50}

# Tags of ACPO's update that another method has no number for: it writes NaN there.
NO_DUAL = {f"dual/{name}" for name in ("lam", "r", "s", "integral", "case")}
NO_LINESEARCH = {"linesearch/accepted", "linesearch/backtracks"}
NAN = {
    "atrpo_lagrangian": NO_DUAL,
    "ppo_lagrangian": NO_DUAL | {"dual/q"} | NO_LINESEARCH,
    "bvf_ppo": NO_DUAL | {"dual/q", "dual/mu"} | NO_LINESEARCH,
}
LINE_SEARCH = [s for s in SCRIPTS if s in ("acpo_continuous", "cpo_continuous", "atrpo_lagrangian")]

every_script = pytest.mark.parametrize("script", SCRIPTS)


@pytest.fixture(scope="module")
def pool():
    """Two at a time: a run has one thread."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """(script, name) -> a job whose result is the folder of a finished run.

    `full` is started as a user would; it is what the others are held against.
    """
    jobs = {}
    for script in SCRIPTS:
        place = {name: tmp_path_factory.mktemp(name) for name in ("full", "half", "blind", "other")}
        full, half = TINY, TINY | {"total_timesteps": BATCH * HALF}
        where = place["full"]
        jobs[script, "full"] = pool.submit(
            finish, script, where, "--capture-video", real=True, **full
        )
        jobs[script, "half"] = pool.submit(finish, script, place["half"], **half)
        blind = half | {"eval_every": 0}
        jobs[script, "blind"] = pool.submit(finish, script, place["blind"], **blind)
        other = {"seed": 2, "cwd": place["other"]}
        jobs[script, "other"] = pool.submit(finish, script, place["other"], **half | other)
    return lambda script, name: jobs[script, name].result()


def assert_numbers(script: str, rows: list[dict[str, str]], evaluated) -> None:
    """Every number is finite, but for those that do not exist, which are NaN in every such row."""
    for i, row in enumerate(rows):
        for tag, text in row.items():
            value = float(text)
            if (
                (tag.startswith("eval/") and not evaluated(i + 1))
                or tag in NAN.get(script, ())
                or (tag in ("dual/predicted_dc", "dual/realised_dc") and i == 0)  # nothing before
                or (tag == "dual/lam" and float(row["dual/case"]) == 2)  # no solution
            ):
                assert math.isnan(value), (i, tag)
            else:
                assert math.isfinite(value), (i, tag)


# --- what a run prints and writes -----------------------------------------------------------------


@every_script
def test_summary(runs, script):
    folder = runs(script, "full")
    lines = (folder.parent / "stdout").read_text().splitlines()
    assert len(lines) == 3
    steps = f"{BATCH * ITERATIONS:,}"
    assert re.fullmatch(rf"ConstrainedLQR: {steps} steps in \d+ s \([\d,]+ steps/s\)", lines[0])
    last = read(folder)[-max(1, ITERATIONS // 5) :]
    reward, cost = (column(last, f"charts/avg_{name}").mean() for name in ("reward", "cost"))
    wanted = f"last 20 %: reward {reward:.4g} and cost {cost:.4g} per step (limit 0.2)"
    assert lines[1] == wanted
    assert Path(lines[2].removeprefix("learning curves: ")) == folder / "curves.png"


@every_script
def test_folder_name_and_files(runs, script):
    assert re.fullmatch(rf"ConstrainedLQR__{script}__2__\d{{10}}", runs(script, "other").name)
    wanted = {"args.json", "progress.csv", "curves.png", "events.out"}
    wanted |= {"checkpoint.pt", "checkpoint.prev.pt"}
    for name, more in (("full", {"video.gif"}), ("other", set())):
        names = {path.name.split(".tfevents")[0] for path in runs(script, name).iterdir()}
        assert names - {"stdout"} == wanted | more
    with Image.open(runs(script, "full") / "curves.png") as picture:
        assert min(picture.size) >= 300 and len(set(picture.convert("L").getdata())) > 10


@every_script
def test_video_moves(runs, script):
    with Image.open(runs(script, "full") / "video.gif") as video:
        assert video.format == "GIF" and video.n_frames >= 2  # it merges equal frames
        first = np.asarray(video.convert("RGB"))
        video.seek(video.n_frames // 2)
        assert (np.asarray(video.convert("RGB")) != first).any()


@every_script
def test_args_json(runs, script):
    record = json.loads((runs(script, "full") / "args.json").read_text())
    assert record["script"] == script
    assert TINY.items() <= record["args"].items()
    assert record["args"]["capture_video"] is True and record["args"]["seed"] == 1
    for package in ("torch", "numpy", "gymnasium", "mujoco", "libsumo"):
        assert record["versions"][package] == importlib.metadata.version(package)


@every_script
def test_what_the_task_recommends_is_a_default(script):
    Args = importlib.import_module(script).Args
    for env_id, damping in (("PointCircle", 0.1), ("AntCircle", 1.0)):
        for given in (None, 0.0, 0.5):  # 0 is a damping, not a default
            flags = {"total_timesteps": 8192 if given else 0}
            flags |= {"cg_damping": given} if hasattr(Args, "cg_damping") else {}
            env, eval_env, _ = envs.make_pair(args := Args(env_id=env_id, **flags))
            assert args.total_timesteps == (8192 if given else env.recommended_timesteps)
            if "cg_damping" in flags:
                assert args.cg_damping == (damping if given is None else given)
            env.close(), eval_env.close()


@pytest.mark.parametrize("name", ["full", "other"])  # `other` was started in another folder
def test_commit_is_that_of_the_script(runs, name):
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    here = subprocess.run(git, capture_output=True, text=True)
    if here.returncode:
        pytest.skip("not a git checkout")
    record = json.loads((runs(SCRIPTS[0], name) / "args.json").read_text())
    assert record["commit"] == here.stdout.strip()


def test_a_run_needs_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    record = envs.runs.versions()
    assert record["commit"] == ""
    assert record["versions"]["torch"] == importlib.metadata.version("torch")


@every_script
def test_every_tag_is_documented_and_every_documented_tag_is_logged(runs, script):
    tags = set(read(runs(script, "full"))[0]) - {"global_step"}
    assert tags == documented_tags() - {"charts/avg_cost_i"}


@every_script
def test_tensorboard_holds_what_progress_csv_holds(runs, script):
    folder = runs(script, "full")
    assert_logs_agree(folder)
    shown = set(read(folder)[0]) - {"global_step"} - NAN.get(script, set())
    assert set(events(folder)) | {"dual/lam"} == shown | {"dual/lam"}


@every_script
def test_progress_has_a_row_an_iteration_of_finite_numbers(runs, script):
    rows = read(runs(script, "full"))
    assert [int(row["global_step"]) for row in rows] == [BATCH * (i + 1) for i in range(ITERATIONS)]
    assert_numbers(script, rows, lambda iteration: iteration % TINY["eval_every"] == 0)


@every_script
def test_logged_numbers_agree_with_one_another(runs, script):
    rows = read(runs(script, "full"))
    cost, c = column(rows, "charts/avg_cost"), column(rows, "dual/c")
    assert set(column(rows, "charts/cost_limit")) == {0.2}
    np.testing.assert_allclose(c, cost - 0.2, rtol=1e-12)
    np.testing.assert_allclose(
        column(rows, "charts/cumulative_cost"), BATCH * np.cumsum(cost), rtol=1e-9
    )
    np.testing.assert_allclose(column(rows, "dual/realised_dc")[1:], np.diff(cost), rtol=1e-9)
    predicted = column(rows, "dual/predicted_dc")[1:]
    assert (predicted == column(rows, "losses/surrogate_c")[:-1]).all()
    assert (column(rows, "losses/kl") >= 0).all() and (column(rows, "losses/kl") > 0).any()
    if "dual/integral" not in NAN.get(script, ()):
        gain = load(runs(script, "full"))["args"]["integral_gain"]
        share = np.clip((cost[0] - 0.2) / 0.2, 0, 1)  # far above the limit: safe first
        recovering = column(rows, "dual/case") == 2
        for i, logged in enumerate(column(rows, "dual/integral")):
            if not recovering[i] or cost[i] < 0.2:
                share = np.clip(share + gain * np.clip((cost[i] - 0.2) / 0.2, -1, 1), 0, 1)
            assert logged == pytest.approx(share, rel=1e-9)
        assert set(column(rows, "dual/case")) <= {0, 1, 2}
        assert (column(rows, "dual/mu") >= 0).all()


@pytest.mark.parametrize("script", LINE_SEARCH)
def test_line_search_keeps_what_it_promises(runs, script):
    rows, flags = read(runs(script, "full")), load(runs(script, "full"))["args"]
    kl, c = column(rows, "losses/kl"), column(rows, "dual/c")
    accepted, tries = column(rows, "linesearch/accepted"), column(rows, "linesearch/backtracks")
    assert (kl <= flags["delta"]).all() and accepted.any()
    assert ((kl > 0) == (accepted == 1)).all() and (tries >= 0).all()
    assert ((tries > flags["backtrack_iterations"]) == (accepted == 0)).all()
    if script != "atrpo_lagrangian":  # it has no rule for the cost
        largest = np.sqrt(2 * flags["delta"] * column(rows, "dual/s"))
        first = np.clip(c[0] / 0.2, 0, 1)
        tight = c + np.append(first, column(rows, "dual/integral")[:-1]) * largest
        assert (column(rows, "losses/surrogate_c") <= np.maximum(0, -tight)).all()


@every_script
def test_checkpoint_is_the_policy_that_was_evaluated(runs, script):
    """Loaded as its documentation says, the agent earns exactly what the last row states."""
    state, module = load(runs(script, "full")), importlib.import_module(script)
    assert state["iteration"] == ITERATIONS and state["args"]["env_id"] == "ConstrainedLQR"
    agent = module.Agent(1, 1, 1, tuple(state["args"]["hidden_sizes"]), 0.0)
    agent.load_state_dict(state["agent"])
    env = envs.make_vec("ConstrainedLQR", 2)
    last = read(runs(script, "full"))[-1]
    for kind, deterministic in (("eval/avg", True), ("eval/stochastic_avg", False)):
        reward, cost = module.evaluate(agent, env, 2, 50, 1_000_000 + 500_000, deterministic)
        assert reward.mean() == pytest.approx(float(last[f"{kind}_reward"]), rel=1e-9)
        assert cost.mean() == pytest.approx(float(last[f"{kind}_cost"]), rel=1e-9)
        assert cost.std() == pytest.approx(float(last[f"{kind}_cost_std"]), rel=1e-9)


@every_script
def test_evaluation_leaves_the_training_alone(runs, script):
    full, blind = (without_clocks(runs(script, name)) for name in ("full", "blind"))
    assert len(blind) == HALF
    for tag in {*blind[0]} - {tag for tag in blind[0] if tag.startswith("eval/")}:
        assert [row[tag] for row in full[:HALF]] == [row[tag] for row in blind], tag


# --- the same again -------------------------------------------------------------------------------


@every_script
def test_same_seed_same_run_and_resume_goes_on_bit_for_bit(runs, script):
    """`half` is another process: its rows are those of `full`, and so is all that follows."""
    folder, full = runs(script, "half"), runs(script, "full")
    assert without_clocks(folder) == without_clocks(full)[:HALF]
    resume(script, folder, total_timesteps=BATCH * ITERATIONS)
    assert_same_training(folder, full)
    assert_logs_agree(folder)
    seconds = column(read(folder), "global_step") / column(read(folder), "charts/SPS")
    assert (np.diff(seconds) > 0).all()  # the clock goes on too


@every_script
def test_other_seed_other_run(runs, script):
    one, other = (without_clocks(runs(script, name)) for name in ("full", "other"))
    for tag in ("charts/avg_reward", "charts/avg_cost", "losses/value_r"):
        assert not set(column(one, tag)) & set(column(other, tag)), tag
    tag = "losses/entropy"  # of the first update: both may reach the floor of the deviation later
    assert column(one, tag)[0] != column(other, tag)[0]
    first, second = (load(runs(script, name))["agent"] for name in ("full", "other"))
    for key in ("actor_mean.0.weight", "critics.weights.0"):
        assert not torch.equal(first[key], second[key])


@every_script
def test_resume_of_a_finished_run_changes_nothing(runs, script):
    folder = runs(script, "other")
    names = ("progress.csv", "checkpoint.pt", "args.json")
    before = [(folder / name).read_bytes() for name in names]
    assert len(resume(script, folder).splitlines()) == 3
    assert [(folder / name).read_bytes() for name in names] == before
    assert_logs_agree(folder)


# --- environments ---------------------------------------------------------------------------------

SHORT = {"total_timesteps": 512, "batch_size": 256, "eval_every": 2}
SHORT |= {"eval_episodes": 1, "eval_steps": 5}
SUMO = SHORT | {"total_timesteps": 128, "batch_size": 64}
LIMITS = {"PointCircle": 0.1, "PointGather": 0.01, "AntCircle": 0.1, "AntGather": 0.002}
LIMITS |= {"ConstrainedLQR": 0.2, "Grid": 0.1, "Bottleneck": 0.1}


@pytest.fixture(scope="module")
def short_runs(pool, tmp_path_factory):
    jobs = {}
    for script in SCRIPTS:
        for env_id in envs.IDS:
            flags = (SUMO if env_id in envs.SUMO else SHORT) | {"env_id": env_id}
            where = tmp_path_factory.mktemp(env_id)
            jobs[script, env_id] = pool.submit(finish, script, where, **flags)
    return lambda script, env_id: jobs[script, env_id].result()


@pytest.mark.parametrize("env_id", envs.IDS)
@every_script
def test_two_iterations_of_each_environment(short_runs, script, env_id):
    folder = short_runs(script, env_id)
    rows = read(folder)
    assert len(rows) == 2 and set(column(rows, "charts/cost_limit")) == {LIMITS[env_id]}
    assert set(rows[0]) - {"global_step"} == documented_tags() - {"charts/avg_cost_i"}
    assert_numbers(script, rows, lambda iteration: iteration == 2)
    assert (column(rows, "charts/avg_cost") >= 0).all()
    agent = load(folder)["agent"]
    assert all(torch.isfinite(weight).all() for weight in agent.values())
    biases = [agent[key] for key in agent if key.startswith("actor_mean") and key.endswith("bias")]
    moved = any(bias.any() for bias in biases)  # they start at zero
    assert moved == (column(rows, "losses/kl") > 0).any()


@every_script
def test_ours_with_our_name_in_front(script):
    args = importlib.import_module(script).Args(env_id="envs:AntGather")
    env, *_ = envs.make_pair(args)
    assert isinstance(env, envs.batch.BatchEnv) and args.env_id == "AntGather"
    assert args.total_timesteps == env.recommended_timesteps
    assert getattr(args, "cg_damping", 1.0) == 1.0


@every_script
def test_third_party_environment_with_terminations(script, tmp_path):
    flags = SHORT | {"env_id": "tests.thirdparty_env:Fuse-v0", "num_envs": 4, "batch_size": 160}
    flags |= {"total_timesteps": 320, "eval_episodes": 2, "eval_steps": 50}
    folder = finish(script, tmp_path, **flags)
    assert folder.name.startswith(f"Fuse-v0__{script}__1__")
    rows = read(folder)
    # No step is lost or counted twice at an end.
    assert column(rows, "charts/avg_cost") == pytest.approx([0.2, 0.2], rel=1e-12)
    assert column(rows, "charts/avg_reward") == pytest.approx([1.2, 1.2], rel=1e-12)
    assert float(rows[-1]["eval/avg_cost"]) == pytest.approx(0.2, rel=1e-12)
    # It has no get_state: a resume says so and starts new episodes.
    printed = resume(script, folder, total_timesteps=640)
    assert "new episodes" in printed and len(read(folder)) == 4


@every_script
def test_third_party_environment_with_two_constraints(script, tmp_path):
    flags = SHORT | {"env_id": "tests.thirdparty_env:TwoCosts-v0", "num_envs": 8}
    if script == "bvf_ppo":  # its safety layer is for one
        done = run(words(script, tmp_path, **flags))
        assert done.returncode == 2 and "--env-id" in done.stderr and "2 costs" in done.stderr
        assert [*tmp_path.iterdir()] == []
        return
    rows = read(finish(script, tmp_path, **flags))
    assert set(rows[0]) - {"global_step"} - documented_tags() == {"charts/avg_cost_2"}
    assert "charts/avg_cost_i" in documented_tags()
    assert set(column(rows, "charts/cost_limit")) == {0.1}
    assert (column(rows, "charts/avg_cost_2") > column(rows, "charts/avg_cost")).all()


# --- the source -----------------------------------------------------------------------------------


def fields(script: str) -> list[ast.AnnAssign]:
    """The flags of a script as they stand in its source."""
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    (args,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args")
    return [item for item in args.body if isinstance(item, ast.AnnAssign)]


def attributes_of_args(path: Path) -> set[str]:
    """x of every args.x and self.args.x that is read in a file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if getattr(owner, "id", getattr(owner, "attr", None)) == "args":
                names.add(node.attr)
    return names


@every_script
def test_every_flag_is_read(script):
    """By the script or by envs/runs.py, whose range check does not count: it names no flag."""
    flags = {item.target.id for item in fields(script)}
    here, shared = (attributes_of_args(ROOT / p) for p in (f"{script}.py", "envs/runs.py"))
    assert len(flags) > 20
    assert flags - here - shared == set()
    assert here - flags == set()  # nothing is read that is not a flag


@every_script
def test_help_explains_every_flag(script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        envs.parse(importlib.import_module(script).Args)
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    for item in fields(script):
        line = lines[item.lineno - 1]
        assert "  # " in line, line
        assert f"--{item.target.id.replace('_', '-')}" in text
        assert line.split("  # ", 1)[1].split(" (")[0] in text, line
