"""The frame that every batched task stands in: n copies of one environment, stepped as arrays.

A task is written once, batch first, as a subclass of `BatchEnv`. `envs.make_vec(id, n)` returns it
with n rows; `gym.make(id)` returns `SingleEnv`, a batch of one behind the ordinary Gymnasium API.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class RowRandom:
    """One random generator per row, drawn from together without a loop over rows.

    SplitMix64 is counter based: number i of a row is a hash of (key + i * GOLDEN). A row's stream
    therefore depends on its own seed and on how often that row has drawn, on nothing else.
    """

    def __init__(self, num_rows: int):
        self.key = np.zeros(num_rows, np.uint64)
        self.counter = np.zeros(num_rows, np.uint64)
        self.seed(range(num_rows), np.random.SeedSequence().generate_state(num_rows, np.uint64))

    def seed(self, rows, seeds) -> None:
        for row, seed in zip(rows, seeds, strict=True):
            self.key[row] = np.random.SeedSequence(int(seed)).generate_state(1, np.uint64)[0]
            self.counter[row] = 0

    def uniform(self, rows: np.ndarray, k: int) -> np.ndarray:
        """(len(rows), k) numbers in [0, 1), each with 53 random bits."""
        index = self.counter[rows][:, None] + np.arange(1, k + 1, dtype=np.uint64)
        self.counter[rows] += np.uint64(k)
        z = self.key[rows][:, None] + index * GOLDEN
        z = (z ^ (z >> np.uint64(30))) * MIX_1
        z = (z ^ (z >> np.uint64(27))) * MIX_2
        z ^= z >> np.uint64(31)
        return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normal(self, rows: np.ndarray, k: int) -> np.ndarray:
        """(len(rows), k) standard normal numbers by Box and Muller."""
        u = self.uniform(rows, 2 * k)
        radius = np.sqrt(-2.0 * np.log1p(-u[:, :k]))  # 1 - u is in (0, 1]
        return radius * np.cos(2.0 * np.pi * u[:, k:])


class BatchEnv(VectorEnv):
    """A vector environment with SAME_STEP autoreset whose rows are array rows, not objects.

    Rules that hold for every task here:
    - `infos["cost"]` is float64, one row per env, on every step, also the last of an episode;
    - `infos["final_obs"]` is the true successor of the step for every row; where a row was
      truncated, the returned observation is the first one of its next episode instead;
    - `terminated` is never set: a fall is a jump inside the chain. `truncated` every `horizon`
      steps. With `stagger`, row i starts at clock i * horizon / n, so that at any time the rows are
      spread evenly over the phases of an episode and a batch mean is a mean over whole episodes.

    A subclass writes `_start(rows)`, `_advance(actions) -> (rewards, costs, infos)`, `_observe()`
    and `arrays()`, the live arrays of its state.
    """

    metadata = {
        "render_modes": ["rgb_array"],
        "render_fps": 20,
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }
    cost_limit: float | tuple[float, ...]
    recommended_num_envs = 8  # long rollouts: a batch then shows its policy, not the one before
    recommended_timesteps = 400_000  # of a training run
    recommended_damping = 0.1  # of the Fisher matrix

    def __init__(
        self,
        num_envs: int,
        obs_size: int,
        act_size: int,
        horizon: int = 1000,
        stagger: bool = False,
        seed: int | None = None,
        render_mode: str | None = None,
    ):
        if num_envs < 1 or horizon < 1:
            raise ValueError(f"num_envs and horizon must be >= 1, got {num_envs} and {horizon}")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode must be None or 'rgb_array', got {render_mode!r}")
        self.num_envs = num_envs
        self.horizon = horizon
        self.stagger = stagger
        self.render_mode = render_mode
        self.first_seed = seed
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (obs_size,), np.float32)
        self.single_action_space = gym.spaces.Box(-1.0, 1.0, (act_size,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.random = RowRandom(num_envs)
        self.clock = np.zeros(num_envs, np.int64)
        self.all_rows = np.arange(num_envs)

    @property
    def num_costs(self) -> int:
        return np.size(self.cost_limit)

    def reset(self, *, seed=None, options: dict[str, Any] | None = None):
        """Start an episode in every row. `seed`: an int (row i gets seed + i) or one per row."""
        if seed is None:
            seed, self.first_seed = self.first_seed, None
        if seed is not None:
            seeds = [seed + i for i in range(self.num_envs)] if np.isscalar(seed) else seed
            self.random.seed(self.all_rows, seeds)
        self.clock[:] = self.all_rows * self.horizon // self.num_envs if self.stagger else 0
        self._start(self.all_rows)
        return self._observe(), {}

    def step(self, actions: np.ndarray):
        rewards, truncated, infos = self.advance(actions)
        obs = infos["final_obs"]
        if truncated.any():
            rows = np.flatnonzero(truncated)
            self.clock[rows] = 0
            self._start(rows)
            obs = self._observe()
        return obs, rewards, np.zeros(self.num_envs, bool), truncated, infos

    def advance(self, actions: np.ndarray):
        """One step of every row, without autoreset: (rewards, truncated, infos)."""
        shape = self.action_space.shape
        if np.shape(actions) != shape:
            raise ValueError(f"actions must have the shape {shape}, got {np.shape(actions)}")
        actions = np.clip(np.asarray(actions, np.float64), -1.0, 1.0)
        rewards, costs, infos = self._advance(actions)
        self.clock += 1
        infos["cost"] = costs
        infos["final_obs"] = self._observe()
        return rewards, self.clock >= self.horizon, infos

    def arrays(self) -> dict[str, np.ndarray]:
        """The live arrays that make up the state. A subclass adds its own."""
        key, counter = self.random.key.view(np.int64), self.random.counter.view(np.int64)
        return {"clock": self.clock, "random_key": key, "random_counter": counter}

    def get_state(self) -> dict[str, np.ndarray]:
        """An exact snapshot; stepping after `set_state` of it is bit-identical."""
        return {name: array.copy() for name, array in self.arrays().items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        arrays = self.arrays()
        state = {name: np.asarray(value) for name, value in state.items()}
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in arrays.items()}:
            raise ValueError(f"not a state of {type(self).__name__} with {self.num_envs} envs")
        for name, array in arrays.items():
            array[...] = state[name]
        self.first_seed = None

    def render(self) -> tuple[np.ndarray, ...]:
        """One RGB picture per row."""
        return tuple(self.render_row(row) for row in range(self.num_envs))

    def render_row(self, row: int) -> np.ndarray:
        raise NotImplementedError

    def _start(self, rows: np.ndarray) -> None:
        raise NotImplementedError

    def _advance(self, actions: np.ndarray):
        raise NotImplementedError

    def _observe(self) -> np.ndarray:
        raise NotImplementedError


class SingleEnv(gym.Env):
    """One row of a batched task as an ordinary `gymnasium.Env`, without autoreset."""

    def __init__(self, task: type[BatchEnv], **kwargs):
        self.batch = task(num_envs=1, **kwargs)
        self.metadata = {**self.batch.metadata}
        self.metadata.pop("autoreset_mode")
        self.observation_space = self.batch.single_observation_space
        self.action_space = self.batch.single_action_space
        self.render_mode = self.batch.render_mode

    @property
    def cost_limit(self) -> float | tuple[float, ...]:
        return self.batch.cost_limit

    @property
    def recommended_num_envs(self) -> int:
        return self.batch.recommended_num_envs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        obs, _ = self.batch.reset(seed=seed)
        return obs[0], {}

    def step(self, action: np.ndarray):
        rewards, truncated, infos = self.batch.advance(np.asarray(action)[None])
        obs = infos.pop("final_obs")[0]
        info = {name: value[0] for name, value in infos.items()}
        if info["cost"].ndim == 0:
            info["cost"] = float(info["cost"])
        return obs, float(rewards[0]), False, bool(truncated[0]), info

    def get_state(self) -> dict[str, np.ndarray]:
        return self.batch.get_state()

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        self.batch.set_state(state)

    def render(self) -> np.ndarray | None:
        return None if self.render_mode is None else self.batch.render_row(0)

    def close(self) -> None:
        self.batch.close()
