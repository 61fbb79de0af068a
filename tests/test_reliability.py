"""What docs/reliability.md promises: killed, stopped, misled, and fed with bad numbers."""

import contextlib
import csv
import dataclasses
import errno
import importlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from launcher import (
    SCRIPTS,
    Done,
    Forked,
    assert_logs_agree,
    assert_same_training,
    column,
    finish,
    folder_in,
    load,
    read,
    resume,
    run,
    wait_for,
    without_clocks,
    words,
)

import envs
from benchmark import soak

BATCH, ITERATIONS = 64, 10
LQR = {"env_id": "ConstrainedLQR", "batch_size": BATCH, "num_envs": 8}
LQR |= {"eval_every": 2, "eval_episodes": 2, "eval_steps": 20}
LQR |= {"total_timesteps": BATCH * ITERATIONS}
ANT = LQR | {"env_id": "AntCircle", "total_timesteps": BATCH * 6}
GRID = LQR | {"env_id": "Grid", "batch_size": 32, "num_envs": 2, "total_timesteps": 32 * 6}
TASKS = [
    (script, task, flags)
    for task, flags in (("LQR", LQR), ("AntCircle", ANT), ("Grid", GRID))
    for script in SCRIPTS
]
ALONE = GRID | {"num_envs": 1}  # in this process, with the evaluation's world: the default
TASKS += [(SCRIPTS[0], "Grid-alone", ALONE)]
TASKS += [(SCRIPTS[0], "Bottleneck-alone", ALONE | {"env_id": "Bottleneck"})]
FEWER = [task for task in TASKS if task[0] == SCRIPTS[0] or task[1] == "LQR"]
THIRD_PARTY = "tests.thirdparty_env:"

every_script = pytest.mark.parametrize("script", SCRIPTS)


def with_tasks(tasks: list[tuple]):
    ids = [f"{script}-{task}" for script, task, _ in tasks]
    return pytest.mark.parametrize(("script", "task", "flags"), tasks, ids=ids)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """(script, task) -> folder of a run that nobody interrupted, made when first asked for."""
    flags = {(script, task): flags for script, task, flags in TASKS}

    @cache
    def make(script: str, task: str) -> Path:
        return finish(script, tmp_path_factory.mktemp(task), **flags[script, task])

    return lambda script, task="LQR": make(script, task)


@pytest.fixture
def copy(full, tmp_path):
    """A copy of the uninterrupted run of a script."""
    return lambda script: Path(shutil.copytree(full(script), tmp_path / "copy"))


def assert_as_if_nothing_had_happened(folder: Path, full: Path) -> None:
    assert_same_training(folder, full)
    assert_logs_agree(folder)


def in_process(script: str, line: list[str], monkeypatch, capsys) -> Done:
    """The script in this process, for what needs no process of its own."""
    monkeypatch.setattr(sys, "argv", line)
    module = importlib.import_module(script)
    capsys.readouterr()
    try:
        module.main(envs.parse(module.Args))
        code = 0
    except SystemExit as end:
        code = end.code
    return Done(code, *capsys.readouterr())


def assert_refused(done: Done, *texts: str) -> None:
    """Exit code 2 and one line that has the texts in it; nothing else was printed."""
    assert done.returncode == 2, done.stderr[-1000:]
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr[-1000:]
    assert done.stderr.startswith("error: --"), done.stderr
    for text in texts:
        assert str(text) in done.stderr, (text, done.stderr)


# --- killed ---------------------------------------------------------------------------------------

# Python that the run executes first, and the iterations that are saved when it dies. Each run
# goes on with the one before, so its first save is not its first iteration. An iteration syncs two
# files: progress.csv, then the checkpoint.
SLOW_TENSORBOARD = """
import time
from tensorboard.summary.writer.record_writer import RecordWriter
real = RecordWriter.write
RecordWriter.write = lambda *args: (time.sleep(0.003), real(*args))
"""
DEATHS = {
    "half of the first row": (
        "import builtins\n"
        "half = lambda *row, file, **_: (file.write('64,1.0,2'), file.flush())\n"
        "kill_at(builtins, 'print', 2, 'progress.csv', half)",
        0,
    ),
    "before the first row is synced": ("import os; kill_at(os, 'fsync', 1)", 0),
    "before the first checkpoint is synced": ("import os; kill_at(os, 'fsync', 2)", 0),
    "half of a row": (
        "import builtins\n"
        "half = lambda *row, file, **_: (file.write('64,1.0,2'), file.flush())\n"
        "kill_at(builtins, 'print', 3, 'progress.csv', half)",  # 1 is the header
        1,
    ),
    "half of a row in TensorBoard": (
        "from torch.utils.tensorboard import SummaryWriter\n"
        "kill_at(SummaryWriter, 'add_scalar', 2, 'losses/kl')",
        1,
    ),
    "half of a record in TensorBoard": (
        "from tensorboard.summary.writer.record_writer import RecordWriter\n"
        "half = lambda self, data: self._writer.write(len(data).to_bytes(8, 'little'))\n"
        "kill_at(RecordWriter, 'write', 35, first=half)",
        1,
    ),
    "half of a checkpoint": (
        "import os; kill_at(os, 'fsync', 4, first=lambda file: os.ftruncate(file, 9000))",
        1,
    ),
    "before progress.csv is cut": ("import os; kill_at(os, 'replace', 1, 'progress.csv')", 0),
    "before the old checkpoint is moved": ("import os; kill_at(os, 'replace', 2, 'prev')", 1),
    "between the two renames": ("import os; kill_at(os, 'replace', 2, 'checkpoint.tmp')", 1),
    "right after the checkpoint, TensorBoard being slow": (
        SLOW_TENSORBOARD + "import os; kill_at(os, 'replace', 2, 'checkpoint.tmp', after=True)",
        2,
    ),
}


