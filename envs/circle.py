"""PointCircle and AntCircle: run around a circle that mostly lies outside the allowed strip."""

import numpy as np

from envs.batch import BatchEnv
from envs.bodies import AntBody, PointBody
from envs.render import draw_circle


class Circle(BatchEnv):
    """The task of both circle environments; the subclasses name body and sizes."""

    radius: float  # of the circle that is rewarded
    strip: float  # |x| above this costs
    fall_penalty = 10.0

    def __init__(self, num_envs: int, body: type, reach: float, **kwargs):
        super().__init__(num_envs, body.obs_size, body.act_size, **kwargs)
        self.body = body(num_envs, self.random, reach)

    def arrays(self) -> dict[str, np.ndarray]:
        return {**super().arrays(), **self.body.arrays()}

    def _start(self, rows: np.ndarray) -> None:
        self.body.start(rows, np.tile([0.0, self.radius, np.pi], (len(rows), 1)))

    def _advance(self, actions: np.ndarray):
        lost = self.body.advance(actions)
        (x, y), (vx, vy) = self.body.where.T, self.body.velocity.T
        rewards = (x * vy - y * vx) / (1.0 + np.abs(np.hypot(x, y) - self.radius))
        costs = (np.abs(x) > self.strip).astype(np.float64)
        if lost.any():  # regeneration: pay and go on there; a lift to the start would be worth it
            rewards[lost] = -self.fall_penalty
            rows = np.flatnonzero(lost)
            place = self.body.place(rows)
            bounds = np.array([self.strip, 0.95 * self.body.reach, np.inf])
            self.body.start(rows, np.clip(place, -bounds, bounds))
        return rewards, costs, {"regenerated": lost}

    def _observe(self) -> np.ndarray:
        return self.body.observe().astype(np.float32)

    def render_row(self, row: int) -> np.ndarray:
        return draw_circle(self, row)


class PointCircle(Circle):
    """
    ## Description
    A point is paid for running counter-clockwise along a circle of radius 15 around the origin, but
    only the strip |x| <= 2.5 is free of cost, and the circle lies outside it for 89 % of its
    length. The task of Achiam et al. (2017), made continuing: a point that runs away pays 10 and is
    put back to the edge of the strip, at its own height.

    ## Action Space
    `Box(-1, 1, (2,))`: way to go in this step (1 = one unit), turn (1 = 0.25 rad, taken first).

    ## Observation Space
    | index | meaning |
    |---|---|
    | 0-1 | x, y |
    | 2-3 | cos yaw, sin yaw |
    | 4-6 | change in the last step: dx, dy, dyaw |
    | 7-8 | centre of mass x, y |

    ## Rewards
    (x dy - y dx) / (1 + | ||(x, y)|| - 15 |), with the position after the step and the displacement
    (dx, dy) that it made. At most 15. In a step of regeneration: -10.

    ## Cost
    1 if |x| > 2.5 after the step (before a regeneration), else 0.

    ## Constraint
    Average cost per step <= 0.1.

    ## Starting State
    The top of the circle, (0, 15), heading counter-clockwise but for N(0, 0.01^2).

    ## Episode End
    Never terminated; truncated after `horizon` steps. Regeneration inside the chain when the
    distance from the origin exceeds 20: x clipped to the strip and y to +-19, same heading.

    ## Arguments
    `horizon=1000`, `render_mode=None | "rgb_array"`.
    """

    radius, strip, cost_limit = 15.0, 2.5, 0.1
    recommended_timesteps = 2_000_000

    def __init__(self, num_envs: int = 1, **kwargs):
        super().__init__(num_envs, PointBody, reach=20.0, **kwargs)


class AntCircle(Circle):
    """
    ## Description
    MuJoCo's ant is paid for running counter-clockwise along a circle of radius 10, but only the
    strip |x| <= 3 is free of cost. The task of Achiam et al. (2017), made continuing: an ant that
    falls, flips on its back or runs away pays 10 and is put on its feet where it is, at the edge of
    the strip if it is outside.

    ## Action Space
    `Box(-1, 1, (8,))`: torques / 150 of hip 4, ankle 4, hip 1, ankle 1, hip 2, ankle 2, hip 3,
    ankle 3.

    ## Observation Space
    | index | meaning |
    |---|---|
    | 0-2 | torso x, y, z |
    | 3-4 | cos yaw, sin yaw |
    | 5-6 | x and y of the vertical in the torso's frame |
    | 7-14 | joint angles: hip 1, ankle 1, ..., hip 4, ankle 4 |
    | 15-17 | torso velocity: ahead, to the left, up |
    | 18-20 | torso angular velocity, torso's frame |
    | 21-28 | joint velocities |
    | 29-31 | centre of mass x, y, z |

    ## Rewards
    (x vy - y vx) / (1 + | ||(x, y)|| - 10 |) with position and velocity (m/s, over the step of
    0.05 s) of the centre of mass. In a step of regeneration: -10.

    ## Cost
    1 if |x| > 3 for the centre of mass after the step (before a regeneration), else 0.

    ## Constraint
    Average cost per step <= 0.1.

    ## Starting State
    Standing at the top of the circle, (0, 10), heading counter-clockwise; noise of 0.01 on the pose
    and 0.1 on the velocities.

    ## Episode End
    Never terminated; truncated after `horizon` steps. Regeneration inside the chain when the torso
    height leaves [0.2, 1], its up-vector points down or the distance from the origin exceeds 20: on
    its feet with x clipped to the strip and y to +-19; at the origin where the physics diverged.

    ## Arguments
    `horizon=1000`, `render_mode=None | "rgb_array"`.
    """

    radius, strip, cost_limit = 10.0, 3.0, 0.1
    recommended_num_envs = 32  # as many as keep the physics busy
    recommended_damping = 1.0  # learns several times as fast as with 0.1
    recommended_timesteps = 5_000_000

    def __init__(self, num_envs: int = 1, **kwargs):
        super().__init__(num_envs, AntBody, reach=20.0, **kwargs)
