"""What simple controllers score on Grid and Bottleneck: the tables of docs/environments.md.

    python benchmark/controllers_sumo.py --seeds 12

Means per step over 1000 steps from the start, ± standard deviation over seeds 0, 1, ...
"""

import argparse
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import envs  # noqa: F401

RNG = np.random.default_rng(1)


def greens(north_south: int, east_west: int):
    """Switch a light when the axis with right of way has had its green seconds."""
    seconds = np.array([north_south, east_west])

    def act(obs):
        age, axis, yellow = obs[84:88] * 60, obs[88:92].astype(int), obs[92:]
        return np.where((yellow == 0) & (age >= seconds[axis] - 0.01), 1.0, -1.0)

    return act


def speed(v: float) -> np.ndarray:
    """The action that asks for v m/s in every region of Bottleneck."""
    return np.full(16, 2 * np.log(v / 0.5) / np.log(46) - 1)


def hold(cars: int, v: float):
    """v m/s while edge 4 has that many cars, else no control."""
    return lambda obs: speed(v) if obs[28:34].sum() * 20 >= cars - 0.1 else np.ones(16)


GRID = {
    "random, N(0, 0.37)": lambda obs: RNG.normal(0, 0.37, 4),
    "always ask (green 1 s)": lambda obs: np.ones(4),
    "green 2 s / 2 s": greens(2, 2),
    **{f"north-south 1 s, east-west {g} s": greens(1, g) for g in (2, 3, 4, 6, 10, 20)},
    "green 10 s / 10 s": greens(10, 10),
    "green 30 s / 30 s": greens(30, 30),
    "east-west always green": greens(0, 10**9),
    "never switch": lambda obs: -np.ones(4),
}
BOTTLENECK = {
    "no control (a = 1)": lambda obs: np.ones(16),
    "random, N(0, 0.37)": lambda obs: RNG.normal(0, 0.37, 16),
    "random, N(0, 0.6)": lambda obs: RNG.normal(0, 0.6, 16),
    "6 m/s everywhere": lambda obs: speed(6.0),
    "3.4 m/s everywhere (a = 0)": lambda obs: np.zeros(16),
    "1 m/s everywhere": lambda obs: speed(1.0),
    "hold at 0.5 m/s when edge 4 has 10 cars or more": hold(10, 0.5),
    "the same from 12 cars on": hold(12, 0.5),
    "3 m/s when edge 4 has 11 cars or more": hold(11, 3.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=12)
    seeds = parser.parse_args().seeds
    for task, controllers, unit in (("Grid", GRID, 1), ("Bottleneck", BOTTLENECK, 7200)):
        env = gym.make(task).unwrapped
        for name, act in controllers.items():
            runs = np.zeros((seeds, 3))
            for seed in range(seeds):
                obs, _ = env.reset(seed=seed)
                for _ in range(1000):
                    obs, reward, _, _, info = env.step(act(obs))
                    runs[seed] += reward, info["cost"], info["exits"]
            (r, c, x), (dr, dc, _) = runs.mean(0) / 1000, runs.std(0) / 1000
            exits = f"{x * unit:.3f}" if unit == 1 else f"{x * unit:.0f}"
            line = f"| {name} | {r:.3f} ± {dr:.3f} | {c:.3f} ± {dc:.3f} | {exits} |"
            print(f"{task}: {line}", flush=True)


if __name__ == "__main__":
    main()
