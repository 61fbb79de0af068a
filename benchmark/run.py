"""Train algorithm x task x seed, several at a time; go on where it stopped; name what failed.

    python benchmark/run.py --suite quick                      # short: do all six work?
    python benchmark/run.py --suite practical --envs PointGather PointCircle
    python benchmark/run.py --suite paper --dry-run            # only print the commands
    python benchmark/run.py --algorithms acpo_continuous --envs PointCircle \\
        --sweep recovery-t 0 0.25 0.5 0.75 1
    python benchmark/report.py runs/benchmark/quick            # tables and figures

The same command again skips the runs that are finished and resumes the others. Each run has a
folder in --out: record.json (flags, and of every attempt its command, commit, exit code and
seconds), what it printed, and the run folder of the script. Page: docs/benchmark.md.
"""

import ast
import fcntl
import itertools
import json
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NoReturn, get_args

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
Algorithm = Literal[
    "acpo_continuous",
    "cpo_continuous",
    "pcpo_continuous",
    "atrpo_lagrangian",
    "ppo_lagrangian",
    "bvf_ppo",
]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
TRUST_REGION, LAGRANGIAN = ALGORITHMS[:3], ALGORITHMS[3:]  # the two columns of the paper's table
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PLAIN_OUTPUT = {"TQDM_DISABLE": "1", "PYTHONIOENCODING": "utf-8"}
OWN_FLAGS = {"env-id", "seed", "run-dir", "resume"}  # set for each run, so nobody else may

Flags = dict[str, object]  # of a script: name -> value, a tuple of values, or () for a switch


@dataclass(frozen=True)
class Suite:
    """What to train and with which flags; a flag that a script does not have is left out for it.

    Later entries win: flags, then by_algorithm, by_env, by_both.
    """

    seeds: dict[str, int]  # task -> number of seeds
    flags: Flags = field(default_factory=dict)
    by_algorithm: dict[str, Flags] = field(default_factory=dict)
    by_env: dict[str, Flags] = field(default_factory=dict)
    by_both: dict[tuple[str, str], Flags] = field(default_factory=dict)

    def flags_of(self, algorithm: str, env_id: str) -> Flags:
        flags = self.flags | self.by_algorithm.get(algorithm, {}) | self.by_env.get(env_id, {})
        return flags | self.by_both.get((algorithm, env_id), {})


# The paper's table of hyperparameters and its table of ell, nothing else. What they do not say
# (cost limits, critic epochs, minibatches, PPO's clip) is as the scripts have it. BVF-PPO is not in
# them and takes PPO's column.
PAPER_ELL = {  # task: (ATRPO, PPO); PointCircle is not in the table
    "PointCircle": (0.50, 0.50),
    "PointGather": (0.50, 0.55),
    "AntCircle": (0.60, 0.50),
    "AntGather": (0.45, 0.50),
    "Grid": (0.45, 0.60),
    "Bottleneck": (0.50, 0.50),
}
BATCHED = {"hidden-sizes": (64, 32), "num-envs": 50}  # 50 divides the batch
PAPER = Suite(
    seeds=dict.fromkeys(PAPER_ELL, 5),
    flags={
        "total-timesteps": 100_000,
        "batch-size": 2500,
        "gae-lambda": 0.95,
        "cost-gae-lambda": 0.95,
        "gamma": 0.999,  # of the discounted algorithms
        "delta": 1e-4,
        "policy-learning-rate": 2e-4,  # only PPO has one: the others solve for their step
        "critic-learning-rate": 2e-4,
        "backtrack-coef": 0.75,
        "backtrack-iterations": 10,
        "cg-iterations": 10,
        "recovery-t": 0.75,
        "hold": "literal",  # the update as printed, without our integral of past violations
        "integral-gain": 0,
        # The paper evaluates every 1000 steps, which is within a batch: after every update then.
        "eval-every": 1,
        "eval-episodes": 10,
        "eval-steps": 1000,
    },
    by_algorithm={name: {"log-std-init": -1.0} for name in TRUST_REGION}
    | {name: {"log-std-init": -0.5, "no-adaptive": ()} for name in LAGRANGIAN},
    by_env={
        "PointCircle": BATCHED,
        "PointGather": BATCHED,
        "AntCircle": BATCHED,
        "AntGather": BATCHED,
        "Grid": {"hidden-sizes": (16, 16), "num-envs": 1},
        "Bottleneck": {"hidden-sizes": (50, 25), "num-envs": 1},
    },
    by_both={
        (algorithm, env_id): {"ell": ell}
        for env_id, ells in PAPER_ELL.items()
        for algorithm, ell in zip(("atrpo_lagrangian", "ppo_lagrangian"), ells, strict=True)
    },
)
# The defaults of the scripts, for as long as each task recommends. The Lagrangian scripts learn
# their multiplier: a fixed weight does not know the limit, so its result cannot be compared. At
# Bottleneck's own limit of 0.1 no policy that we know is feasible: every update would recover.
PRACTICAL = Suite(
    flags={"adaptive": ()},
    by_env={"Bottleneck": {"cost-limit": 0.2, "total-timesteps": 600_000}},
    seeds={
        "PointCircle": 5,
        "PointGather": 5,
        "AntCircle": 5,
        "AntGather": 3,
        "Grid": 3,
        "Bottleneck": 3,
    },
)
# Does everything run, and does it go up?
QUICK = Suite(
    seeds={"ConstrainedLQR": 1, "PointGather": 1},
    flags={"total-timesteps": 200_000},
)
SUITES = {"practical": PRACTICAL, "paper": PAPER, "quick": QUICK}

