"""PointGather and AntGather: collect apples, leave the bombs."""

import numpy as np

from envs.batch import BatchEnv
from envs.bodies import AntBody, PointBody
from envs.render import draw_gather

BINS = 10
SENSOR_RANGE = 6.0
CATCH_RANGE = 1.0
SPACING = 2.0  # objects appear at least this far from the body
LATTICE = np.array([(x, y) for x in range(-6, 6, 2) for y in range(-6, 6, 2)], np.float64)
CELLS = len(LATTICE)  # 36; the origin is left empty when an episode starts


class Gather(BatchEnv):
    """The task of both gather environments; the subclasses name body and number of objects."""

    apples: int
    bombs: int
    apple_reward = 10.0
    fall_penalty = 10.0

    def __init__(self, num_envs: int, body: type, progress: float = 0.0, **kwargs):
        super().__init__(num_envs, body.obs_size + 2 * BINS, body.act_size, **kwargs)
        self.body = body(num_envs, self.random, reach=12.0, walls=6.0)
        self.progress = progress
        self.cells = np.zeros((num_envs, self.apples + self.bombs), np.int64)  # apples first
        # Where the reading of row i, object k, bin b goes in the flat (n, 2, BINS) sensor array.
        kind = np.repeat([0, 1], [self.apples, self.bombs])
        self.slots = (self.all_rows[:, None] * 2 + kind) * BINS

    def arrays(self) -> dict[str, np.ndarray]:
        return {**super().arrays(), **self.body.arrays(), "cells": self.cells}

    def _start(self, rows: np.ndarray) -> None:
        self.body.start(rows)
        keys = self.random.uniform(rows, CELLS)
        keys[:, (LATTICE == 0.0).all(axis=1)] = np.inf
        self.cells[rows] = np.argsort(keys, axis=1)[:, : self.cells.shape[1]]

    def _offsets(self, rows=slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """(len(rows), objects) each: x and y from the body's centre to every object."""
        offset = LATTICE[self.cells[rows]] - self.body.center[rows][:, None]
        return offset[..., 0], offset[..., 1]

    def _advance(self, actions: np.ndarray):
        apple, before = self._apple_in_sight() if self.progress else (0, np.inf)
        lost = self.body.advance(actions)
        dx, dy = self._offsets()
        after = np.hypot(dx[self.all_rows, apple], dy[self.all_rows, apple])
        closer = np.where(lost | np.isinf(before), 0.0, before - after)
        caught = (dx * dx + dy * dy < CATCH_RANGE**2) & ~lost[:, None]
        rewards = self.apple_reward * np.count_nonzero(caught[:, : self.apples], axis=1)
        costs = np.count_nonzero(caught[:, self.apples :], axis=1).astype(np.float64)
        if caught.any():
            self._respawn(caught)
        if lost.any():  # regeneration: pay, jump to the start, clear the ground around it
            rewards[lost] = -self.fall_penalty
            self.body.start(np.flatnonzero(lost))
            dx, dy = self._offsets()
            near = (dx * dx + dy * dy < SPACING**2) & lost[:, None]
            if near.any():
                self._respawn(near)
        return rewards + self.progress * closer, costs, {"raw_reward": rewards, "regenerated": lost}

    def _apple_in_sight(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of the nearest apple that the sensors see and the way to it (inf: none), (n,)."""
        dx, dy = (offset[:, : self.apples] for offset in self._offsets())
        yaw, distance = self.body.yaw[:, None], np.hypot(dx, dy)
        unseen = (dx * np.cos(yaw) + dy * np.sin(yaw) < 0.0) | (distance > SENSOR_RANGE)
        distance[unseen] = np.inf
        apple = distance.argmin(axis=1)
        return apple, distance[self.all_rows, apple]

    def _respawn(self, moved: np.ndarray) -> None:
        """Put the objects of a mask (n, objects) on random free cells away from the body."""
        rows = np.flatnonzero(moved.any(axis=1))
        moved = moved[rows]
        keys = self.random.uniform(rows, CELLS)
        away = LATTICE - self.body.center[rows][:, None]
        near = away[..., 0] ** 2 + away[..., 1] ** 2 < SPACING**2
        np.put_along_axis(near, self.cells[rows], True, axis=1)  # near or occupied
        order = np.argsort(np.where(near, 2.0, keys), axis=1)
        rank = np.maximum(np.cumsum(moved, axis=1) - 1, 0)  # the k-th moved takes the k-th cell
        fresh = np.take_along_axis(order, rank, axis=1)
        self.cells[rows] = np.where(moved, fresh, self.cells[rows])

    def _observe(self) -> np.ndarray:
        return np.concatenate([self.body.observe(), self.sense()], axis=1).astype(np.float32)

    def sense(self) -> np.ndarray:
        """(n, 20): 10 apple then 10 bomb readings, from right (-90 degrees) to left (+90).

        A bin of 18 degrees reads 1 - distance / 6 of the nearest object of its type in it.
        """
        dx, dy = self._offsets()
        yaw = self.body.yaw[:, None]
        cos, sin = np.cos(yaw), np.sin(yaw)
        ahead, left = dx * cos + dy * sin, dy * cos - dx * sin
        reading = 1.0 - np.sqrt(dx * dx + dy * dy) / SENSOR_RANGE
        reading[(ahead < 0.0) | (reading < 0.0)] = 0.0
        bearing = np.arctan2(left, ahead)
        bins = np.floor(bearing * (BINS / np.pi) + BINS / 2).astype(np.int64)
        sensors = np.zeros(self.num_envs * 2 * BINS)
        # The bearing +90 degrees belongs to the last bin; objects behind read 0 wherever they go.
        np.maximum.at(sensors, self.slots + np.clip(bins, 0, BINS - 1), reading)
        return sensors.reshape(self.num_envs, 2 * BINS)

    def render_row(self, row: int) -> np.ndarray:
        return draw_gather(self, row)


class PointGather(Gather):
    """
    ## Description
    A point collects 2 apples among 8 bombs. What is collected appears again elsewhere at once, so
    the task never ends. The task of Achiam et al. (2017), made continuing.

    ## Action Space
    `Box(-1, 1, (2,))`: way to go in this step (1 = one unit), turn (1 = 0.25 rad, taken first).

    ## Observation Space
    | index | meaning |
    |---|---|
    | 0-1 | x, y |
    | 2-3 | cos yaw, sin yaw |
    | 4-6 | change in the last step: dx, dy, dyaw |
    | 7-8 | centre of mass x, y |
    | 9-18 | apple sensors from -90 to +90 degrees: 1 - distance / 6 of the nearest in the bin |
    | 19-28 | bomb sensors, likewise |

    ## Rewards
    10 for an apple (its centre less than 1 from the centre of mass after the step).

    ## Cost
    Number of bombs collected in the step.

    ## Constraint
    Average cost per step <= 0.01.

    ## Starting State
    The origin, yaw ~ N(0, 0.01^2); objects on random cells of the lattice {-6, ..., 4}^2 but the
    origin.

    ## Episode End
    Never terminated; truncated after `horizon` steps. A collected object moves at once to a random
    free cell at least 2 from the body.

    ## Arguments
    `horizon=1000`, `render_mode=None | "rgb_array"`, `progress=0`: shaping, see AntGather.
    """

    apples, bombs, cost_limit = 2, 8, 0.01
    recommended_timesteps = 1_500_000

    def __init__(self, num_envs: int = 1, **kwargs):
        super().__init__(num_envs, PointBody, **kwargs)


class AntGather(Gather):
    """
    ## Description
    MuJoCo's ant collects 8 apples among 8 bombs inside four walls. What is collected appears again
    elsewhere at once. An ant that falls or flips is put back to the start and pays. The task of
    Achiam et al. (2017), made continuing.

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
    | 32-41 | apple sensors from -90 to +90 degrees: 1 - distance / 6 of the nearest in the bin |
    | 42-51 | bomb sensors, likewise |

    ## Rewards
    10 for an apple (its centre less than 1 from the centre of mass after the step); -10 for a
    fall. To this the step adds `progress` x the way made towards the nearest apple in sight,
    without which an ant that cannot walk yet learns to stand still. `info["raw_reward"]` is without
    it.

    ## Cost
    Number of bombs collected in the step.

    ## Constraint
    Average cost per step <= 0.002.

    ## Starting State
    Standing at the origin; noise of 0.01 on the pose and 0.1 on the velocities; objects on random
    cells of the lattice {-6, -4, ..., 4}^2 but the origin.

    ## Episode End
    Never terminated; truncated after `horizon` steps. Regeneration inside the chain when the torso
    height leaves [0.2, 1], its up-vector points down or the physics diverges; the objects stay, but
    for those closer than 2 to the start. A collected object moves at once to a random free cell at
    least 2 from the body.

    ## Arguments
    `horizon=1000`, `render_mode=None | "rgb_array"`, `progress=2`: shaping in reward per metre.
    """

    apples, bombs, cost_limit = 8, 8, 0.002
    recommended_num_envs = 32  # as many as keep the physics busy
    recommended_damping = 1.0  # learns several times as fast as with 0.1
    recommended_timesteps = 8_000_000

    def __init__(self, num_envs: int = 1, progress: float = 2.0, **kwargs):
        super().__init__(num_envs, AntBody, progress, **kwargs)