def saved_iteration(folder: Path) -> int:
    names = [name for name in ("checkpoint.pt", "checkpoint.prev.pt") if (folder / name).exists()]
    return load(folder, names[0])["iteration"] if names else 0


@every_script
def test_killed_at_every_kind_of_moment(full, script, tmp_path):
    """One run, killed again and again; it ends as if nothing had happened."""
    line, saved = words(script, tmp_path, **LQR), 0
    for moment, (before, more) in DEATHS.items():
        done = run(line, before=before)
        assert done.returncode == -signal.SIGKILL, (moment, done.stderr[-1000:])
        folder = folder_in(tmp_path)
        saved += more
        assert saved_iteration(folder) == saved, moment
        rows = without_clocks(folder)[:saved]
        assert rows == without_clocks(full(script))[:saved], moment
        line = words(script, None, resume=folder)
    resume(script, folder)
    assert [*folder.glob("*.tmp")] == []
    assert_as_if_nothing_had_happened(folder, full(script))


@with_tasks(TASKS)
def test_killed_at_random_moments(full, script, task, flags, tmp_path):
    reference = read(full(script, task))
    seconds = sum(column(reference, f"time/{part}").sum() for part in ("rollout", "update", "eval"))
    dice, line, killed = random.Random(script + task), words(script, tmp_path, **flags), 0
    for starts in range(3):
        process = Forked(line)
        wait_for(partial(has_begun, tmp_path, starts + 1, process), "the start of a log")
        time.sleep(dice.uniform(0.0, 0.4 * seconds))
        children = children_of(process.pid)
        process.send(signal.SIGKILL)
        killed += process.wait().returncode == -signal.SIGKILL
        wait_for(partial(all_gone, children), "the end of its workers")
        folder = folder_in(tmp_path)
        line = words(script, None, resume=folder)
    assert killed, "it had always ended before"
    resume(script, folder)
    assert_as_if_nothing_had_happened(folder, full(script, task))


def has_begun(where: Path, starts: int, process: Forked) -> bool:
    return process.ended or len([*where.glob("*/events*")]) >= starts


def has_rows(where: Path, rows: int, process: Forked) -> bool:
    found = [path.read_text().count("\n") - 1 for path in where.glob("*/progress.csv")]
    return process.ended or max(found, default=0) >= rows


def children_of(pid: int) -> list[int]:
    try:
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # it has ended, or this is not Linux
        return []


def all_gone(pids: list[int]) -> bool:
    """None of the processes runs; one that nobody has waited for yet does not count."""
    states = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.append(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0])
    return set(states) <= {"Z", "X"}


# --- a checkpoint that is none --------------------------------------------------------------------


class Bomb:
    """Unpickled by a reader that trusts it, it writes a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def cut(share: float):
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


FOREIGN = {
    "empty": cut(0.0),
    "cut in the middle": cut(0.5),
    "cut at the end": cut(0.999),
    "text": lambda path: path.write_text("not a checkpoint"),
    "a list": lambda path: torch.save([1, 2], path),
    "weights only": lambda path: torch.save({"weight": torch.zeros(3)}, path),
    "flags only": lambda path: torch.save({"args": torch.load(path)["args"]}, path),
    "no optimizer": lambda path: torch.save(
        {k: v for k, v in torch.load(path).items() if k != "optimizer"}, path
    ),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "code": lambda path: torch.save(Bomb(path.with_name("bang")), path),
    "bare code": lambda path: path.write_bytes(
        pickle.dumps(Bomb(path.with_name("bang")), protocol=2)
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
@every_script
def test_broken_checkpoint_is_refused(copy, script, kind, monkeypatch, capsys):
    folder = copy(script)
    FOREIGN[kind](folder / "checkpoint.pt")
    kept = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    done = in_process(script, words(script, None, resume=folder), monkeypatch, capsys)
    assert_refused(done, "--resume", folder / "checkpoint.pt", "checkpoint.prev.pt")
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == kept


@every_script
def test_checkpoint_before_the_broken_one_is_good(full, copy, script):
    folder = copy(script)
    assert load(folder, "checkpoint.prev.pt")["iteration"] == ITERATIONS - 1
    (folder / "checkpoint.prev.pt").rename(folder / "checkpoint.pt")
    resume(script, folder)
    assert_as_if_nothing_had_happened(folder, full(script))


@every_script
def test_run_without_a_checkpoint_starts_anew(full, copy, script):
    folder = copy(script)
    for name in ("checkpoint.pt", "checkpoint.prev.pt", "curves.png"):
        (folder / name).unlink()
    resume(script, folder)
    assert_as_if_nothing_had_happened(folder, full(script))


# --- told to stop ---------------------------------------------------------------------------------


@with_tasks(FEWER)
def test_stopped_by_ctrl_c_and_by_sigterm(full, script, task, flags, tmp_path):
    """Each ends the iteration, saves it, says how to go on, and does so twice in one run."""
    line = words(script, tmp_path, **flags)
    for number, rows in ((signal.SIGINT, 1), (signal.SIGTERM, 3)):
        process = Forked(line)
        wait_for(partial(has_rows, tmp_path, rows, process), "some rows")
        process.send(number, group=True)  # as a terminal does
        done, folder = process.wait(), folder_in(tmp_path)
        assert done.returncode == 128 + number, done.stderr[-1000:]
        wanted = f"stopped; go on with: python {script}.py --resume {folder}"
        assert done.stdout.splitlines() == [wanted] and done.errors == []
        saved = load(folder)["iteration"]
        assert rows <= saved == len(read(folder)) < len(read(full(script, task)))
        line = words(script, None, resume=folder)
    resume(script, folder)
    assert_as_if_nothing_had_happened(folder, full(script, task))


SIGNAL = """
import os, signal
real, calls = os.{name}, []
def call(*args, **kwargs):
    calls.append(args)
    if len(calls) == {number}:
        os.kill(os.getpid(), signal.{signal})
    return real(*args, **kwargs)
