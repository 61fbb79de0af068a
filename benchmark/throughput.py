"""Environment steps per second: ours, the raw simulator, and Gymnasium's vector environments.

    python benchmark/throughput.py --seconds 10 --out benchmark/results/throughput.csv

All rows of a task are open together and measured in turn, a slice at a time and the order reversed
every round, so that whatever else the machine does falls on all of them alike. A rate is the median
over the rounds. Compare rates within one run only.
"""

import argparse
import csv
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from mujoco import rollout

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import envs  # noqa: E402

EPISODE = 200  # steps between restarts, the same in every row
SEGMENT = 20  # steps that the raw simulator runs from one recorded state
ANTS = ("AntCircle", "AntGather")


@dataclass
class Row:
    """One line of the table. `work()` makes some environment steps and returns how many."""

    task: str
    name: str
    num_envs: int
    work: Callable[[], int]
    close: Callable[[], None]
    before: Callable[[], None] = lambda: None  # before each call of work, not measured
    rates: list[float] = field(default_factory=list)

    def measure(self, seconds: float) -> None:
        steps, elapsed = 0, 0.0
        while elapsed < seconds:
            self.before()
            start = time.perf_counter()
            steps += self.work()
            elapsed += time.perf_counter() - start
        self.rates.append(steps / elapsed)

    @property
    def rate(self) -> float:
        return float(np.median(self.rates))


def random_actions(shape: tuple[int, ...], steps: int = EPISODE) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (steps, *shape)).astype(np.float32)


def vector_row(task: str, name: str, env: gym.vector.VectorEnv, chunk: int) -> Row:
    """Random actions, `chunk` steps per call of work, a restart every EPISODE steps."""
    actions = random_actions(env.action_space.shape)
    env.reset(seed=0)
    clock = 0

    def work() -> int:
        nonlocal clock
        for _ in range(chunk):
            if clock == EPISODE:
                env.reset(seed=0)
                clock = 0
            env.step(actions[clock])
            clock += 1
        return chunk * env.num_envs

    return Row(task, name, env.num_envs, work, env.close)


def ours(task: str) -> list[Row]:
    return [
        vector_row(task, "ours", envs.make_vec(task, n), chunk=EPISODE if n <= 8 else SEGMENT)
        for n in (1, 8, 32, 128)
    ]


