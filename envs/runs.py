"""A run from outside: its flags, its environments, its folder, its log. Nothing about learning."""

import contextlib
import csv
import dataclasses
import importlib.metadata
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RANGES = {  # what a flag may be, in whichever script it is
    "batch_size fisher_samples cg_iterations critic_epochs critic_minibatch": (1, 1e9),
    "policy_epochs policy_minibatch eval_episodes eval_steps": (1, 1e9),
    "seed eval_every save_every backtrack_iterations": (0, 1e9),
    "num_envs": (0, 65536),
    "cg_damping integral_gain multiplier_rate max_grad_norm": (0, 1e3),
    "delta critic_learning_rate policy_learning_rate clip_coef": (1e-12, 1),
    "log_std_init log_std_min": (-20, 2),
    "gae_lambda cost_gae_lambda backtrack_coef": (0, 0.999),
    "gamma cost_gamma": (0, 0.99999),
    "recovery_t ell": (0, 1),
}
BATCH_RULE = "must be a multiple, 2 or more, of the {} environments"
RAISED_BY_OTHERS = TypeError, AttributeError, AssertionError, RuntimeError  # when they are made
FREE = {"resume", "total_timesteps", "eval_every", "eval_episodes", "eval_steps", "save_every"}
FREE |= {"capture_video", "track", "run_dir", "device"}  # what a resumed run may change


def refuse(flag: str, value, why) -> NoReturn:
    """One line that names the flag, its value and what is wrong; exit code 2."""
    print(f"error: --{flag.replace('_', '-')} {value}: {why}", file=sys.stderr)
    sys.exit(2)


