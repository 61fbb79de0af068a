"""What controllers written by hand score on the tasks, and pictures of the tasks.

    python benchmark/controllers.py                         # the table of docs/environments.md
    python benchmark/controllers.py --pictures docs/images  # its pictures

Every row: `--episodes` episodes of `--steps` steps from the start state, mean per step and the
standard deviation over episodes.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
import envs

Controller = Callable[[np.ndarray], np.ndarray]  # observations (n, obs) -> actions (n, act)
TURN = 0.25  # rad per step at full action


def zero(act_size: int) -> Controller:
    return lambda obs: np.zeros((len(obs), act_size))


def gaussian(act_size: int, sigma: float = 0.37, seed: int = 0) -> Controller:
    """The untrained policy: mean 0, and the usual initial log-std of -1."""
    rng = np.random.default_rng(seed)
    return lambda obs: sigma * rng.standard_normal((len(obs), act_size))


def wrap(angle: np.ndarray) -> np.ndarray:
    return (angle + np.pi) % (2 * np.pi) - np.pi


def circle_follower(obs: np.ndarray, radius: float = 15.0) -> np.ndarray:
    """PointCircle at full speed: out to the circle, then along it, as if there were no cost."""
    x, y, yaw = obs[:, 0], obs[:, 1], np.arctan2(obs[:, 3], obs[:, 2])
    off = np.clip(0.5 * (np.hypot(x, y) - radius), -np.pi / 2, np.pi / 2)
    # Tangent, plus the way inwards (or outwards), plus half of the turn of one step on the circle.
    heading = np.arctan2(y, x) + np.pi / 2 + off + 0.5 / radius
    return np.stack([np.ones(len(obs)), wrap(heading - yaw) / TURN], axis=1)


def apple_seeker(obs: np.ndarray, avoid: bool = False, margin: float = 1.1) -> np.ndarray:
    """PointGather by the sensors: to the nearest apple in sight, full speed where it is ahead.

    With `avoid`, only directions that pass the bombs closer than 3 at a distance of `margin`; it
    creeps on while it turns, because turning on the spot between two bombs can last for ever.
    """
    n, bearings = len(obs), (np.arange(10) + 0.5) * np.pi / 10 - np.pi / 2  # middle of every bin
    apples, bombs = obs[:, 9:19], obs[:, 19:29]
    x, y, yaw = obs[:, 0], obs[:, 1], np.arctan2(obs[:, 3], obs[:, 2])
    # Nothing in sight: ahead, or towards the middle when near the border.
    home = np.where(np.hypot(x, y) > 4.5, wrap(np.arctan2(-y, -x) - yaw), 0.0)
    home = np.where(np.abs(home) > np.pi / 2, np.pi / 2, home)
    wish = apples - 0.01 * np.abs(bearings - home[:, None])  # (n, 10): the best direction wins
    if avoid:
        away = 6.0 * (1.0 - bombs)
        half = np.arcsin(np.minimum(1.0, margin / away))  # half the angle that a bomb covers
        gap = np.abs(bearings[:, None] - bearings)  # (direction, bin)
        blocked = (gap < half[:, None]) & (away < 3.0)[:, None]
        wish = np.where(blocked.any(axis=2), -1.0, wish)
    best = wish.argmax(axis=1)
    bearing = np.where(wish.max(axis=1) == -1.0, np.pi / 2, bearings[best])
    ahead = np.abs(bearing) < 0.5
    # Aside without an apple there: always to the left, not to and fro.
    bearing = np.where(ahead | (apples[np.arange(n), best] > 0), bearing, np.pi / 2)
    return np.stack([np.where(ahead, 1.0, 0.05), bearing / TURN], axis=1)


def linear(gain: float, offset: float = 0.0) -> Controller:
    return lambda obs: (offset - gain * obs) / envs.ConstrainedLQR.u_max


def table() -> list[tuple[str, str, Controller]]:
    best = envs.ConstrainedLQR.solution()
    free = envs.ConstrainedLQR.solution(limit=1.0)
    return [
        ("PointCircle", "zero action", zero(2)),
        ("PointCircle", "random, sigma 0.37", gaussian(2)),
        ("PointCircle", "circle follower", circle_follower),
        ("PointGather", "zero action", zero(2)),
        ("PointGather", "random, sigma 0.37", gaussian(2)),
        ("PointGather", "apple seeker", apple_seeker),
        ("PointGather", "seeker, avoids bombs", lambda obs: apple_seeker(obs, avoid=True)),
        ("AntCircle", "zero action", zero(8)),
        ("AntCircle", "random, sigma 0.37", gaussian(8)),
        ("AntGather", "zero action", zero(8)),
        ("AntGather", "random, sigma 0.37", gaussian(8)),
        ("ConstrainedLQR", "zero action", zero(1)),
        ("ConstrainedLQR", "random, sigma 0.37", gaussian(1)),
        ("ConstrainedLQR", "unconstrained optimum", linear(free["gain"])),
        ("ConstrainedLQR", "constrained optimum", linear(best["gain"])),
    ]


def score(env_id: str, controller: Controller, episodes: int, steps: int, seed: int) -> dict:
    """Mean reward and cost per step of each episode: two arrays (episodes,), and what fell."""
    kwargs = {"progress": 0.0} if env_id.endswith("Gather") else {}
    env = envs.make_vec(env_id, episodes, seed=seed, horizon=steps, **kwargs)
    obs, _ = env.reset()
    rewards, costs, lost = np.zeros((3, episodes))
    for _ in range(steps):
        obs, reward, _, _, infos = env.step(controller(obs.astype(np.float64)))
        rewards += reward / steps
        costs += infos["cost"] / steps
        lost += infos.get("regenerated", False)
    limit = env.cost_limit
    env.close()
    return {"reward": rewards, "cost": costs, "lost": lost.mean(), "limit": limit}


def draw(folder: Path) -> None:
    """A picture of every task at a moment that shows what it is about."""
    scenes = {
        "point_circle": ("PointCircle", circle_follower, 30),
        "point_gather": ("PointGather", lambda obs: apple_seeker(obs, avoid=True), 12),
        "ant_circle": ("AntCircle", gaussian(8), 20),
        "ant_gather": ("AntGather", gaussian(8), 20),
        "lqr": ("ConstrainedLQR", linear(0.3827), 3),
    }
    for name, (env_id, controller, steps) in scenes.items():
        env = envs.make_vec(env_id, 1, seed=3, render_mode="rgb_array")
        obs, _ = env.reset()
        for _ in range(steps):
            obs = env.step(controller(obs.astype(np.float64)))[0]
        Image.fromarray(env.render()[0]).save(folder / f"{name}.png", optimize=True)
        env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000, help="steps of an episode")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pictures", type=Path, help="draw into this folder instead")
    args = parser.parse_args()
    if args.pictures:
        draw(args.pictures)
        return
    print("| task | controller | reward per step | cost per step | limit | falls per episode |")
    print("|---|---|---|---|---|---|")
    for env_id, name, controller in table():
        r = score(env_id, controller, args.episodes, args.steps, args.seed)
        reward, cost = r["reward"], r["cost"]
        print(
            f"| {env_id} | {name} | {reward.mean():.3f} ± {reward.std():.3f} "
            f"| {cost.mean():.4f} ± {cost.std():.4f} | {r['limit']} | {r['lost']:.1f} |"
        )


if __name__ == "__main__":
    main()