os.{name} = call
"""
# The call that the signal comes in, and the iteration that is then the last
MOMENTS = {
    "before there is a folder": (SIGNAL.format(name="makedirs", number=1, signal="SIGINT"), 1),
    "while a row is written": (SIGNAL.format(name="fsync", number=3, signal="SIGTERM"), 2),
    "while a checkpoint is written": (SIGNAL.format(name="fsync", number=4, signal="SIGINT"), 2),
    "in the last iteration": (
        SIGNAL.format(name="fsync", number=2 * ITERATIONS, signal="SIGTERM"),
        ITERATIONS,
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_stopped_at_a_known_moment(full, moment, tmp_path):
    script, (before, saved) = SCRIPTS[0], MOMENTS[moment]
    done = run(words(script, tmp_path, **LQR), before=before)
    folder = folder_in(tmp_path)
    assert done.returncode == (130 if "SIGINT" in before else 143), done.stderr[-1000:]
    assert done.stdout == f"stopped; go on with: python {script}.py --resume {folder}\n"
    assert done.errors == [] and load(folder)["iteration"] == len(read(folder)) == saved
    resume(script, folder)
    assert (folder / "curves.png").exists()
    assert_as_if_nothing_had_happened(folder, full(script))


class Late(list):
    """Signals of which the first comes right after the script has looked for the first time."""

    looks = 0

    def __bool__(self):
        self.looks += 1
        return len(self) > 0 and self.looks > 1

    def __iter__(self):
        return iter([*super().__iter__()] if self else [])


@every_script
def test_signal_between_two_looks_is_not_lost(full, script, tmp_path):
    """Whenever it comes, what is said to be saved is saved."""
    module = importlib.import_module(script)
    flags = LQR | {"save_every": 100, "run_dir": str(tmp_path)}
    with pytest.raises(SystemExit) as end:
        module.main(module.Args(**flags), Late([signal.SIGTERM]))
    folder = folder_in(tmp_path)
    assert end.value.code == 143 and saved_iteration(folder) == len(read(folder)) > 0
    resume(script, folder)
    assert_as_if_nothing_had_happened(folder, full(script))


# --- a simulator that dies ------------------------------------------------------------------------


@every_script
def test_killed_sumo_worker_ends_the_run_in_one_line(full, script, tmp_path):
    """No traceback, no process left; the run goes on from its checkpoint."""
    process = Forked(words(script, tmp_path, **GRID))
    wait_for(partial(has_rows, tmp_path, 2, process), "two rows")  # one is saved, or both
    workers = children_of(process.pid)
    if sys.version_info >= (3, 14):  # a tracker of the lock of the progress bar is the last child
        workers.pop()
    assert len(workers) == GRID["num_envs"]
    os.kill(workers[1], signal.SIGKILL)
    done = process.wait()
    assert done.returncode == 1 and done.stdout == ""
    assert done.errors == ["error: a SUMO worker process died: worker 1 (exit code -9)"]
    wait_for(partial(all_gone, workers), "the end of the other worker")
    folder = folder_in(tmp_path)
    assert 1 <= saved_iteration(folder) < len(read(full(script, "Grid")))
    resume(script, folder)
    assert_as_if_nothing_had_happened(folder, full(script, "Grid"))


def test_sumo_worker_that_is_killed_at_the_start(tmp_path):
    before = """
import multiprocessing.process, os, signal
real = multiprocessing.process.BaseProcess.start
def start(self):
    real(self)
    os.kill(self.pid, signal.SIGKILL)
multiprocessing.process.BaseProcess.start = start
"""
    done = run(words(SCRIPTS[0], tmp_path, **GRID), before=before)
    assert done.returncode == 1 and len(done.errors) == 1
    assert done.errors[0].startswith("error: a SUMO worker process died: worker 0 (exit code -9)")
    assert [*tmp_path.iterdir()] == []


# --- a full disk ----------------------------------------------------------------------------------


def test_no_room_for_the_state_of_sumo(full, tmp_path):
    """SUMO itself would write half of it and say nothing."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    done = run(words(SCRIPTS[0], tmp_path, **ALONE), before=limit)
    assert done.returncode == 1 and len(done.errors) == 1
    assert "SUMO could not write its state" in done.errors[0]
    folder = folder_in(tmp_path)
    assert not (folder / "checkpoint.pt").exists()
    resume(SCRIPTS[0], folder)
    assert_as_if_nothing_had_happened(folder, full(SCRIPTS[0], "Grid-alone"))


@every_script
def test_disk_is_full_at_the_first_checkpoint(full, script, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))"
    done = run(words(script, tmp_path, **LQR), before=limit)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.errors) == 1 and done.errors[0].startswith("error: "), done.errors
    assert "File too large" in done.errors[0]
    folder = folder_in(tmp_path)
    assert not (folder / "checkpoint.pt").exists()
    resume(script, folder)
    assert_as_if_nothing_had_happened(folder, full(script))