def gymnasium_rows(task: str) -> list[Row]:
    """Gymnasium's vector environments around the same single environment."""
    make, mode = partial(gym.make, f"envs:{task}"), AutoresetMode.SAME_STEP
    rows = [
        vector_row(task, "SyncVectorEnv", SyncVectorEnv([make] * n, autoreset_mode=mode), 256 // n)
        for n in (8, 128)
    ]
    processes = AsyncVectorEnv([make] * 8, autoreset_mode=mode, context="forkserver")
    return [*rows, vector_row(task, "AsyncVectorEnv", processes, SEGMENT)]


def gymnasium_ant(num_envs: int = 8) -> list[Row]:
    """Gymnasium's own ant: another task (and the RK4 integrator), for orientation."""
    if importlib.util.find_spec("imageio") is None:
        print("Ant-v5 is left out: Gymnasium needs the package imageio for it")
        return []
    makers = [partial(gym.make, "Ant-v5")] * num_envs
    mode = AutoresetMode.SAME_STEP
    env = AsyncVectorEnv(makers, autoreset_mode=mode, context="forkserver")
    return [vector_row("Ant-v5", "AsyncVectorEnv", env, SEGMENT)]


def record(task: str, num_envs: int = 128) -> tuple[mujoco.MjModel, np.ndarray, ...]:
    """What the raw simulator has to do to repeat the 128-env row of `ours`, state for state.

    Returns the model and, for every segment: full physics state, warm start, controls (SEGMENT, 8).
    """
    env = envs.make_vec(task, num_envs)
    actions = random_actions(env.action_space.shape)
    env.reset(seed=0)
    body, states, warmstarts = env.body, [], []
    for t, action in enumerate(actions):
        if t % SEGMENT == 0:
            states.append(np.column_stack([body.time, body.positions, body.velocities]))
            warmstarts.append(body.warmstart.copy())
        env.step(action)
    controls = actions.reshape(EPISODE // SEGMENT, SEGMENT, num_envs, 8).swapaxes(1, 2)
    controls = controls.reshape(-1, SEGMENT, 8).astype(np.float64)
    return body.model, np.concatenate(states), np.concatenate(warmstarts), controls


def raw_simulator(task: str) -> list[Row]:
    """mj_step on all cores with controls known beforehand: nothing to observe, decide or pay.

    Both ways to do it: MuJoCo's own thread pool over whole segments, and a Python thread per core
    that calls mj_step. The 128 trajectories of the largest row of `ours`, cut into segments that
    start from recorded states, so that poses and contacts are alike. (An ant that falls within a
    segment stays down until its end: here nobody looks.)
    """
    model, states, warmstarts, controls = record(task)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    datas = [mujoco.MjData(model) for _ in range(cores)]
    pool, threads = rollout.Rollout(nthread=cores), ThreadPoolExecutor(cores)
    every_substep = np.repeat(controls, 5, axis=1)
    state_kind = mujoco.mjtState.mjSTATE_FULLPHYSICS
    batch = 128  # segments per call of work: as many as environments
    parts = [slice(i, i + batch) for i in range(0, len(states), batch)]
    turns = {"pool": 0, "threads": 0}

    def next_part(name: str) -> slice:
        turns[name] += 1
        return parts[turns[name] % len(parts)]

    def pool_work() -> int:
        part = next_part("pool")
        pool.rollout(
            model, datas, states[part], every_substep[part], initial_warmstart=warmstarts[part]
        )
        return batch * SEGMENT

    def thread_loop(data: mujoco.MjData, indices: range) -> None:
        for i in indices:
            mujoco.mj_setState(model, data, states[i], state_kind)
            data.qacc_warmstart[:] = warmstarts[i]
            for control in controls[i]:
                data.ctrl[:] = control
                mujoco.mj_step(model, data, 5)

    def thread_work() -> int:
        part = next_part("threads")
        shares = [range(part.start + k, part.stop, cores) for k in range(cores)]
        list(threads.map(thread_loop, datas, shares))
        return batch * SEGMENT

    return [
        Row(task, "raw mj_step, MuJoCo's pool", batch, pool_work, pool.close),
        Row(task, "raw mj_step, Python threads", batch, thread_work, threads.shutdown),
    ]


def record_sumo(env, actions: np.ndarray) -> list[tuple]:
    """Step the env; the calls that changed its SUMO world, in order, none that only reads."""
    libsumo, calls = env.libsumo, []

    def noting(function):
        def call(*args):
            calls.append((function, args))
            return function(*args)

        return call

    control = "_show" if hasattr(env, "_show") else "_set_cap"  # lights or speed caps
    before = getattr(env, control)
    setattr(env, control, noting(before))
    env.libsumo = SimpleNamespace(
        simulationStep=noting(libsumo.simulationStep),
        simulation=libsumo.simulation,
        vehicle=SimpleNamespace(
            add=noting(libsumo.vehicle.add),
            setSpeedFactor=noting(libsumo.vehicle.setSpeedFactor),
            getSpeed=libsumo.vehicle.getSpeed,
        ),
    )
    for action in actions:
        env.step(action)
    env.libsumo = libsumo
    setattr(env, control, before)
    return calls


def sumo_rows(task: str) -> list[Row]:
    """The raw limit is `libsumo.simulationStep` on the trajectory that the env drives: lights, caps
    and re-entries are recorded once and replayed, nothing is read."""
    env, chunk = gym.make(task, horizon=10**9).unwrapped, 250
    workers = envs.make_vec(task, 2, seed=0)
    workers.reset()
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    actions = rng.normal(0.0, 0.37, (chunk, 2, *env.action_space.shape)).astype(np.float32)
    start = env.get_state()
    calls = record_sumo(env, actions[:, 0])

    def raw_work() -> int:
        for function, args in calls:
            function(*args)
        return chunk

    def env_work() -> int:
        for action in actions[:, 0]:
            env.step(action)
        return chunk

    def workers_work() -> int:
        for action in actions:
            workers.step(action)
        return 2 * chunk

    def rewind() -> None:
        env.set_state(start)

    return [
        Row(task, "raw simulationStep", 1, raw_work, lambda: None, before=rewind),
        Row(task, "ours, in process", 1, env_work, env.close, before=rewind),
        Row(task, "ours, 2 workers", 2, workers_work, workers.close),
    ]


def rows_of(task: str) -> list[Row]:
    """Everything that is measured for a task. New groups of rows are added here."""
    if task in envs.SUMO:
        return sumo_rows(task)
    rows = ours(task) + gymnasium_rows(task)
    if task in ANTS:
        rows = raw_simulator(task) + rows
    if task == "AntCircle":
        rows += gymnasium_ant()
    return rows


def measure(rows: list[Row], seconds: float, rounds: int) -> None:
    for row in rows:
        row.before()
        row.work()  # warm up
    for i in range(rounds):
        for row in rows if i % 2 == 0 else rows[::-1]:
            row.measure(seconds / rounds)


def ratios(rows: list[Row]) -> list[dict]:
    """The table: each rate against the faster of the raw rows and of the SyncVectorEnv rows."""
    raw = max((row.rate for row in rows if row.name.startswith("raw")), default=None)
    sync = max((row.rate for row in rows if row.name == "SyncVectorEnv"), default=None)
    return [
        {
            "task": row.task,
            "row": row.name,
            "num_envs": row.num_envs,
            "steps_per_second": round(row.rate),
            "of_raw": round(row.rate / raw, 3) if raw else "",
            "times_sync": round(row.rate / sync, 2) if sync else "",
        }
        for row in rows
    ]


def training_rates(rows: list[dict]) -> dict[str, tuple[float, float]]:
    """Of the rows of progress.csv: part of the loop -> its steps/s and its part of the time.

    The first row only says where the count starts: that iteration warms up.
    """
    first, *rows = rows
    steps = int(rows[-1]["global_step"]) - int(first["global_step"])
    spent = {k: sum(float(row[f"time/{k}"]) for row in rows) for k in ("rollout", "update", "eval")}
    train = spent["rollout"] + spent["update"]
    spent = {"rollout + update": train, **spent}
    return {part: (steps / t if t else 0.0, t / train) for part, t in spent.items()}


def training_lines(task: str, env_rate: float, seconds: float) -> list[dict]:
    """ACPO with its default settings: steps/s of the whole loop, split into its three parts."""
    with tempfile.TemporaryDirectory() as folder:
        steps = round(min(max(seconds * env_rate / 3, 50_000), 500_000))
        command = [sys.executable, "acpo_continuous.py", "--env-id", task, "--run-dir", folder]
        command += ["--total-timesteps", str(steps), "--eval-every", "20"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        with open(next(Path(folder).glob("*/progress.csv"))) as file:
            parts = training_rates(list(csv.DictReader(file)))
    lines = []
    for part, (rate, spent) in parts.items():
        share = f"{rate / env_rate:.2f} of env only; {spent:.2f} of training time"
        print(f"{task:<15}training, {part:<21}{rate:>14,.0f} steps/s  {share}", flush=True)
        lines.append({"task": task, "row": f"training, {part}", "num_envs": "default"})
        lines[-1] |= {"steps_per_second": round(rate), "of_raw": "", "times_sync": ""}
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tasks = list(envs.IDS)
    parser.add_argument("--tasks", nargs="+", default=tasks, choices=tasks)
    parser.add_argument("--seconds", type=float, default=10.0, help="per row, over all rounds")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--training", action="store_true", help="also time ACPO itself")
    parser.add_argument("--out", type=Path, default=Path("benchmark/results/throughput.csv"))
    args = parser.parse_args()
    multiprocessing.set_forkserver_preload(["envs"])
    load = os.getloadavg()[0]
    cores = os.cpu_count()
    print(f"{cores} cores, load average at the start {load:.1f}")
    table = []
    for task in args.tasks:
        rows = rows_of(task)
        measure(rows, args.seconds, args.rounds)
        for line in ratios(rows):
            table.append({**line, "cores": cores, "load": round(load, 1)})
            print(
                f"{line['task']:<15}{line['row']:<29}{line['num_envs']:>4}"
                f"{line['steps_per_second']:>11,} steps/s  of raw {line['of_raw']!s:<6}"
                f" x sync {line['times_sync']}",
                flush=True,
            )
        for row in rows:
            row.close()
        if args.training:
            rate = max(row.rate for row in rows if row.name.startswith("ours"))
            for line in training_lines(task, rate, args.seconds):
                table.append({**line, "cores": cores, "load": round(load, 1)})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys())
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
