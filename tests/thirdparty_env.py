"""Environments as somebody else might write them: nothing here knows of this project."""

import gymnasium as gym
import numpy as np


class Fuse(gym.Env):
    """Terminates on every fifth step, which pays 2 instead of 1 and costs 1 instead of 0.

    The averages are 1.2 and 0.2 per step whatever the policy, if and only if no step is lost.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (5,), np.float32)
    action_space = gym.spaces.Box(-2.0, 3.0, (2,), np.float32)
    cost_limit = 0.3

    def _obs(self) -> np.ndarray:
        return np.eye(5, dtype=np.float32)[self.clock % 5]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.clock = 0
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.clock += 1
        end = self.clock == 5
        return self._obs(), 1.0 + end, end, False, {"cost": float(end)}


class TwoCosts(gym.Env):
    """x <- 0.5 x + u + noise with the costs u^2 and x^2; no end but the time limit of 25."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    cost_limit = (0.1, 2.0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = 0.0
        return np.array([self.x]), {}

    def step(self, action):
        self.x = 0.5 * self.x + float(action[0]) + 0.1 * self.np_random.normal()
        info = {"cost": np.array([float(action[0]) ** 2, self.x**2])}
        return np.array([self.x]), self.x, False, False, info


gym.register("Fuse-v0", entry_point=Fuse)
gym.register("TwoCosts-v0", entry_point=TwoCosts, max_episode_steps=25)


class Broken(gym.Env):
    """Like TwoCosts with one cost, but one number at the 20th step is `value`.

    `part` is obs, reward, cost, reset (the observation that a reset returns: from the second on) or
    start (that of the very first reset).
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    cost_limit = 0.1
    clock = resets = 0

    def __init__(self, part: str, value: float):
        self.part, self.value = part, value

    def _obs(self, part: str, bad: bool) -> np.ndarray:
        return np.array([self.x, self.value if bad and self.part == part else 0.0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = 0.0
        self.resets += 1
        return self._obs("reset" if self.resets > 1 else "start", True), {}

    def step(self, action):
        self.clock += 1
        self.x = 0.5 * self.x + float(action[0]) + 0.1 * self.np_random.normal()
        bad = self.clock == 20
        reward = self.value if bad and self.part == "reward" else self.x
        cost = self.value if bad and self.part == "cost" else float(action[0]) ** 2
        return self._obs("obs", bad), reward, False, False, {"cost": cost}


class Strict(Broken):
    """The same, but it refuses an action that is not finite."""

    def step(self, action):
        assert self.action_space.contains(action)
        return super().step(action)


class Still(gym.Env):
    """Nothing ever changes: one observation, no reward, no cost."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    cost_limit = 0.1

    def reset(self, *, seed=None, options=None):
        return np.array([0.0, 1e6, -3.0]), {}

    def step(self, action):
        return np.array([0.0, 1e6, -3.0]), 0.0, False, False, {"cost": 0.0}


class Free(TwoCosts):
    """Never costs anything."""

    cost_limit = 0.1

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"cost": 0.0}


class NoLimit(Free):
    """Says nothing about a limit."""

    cost_limit = None


class WrongCosts(Still):
    """Gives `many` costs in a step, 0 is none at all; other than one only from step `since` on."""

    clock = 0

    def __init__(self, many: int, since: int = 0, cost_limit=0.1):
        self.many, self.since, self.cost_limit = many, since, cost_limit

    def step(self, action):
        self.clock += 1
        obs, reward, terminated, truncated, info = super().step(action)
        if self.clock > self.since:
            info = {"cost": np.zeros(self.many)} if self.many else {}
        return obs, reward, terminated, truncated, info


class NoPicture(Still):
    """Claims to have pictures, which need a package that is not installed."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        import no_such_renderer  # noqa: F401


class Picture(Still):
    """Observes pictures."""

    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)


for part in ("obs", "reward", "cost", "reset", "start"):
    for name, value in (("Nan", np.nan), ("Inf", np.inf), ("Huge", 1e300)):
        gym.register(
            f"{name}-{part}-v0", Broken, max_episode_steps=25, kwargs={"part": part, "value": value}
        )
for part in ("obs", "start"):
    kwargs = {"part": part, "value": np.nan}
    gym.register(f"Strict-{part}-v0", Strict, max_episode_steps=25, kwargs=kwargs)
gym.register("Still-v0", Still, max_episode_steps=25)
gym.register("Free-v0", Free, max_episode_steps=25)
gym.register("NoLimit-v0", NoLimit, max_episode_steps=25)
gym.register("NoCost-v0", WrongCosts, kwargs={"many": 0})
gym.register("OneLimit-v0", WrongCosts, kwargs={"many": 2})
gym.register("TwoLimits-v0", WrongCosts, kwargs={"many": 1, "cost_limit": (0.1, 0.2)})
gym.register("CostStops-v0", WrongCosts, kwargs={"many": 0, "since": 20})
gym.register("CostGrows-v0", WrongCosts, kwargs={"many": 2, "since": 20})
gym.register("NoPicture-v0", NoPicture, max_episode_steps=25)
gym.register("Picture-v0", Picture, max_episode_steps=25)
