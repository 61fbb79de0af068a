"""How the tests start a script and read what it has written.

`run(line, real=True)` starts Python as a user does. Of the four seconds that this takes, three are
imports; all other runs are forked from one process that has done the imports and nothing else
(`python launcher.py`: it reads jobs from its standard input). A forked run is a process of its own
like any other: it can be killed, and it has its own output, exit code and working folder.
"""

import atexit
import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("acpo_continuous", "cpo_continuous", "pcpo_continuous")
NAMES += ("atrpo_lagrangian", "ppo_lagrangian", "bvf_ppo")
SCRIPTS = [name for name in NAMES if (ROOT / f"{name}.py").exists()]
CLOCKS = ("time/", "charts/SPS")
TIMEOUT = 300.0


# --- start ----------------------------------------------------------------------------------------


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The lines of stderr without those of the progress bar."""
        lines = self.stderr.replace("\r", "\n").splitlines()
        return [line for line in lines if line.strip() and "%|" not in line]


def words(script: str, where: Path | None, *switches: str, **flags) -> list[str]:
    """The command line; a flag's value may be a list, and None drops the flag."""
    line = [str(ROOT / f"{script}.py"), *switches]
    for name, value in ({"run_dir": where} | flags).items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            line += [f"--{name.replace('_', '-')}", *map(str, values)]
    return line


class Forked:
    """A script in a process of its own, `pid`. `before` is Python that it executes first."""

    def __init__(self, line: list[str], cwd: Path = ROOT, before: str = ""):
        process, folder, lock = server()
        self.place = Path(tempfile.mkdtemp(dir=folder))
        job = {"line": line, "cwd": str(cwd), "before": before, "place": str(self.place)}
        with lock:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        self.pid = int(self._read("pid"))

    def _read(self, name: str) -> str:
        wait_for((self.place / name).exists, f"the {name} of a run")
        return (self.place / name).read_text()

    @property
    def ended(self) -> bool:
        return (self.place / "code").exists()

    def send(self, number: int, group: bool = False) -> None:
        """A signal, to the process alone or, as a terminal does, to its children too."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def wait(self) -> Done:
        code = int(self._read("code"))
        return Done(code, *((self.place / name).read_text() for name in ("out", "err")))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, f"waited {TIMEOUT} s for {what}"
        time.sleep(0.002)


def run(line: list[str], cwd: Path = ROOT, before: str = "", real: bool = False) -> Done:
    """To the end, whatever it is."""
    if not real:
        return Forked(line, cwd, before).wait()
    done = subprocess.run(
        [sys.executable, *line], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT
    )
    return Done(done.returncode, done.stdout, done.stderr)


def finish(script: str, where: Path, *switches: str, cwd=ROOT, real=False, **flags) -> Path:
    """Run to a good end; returns the folder of the run. `where`/stdout keeps what it printed."""
    done = run(words(script, where, *switches, **flags), cwd, real=real)
    assert done.returncode == 0, done.stderr[-2000:]
    (where / "stdout").write_text(done.stdout)
    return folder_in(where)


def resume(script: str, folder: Path, **flags) -> str:
    """Go on with a run to a good end; returns what it prints."""
    done = run(words(script, None, resume=folder, **flags))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# --- read -----------------------------------------------------------------------------------------


def folder_in(where: Path) -> Path:
    (folder,) = (path for path in where.iterdir() if path.is_dir())
    return folder


def read(folder: Path) -> list[dict[str, str]]:
    with open(folder / "progress.csv") as file:
        return list(csv.DictReader(file))


def without_clocks(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in read(folder)]


def column(rows: list[dict[str, str]], tag: str):
    import numpy as np

    return np.array([float(row[tag]) for row in rows])


def load(folder: Path, name: str = "checkpoint.pt") -> dict:
    import torch

    return torch.load(folder / name, weights_only=True)


def events(folder: Path) -> dict[str, dict[int, float]]:
    """tag -> {step: value}; a step that TensorBoard would show twice is an error."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # TensorBoard reads the files by the second and the process number in their names. Tests resume
    # several times a second, and process numbers start again.
    files = sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns)
    with tempfile.TemporaryDirectory() as sorted_files:
        for i, path in enumerate(files):
            Path(sorted_files, f"events.out.tfevents.{i:010d}").symlink_to(path.absolute())
        log = EventAccumulator(sorted_files, size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in log.Tags()["scalars"]:
        points = [(event.step, event.value) for event in log.Scalars(tag)]
        assert len(dict(points)) == len(points), tag
        found[tag] = dict(points)
    return found


def documented_tags() -> set[str]:
    text = (ROOT / "docs" / "metrics.md").read_text()
    return set(re.findall(r"^\| `([a-z]+/\w+)`", text, flags=re.MULTILINE))


def assert_same(one, other, path: str = "") -> None:
    """Two trees of tensors, numbers and strings are equal bit for bit."""
    import torch

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
    elif path.endswith("/world") and one != b"new":
        # A light that is set by hand has no end, but SUMO writes one, a day after it was loaded.
        one, other = (re.sub(rb' until="\d+"', b"", zlib.decompress(x)) for x in (one, other))
        assert one == other, path
    else:
        assert one == other or (one != one and other != other), path


def assert_same_training(one: Path, other: Path) -> None:
    """All that was logged, and all that the next iteration would depend on, is equal."""
    assert without_clocks(one) == without_clocks(other)
    first, second = load(one), load(other)
    for state in (first, second):
        del state["seconds"], state["args"]
    assert_same(first, second)


def assert_logs_agree(folder: Path) -> None:
    """TensorBoard holds every number of progress.csv but the NaNs, once."""
    rows, log = read(folder), events(folder)
    for tag in set(rows[0]) - {"global_step"}:
        wanted = {int(row["global_step"]): float(row[tag]) for row in rows if row[tag] != "nan"}
        points = log.pop(tag, {})
        assert points.keys() == wanted.keys(), tag
        for step, value in wanted.items():
            near = 1e-6 * abs(value) + 1e-37  # it is float32, which has nothing below
            assert abs(points[step] - value) <= near, (tag, step)
    assert log == {}


# --- the process that others are forked from ------------------------------------------------------


@cache
def server() -> tuple:
    """(process, folder of the jobs, lock), started at the first use."""
    folder = tempfile.TemporaryDirectory()
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True)

    @atexit.register
    def close():
        process.stdin.close()
        process.wait()
        folder.cleanup()

    return process, folder.name, threading.Lock()


