"""The two bodies, Point and Ant, as arrays: n bodies, one row each.

Both offer the same few things to a task: `start(rows)`, `advance(actions)`, `observe()` and, in the
plane, `where` (what a task follows), its `velocity`, `center` (centre of mass) and `yaw`.
"""

import ctypes
import os
import sys

import gymnasium
import numpy as np

from envs.batch import RowRandom

if sys.platform == "linux" and not os.environ.get("DISPLAY") and "MUJOCO_GL" not in os.environ:
    # Pictures without a screen, if there is a way. MuJoCo reads this when it is imported.
    try:
        ctypes.CDLL("libEGL.so.1")
        os.environ["MUJOCO_GL"] = "egl"
    except OSError:
        os.environ["MUJOCO_GL"] = "disable"

import mujoco  # noqa: E402
from mujoco.batch import Batch  # noqa: E402

ASSETS = os.path.join(os.path.dirname(gymnasium.__file__), "envs", "mujoco", "assets")
CURRENT = mujoco.mjtStage.mjSTAGE_VEL  # all that depends on the state alone


class PointBody:
    """A point that drives and turns: kinematic, one move per step, no inertia.

    Action 0 is the way to go in this step (1 = one unit of length; negative is reverse), action 1
    the turn (1 = a quarter of a radian). The turn comes first. Walls, if any, clip x and y.

    | index | observation |
    |---|---|
    | 0-1 | x, y |
    | 2-3 | cos yaw, sin yaw |
    | 4-6 | what the last step really changed: dx, dy, dyaw |
    | 7-8 | centre of mass x, y (the arrow moves it 0.0426 ahead of x, y) |
    """

    obs_size, act_size = 9, 2
    model_file = os.path.join(ASSETS, "point.xml")
    turn = 0.25
    # The arrow, a box of 1 x 0.2 x 0.2 centred 0.6 ahead, against the sphere of radius 0.5.
    lead = 0.6 * 0.04 / (0.04 + np.pi / 6)

    def __init__(self, num_envs: int, random: RowRandom, reach: float, walls: float = np.inf):
        self.random = random
        self.reach = reach
        self.walls = walls
        self.position = self.where = np.zeros((num_envs, 2))
        self.velocity = np.zeros((num_envs, 2))  # displacement per step
        self.yaw = np.zeros(num_envs)
        self.turned = np.zeros(num_envs)
        self.cos, self.sin = np.ones(num_envs), np.zeros(num_envs)
        self.center = np.zeros((num_envs, 2))

    def start(self, rows: np.ndarray, place: np.ndarray | None = None) -> None:
        """At the origin, heading along x, or at place, (len(rows), 3): x, y and heading; with a
        noise of 0.01 rad."""
        place = np.zeros((len(rows), 3)) if place is None else place
        self.position[rows] = place[:, :2]
        self.velocity[rows] = 0.0
        self.turned[rows] = 0.0
        self.yaw[rows] = wrap(place[:, 2] + 0.01 * self.random.normal(rows, 1)[:, 0])
        self._head()
        self.center[:] = self.position + self.lead * np.stack([self.cos, self.sin], axis=1)

    def place(self, rows: np.ndarray) -> np.ndarray:
        """(len(rows), 3): x, y and heading."""
        return np.column_stack([self.position[rows], self.yaw[rows]])

    def advance(self, actions: np.ndarray) -> np.ndarray:
        """One move; returns the rows that left the arena."""
        self.turned[:] = self.turn * actions[:, 1]
        self.yaw[:] = wrap(self.yaw + self.turned)
        self._head()
        heading = np.stack([self.cos, self.sin], axis=1)
        moved = np.clip(self.position + actions[:, :1] * heading, -self.walls, self.walls)
        self.velocity[:] = moved - self.position
        self.position[:] = moved
        self.center[:] = moved + self.lead * heading
        return np.hypot(moved[:, 0], moved[:, 1]) > self.reach

    def _head(self) -> None:
        np.cos(self.yaw, out=self.cos)
        np.sin(self.yaw, out=self.sin)

    def observe(self) -> np.ndarray:
        return np.column_stack(
            [self.position, self.cos, self.sin, self.velocity, self.turned, self.center]
        )

    def qpos(self, row: int) -> np.ndarray:
        return np.array([*self.position[row], self.yaw[row]])

    def arrays(self) -> dict[str, np.ndarray]:
        names = ("position", "velocity", "yaw", "turned", "cos", "sin", "center")
        return {name: getattr(self, name) for name in names}


