"""SUMO in process: the libsumo connection, what Grid and Bottleneck have in common, and workers.

libsumo holds one simulation a process. Here that is no limit: at most one environment's world is
loaded, and the others sleep as saved states until they are used again. Nothing is lost by a swap:
all chance (speed factors, lanes) comes from the environment's own generator, and what SUMO cannot
save exactly is replayed. A swap takes 20 to 40 ms, so environments that take turns at every step
belong into worker processes (`make_workers`).
"""

import contextlib
import copy
import errno
import functools
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState, _async_worker

ASSETS = Path(__file__).parent / "assets"
NEW_WORLD = b"new"


def import_libsumo():
    """libsumo, imported when the first SUMO environment is made (it takes a second)."""
    try:
        import libsumo
    except ImportError as err:
        why = f"pip install libsumo ({err})"
        if not isinstance(err, ModuleNotFoundError):  # its wheel brings all but these
            why = f"{err}; on Debian or Ubuntu: apt-get install libgl1 libxrender1 libatomic1"
        raise ImportError(f"Grid and Bottleneck need SUMO: {why}") from None
    return libsumo


def path_lengths(net: Path, edges: list[str], lane: int) -> np.ndarray:
    """Lengths (m) of the lanes that a car on `edges` drives, crossings included.

    Args:
        net: a SUMO network file.
        edges: ids of the edges in driving order.
        lane: the lane on the first edge; from there on the network's connections decide.

    Returns:
        Array (2 * len(edges) - 1,): edge, crossing, edge, ..., edge.
    """
    try:
        root = ElementTree.parse(net).getroot()
    except ElementTree.ParseError as err:
        raise ValueError(f"network file broken: {net}: {err}") from None
    length = {e.get("id"): float(e.get("length")) for e in root.iter("lane")}
    links = {
        (c.get("from"), c.get("to"), c.get("fromLane")): (c.get("via"), c.get("toLane"))
        for c in root.iter("connection")
    }
    lengths, at = [], str(lane)
    try:
        for edge, successor in zip(edges, [*edges[1:], None], strict=True):
            lengths.append(length[f"{edge}_{at}"])
            if successor is not None:
                via, at = links[edge, successor, at]
                lengths.append(length[via])
    except KeyError as err:
        raise ValueError(f"network file broken: {net}: no lane or link {err}") from None
    return np.array(lengths)