def fail(text) -> NoReturn:
    """One line, clear of the progress bar; exit code 1."""
    for bar in [*getattr(tqdm, "_instances", ())]:
        bar.close()
    print(f"error: {text}", file=sys.stderr)
    sys.exit(1)


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def parse(Args: type) -> Any:
    """The command line; with --resume, the flags of that run are the defaults."""
    args = tyro.cli(Args)
    if args.resume:
        try:
            with open(f"{args.resume}/args.json") as file:
                record = json.load(file)
            stored = {k: tuple(v) if isinstance(v, list) else v for k, v in record["args"].items()}
            default = Args(**stored | {"resume": args.resume})
            for name, value in stored.items():
                if not same_kind(value, getattr(Args, name)):
                    raise ValueError(f"{name} is {value!r}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = getattr(error, "strerror", None) or error
            refuse("resume", args.resume, f"has no args.json of this script ({text})")
        script = os.path.splitext(os.path.basename(sys.argv[0]))[0]
        if record.get("script") != script:
            refuse("resume", args.resume, f"is a run of {record.get('script')}.py")
        args = tyro.cli(Args, default=default)
    return args


def same_kind(value, default) -> bool:
    """Whether a value read from a file is of the kind of a flag's default."""
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(type(x) in (int, float) for x in value)
    if isinstance(default, float | None):
        return type(value) in (int, float) or value is default
    return type(value) is type(default)


def check(args) -> None:
    """Refuse what cannot work, before anything is written."""
    for names, (low, high) in RANGES.items():
        for name in names.split():
            value = getattr(args, name, None)  # None: not set, or no flag of this script
            if value is not None and not low <= value <= high:  # NaN fails too
                refuse(name, value, f"must be in [{low:g}, {high:g}]")
    if args.total_timesteps and args.total_timesteps < args.batch_size:
        why = f"must be at least --batch-size {args.batch_size}, or 0: the task's own"
        refuse("total_timesteps", args.total_timesteps, why)
    if args.log_std_init < args.log_std_min:
        refuse("log_std_init", args.log_std_init, f"is below --log-std-min {args.log_std_min}")
    if not all(1 <= size <= 4096 for size in args.hidden_sizes):
        refuse("hidden_sizes", args.hidden_sizes, "must all be in [1, 4096]")
    if args.num_envs and (args.batch_size % args.num_envs or args.batch_size < 2 * args.num_envs):
        refuse("batch_size", args.batch_size, BATCH_RULE.format(args.num_envs))
    try:
        torch.zeros(1, dtype=torch.float64, device=args.device).cpu()
    except (RuntimeError, AssertionError, TypeError) as error:
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        refuse("device", args.device, f"{first_line(error)} (there is {', '.join(there)})")
    if args.track and importlib.util.find_spec("wandb") is None:
        refuse("track", True, "needs Weights & Biases: pip install wandb")


def make_pair(args):
    """(environments to train in, environments to evaluate in, limit (m,)) as the flags say.

    Where the flags leave the number of steps or the damping to the task, it is put into args;
    `envs:AntGather` becomes AntGather.
    """
    from envs import make_vec

    check(args)
    args.env_id = args.env_id.removeprefix("envs:")  # the scripts look at it too
    seed = args.seed * 1_000_000  # row i of an env has seed + i: no two runs share random numbers
    try:
        env = make_vec(args.env_id, args.num_envs, seed=seed, stagger=True)
        rows = min(args.eval_episodes, env.recommended_num_envs)
        eval_env = make_vec(args.env_id, rows, seed=seed + 500_000)
    except (ValueError, ImportError, gym.error.Error, *RAISED_BY_OTHERS) as error:
        refuse("env_id", args.env_id, first_line(error))
    args.total_timesteps = args.total_timesteps or max(env.recommended_timesteps, args.batch_size)
    if getattr(args, "cg_damping", 0.0) is None:
        args.cg_damping = env.recommended_damping
    own = () if env.cost_limit is None else env.cost_limit
    limit, m = np.ravel(args.cost_limit or own).astype(np.float64), env.num_costs
    if limit.size != m or not (np.isfinite(limit) & (limit >= 0.0)).all():
        why = f"must be {m} finite number(s) >= 0, one per cost of {args.env_id}"
        refuse("cost_limit", args.cost_limit or env.cost_limit, why)
    if args.batch_size % env.num_envs or args.batch_size < 2 * env.num_envs:
        refuse("batch_size", args.batch_size, BATCH_RULE.format(env.num_envs))
    if args.capture_video:
        check_pictures(args.env_id)
    return env, eval_env, limit


def check_pictures(env_id: str) -> None:
    """Take one now: the video is made at the end, too late to find that there is none."""
    from envs import make_vec

    try:
        env = make_vec(env_id, 1, seed=0, render_mode="rgb_array")
        env.reset()
        np.asarray(env.render()[0]).reshape(-1)[0] + 0
        env.close()
    except Exception as error:  # whatever a renderer of somebody else's raises
        refuse("capture_video", True, f"{env_id} gives no pictures ({first_line(error)})")


def stop_signals() -> list[int]:
    """A list that Ctrl-C or SIGTERM puts its number into, in place of ending the process."""
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    return stop


def unless_full(failed) -> None:
    """The hook of threads: what TensorBoard's cannot write, flush() raises again in ours."""
    if not issubclass(failed.exc_type, OSError):
        threading.__excepthook__(failed)


class Log:
    """The folder of a run: args.json, progress.csv, TensorBoard, and the bar on the terminal."""

    def __init__(self, args, script: str):
        self.args, self.script = args, os.path.splitext(os.path.basename(script))[0]
        env = args.env_id.split(":")[-1].replace("/", "-")  # of a namespace: no folder of its own
        name = f"{env}__{self.script}__{args.seed}__{int(time.time())}"
        self.folder = args.resume or os.path.join(args.run_dir, name)
        self.progress = f"{self.folder}/progress.csv"
        if args.resume:
            return
        record = {"script": self.script, "args": dataclasses.asdict(args), **versions()}
        made = False
        try:
            os.makedirs(self.folder)
            made = True
            with open(f"{self.folder}/args.json", "w") as file:
                json.dump(record, file, indent=2)
        except OSError as error:
            if made:
                shutil.rmtree(self.folder, ignore_errors=True)
            refuse("run_dir", args.run_dir, f"cannot write {self.folder} ({error.strerror})")

    def same_flags(self, stored: dict) -> None:
        """Refuse to go on with a checkpoint that was made with other flags."""
        ours = {field.name for field in dataclasses.fields(self.args)}
        if not isinstance(stored, dict) or not {"seed"} <= stored.keys() <= ours:
            refuse("resume", self.folder, f"its checkpoint is none of {self.script}.py")
        for name, value in stored.items():
            if name not in FREE and value != getattr(self.args, name):
                why = f"the checkpoint in {self.folder} was made with {value}"
                refuse(name, getattr(self.args, name), why)

    def begin(self, iteration: int, seconds: float) -> None:
        """Drop what a stopped run logged after `iteration`, which will be done again; open."""
        lines = []
        try:
            if iteration:
                with open(self.progress) as file:
                    lines = [line for line in file.readlines()[: iteration + 1] if line[-1] == "\n"]
                if len(lines) <= iteration:
                    why = f"its checkpoint is at row {iteration} of progress.csv, which ends before"
                    refuse("resume", self.folder, why)
            with open(f"{self.progress}.tmp", "w") as file:
                file.writelines(lines)
            os.replace(f"{self.progress}.tmp", self.progress)
        except OSError as error:
            if not self.args.resume:
                raise
            refuse("resume", self.folder, f"cannot rewrite progress.csv ({error.strerror})")
        if self.args.track:
            import wandb

            config = dataclasses.asdict(self.args)
            name = os.path.basename(self.folder)
            wandb.init(project="acpo", name=name, config=config, sync_tensorboard=True)
        size = self.args.batch_size
        total, step = self.args.total_timesteps // size * size, iteration * size
        if threading.excepthook is threading.__excepthook__:
            threading.excepthook = unless_full
        self.writer = SummaryWriter(self.folder, purge_step=step + 1 if self.args.resume else None)
        self.bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True)
        self.seconds, self.started = seconds, time.perf_counter() - seconds

    def write(self, step: int, row: dict[str, float]) -> None:
        """One row of tags. NaN, a number that does not exist, is not sent to TensorBoard."""
        self.seconds = time.perf_counter() - self.started
        row["charts/SPS"] = step / self.seconds
        with open(self.progress, "a") as file:
            if file.tell() == 0:
                print("global_step", *row, sep=",", file=file)
            print(step, *(float(value) for value in row.values()), sep=",", file=file)
            file.flush()
            os.fsync(file.fileno())  # the checkpoint, which is synced, must never be ahead of it
        for tag, value in row.items():
            if not math.isnan(value):
                self.writer.add_scalar(tag, value, step)
        self.writer.flush()
        reward, cost, limit = (row[f"charts/{x}"] for x in ("avg_reward", "avg_cost", "cost_limit"))
        shown = f"reward {reward:.4g}, cost {cost:.4g} (limit {limit:.4g})"
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(self.args.batch_size)

    def finite(self, what: str, *arrays) -> None:
        """End the run if a number in one of the arrays or tensors is not finite."""
        if not all((np if isinstance(x, np.ndarray) else torch).isfinite(x).all() for x in arrays):
            fail(f"{what} a number that is not finite; what was saved before is in {self.folder}")

    def stopped(self, number: int) -> NoReturn:
        """End after a signal: how to go on, and the exit code that the shell expects."""
        self.close()
        print(f"stopped; go on with: python {self.script}.py --resume {self.folder}")
        sys.exit(128 + number)

    def close(self) -> None:
        self.bar.close()
        self.writer.close()

    def summary(self) -> None:
        """Three lines and curves.png."""
        self.close()
        step, reward, cost, limit = draw_curves(self.folder)
        sps = f"{step:,} steps in {self.seconds:.0f} s ({step / self.seconds:,.0f} steps/s)"
        print(f"{self.args.env_id}: {sps}")
        print(f"last 20 %: reward {reward:.4g} and cost {cost:.4g} per step (limit {limit:g})")
        print(f"learning curves: {self.folder}/curves.png")


