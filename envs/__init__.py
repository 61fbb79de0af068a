"""Constrained continuing control tasks. `import envs` registers them with Gymnasium.

`gym.make("AntCircle")` gives a single environment, `envs.make_vec("AntCircle", 64)` a batch.
"""

import difflib
from functools import partial

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv

from envs.adapter import Adapter
from envs.batch import BatchEnv, SingleEnv
from envs.circle import AntCircle, PointCircle
from envs.gather import AntGather, PointGather
from envs.lqr import ConstrainedLQR
from envs.render import record_gif
from envs.runs import Log, fail, make_pair, parse, refuse, stop_signals

BATCHED = {
    task.__name__: task for task in (PointCircle, PointGather, AntCircle, AntGather, ConstrainedLQR)
}
SUMO = {"Grid": "envs.grid:Grid", "Bottleneck": "envs.bottleneck:Bottleneck"}
IDS = (*BATCHED, *SUMO)

for _id, _task in BATCHED.items():
    gym.register(_id, entry_point=partial(SingleEnv, _task), vector_entry_point=_task)
for _id, _entry in SUMO.items():
    gym.register(_id, entry_point=_entry)


def make_vec(env_id: str, num_envs: int = 0, seed: int | None = None, **kwargs) -> VectorEnv:
    """n copies of an environment under one rule, ours or any Gymnasium id (`package.module:Id`).

    Autoreset is SAME_STEP; `infos["cost"]` (float64) and `infos["final_obs"]` cover every row on
    every step. Row i is seeded with seed + i. `num_envs=0` takes `recommended_num_envs`;
    `num_costs` is the number of costs per step. `stagger=True` spreads the episode clocks of our
    batched tasks; others ignore it. Further arguments go to the environment.
    """
    env_id = env_id.removeprefix("envs:")
    if num_envs < 0:
        raise ValueError(f"num_envs must be >= 0, got {num_envs}")
    if env_id in BATCHED:
        task = BATCHED[env_id]
        n = num_envs or getattr(task, "recommended_num_envs", BatchEnv.recommended_num_envs)
        return task(num_envs=n, seed=seed, **kwargs)
    kwargs.pop("stagger", None)
    if env_id in SUMO and num_envs > 1:
        from envs.sumo import make_workers

        return make_workers(env_id, num_envs, seed, **kwargs)
    try:
        make = partial(gym.make, env_id, **kwargs)
        if num_envs == 0:
            single = make()
            num_envs = getattr(single.unwrapped, "recommended_num_envs", 1)
            single.close()
        return Adapter([make] * num_envs, env_id, seed, num_costs=int(env_id in SUMO))
    except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError):
            missing = getattr(error.__cause__, "name", error.name)  # Gymnasium's own has no name
            if not f"{env_id.split(':')[0]}.".startswith(f"{missing}."):
                raise  # the module is there, but not what it needs
        known = dict.fromkeys([*IDS, *gym.registry])
        near = difflib.get_close_matches(env_id.split(":")[-1], known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(
            f"unknown environment {env_id!r}{hint} (ours: {', '.join(IDS)})"
        ) from error


def snapshot(env: VectorEnv):
    """`env.get_state()` with tensors for arrays, so that torch.load(weights_only=True) takes it.

    None where the environment cannot give its state.
    """
    return _convert(env.get_state(), np.ndarray, lambda array: torch.from_numpy(array.copy()))


def restore(env: VectorEnv, state) -> None:
    """Put a `snapshot` back: stepping goes on bit for bit."""
    env.set_state(_convert(state, torch.Tensor, lambda tensor: tensor.numpy()))


def _convert(tree, kind: type, change):
    if isinstance(tree, dict):
        return {key: _convert(value, kind, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_convert(value, kind, change) for value in tree]
    return change(tree) if isinstance(tree, kind) else tree


__all__ = [
    "IDS",
    "Adapter",
    "BatchEnv",
    "Log",
    "SingleEnv",
    "fail",
    "make_pair",
    "make_vec",
    "parse",
    "record_gif",
    "refuse",
    "restore",
    "snapshot",
    "stop_signals",
    *BATCHED,
]