Repeated = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]  # an option to give many times


@dataclass
class Args:
    suite: Literal["practical", "paper", "quick"] = "practical"  # which settings: docs/benchmark.md
    algorithms: tuple[Algorithm, ...] = ALGORITHMS  # scripts to train, without the ending .py
    envs: tuple[str, ...] = ()  # tasks (empty: those of the suite), or package.module:EnvId
    seeds: tuple[int, ...] = ()  # the seeds themselves: 1 2 3 (empty: as many as the suite has)
    sweep: Repeated = ()  # a flag and its values: recovery-t 0 0.5 1; scripts without it run once
    set: Repeated = ()  # a flag and its value for all scripts that have it: total-timesteps 50000
    out: Path | None = None  # folder of all runs (None: runs/benchmark/SUITE)
    workers: int = 0  # runs at a time, one thread and one core each (0: the number of cores)
    ray_address: str = ""  # a Ray cluster that shares --out with this machine; auto: the one here
    dry_run: bool = False  # print the commands and start nothing


@dataclass(frozen=True)
class Run:
    """One training, and its name in the output folder."""

    algorithm: str
    env_id: str
    seed: int
    flags: dict[str, list[str]]
    sweep: dict[str, str]  # the part of flags that a sweep has set

    @property
    def name(self) -> str:
        env = self.env_id.split(":")[-1].replace("/", "-")
        swept = "".join(f"__{flag}={value}" for flag, value in self.sweep.items())
        return f"{env}__{self.algorithm}__{self.seed}{swept}"

    def new_record(self) -> dict:
        record = {"algorithm": self.algorithm, "env_id": self.env_id, "seed": self.seed}
        return record | {"sweep": self.sweep, "flags": self.flags, "folder": None, "attempts": []}


@dataclass(frozen=True)
class Outcome:
    """How an attempt at a run ended. `line` is its result, or the last line of its stderr."""

    name: str
    exit_code: int
    seconds: float
    line: str


def refuse(why: str) -> NoReturn:
    print(f"error: {why}", file=sys.stderr)
    sys.exit(2)


def script_flags(algorithm: str) -> set[str]:
    """The flags of a script, read from its Args without running it."""
    path = ROOT / f"{algorithm}.py"
    if not path.exists():
        refuse(f"{path.name} does not exist; choose others with --algorithms")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            fields = (line for line in node.body if isinstance(line, ast.AnnAssign))
            return {line.target.id.replace("_", "-") for line in fields}
    refuse(f"{path.name} has no class Args")