def versions() -> dict:
    """What a run was made with: the git commit of this code and the versions of its packages."""
    here = os.path.dirname(os.path.abspath(__file__))
    ask = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(ask, cwd=here, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git: a run does not need it
        commit = ""
    found = {}
    for name in ("torch", "numpy", "gymnasium", "mujoco", "libsumo"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {"commit": commit, "versions": found}


def draw_curves(folder: str) -> tuple[int, float, float, float]:
    """curves.png from progress.csv; (steps, reward and cost of the last 20 %, limit)."""
    import matplotlib.pyplot as plt

    with open(f"{folder}/progress.csv") as file:
        rows = [{tag: float(x) for tag, x in row.items()} for row in csv.DictReader(file)]
    column = {tag: np.array([row[tag] for row in rows]) for tag in rows[0]}
    limit = column["charts/cost_limit"][-1]
    figure = plt.figure(figsize=(10, 4), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), ("reward", "cost"), strict=True):
        for group, label in (("charts", "training"), ("eval", "evaluation, mean action")):
            y = column[f"{group}/avg_{name}"]
            seen = np.isfinite(y)
            axis.plot(column["global_step"][seen], y[seen], label=label)
        axis.set(xlabel="environment steps", ylabel=f"average {name} per step")
    axis.axhline(limit, color="black", linestyle="--", label="limit")
    axis.legend()
    figure.savefig(f"{folder}/curves.png")
    plt.close(figure)
    last = slice(-max(1, len(rows) // 5), None)
    means = (column[f"charts/avg_{name}"][last].mean() for name in ("reward", "cost"))
    return int(column["global_step"][-1]), *means, limit