FULL = """
import errno, os
{more}
def full(*args):
    global calls
    calls += 1
    if calls == {number}:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(*args)
real, calls, {place} = {place}, 0, full
"""
RECORDS = "from tensorboard.summary.writer.record_writer import RecordWriter"
FULL = {  # the file that there is no room for, in the fourth iteration
    "checkpoint": FULL.format(place="os.fsync", number=8, more=""),
    "progress.csv": FULL.format(place="os.fsync", number=7, more=""),
    "TensorBoard": FULL.format(place="RecordWriter.write", number=120, more=RECORDS),
}
CASES = [(script, "checkpoint") for script in SCRIPTS]
CASES += [(SCRIPTS[0], "progress.csv"), (SCRIPTS[0], "TensorBoard")]


@pytest.mark.parametrize(("script", "file"), CASES)
def test_disk_is_full_later(full, script, file, tmp_path):
    """The checkpoint before stays, and the run goes on from it once there is room."""
    done = run(words(script, tmp_path, **LQR), before=FULL[file])
    assert done.returncode == 1 and done.errors == ["error: [Errno 28] No space left on device"]
    folder = folder_in(tmp_path)
    assert load(folder)["iteration"] == 3
    resume(script, folder)
    assert_as_if_nothing_had_happened(folder, full(script))


def test_disk_is_full_at_the_start(monkeypatch, capsys, tmp_path):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(envs.runs.json, "dump", full)
    line = words(SCRIPTS[0], tmp_path, **LQR)
    done = in_process(SCRIPTS[0], line, monkeypatch, capsys)
    assert_refused(done, "--run-dir", tmp_path, "No space left on device")
    assert [*tmp_path.iterdir()] == []


# --- bad input ------------------------------------------------------------------------------------


def register_one_that_raises(error: type) -> None:
    """An environment that cannot be made."""

    def make():
        raise error("its own words") if error is not AssertionError else error

    gym.register(f"Raises-{error.__name__}-v0", make)


for error in (TypeError, AttributeError, AssertionError, RuntimeError):
    register_one_that_raises(error)

# (flag, value, further flags, what the line must say)
BAD = [
    ("env_id", "PointCircel", {}, "PointCircle"),
    ("env_id", "antcircle", {}, "AntCircle"),
    ("env_id", "Pendulum-v99", {}, "Pendulum-v1"),
    ("env_id", "no.such.module:Task-v0", {}, "PointCircle, PointGather"),
    ("env_id", THIRD_PARTY + "NoSuch-v0", {}, "unknown"),
    ("env_id", "", {}, "Malformed"),
    ("env_id", "two words", {}, "Malformed"),
    ("env_id", "Pendulum-v1", {"cost_limit": 0.1}, "info['cost']"),  # no cost
    ("env_id", THIRD_PARTY + "NoCost-v0", {}, "info['cost']"),
    ("env_id", "CartPole-v1", {"cost_limit": 0.1}, "Discrete(2)"),
    ("env_id", "FrozenLake-v1", {"cost_limit": 0.1}, "Discrete(16)"),
    ("env_id", THIRD_PARTY + "Picture-v0", {}, "flat Box"),
    ("env_id", "CarRacing-v3", {}, "Box2D"),  # not installed
    ("env_id", "..a:x", {}, "import"),
    ("env_id", "Raises-TypeError-v0", {}, "its own words"),
    ("env_id", "Raises-AttributeError-v0", {}, "its own words"),
    ("env_id", "Raises-AssertionError-v0", {}, "AssertionError"),  # it says nothing
    ("env_id", "Raises-RuntimeError-v0", {}, "its own words"),
    ("cost_limit", -1.0, {}, "1 finite"),
    ("cost_limit", "nan", {}, "1 finite"),
    ("cost_limit", "inf", {}, "1 finite"),
    ("cost_limit", [0.1, 0.2], {}, "1 finite"),
    ("cost_limit", None, {"env_id": THIRD_PARTY + "NoLimit-v0"}, "1 finite"),
    ("cost_limit", None, {"env_id": THIRD_PARTY + "OneLimit-v0"}, "0.1: must be 2 finite"),
    ("cost_limit", None, {"env_id": THIRD_PARTY + "TwoLimits-v0"}, "(0.1, 0.2): must be 1 finite"),
    ("log_std_init", -2.5, {}, "below --log-std-min -2"),
    ("batch_size", 100, {}, "8 environments"),
    ("batch_size", 8, {}, "8 environments"),
    ("batch_size", 63, {"num_envs": 0}, "8 environments"),
    ("batch_size", 0, {}, "[1, "),
    ("batch_size", -64, {}, "[1, "),
    ("num_envs", -1, {}, "[0, "),
    ("num_envs", 10**9, {}, "[0, "),
    ("total_timesteps", BATCH - 1, {}, "--batch-size 64"),
    ("total_timesteps", -1, {}, "--batch-size 64"),
    ("hidden_sizes", 0, {}, "[1, 4096]"),
    ("hidden_sizes", [64, -4], {}, "[1, 4096]"),
    ("hidden_sizes", 10**9, {}, "[1, 4096]"),
    ("delta", 0.0, {}, "[1e-12, 1]"),
    ("delta", -0.01, {}, "[1e-12, 1]"),
    ("delta", "inf", {}, "[1e-12, 1]"),
    ("recovery_t", -0.1, {}, "[0, 1]"),
    ("recovery_t", 1.5, {}, "[0, 1]"),
    ("ell", -0.1, {}, "[0, 1]"),
    ("ell", 1.1, {}, "[0, 1]"),
    ("gae_lambda", 1.0, {}, "[0, 0.999]"),
    ("cost_gae_lambda", -0.1, {}, "[0, 0.999]"),
    ("gamma", 1.0, {}, "[0, 0.99999]"),
    ("cost_gamma", -0.5, {}, "[0, 0.99999]"),
    ("clip_coef", 0.0, {}, "[1e-12, 1]"),
    ("critic_epochs", 0, {}, "[1, "),
    ("critic_learning_rate", 0.0, {}, "[1e-12, 1]"),
    ("seed", -1, {}, "[0, "),
    ("device", "cudda", {}, "cpu, cuda"),
    ("device", "meta", {}, "meta"),  # it has no numbers
    ("device", "cuda:99", {}, "(there is cpu"),  # what else it says is the business of the build
    ("resume", "no/such/run", {}, "args.json"),
    ("capture_video", True, {"env_id": THIRD_PARTY + "NoPicture-v0"}, "no pictures"),
]
FLAGS = {
    s: {f.name: f for f in dataclasses.fields(importlib.import_module(s).Args)} for s in SCRIPTS
}
CASES = [
    pytest.param(script, *case, id=f"{script}-{case[0]}-{case[1]}-{i}")
    for script in SCRIPTS
    for i, case in enumerate(BAD)
    if case[0] in FLAGS[script]
]