def has(known: set[str], flag: str) -> bool:
    return flag in known or flag.removeprefix("no-") in known  # --no-track turns --track off


def words_of(value: object) -> list[str]:
    return [str(word) for word in (value if isinstance(value, tuple) else (value,))]


def check(args: Args, known: dict[str, set[str]]) -> None:
    """Refuse what cannot work, before anything is written."""
    if args.workers < 0:
        refuse(f"--workers {args.workers}: must be >= 0")
    for option, least in (("sweep", 2), ("set", 1)):
        for words in getattr(args, option):
            if len(words) < least:
                refuse(f"--{option} {' '.join(words)}: needs a flag and its values")
            if words[0] in OWN_FLAGS:
                refuse(f"--{option} {words[0]}: is set by the benchmark itself")
            if not any(has(flags, words[0]) for flags in known.values()):
                refuse(f"--{option} {words[0]}: no chosen script has this flag")
    swept = [words[0] for words in args.sweep]
    for flag in swept:
        if swept.count(flag) > 1:
            refuse(f"--sweep {flag}: is given twice; give all its values at once")


def plan(args: Args) -> list[Run]:
    """All runs in the order of their start: task by task, and a seed of each algorithm in turn."""
    suite, known = SUITES[args.suite], {name: script_flags(name) for name in args.algorithms}
    check(args, known)
    runs = {}
    for env_id in args.envs or suite.seeds:
        seeds = args.seeds or range(1, suite.seeds.get(env_id, 1) + 1)
        for seed, algorithm in itertools.product(seeds, args.algorithms):
            flags = suite.flags_of(algorithm, env_id)
            flags |= {flag: tuple(values) for flag, *values in args.set}
            flags = {k: words_of(v) for k, v in flags.items() if has(known[algorithm], k)}
            axes = [words for words in args.sweep if has(known[algorithm], words[0])]
            for values in itertools.product(*(words[1:] for words in axes)):
                sweep = {words[0]: value for words, value in zip(axes, values, strict=True)}
                swept = {flag: [value] for flag, value in sweep.items()}
                run = Run(algorithm, env_id, seed, flags | swept, sweep)
                other = runs.setdefault(run.name, run)  # a seed or value given twice is run once
                if other.env_id != env_id:
                    refuse(f"--envs {other.env_id} {env_id}: both runs would be {run.name}")
    return list(runs.values())


def run_folder(home: Path) -> Path | None:
    """The folder that the script made, if it got as far as to write down its flags."""
    for path in sorted(home.glob("*/args.json"), reverse=True):
        try:
            json.loads(path.read_text())
        except ValueError:
            continue  # cut off while being written: such a run starts anew
        return path.parent
    return None


def command_of(run: Run, home: Path) -> list[str]:
    """What to call: the run from its start, or from where it stopped."""
    command = [sys.executable, f"{run.algorithm}.py"]
    folder = run_folder(home)
    if folder:
        return [*command, "--resume", str(folder)]
    command += ["--env-id", run.env_id, "--seed", str(run.seed), "--run-dir", str(home)]
    for flag, values in run.flags.items():
        command += [f"--{flag}", *values]
    return command


def read_record(home: Path) -> dict | None:
    """None where the script has not yet made its folder: such a record binds nobody."""
    path = home / "record.json"
    if not path.exists() or run_folder(home) is None:
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path}: cannot be read ({error}); delete it to resume the run"
        ) from error


def write_record(home: Path, record: dict) -> None:
    """Replaced in one piece: a record is never half written."""
    (home / "record.tmp").write_text(json.dumps(record, indent=2))
    os.replace(home / "record.tmp", home / "record.json")


def has_succeeded(record: dict) -> bool:
    return any(attempt["exit_code"] == 0 for attempt in record["attempts"])


def is_finished(run: Run, home: Path) -> bool:
    """True after exit code 0. A record of the same name but other flags is refused."""
    try:
        record = read_record(home)
    except (OSError, ValueError) as error:
        refuse(str(error))
    if record is None:
        return False
    stored = {"env-id": record["env_id"]} | record["flags"]
    wanted = {"env-id": run.env_id} | run.flags
    other = [flag for flag in stored | wanted if stored.get(flag) != wanted.get(flag)]
    if other:
        refuse(f"{home} was made with another {', '.join(other)}: choose another --out")
    return has_succeeded(record)