class SumoEnv(gym.Env):
    """A closed fleet in one SUMO world: a car that leaves the road enters it again.

    Car i is at `x[i]` metres along its own path and drives `speed[i]` m/s; both are 0 while it
    waits to enter (`on_road[i]` False). SUMO moves a car by speed * step_length and nobody changes
    lane, so a single getter for each car and step, its speed, tells all there is to know.

    A subclass writes `_place()`, which fills an empty world, `_enter(car)`, `_restore()`, which
    sets the lights or speed caps of a world that was loaded, and `_observe()`; `_own_state` names
    the attributes of its state.

    Args:
        name: the world is `assets/<name>.net.xml` with `assets/<name>.rou.xml`.
        step_length: seconds of one step.
        fleet: number of cars.
        horizon: steps until truncation.
        render_mode: None or "rgb_array".
    """

    recommended_num_envs = 1  # in process; a worker spends more time on its pipe than on a step
    recommended_timesteps = 300_000  # of a training run
    recommended_damping = 0.1  # of the Fisher matrix
    _loaded: ClassVar["SumoEnv | None"] = None  # the environment whose world libsumo holds now
    _own_state: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, name: str, step_length: float, fleet: int, horizon: int, render_mode: str | None
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode {render_mode!r}: allowed are None and 'rgb_array'")
        if horizon < 1:
            raise ValueError(f"horizon {horizon}: must be at least 1 step")
        self.libsumo = import_libsumo()
        self.render_mode = render_mode
        self.horizon = horizon
        self.step_length = step_length
        self.files = [ASSETS / f"{name}.net.xml", ASSETS / f"{name}.rou.xml"]
        for file in self.files:
            if not file.is_file():
                raise FileNotFoundError(f"SUMO input file missing: {file}")
        self.ids = [str(car) for car in range(fleet)]
        self.x = np.zeros(fleet)
        self.speed = np.zeros(fleet)
        self.on_road = np.zeros(fleet, bool)
        self.t = 0
        self._anchor: dict[str, Any] | None = None  # a state that SUMO can restore exactly, and
        self._since: list[list[float]] = []  # the actions that have led from there to here
        self._asleep: dict[str, Any] | None = None
        # what vehicle.getSpeed calls: without its Python shell, half the time
        shell = self.libsumo.vehicle.getSpeed
        self._get_speed = getattr(self.libsumo.libsumo._libsumo, "vehicle_getSpeed", shell)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self._begin()
        return self._observe(), {"cost": 0.0, "exits": 0}

    def _begin(self) -> None:
        """A new world, as the generator decides."""
        self._anchor, self._since = self._snapshot(NEW_WORLD), []
        self._open(seed=int(self.np_random.integers(2**31)))
        self.t = 0
        self.on_road[:] = False
        self._place()

    def _open(self, seed: int) -> None:
        """Give libsumo a new, empty world; another environment's world goes to sleep."""
        other = SumoEnv._loaded
        if other is not None:
            if other is not self:
                other._asleep = other.get_state()
            SumoEnv._loaded = None
            self.libsumo.close()
        options = {
            "net-file": self.files[0],
            "route-files": self.files[1],
            "step-length": self.step_length,
            "seed": seed,
            "time-to-teleport": -1,  # a queue is part of the task: never move a waiting car away
            "save-state.rng": "true",
            "save-state.precision": 60,  # decimals, so that tiny speeds survive as text too
            "no-step-log": "true",
            "no-warnings": "true",
        }
        flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        try:
            self.libsumo.start(["sumo", *flags])
        except self.libsumo.TraCIException as err:
            raise RuntimeError(f"SUMO cannot load {self.files[0]}: {err}") from None
        SumoEnv._loaded = self
        self._asleep = None

    def _add(self, car: int, route: str, kind: str, lane: int, x: float, speed: str) -> None:
        """Let a car enter at the next step with a new speed factor, N(1, 0.1) within [0.2, 2]."""
        vehicle, name = self.libsumo.vehicle, self.ids[car]
        vehicle.add(name, route, kind, "now", str(lane), f"{x:.2f}", speed)
        factor = 1.0 + 0.1 * self.np_random.standard_normal()
        vehicle.setSpeedFactor(name, min(max(factor, 0.2), 2.0))

    def _advance(self) -> int:
        """One simulation step: cars that left enter again, the rest is read. Returns the exits."""
        self.libsumo.simulationStep()
        arrived = self.libsumo.simulation.getArrivedIDList()
        for car in map(int, arrived):
            self.x[car], self.on_road[car] = 0.0, False
            self._enter(car)
        speed = np.array([*map(self._get_speed, self.ids)])
        was_on_road, self.on_road = self.on_road, speed >= 0.0  # -2**30: the car waits to enter
        self.speed = np.maximum(speed, 0.0)
        self.x += self.step_length * (self.speed * was_on_road)  # a car appears without moving
        return len(arrived)

    def _ready(self, action: np.ndarray) -> list[float]:
        """Wake this world if another environment was used meanwhile; check and note the action."""
        if SumoEnv._loaded is not self:
            if self._asleep is None:
                raise RuntimeError("no simulation: call reset() first")
            self.set_state(self._asleep)
        action = np.asarray(action)
        values = action.tolist()
        if action.shape != self.action_space.shape or not all(map(math.isfinite, values)):
            raise ValueError(f"action must be {self.action_space.shape} finite numbers: {action}")
        if len(self._since) > 1000 and self._savable():  # a run without resets: keep it short
            self._anchor, self._since = self._snapshot(self._save()), []
        self._since.append(values)
        return values

    def get_state(self) -> dict[str, Any]:
        """An exact snapshot: SUMO's state, the fleet, the clocks and the generator.

        Where SUMO cannot save the present world exactly (see `_savable`), it is the last one that
        it could, or the start of the episode, and the actions since then.
        """
        if SumoEnv._loaded is not self:
            if self._asleep is None:
                raise RuntimeError("no state yet: call reset() first")
            return copy.deepcopy(self._asleep)
        if self._savable():
            self._anchor, self._since = self._snapshot(self._save()), []
        actions = np.array(self._since).reshape(-1, *self.action_space.shape)
        return {**copy.deepcopy(self._anchor), "actions": actions}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a snapshot; the steps that follow are those that followed it, bit for bit."""
        if state["task"] != self._task():
            raise ValueError(f"this is a state of {state['task']}, not of {self._task()}")
        self.np_random.bit_generator.state = state["generator"]
        if state["world"] != NEW_WORLD:
            for name in ("t", "x", "speed", "on_road", *self._own_state):
                old, new = getattr(self, name), copy.deepcopy(state[name])
                new = np.array(new, old.dtype) if isinstance(old, np.ndarray) else new
                setattr(self, name, new)
            self._load(state["world"])
            self._restore()
            self._anchor, self._since = self._snapshot(state["world"]), []
        else:
            self._begin()
        for action in np.asarray(state["actions"]):
            self.step(action)

    def _snapshot(self, world: bytes) -> dict[str, Any]:
        """All but SUMO's own state, which comes as bytes; NEW_WORLD: one not yet begun."""
        names = ("t", "x", "speed", "on_road", *self._own_state)
        return {
            "task": self._task(),
            "world": world,
            "generator": self.np_random.bit_generator.state,
            **{name: copy.deepcopy(getattr(self, name)) for name in names},
        }

    def _save(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "state.xml"
            self.libsumo.simulation.saveState(str(file))
            # the comment holds the date and the file paths of this machine
            text = re.sub(rb"<!--.*?-->", b"", file.read_bytes(), count=1, flags=re.DOTALL)
        if not text.rstrip().endswith(b"</snapshot>"):  # SUMO does not say that a disk is full
            raise OSError(errno.ENOSPC, "SUMO could not write its state", tempfile.gettempdir())
        return zlib.compress(text, level=1)

    def _load(self, world: bytes) -> None:
        self._open(seed=0)  # the generators are part of the state
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "state.xml"
            file.write_bytes(zlib.decompress(world))
            self.libsumo.simulation.loadState(str(file))

    def _savable(self) -> bool:
        """Whether SUMO can save the present world exactly."""
        return True

    def _task(self) -> str:
        return f"{type(self).__name__} with {len(self.ids)} cars"

    def close(self) -> None:
        if SumoEnv._loaded is self:
            SumoEnv._loaded = None
            self.libsumo.close()
        self._asleep = None

    def _place(self) -> None:
        raise NotImplementedError

    def _enter(self, car: int) -> None:
        raise NotImplementedError

    def _restore(self) -> None:
        raise NotImplementedError

    def _observe(self) -> np.ndarray:
        raise NotImplementedError


def fill_boxes(frame: np.ndarray, boxes: np.ndarray, colour: tuple[int, int, int]) -> None:
    """Paint boxes (n, 4) of x0, y0, x1, y1 in pixels, y downwards."""
    for x0, y0, x1, y1 in np.rint(boxes).astype(int).clip(0).tolist():
        frame[y0:y1, x0:x1] = colour


def _worker(*args) -> None:
    """Gymnasium's worker, except that it never outlives its parent and leaves Ctrl-C to it."""

    def exit_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    _async_worker(*args)


class SumoVectorEnv(AsyncVectorEnv):
    """Worker processes with one environment each, autoreset SAME_STEP.

    `infos["cost"]` (num_envs,) is the cost of every row, also of the last step of an episode;
    `infos["final_obs"]` (num_envs, obs) is the true successor of this step in every row.
    """

    def __init__(self, env_class: type[SumoEnv], num_envs: int, seed: int | None, **kwargs) -> None:
        self.cost_limit = env_class.cost_limit
        self.recommended_num_envs = env_class.recommended_num_envs
        self.recommended_timesteps = env_class.recommended_timesteps
        self.recommended_damping = env_class.recommended_damping
        self.num_costs = 1
        self._first_seed = seed
        makers = [functools.partial(env_class, **kwargs)] * num_envs
        # The default until Python 3.14; with the new one workers are not children of this process.
        context = "fork" if sys.platform == "linux" else None
        mode = AutoresetMode.SAME_STEP
        with self._workers_needed():
            super().__init__(makers, worker=_worker, autoreset_mode=mode, context=context)

    @contextlib.contextmanager
    def _workers_needed(self):
        """Turn the broken pipe of a dead worker into one line, and end the other workers."""
        try:
            yield
        except (EOFError, ConnectionError):
            for process in self.processes:
                process.join(timeout=0.5)
            dead = {i: p.exitcode for i, p in enumerate(self.processes) if p.exitcode is not None}
            self.close()
            text = ", ".join(f"worker {i} (exit code {code})" for i, code in dead.items())
            raise ChildProcessError(f"a SUMO worker process died: {text}") from None

    def reset(self, *, seed=None, options=None):
        if seed is None:
            seed = self._first_seed
        self._first_seed = None
        with self._workers_needed():
            return super().reset(seed=seed, options=options)

    def step(self, actions: np.ndarray):
        with self._workers_needed():
            obs, rewards, terminated, truncated, infos = super().step(actions)
        final_obs = obs.copy()
        for row in np.flatnonzero(terminated | truncated):
            final_obs[row] = infos["final_obs"][row]
            for key in ("cost", "exits"):  # the reset that followed has put its own here
                infos[key][row] = infos["final_info"][key][row]
        infos["final_obs"] = final_obs
        return obs, rewards, terminated, truncated, infos

    def call(self, name: str, *args, **kwargs) -> tuple:
        with self._workers_needed():
            return super().call(name, *args, **kwargs)

    def get_state(self) -> dict[str, Any]:
        """Snapshots of all rows."""
        return {"rows": list(self.call("get_state"))}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from the snapshots of as many rows."""
        if len(state["rows"]) != self.num_envs:
            raise ValueError(f"state of {len(state['rows'])} rows for {self.num_envs} rows")
        self._assert_is_running()
        with self._workers_needed():
            for pipe, row in zip(self.parent_pipes, state["rows"], strict=True):
                pipe.send(("_call", ("set_state", (row,), {})))
            self._state = AsyncState.WAITING_CALL
            self.call_wait()
        self._first_seed = None

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers; they hold nothing that would have to be saved."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.parent_pipes:
            if pipe is not None:
                pipe.close()


def make_workers(env_id: str, num_envs: int, seed: int | None = None, **kwargs) -> SumoVectorEnv:
    """`num_envs` rows of Grid or Bottleneck in worker processes; row i is seeded with seed + i."""
    from envs.bottleneck import Bottleneck
    from envs.grid import Grid

    classes = {"Grid": Grid, "Bottleneck": Bottleneck}
    if env_id not in classes:
        raise ValueError(f"env_id {env_id!r}: SUMO workers serve {', '.join(classes)}")
    return SumoVectorEnv(classes[env_id], num_envs, seed, **kwargs)