def bad_line(script: str, where: Path, flag: str, value, more: dict) -> list[str]:
    given = LQR | more | ({} if value is True else {flag: value})
    return words(
        script, where / "runs", *[f"--{flag.replace('_', '-')}"] * (value is True), **given
    )


def shown(value) -> str:
    """How the line shows a value: at least its first number or word."""
    first = value[0] if isinstance(value, list) else value
    return "" if first is None else str(first)


@pytest.mark.parametrize(("script", "flag", "value", "more", "allowed"), CASES)
def test_bad_input_is_refused(script, flag, value, more, allowed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    done = in_process(script, bad_line(script, tmp_path, flag, value, more), monkeypatch, capsys)
    assert_refused(done, f"--{flag.replace('_', '-')} ", shown(value), allowed)
    assert [*tmp_path.rglob("*")] == []


@every_script
def test_every_number_is_checked(script, tmp_path, monkeypatch, capsys):
    """Also of flags that are yet to be invented: none takes -1e30, and no float takes NaN."""
    monkeypatch.chdir(tmp_path)
    numbers = {name: str(f.type) for name, f in FLAGS[script].items() if name != "resume"}
    numbers = {name: kind for name, kind in numbers.items() if re.search(r"\b(int|float)\b", kind)}
    assert len(numbers) > 15
    for name, kind in numbers.items():
        for value in ["-1e30", "nan", "inf"] if "float" in kind else [-(10**30)]:
            done = in_process(
                script, words(script, tmp_path / "runs", **LQR | {name: value}), monkeypatch, capsys
            )
            assert_refused(done, f"--{name.replace('_', '-')} ")
    assert [*tmp_path.rglob("*")] == []


def test_weights_and_biases_that_is_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(envs.runs.importlib.util, "find_spec", lambda name: None)
    line = words(SCRIPTS[0], tmp_path / "runs", "--track", **LQR)
    assert_refused(in_process(SCRIPTS[0], line, monkeypatch, capsys), "--track", "wandb")
    assert [*tmp_path.iterdir()] == []


def test_sumo_that_is_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "libsumo", None)
    line = words(SCRIPTS[0], tmp_path / "runs", **GRID | {"num_envs": 1})
    done = in_process(SCRIPTS[0], line, monkeypatch, capsys)
    assert_refused(done, "--env-id Grid", "pip install libsumo")
    assert [*tmp_path.iterdir()] == []