def git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # there is none: a run does not need it
        return ""
    return done.stdout.strip()


def try_lock(file) -> bool:
    """Ours until the file is closed here and in every process that it was handed to."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def usable_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextmanager
def own_core() -> Iterator[int | None]:
    """A core of this machine that no other run of ours has; any where all are taken.

    A run is kept to one core because the ants' physics starts a thread for each that it may use.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    cores = usable_cores()
    for core in cores:
        path = f"{tempfile.gettempdir()}/acpo-benchmark-{os.getuid()}-core-{core}"
        with open(path, "w") as lock:
            if try_lock(lock):
                yield core
                return
    yield random.choice(cores)


def last_line(path: Path, prefix: str = "") -> str:
    lines = path.read_text("utf-8", "replace").splitlines()
    told = (x for x in reversed(lines) if x.startswith(prefix) and any(map(str.isalnum, x)))
    return next(told, "").strip()


def error_in(path: Path) -> str:
    """The last line; or what tyro, which refuses a flag in a box, says above the rule in it."""
    text = path.read_text("utf-8", "replace").rstrip()
    if not text.endswith("╯"):
        return last_line(path)
    inside = text.rpartition("╭")[2].splitlines()[1:]
    message = itertools.takewhile(lambda line: "──" not in line, inside)
    return " ".join(line.strip("│ ") for line in message)


def new_attempt(command: list[str]) -> dict:
    return {
        "command": shlex.join(command),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "machine": platform.node(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "exit_code": None,
        "seconds": None,
    }


def launch(command: list[str], home: Path, lock, core: int | None) -> subprocess.Popen:
    with open(home / "stdout.txt", "w") as stdout, open(home / "stderr.txt", "w") as stderr:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | dict.fromkeys(ONE_THREAD, "1") | PLAIN_OUTPUT,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            process_group=0,  # Ctrl-C reaches it through us only
            pass_fds=[lock.fileno()],  # it holds the lock even if we are killed
        )
    if core is not None:
        with suppress(OSError):  # where it has ended already, or must not be moved
            os.sched_setaffinity(process.pid, {core})
    return process


def wait_for(process: subprocess.Popen) -> int:
    """Its exit code. Polled, as Ray's way to cancel a task does not reach into process.wait()."""
    try:
        while process.poll() is None:
            time.sleep(0.1)
    except KeyboardInterrupt:
        process.terminate()
    return process.wait()


def execute(run: Run, out: Path, started: Callable = lambda process: None) -> Outcome:
    """One attempt at a run, to its end, in a process of its own. Here or on a node of a cluster."""
    home = out / run.name
    if not out.is_dir():
        why = f"{platform.node()} does not see {out}: all nodes must share this folder"
        return Outcome(run.name, 2, 0.0, why)
    try:
        home.mkdir(exist_ok=True)
        with open(home / "lock", "w") as lock, own_core() as core:
            if not try_lock(lock):
                return Outcome(run.name, 2, 0.0, "another process is at work on it")
            return execute_locked(run, home, lock, core, started)
    except (OSError, ValueError) as error:  # a full disk, a broken record: the others go on
        return Outcome(run.name, 1, 0.0, str(error))


def execute_locked(run: Run, home: Path, lock, core: int | None, started: Callable) -> Outcome:
    command = command_of(run, home)
    record = read_record(home) or run.new_record()
    if has_succeeded(record):
        return Outcome(run.name, 0, 0.0, "another process has finished it")
    attempt = new_attempt(command)
    record["attempts"].append(attempt)
    write_record(home, record)
    start = time.perf_counter()
    process = launch(command, home, lock, core)
    started(process)
    attempt["exit_code"] = code = wait_for(process)
    attempt["seconds"] = seconds = round(time.perf_counter() - start, 2)
    folder = run_folder(home)
    record["folder"] = folder.name if folder else None
    line = last_line(home / "stdout.txt", "last 20 %")
    if code:
        ended = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
        line = attempt["error"] = f"{ended}: {error_in(home / 'stderr.txt') or 'no message'}"
    write_record(home, record)
    return Outcome(run.name, code, seconds, line)