class AntBody:
    """MuJoCo's ant, n of them, stepped by the native thread pool of `mujoco.batch`.

    Gymnasium's `ant.xml` with the implicitfast integrator: five physics steps of 0.01 s per action,
    torques 150 x action. Torques and joints in the order of the model's actuators and joints.

    | index | observation |
    |---|---|
    | 0-2 | torso x, y, z |
    | 3-4 | cos yaw, sin yaw |
    | 5-6 | how it leans: x and y of the vertical in the torso's frame (its z is >= 0) |
    | 7-14 | joint angles: hip and ankle of legs 1 to 4 |
    | 15-17 | torso velocity: ahead, to the left, up |
    | 18-20 | torso angular velocity, torso's frame |
    | 21-28 | joint velocities, order as 7-14 |
    | 29-31 | centre of mass x, y, z |
    """

    obs_size, act_size = 32, 8
    model_file = os.path.join(ASSETS, "ant.xml")
    substeps, step_time = 5, 0.05  # the model's own step is 0.01 s
    start_qpos = np.array([0, 0, 0.55, 1, 0, 0, 0, 0, 1, 0, -1, 0, -1, 0, 1], np.float64)

    def __init__(self, num_envs: int, random: RowRandom, reach: float, walls: float | None = None):
        self.random = random
        self.reach = reach
        self.model = self.build_model(walls)
        # One thread per core that this process may use: `taskset -c 0` keeps it to one.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        # Persistent: a step goes on from the stages that the last one computed, at no extra cost.
        self.physics = Batch(
            self.model, nsim=num_envs, nthread=min(cores, num_envs), persistent=True
        )
        # Live arrays of the simulations: writing to one is setting the state.
        self.positions, self.velocities = self.physics.bind("qpos"), self.physics.bind("qvel")
        self.control, self.time = self.physics.bind("ctrl"), self.physics.bind("time")
        self.warmstart = self.physics.bind("qacc_warmstart")
        self.mass_center = self.physics.bind("subtree_com")[:, 1]  # body 1 is the torso: all of it
        self.center3 = np.zeros((num_envs, 3))
        self.center = self.where = self.center3[:, :2]
        self.velocity = np.zeros((num_envs, 2))  # of the centre of mass, m/s

    @classmethod
    def build_model(cls, walls: float | None) -> mujoco.MjModel:
        spec = mujoco.MjSpec.from_file(cls.model_file)
        spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
        # A diverged state must stay visible (we regenerate it), not be silently reset by MuJoCo.
        spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        for i in range(4 if walls is not None else 0):
            side, along_x = (-1) ** i, i < 2
            place, half = side * (walls + 1.0), walls + 1.5  # inner face at walls + 0.5
            spec.worldbody.add_geom(
                name=f"wall_{i}",
                type=mujoco.mjtGeom.mjGEOM_BOX,
                pos=[place, 0, 0.5] if along_x else [0, place, 0.5],
                size=[0.5, half, 0.5] if along_x else [half, 0.5, 0.5],
                conaffinity=1,  # the ant's parts have 0: they touch walls and floor, not each other
                rgba=[0.4, 0.4, 0.4, 1],
            )
        return spec.compile()

    def start(self, rows: np.ndarray, place: np.ndarray | None = None) -> None:
        """Standing, with noise 0.01 on the pose and 0.1 on the velocities: at the origin, or at
        place, (len(rows), 3): x, y and heading."""
        noise = self.random.normal(rows, 29)
        qpos = self.start_qpos + 0.01 * noise[:, :15]
        w, x, y, z = qpos[:, 3], qpos[:, 4], qpos[:, 5], qpos[:, 6]
        qpos[:, 3:7] /= np.sqrt(w * w + x * x + y * y + z * z)[:, None]
        if place is not None:
            qpos[:, :2] += place[:, :2]
            w, x, y, z = qpos[:, 3:7].T
            cos, sin = np.cos(0.5 * place[:, 2]), np.sin(0.5 * place[:, 2])
            turned = [cos * w - sin * z, cos * x - sin * y, cos * y + sin * x, cos * z + sin * w]
            qpos[:, 3:7] = np.stack(turned, axis=1)  # a turn about z, from the left
        self.positions[rows] = qpos
        self.velocities[rows] = 0.1 * noise[:, 15:]
        self.warmstart[rows] = 0.0
        self.time[rows] = 0.0
        self.physics.forward(rows, stage=CURRENT)
        self.center3[rows] = self.mass_center[rows]
        self.velocity[rows] = 0.0

    def place(self, rows: np.ndarray) -> np.ndarray:
        """(len(rows), 3): x, y and heading; those of the origin where the physics has diverged."""
        qpos = self.positions[rows]
        qpos[~np.isfinite(qpos).all(axis=1)] = self.start_qpos
        return np.column_stack([qpos[:, :2], quaternion_yaw(qpos[:, 3:7])])

    def advance(self, actions: np.ndarray) -> np.ndarray:
        """Five physics steps; returns the rows that fell, flipped, left the arena or diverged."""
        self.control[:] = actions
        # The stage makes the centre of mass that of the new state, not one substep behind it.
        self.physics.step(nstep=self.substeps, stage=CURRENT)
        self.velocity[:] = (self.mass_center - self.center3)[:, :2] / self.step_time
        self.center3[:] = self.mass_center
        return self.lost()

    def lost(self) -> np.ndarray:
        z, qx, qy = self.positions[:, 2], self.positions[:, 4], self.positions[:, 5]
        standing = (z >= 0.2) & (z <= 1.0) & (qx * qx + qy * qy <= 0.5)  # up-vector z >= 0
        inside = np.hypot(self.center[:, 0], self.center[:, 1]) <= self.reach
        # NaN fails every comparison; a diverging state shows in the velocities first.
        return ~(standing & inside & (np.abs(self.velocities) < 1e4).all(axis=1))

    @property
    def yaw(self) -> np.ndarray:
        return quaternion_yaw(self.positions[:, 3:7])

    def observe(self) -> np.ndarray:
        obs = np.concatenate([self.positions, self.velocities, self.center3], axis=1)
        w, x, y, z = self.positions[:, 3:7].T
        vx, vy, yaw = self.velocities[:, 0], self.velocities[:, 1], self.yaw
        cos, sin = np.cos(yaw), np.sin(yaw)
        # What the ant must know to walk does not depend on where it heads, so neither do the
        # numbers: a quaternion and a velocity in the world's frame mix the two.
        obs[:, 3:7] = np.column_stack([cos, sin, 2 * (x * z - w * y), 2 * (y * z + w * x)])
        obs[:, 15:17] = np.column_stack([cos * vx + sin * vy, cos * vy - sin * vx])
        return obs

    def qpos(self, row: int) -> np.ndarray:
        return self.positions[row]

    def arrays(self) -> dict[str, np.ndarray]:
        names = ("positions", "velocities", "warmstart", "time", "center3", "velocity")
        return {name: getattr(self, name) for name in names}


def wrap(angle: np.ndarray) -> np.ndarray:
    """The same angle in [-pi, pi)."""
    return angle - 2 * np.pi * np.floor((angle + np.pi) / (2 * np.pi))


def quaternion_yaw(quaternion: np.ndarray) -> np.ndarray:
    """(n,): heading of the body's x axis in the plane, in (-pi, pi]."""
    w, x, y, z = quaternion.T
    return np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