def kill_at(module, name: str, number: int, about: str = "", first=None, after=False) -> None:
    """For `before`: the process dies by SIGKILL in a call of module.name, its number-th.

    Counted are the calls with `about` in their arguments. `first` is called with the arguments
    before that; with `after`, the call itself still happens.
    """
    real, count = getattr(module, name), 0

    def call(*args, **kwargs):
        nonlocal count
        count += about in str((args, kwargs))
        if count == number and about in str((args, kwargs)):
            if first:
                first(*args, **kwargs)
            if after:
                real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(module, name, call)


def write(place: str, name: str, number: int) -> None:
    with open(f"{place}/{name}.new", "w") as file:
        file.write(str(number))
    os.rename(f"{place}/{name}.new", f"{place}/{name}")  # whole or not there


def serve() -> None:
    """For each job a process that waits and a process that runs it; only the latter returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    for line in sys.stdin:
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return prepare(job)
        write(job["place"], "pid", pid)
        write(job["place"], "code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os._exit(0)


def prepare(job: dict) -> None:
    """Make this process what `python script.py ...` would be."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job["cwd"])
    for number, name in enumerate((os.devnull, "out", "err")):
        os.dup2(os.open(os.path.join(job["place"], name), os.O_RDWR | os.O_CREAT), number)
    sys.argv = job["line"]
    sys.path[0] = str(ROOT)
    exec(job["before"], {"kill_at": kill_at})


def main() -> None:
    """The imports, and matplotlib's first picture, are what all runs share."""
    sys.path.insert(0, str(ROOT))
    import gc
    import importlib
    import runpy

    import matplotlib.pyplot as plt

    late = ("mujoco.rollout", "torch._dynamo", "tensorboard.summary.writer.event_file_writer")
    for name in ("envs", *late):  # those that are else imported when they are first used
        importlib.import_module(name)
    plt.figure().subplots().plot([0, 1])
    plt.savefig(os.devnull, format="png")
    plt.close()
    gc.freeze()
    serve()
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # to take the interpreter apart would take longer than most runs


if __name__ == "__main__":
    main()