def test_sumo_without_a_library_of_the_system(monkeypatch, capsys, tmp_path):
    """As in a bare container: the wheel is there, what it links to is not."""
    (tmp_path / "libsumo.py").write_text("raise ImportError('libGL.so.1: cannot open')")
    monkeypatch.delitem(sys.modules, "libsumo", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    line = words(SCRIPTS[0], tmp_path / "runs", **GRID | {"num_envs": 1})
    done = in_process(SCRIPTS[0], line, monkeypatch, capsys)
    assert_refused(done, "--env-id Grid", "libGL.so.1", "apt-get install libgl1")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("where", ["file", "file/below", "/dev/null/runs", "/proc/runs"])
def test_run_folder_that_cannot_be_made(where, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    line = words(SCRIPTS[0], tmp_path / where, **LQR)
    done = in_process(SCRIPTS[0], line, monkeypatch, capsys)
    assert_refused(done, "--run-dir", tmp_path / where)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"delta": "tiny"}, "--delta"),
        ({"no_such_flag": 3}, "--no-such-flag"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_what_cannot_be_parsed_is_refused(flags, name, tmp_path, monkeypatch, capsys):
    """By tyro, in a few lines."""
    line = words(SCRIPTS[0], tmp_path / "runs", **LQR | flags)
    done = in_process(SCRIPTS[0], line, monkeypatch, capsys)
    assert done.returncode == 2 and name in done.stderr and "Traceback" not in done.stderr
    assert [*tmp_path.iterdir()] == []


# A dozen again as a user would meet them: as processes, with Python started anew
REAL = [
    ("env_id", "PointCircel", {}),
    ("env_id", "Pendulum-v1", {"cost_limit": 0.1}),
    ("env_id", "CartPole-v1", {}),
    ("cost_limit", -1.0, {}),
    ("cost_limit", "nan", {}),
    ("cost_limit", [0.1, 0.2], {}),
    ("batch_size", 100, {}),
    ("batch_size", 0, {}),
    ("delta", 0.0, {}),
    ("gae_lambda", 1.0, {}),
    ("device", "cudda", {}),
    ("resume", "no/such/run", {}),
    ("capture_video", True, {"env_id": THIRD_PARTY + "NoPicture-v0"}),
]
REAL = [(SCRIPTS[i % len(SCRIPTS)], *case) for i, case in enumerate(REAL)]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """(folder, job) per bad command line; started in an empty folder, which must stay empty."""
    with ThreadPoolExecutor(2) as pool:
        places = [tmp_path_factory.mktemp("bad") for _ in REAL]
        lines = [
            bad_line(case[0], place, *case[1:]) for case, place in zip(REAL, places, strict=True)
        ]
        yield [
            (place, pool.submit(run, line, place, real=True))
            for place, line in zip(places, lines, strict=True)
        ]


@pytest.mark.parametrize("i", range(len(REAL)), ids=[" ".join(map(str, x[:3])) for x in REAL])
def test_bad_input_is_refused_as_a_process(refusals, i):
    (_, flag, value, _), (place, job) = REAL[i], refusals[i]
    assert_refused(job.result(), f"--{flag.replace('_', '-')} ", shown(value))
    assert [*place.rglob("*")] == []


# --- resumed with something else ------------------------------------------------------------------


def edit(change) -> None:
    """A change of the record in args.json."""

    def apply(folder: Path):
        record = json.loads((folder / "args.json").read_text())
        change(record)
        (folder / "args.json").write_text(json.dumps(record))

    return apply


# what is done to the folder, further flags, what the line must say
RESUMES = {
    "another environment": (None, {"env_id": "PointCircle"}, "--env-id PointCircle"),
    "another seed": (None, {"seed": 2}, "--seed 2"),
    "another delta": (None, {"delta": 0.5}, "--delta 0.5"),
    "another batch": (None, {"batch_size": 128}, "--batch-size 128"),
    "another number of environments": (None, {"num_envs": 4}, "--num-envs 4"),
    "other networks": (None, {"hidden_sizes": [8, 8]}, "--hidden-sizes (8, 8)"),
    "another limit": (None, {"cost_limit": 0.5}, "--cost-limit (0.5,)"),
    "a run of another script": (edit(lambda r: r.update(script="other")), {}, "other.py"),
    "delta edited": (edit(lambda r: r["args"].update(delta=0.5)), {}, "--delta 0.5"),
    "seed edited": (edit(lambda r: r["args"].update(seed=7)), {}, "--seed 7"),
    "text for a number": (edit(lambda r: r["args"].update(delta="small")), {}, "delta is 'small'"),
    "number for a text": (edit(lambda r: r["args"].update(env_id=3)), {}, "env_id is 3"),
    "number for a list": (
        edit(lambda r: r["args"].update(hidden_sizes=3)),
        {},
        "hidden_sizes is 3",
    ),
    "list of texts": (edit(lambda r: r["args"].update(cost_limit=["a"])), {}, "cost_limit is"),
    "null": (edit(lambda r: r["args"].update(seed=None)), {}, "seed is None"),
    "out of range": (edit(lambda r: r["args"].update(delta=-1.0)), {}, "--delta -1.0"),
    "an unknown flag": (edit(lambda r: r["args"].update(colour="red")), {}, "colour"),
    "no flags": (edit(lambda r: r.pop("args")), {}, "args"),
    "a list": (lambda folder: (folder / "args.json").write_text("[1, 2]"), {}, "args.json"),
    "half a file": (lambda folder: cut(0.5)(folder / "args.json"), {}, "args.json"),
    "no file": (lambda folder: (folder / "args.json").unlink(), {}, "args.json"),
}


@pytest.mark.parametrize("kind", RESUMES)
@every_script
def test_resume_of_something_else_is_refused(copy, script, kind, monkeypatch, capsys):
    change, flags, text = RESUMES[kind]
    folder = copy(script)
    if change:
        change(folder)
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    done = in_process(script, words(script, None, resume=folder, **flags), monkeypatch, capsys)
    assert_refused(done, text)
    assert {path: path.read_bytes() for path in folder.iterdir()} == kept


@pytest.mark.skipif(len(SCRIPTS) < 2, reason="there is no other script")
@every_script
def test_run_of_another_script_is_refused(copy, script, monkeypatch, capsys):
    other = SCRIPTS[SCRIPTS.index(script) - 1]
    done = in_process(script, words(script, None, resume=copy(other)), monkeypatch, capsys)
    assert_refused(done, "--resume")


@every_script
def test_checkpoint_of_another_script_is_refused(full, copy, script, monkeypatch, capsys):
    """In the folder of this one, by its side the right args.json."""
    folder = copy(script)
    for other in SCRIPTS:
        if other != script:
            shutil.copy(full(other) / "checkpoint.pt", folder)
            done = in_process(script, words(script, None, resume=folder), monkeypatch, capsys)
            assert_refused(done)


def cut_rows(rows: float):
    """Keep so many rows of progress.csv."""

    def apply(path: Path):
        lines = path.read_text().splitlines(keepends=True)
        half = lines[int(rows) + 1][:300] if rows % 1 else ""
        path.write_text("".join(lines[: int(rows) + 1]) + half)

    return apply


LOGS = {
    "no log": (Path.unlink, "No such file"),
    "an empty log": (cut(0.0), f"row {ITERATIONS} of progress.csv"),
    "a row less": (cut_rows(ITERATIONS - 1), f"row {ITERATIONS} of progress.csv"),
    "half a row less": (cut_rows(ITERATIONS - 0.5), f"row {ITERATIONS} of progress.csv"),
    "no room beside it": (
        lambda path: path.with_name("progress.csv.tmp").mkdir(),
        "Is a directory",  # as good as read-only, which the superuser would not notice
    ),
}


@pytest.mark.parametrize("kind", LOGS)
def test_resume_with_a_log_that_is_cut_is_refused(copy, kind, monkeypatch, capsys):
    """No iteration may be missing in progress.csv, and none is silently."""
    script, (change, text) = SCRIPTS[0], LOGS[kind]
    folder = copy(script)
    change(folder / "progress.csv")
    kept = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    line = words(script, None, resume=folder, total_timesteps=BATCH * (ITERATIONS + 1))
    assert_refused(in_process(script, line, monkeypatch, capsys), "--resume", folder, text)
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == kept


@every_script
def test_checkpoint_of_another_run_is_refused(copy, script, monkeypatch, capsys):
    folder = copy(script)
    state = load(folder)
    state["args"]["seed"] = 5
    torch.save(state, folder / "checkpoint.pt")
    done = in_process(script, words(script, None, resume=folder), monkeypatch, capsys)
    assert_refused(done, "--seed 1", folder, "made with 5")


@every_script
def test_resume_may_change_what_is_not_learning(full, copy, script):
    folder = copy(script)
    (folder / "checkpoint.prev.pt").rename(folder / "checkpoint.pt")
    resume(script, folder, eval_every=1, eval_episodes=1, eval_steps=5, save_every=3)
    ours, theirs = load(folder), load(full(script))
    assert ours["iteration"] == ITERATIONS
    for key, weight in theirs["agent"].items():
        assert torch.equal(weight, ours["agent"][key]), key


# --- bad numbers ----------------------------------------------------------------------------------

SMALL = LQR | {"num_envs": 4, "total_timesteps": 4 * BATCH}
PARTS = ("obs", "reward", "cost", "reset", "start")
BROKEN = [f"{value}-{part}-v0" for value in ("Nan", "Inf", "Huge") for part in PARTS]
BROKEN += ["Strict-obs-v0", "Strict-start-v0"]  # one that takes no NaN as an action


def assert_finite(folder: Path) -> None:
    for path in folder.glob("checkpoint*.pt"):
        for key, weight in load(folder, path.name)["agent"].items():
            assert torch.isfinite(weight).all(), (path.name, key)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # of numpy, about overflow
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of Gymnasium, about the observation
@pytest.mark.parametrize("env_id", BROKEN)
@every_script
def test_number_that_is_not_finite_ends_the_run(script, env_id, tmp_path, monkeypatch, capsys):
    """NaN and infinity from the environment, and finite numbers that overflow in the update."""
    line = words(script, tmp_path, **SMALL | {"env_id": THIRD_PARTY + env_id})
    done = in_process(script, line, monkeypatch, capsys)
    assert done.returncode == 1 and done.stdout == ""
    folder = folder_in(tmp_path)
    whose = "the update" if env_id in ("Huge-reward-v0", "Huge-cost-v0") else THIRD_PARTY + env_id
    wanted = (
        f"error: {whose} gave a number that is not finite; what was saved before is in {folder}"
    )
    assert done.errors == [wanted]
    # The 20th step is in the second batch of 16, the second reset too.
    saved = 0 if "start" in env_id else 1
    assert len(read(folder)) == saved if saved else (folder / "progress.csv").read_text() == ""
    assert (folder / "checkpoint.pt").exists() == bool(saved)
    assert_finite(folder)


@pytest.mark.parametrize(
    ("env_id", "text"), [("CostStops-v0", "no 'cost'"), ("CostGrows-v0", "2 costs, not 1")]
)
@every_script
def test_costs_that_are_missing_later_end_the_run(script, env_id, text, tmp_path):
    """As a process, as the line is that of the script's last resort."""
    done = run(words(script, tmp_path, **SMALL | {"env_id": THIRD_PARTY + env_id}))
    assert done.returncode == 1 and len(done.errors) == 1
    assert done.errors[0].startswith(f"error: {THIRD_PARTY}{env_id} ") and text in done.errors[0]
    assert len(read(folder_in(tmp_path))) == 1  # the 21st step is in the second batch of 16


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@every_script
def test_evaluation_that_is_not_finite_ends_the_run(script, tmp_path, monkeypatch, capsys):
    """The environments of the training are good; it is the 10th step of the evaluation."""
    steps = []

    def make_pair(args):
        env, eval_env, limit = real(args)
        step = eval_env.step

        def broken(actions):
            steps.append(1)
            obs, rewards, *rest = step(actions)
            return obs, rewards * (np.nan if len(steps) == 10 else 1.0), *rest

        eval_env.step = broken
        return env, eval_env, limit

    real = envs.make_pair
    monkeypatch.setattr(envs, "make_pair", make_pair)
    done = in_process(script, words(script, tmp_path, **LQR), monkeypatch, capsys)
    assert done.returncode == 1 and len(done.errors) == 1
    assert "ConstrainedLQR gave in the evaluation a number that is not finite" in done.errors[0]
    assert load(folder_in(tmp_path))["iteration"] == LQR["eval_every"] - 1


@pytest.mark.parametrize("env_id", ["Still-v0", "Free-v0"])
@every_script
def test_nothing_to_learn(script, env_id, tmp_path, monkeypatch, capsys):
    """A constant observation without reward and cost; a cost that is always zero."""
    line = words(script, tmp_path, **SMALL | {"env_id": THIRD_PARTY + env_id})
    done = in_process(script, line, monkeypatch, capsys)
    assert done.returncode == 0, done.stderr
    folder = folder_in(tmp_path)
    assert_finite(folder)
    rows = read(folder)
    assert len(rows) == 4 and (column(rows, "charts/avg_cost") == 0).all()
    for tag in ("charts/avg_reward", "losses/kl", "losses/entropy", "losses/value_c", "dual/c"):
        assert np.isfinite(column(rows, tag)).all(), tag


# The largest steps that the flags allow
EXTREME = {
    "critic": {"critic_learning_rate": 1.0},
    "policy": {"delta": 1.0, "policy_learning_rate": 1.0, "clip_coef": 1.0, "max_grad_norm": 1e3},
    "wide": {"log_std_init": 2.0, "delta": 1.0},
    "narrow": {"log_std_init": -20.0, "log_std_min": -20.0},
    "undamped": {"cg_damping": 0.0, "cg_iterations": 50},
    "limit 0": {"cost_limit": 0.0},
}


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("kind", EXTREME)
@every_script
def test_extreme_flags(script, kind, tmp_path, monkeypatch, capsys):
    """Training goes on, or stops with one line; no checkpoint has a number that is not finite."""
    flags = {name: value for name, value in EXTREME[kind].items() if name in FLAGS[script]}
    line = words(script, tmp_path, **SMALL | flags | {"total_timesteps": 10 * BATCH})
    done = in_process(script, line, monkeypatch, capsys)
    folder = folder_in(tmp_path)
    assert_finite(folder)
    if done.returncode:
        assert done.returncode == 1 and len(done.errors) == 1
        assert done.errors[0].startswith("error: the update gave a number that is not finite")
    else:
        assert len(read(folder)) == 10 and load(folder)["iteration"] == 10


# --- a long run -----------------------------------------------------------------------------------


def soaked(**growth: float) -> list[str]:
    """What soak.py finds broken in a run whose numbers grow by these shares, evenly."""
    samples = []
    for i in range(1, 100):
        grown = {name: 1.0 + share * i / 100 for name, share in growth.items()}
        cpu = 0.01 * i * (1.0 + 0.5 * (grown.get("cpu", 1.0) - 1.0))  # its slope grows by the share
        sizes = {"memory": 4e8 * grown.get("memory", 1.0)}
        sizes |= {"files": int(10 * grown.get("files", 1.0)), "children": 2}
        samples.append(soak.Sample(step=1000 * i, clock=0.02 * i, cpu=cpu, **sizes))
    return soak.judge(samples, 100_000)[1]


def test_soak_finds_what_grows():
    assert soaked() == [] and soaked(memory=0.04, cpu=0.1) == []
    assert soaked(memory=0.08) == ["memory grew by more than 5%"]
    assert soaked(files=0.5) == ["files: 10 -> 14"]
    assert soaked(cpu=0.8) == ["more than 25% slower"]


def test_soak_reads_what_a_process_has():
    """This process: what it allocates, opens and starts is counted, and what its child opens."""
    before = soak.sample(os.getpid(), 7)
    held = [bytearray(b"x" * 50_000_000), open(os.devnull)]  # noqa: SIM115
    after = soak.sample(os.getpid(), 8)
    assert (before.step, after.step) == (7, 8)
    assert after.memory - before.memory > 40_000_000
    assert after.files == before.files + 1 and after.children == before.children
    assert after.cpu >= before.cpu > 0.0 and after.clock > before.clock
    code = "import sys; files = [open('/dev/null') for _ in range(50)]\n"
    code += "print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        later = soak.sample(os.getpid(), 9)
        assert child.pid in soak.family(os.getpid())
        child.stdin.close()
    assert later.children == after.children + 1 and later.files > after.files + 50
    assert later.memory - after.memory > 1_000_000
    held.pop().close()


def test_soak_of_a_short_run(tmp_path):
    """The whole of it, on the fastest task; a process that has ended counts nothing."""
    words = ["--envs", "ConstrainedLQR", "--steps", "5120", "--batch-size", "128"]
    words += ["--out", str(tmp_path / "table.csv")]
    done = subprocess.run(
        [sys.executable, soak.__file__, *words], capture_output=True, text=True, timeout=600
    )
    assert done.stderr == "" and done.stdout.count("\n") == 3, done.stderr
    (row,) = csv.DictReader((tmp_path / "table.csv").open())
    # From Python 3.14 on there is one child: a tracker of the lock of the progress bar.
    assert row["task"] == "ConstrainedLQR" and row["steps"] == "5120"
    assert 100 < float(row["MB at 10 %"]) < 2000 and row["children"] in ("0 0", "1 1")
    assert done.returncode == (0 if row["broken"] == "nothing" else 1)
    gone = soak.sample(2**30, 1)
    assert (gone.memory, gone.files, gone.children) == (0, 0, 0)


def test_soak_refuses_what_is_too_short_to_judge():
    words = ["--steps", "100000", "--batch-size", "4096"]
    done = subprocess.run([sys.executable, soak.__file__, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "40 times --batch-size" in done.stderr