def on_this_machine(runs: list[Run], out: Path, workers: int, stop: list) -> Iterator[Outcome]:
    """`workers` at a time; a signal is passed on to the scripts, which save and end.

    A second signal kills them.
    """
    children = []

    def started(process: subprocess.Popen) -> None:
        children.append(process)
        if stop:  # the signal came while this one was being started
            process.terminate()

    def pass_on(number, frame) -> None:
        stop.append(number)
        for process in children:
            process.send_signal(signal.SIGTERM if len(stop) == 1 else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    with ThreadPoolExecutor(workers) as pool:
        work = lambda run: None if stop else execute(run, out, started)  # noqa: E731
        for future in as_completed([pool.submit(work, run) for run in runs]):
            if future.result():
                yield future.result()


def connect(address: str):
    """The module ray, connected to the cluster."""
    try:
        import ray
    except ImportError:
        refuse(f"--ray-address {address}: needs Ray: pip install ray")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        refuse(f"--ray-address {address}: {str(error).splitlines()[0]}")
    return ray


def on_ray(ray, runs: list[Run], out: Path, stop: list) -> Iterator[Outcome]:
    """The same on a cluster, as many at a time as it has CPUs."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    task = ray.remote(num_cpus=1)(execute)
    waiting = {task.remote(run, out): run for run in runs}
    cancelled = False
    while waiting:
        for done in ray.wait(list(waiting), timeout=1.0)[0]:
            run = waiting.pop(done)
            try:
                yield ray.get(done)
            except ray.exceptions.TaskCancelledError:
                pass  # before it was started
            except ray.exceptions.RayError as error:  # the node died, and Ray's retries as well
                yield Outcome(run.name, 1, 0.0, str(error).splitlines()[0])
        if stop and not cancelled:
            cancelled = True
            for reference in waiting:
                ray.cancel(reference)


def follow(outcomes: Iterable[Outcome], total: int, stop: list) -> list[Outcome]:
    """Show each run as it ends; returns those that failed."""
    failed = []
    with tqdm(total=total, unit="run", dynamic_ncols=True) as bar:
        for outcome in outcomes:
            how = "FAILED" if outcome.exit_code else "done"
            if outcome.exit_code and stop:
                how = "stopped"
            elif outcome.exit_code:
                failed.append(outcome)
            bar.write(f"{how} {outcome.name} ({outcome.seconds:.0f} s): {outcome.line}")
            bar.update()
    return failed


def main(args: Args) -> None:
    out = (args.out or ROOT / "runs" / "benchmark" / args.suite).resolve()
    runs = plan(args)
    finished = {run.name for run in runs if is_finished(run, out / run.name)}
    todo = [run for run in runs if run.name not in finished]
    if args.dry_run:
        for run in runs:
            done = run.name in finished
            print(
                f"# finished: {run.name}" if done else shlex.join(command_of(run, out / run.name))
            )
        return
    workers = args.workers or len(usable_cores())
    resumed = sum(run_folder(out / run.name) is not None for run in todo)
    print(f"{len(runs)} runs: {len(finished)} finished, {resumed} to resume; folder {out}")
    stop = []
    ray = connect(args.ray_address) if args.ray_address else None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--out {out}: must be a folder to write into ({error.strerror})")
    outcomes = on_ray(ray, todo, out, stop) if ray else on_this_machine(todo, out, workers, stop)
    failed = follow(outcomes, len(todo), stop)
    for outcome in failed:
        print(f"failed: {outcome.name}: {outcome.line}", file=sys.stderr)
    if stop:
        print("interrupted; the same command goes on", file=sys.stderr)
        sys.exit(128 + stop[0])
    if failed:
        sys.exit(1)
    print(f"tables and figures: python benchmark/report.py {out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
