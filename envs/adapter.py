"""Any Gymnasium environment with a cost in its info, made to obey the rules of this package."""

from collections.abc import Callable

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import TimeLimit


class CostError(OSError, ValueError):
    """A step without its costs. It is an OSError: the scripts tell those in one line."""


class Adapter(VectorEnv):
    """Single environments side by side in this process, stepped one after the other.

    SAME_STEP autoreset; `infos["cost"]` and `infos["final_obs"]` are full arrays on every step, as
    in `envs.batch.BatchEnv`. Bounded actions are rescaled to [-1, 1]. `num_costs` is the number of
    costs per step; where it is 0, a copy of the environment makes one step to tell.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        makers: list[Callable[[], gym.Env]],
        name: str,
        seed: int | None = None,
        num_costs: int = 0,
    ):
        self.envs = [make() for make in makers]
        self.name = name
        self.num_envs = len(self.envs)
        self.first_seed = seed
        first = self.envs[0]
        self.bounded = self._check_spaces(first)
        self.metadata = {**first.metadata, **self.metadata}
        self.render_mode = first.render_mode
        self.cost_limit = getattr(first.unwrapped, "cost_limit", None)
        self.recommended_num_envs = getattr(first.unwrapped, "recommended_num_envs", 1)
        self.recommended_timesteps = getattr(first.unwrapped, "recommended_timesteps", 1_000_000)
        self.recommended_damping = getattr(first.unwrapped, "recommended_damping", 0.1)
        obs, act = first.observation_space, first.action_space
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, obs.shape, np.float32)
        bound = 1.0 if self.bounded else np.inf
        self.single_action_space = gym.spaces.Box(-bound, bound, act.shape, np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.low, self.high = act.low.astype(np.float64), act.high.astype(np.float64)
        self.num_costs = num_costs or self._probe(makers[0]())

    def _check_spaces(self, env: gym.Env) -> bool:
        obs, act = env.observation_space, env.action_space
        for what, space in (("observation", obs), ("action", act)):
            if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
                raise ValueError(
                    f"{self.name} has the {what} space {space}; these scripts need a flat Box"
                )
        return bool(np.isfinite(act.low).all() and np.isfinite(act.high).all())

    def _probe(self, copy: gym.Env) -> int:
        """How many costs a step gives. The copy makes it: our rows and their generators do not."""
        copy.reset(seed=0)
        info = copy.step(self._env_action(np.zeros(self.single_action_space.shape)))[-1]
        copy.close()
        return self._cost(info).size

    def _cost(self, info: dict) -> np.ndarray:
        cost = np.array(info.get("cost", ()), np.float64)
        if not cost.size:
            raise CostError(
                f"{self.name} puts no 'cost' into info: a constrained task must give the cost "
                f"of every step in info['cost'] (a wrapper can add it)"
            )
        return cost

    def _env_action(self, action: np.ndarray) -> np.ndarray:
        if self.bounded:
            action = self.low + (np.clip(action, -1.0, 1.0) + 1.0) / 2.0 * (self.high - self.low)
        return np.asarray(action, self.envs[0].action_space.dtype)

    def reset(self, *, seed=None, options=None):
        if seed is None:
            seed, self.first_seed = self.first_seed, None
        obs = np.zeros(self.observation_space.shape, np.float32)
        for i, env in enumerate(self.envs):
            row_seed = seed if seed is None else seed + i if np.isscalar(seed) else seed[i]
            obs[i], _ = env.reset(seed=row_seed, options=options)
        return obs, {}

    def step(self, actions: np.ndarray):
        obs = np.zeros(self.observation_space.shape, np.float32)
        final_obs = np.zeros_like(obs)
        rewards, costs = np.zeros(self.num_envs), [None] * self.num_envs
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        for i, env in enumerate(self.envs):
            obs[i], rewards[i], terminated[i], truncated[i], info = env.step(
                self._env_action(np.asarray(actions[i], np.float64))
            )
            costs[i] = self._cost(info)
            if costs[i].size != self.num_costs:
                raise CostError(f"{self.name} gave {costs[i].size} costs, not {self.num_costs}")
            final_obs[i] = obs[i]
            if terminated[i] or truncated[i]:
                obs[i], _ = env.reset()
        infos = {"cost": np.stack(costs), "final_obs": final_obs}
        return obs, rewards, terminated, truncated, infos

    def get_state(self) -> list | None:
        """Snapshots of all rows, then the clocks of their time limits, which are wrappers.

        None where the environment cannot give its state or take it back.
        """
        names = ("get_state", "set_state")
        if not all(hasattr(env.unwrapped, name) for env in self.envs for name in names):
            return None
        clocks = [limit._elapsed_steps for limit in self._time_limits()]
        return [env.unwrapped.get_state() for env in self.envs] + clocks

    def set_state(self, state: list) -> None:
        rows, clocks, limits = state[: self.num_envs], state[self.num_envs :], self._time_limits()
        if len(rows) != self.num_envs or len(clocks) != len(limits):
            raise ValueError(f"this is no state of {self.num_envs} envs of {self.name}")
        self.first_seed = None
        for env, row in zip(self.envs, rows, strict=True):
            env.reset()  # Gymnasium's wrappers refuse a step before it
            env.unwrapped.set_state(row)
        for limit, clock in zip(limits, clocks, strict=True):
            limit._elapsed_steps = clock

    def _time_limits(self) -> list[TimeLimit]:
        limits = []
        for env in self.envs:
            while isinstance(env, gym.Wrapper):
                limits += [env] * isinstance(env, TimeLimit)
                env = env.env
        return limits

    def render(self) -> tuple[np.ndarray, ...]:
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs) -> None:
        for env in self.envs:
            env.close()
