"""Grid and Bottleneck: sizes, known averages, clocks, and swaps and snapshots to the bit."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

pytest.importorskip("libsumo", exc_type=ImportError)

from envs import sumo
from envs.bottleneck import Bottleneck
from envs.grid import Grid
from envs.sumo import make_workers

ROOT = Path(__file__).parent.parent
BOTH = pytest.mark.parametrize("env_class", [Grid, Bottleneck])


def noise(env, steps: int, seed: int = 0, mean: float = 0.0, std: float = 0.37) -> np.ndarray:
    """Gaussian actions (steps, act)."""
    return np.random.default_rng(seed).normal(mean, std, (steps, *env.action_space.shape))


def trace(env, actions) -> list[tuple]:
    """What an agent sees, to the bit."""
    seen = []
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(action)
        assert not terminated
        seen.append((obs.tobytes(), reward, truncated, info["cost"], info["exits"]))
    return seen


def averages(env, policy, seed: int, steps: int = 1000) -> np.ndarray:
    """Mean reward, cost and exits per step."""
    obs, _ = env.reset(seed=seed)
    total = np.zeros(3)
    for _ in range(steps):
        obs, reward, _, _, info = env.step(policy(obs))
        total += reward, info["cost"], info["exits"]
    return total / steps


def fixed_greens(north_south: float, east_west: float):
    """Ask for a switch once the green of an axis has lasted so many seconds."""
    green = np.array([north_south, east_west])

    def policy(obs):
        age, axis, yellow = np.rint(60 * obs[84:88]), obs[88:92].astype(int), obs[92:]
        return np.where((yellow == 0) & (age >= green[axis]), 1.0, -1.0)

    return policy


def speed_cap(metres_per_second: float):
    """Bottleneck: the same maximum speed everywhere."""
    action = np.full(16, 2 * np.log(metres_per_second / 0.5) / np.log(46.0) - 1)
    return lambda obs: action


@pytest.mark.parametrize(("env_class", "obs", "act"), [(Grid, 96, 4), (Bottleneck, 71, 16)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sizes_and_check_env(env_class, obs, act):
    env = env_class()
    assert env.observation_space.shape == (obs,)
    assert env.action_space.shape == (act,)
    assert (env.cost_limit, env.recommended_num_envs) == (0.1, 1)
    assert env.recommended_damping == 0.1
    check_env(env, skip_render_check=True)
    env.close()


def test_grid_split_changes_the_observation():
    env = Grid(cars_per_road=(5, 2))
    assert env.reset(seed=0)[0].shape == (3 * 28 + 12,)
    assert np.bincount(env.road_of).tolist() == [5, 5, 5, 5, 2, 2, 2, 2]
    assert Grid(cars_per_road=(3, 2)).observation_space.shape == (3 * 20 + 12,)
    with pytest.raises(ValueError, match="cars_per_road"):
        Grid(cars_per_road=(0, 1))


# 1000 steps from reset: means over 12 seeds; tolerances are 4 standard deviations, at least .004
@pytest.mark.parametrize(
    ("policy", "reward", "reward_tol", "cost", "cost_tol"),
    [
        (lambda obs: np.ones(4), 0.533, 0.020, 0.0, 0.0),
        (fixed_greens(2, 2), 0.452, 0.008, 0.0, 0.0),
        (fixed_greens(1, 3), 0.447, 0.008, 0.100, 0.004),
        (fixed_greens(1, 10), 0.692, 0.060, 0.471, 0.004),
        (fixed_greens(0, 10**9), 0.807, 0.004, 0.994, 0.004),
    ],
    ids=["always ask", "2/2", "NS1/EW3", "NS1/EW10", "EW green"],
)
def test_grid_controllers(policy, reward, reward_tol, cost, cost_tol):
    env = Grid()
    for seed in (0, 1):
        mean = averages(env, policy, seed)
        assert abs(mean[0] - reward) <= reward_tol
        assert abs(mean[1] - cost) <= cost_tol
        # throughput of a closed fleet: 28 * mean speed / 737.6 m; up to 2 s are lost at a re-entry
        predicted = 28 * 30 * mean[0] / 737.6
        assert 0.95 * predicted < mean[2] < 1.01 * predicted
    env.close()


def test_grid_random_policy():
    env = Grid()
    rng = np.random.default_rng(0)
    mean = np.mean([averages(env, lambda obs: rng.normal(0, 0.37, 4), s) for s in (0, 1)], axis=0)
    assert abs(mean[0] - 0.479) < 0.014
    assert abs(mean[1] - 0.103) < 0.02
    env.close()


@pytest.mark.parametrize(
    ("cap", "reward", "reward_tol", "cost", "cost_tol"),
    [
        (23.0, 0.793, 0.024, 0.509, 0.024),
        (3.4, 0.796, 0.088, 0.151, 0.112),
        (1.0, 0.331, 0.188, 0.755, 0.136),
    ],
    ids=["no control", "3.4 m/s", "1 m/s"],
)
def test_bottleneck_controllers(cap, reward, reward_tol, cost, cost_tol):
    env = Bottleneck()
    for seed in (0, 1):
        mean = averages(env, speed_cap(cap), seed)
        assert abs(mean[0] - reward) <= reward_tol
        assert abs(mean[1] - cost) <= cost_tol
        # reward is the outflow in 2000 cars/h: sum of speeds / length of the road
        assert mean[2] * 7200 / 2000 == pytest.approx(mean[0], abs=0.07)
    env.close()


@pytest.mark.slow
@BOTH
def test_fleet_is_constant_and_what_we_track_is_what_sumo_drives(env_class):
    """5000 random steps: positions, lanes, speeds and edges against SUMO's own; no accidents."""
    env = env_class()
    env.reset(seed=4)
    vehicle, simulation = env.libsumo.vehicle, env.libsumo.simulation
    starts, lanes = reference_lanes(env)
    accidents = exits = longest = 0
    waiting = np.zeros(len(env.ids), int)
    for step, action in enumerate(noise(env, 5000, seed=1)):
        exits += env.step(action)[4]["exits"]
        accidents += (
            simulation.getStartingTeleportNumber() + simulation.getCollidingVehiclesNumber()
        )
        accidents += simulation.getEmergencyStoppingVehiclesNumber()
        on_road = set(vehicle.getIDList())
        assert [car in on_road for car in env.ids] == env.on_road.tolist()
        assert on_road <= set(env.ids)
        for car in np.flatnonzero(~env.on_road):
            vehicle.getTypeID(env.ids[car])  # SUMO knows it: it waits to enter
        waiting = (waiting + 1) * ~env.on_road
        longest = max(longest, waiting.max())
        if step % 5:
            continue
        for car in np.flatnonzero(env.on_road):
            lane = vehicle.getLaneID(env.ids[car])
            x = starts[lane] + vehicle.getLanePosition(env.ids[car])
            assert abs(env.x[car] - x) < 1e-9
            assert lane in lanes(car)
    assert accidents == 0
    assert exits > 1000
    assert longest < 30, "every car that left is soon back"
    env.close()


def reference_lanes(env):
    """Where each lane starts (m along its road), and the lanes that a car may be on."""
    import xml.etree.ElementTree as ElementTree

    root = ElementTree.parse(env.files[0]).getroot()
    length = {lane.get("id"): float(lane.get("length")) for lane in root.iter("lane")}
    if isinstance(env, Grid):
        starts = {}
        for road in ("E0", "E1", "W0", "W1", "N0", "N1", "S0", "S1"):
            starts.update({f"{road}_0_0": 0.0, f"{road}_1_0": 318.8, f"{road}_2_0": 637.6})
        road_of = np.repeat(["E0", "E1", "W0", "W1", "N0", "N1", "S0", "S1"], [6] * 4 + [1] * 4)
        for link in root.iter("connection"):
            if link.get("via"):
                starts[link.get("via")] = starts[link.get("from") + "_0"] + 300.0
        vias = {
            road: [c.get("via") for c in root.iter("connection") if c.get("from", "")[:2] == road]
            for road in road_of
        }
        return starts, lambda car: [f"{road_of[car]}_{k}_0" for k in range(3)] + vias[road_of[car]]
    starts, x = {}, 0.0
    names = ["e1", ":n2_0", "e2", ":n3_0", "e3", ":n4_0", "e4", ":n5_0", "e5"]
    for name in names:
        starts.update({f"{name}_{k}": x for k in range(4)})
        x += length[f"{name}_0"]
    assert x == pytest.approx(1065.29)

    def lanes(car):
        k = env.lane[car]
        pair = k // 2
        return [f"{n}_{k}" for n in names[:6]] + [f"e4_{pair}", f":n5_0_{pair}", "e5_0"]

    return starts, lanes


def test_grid_observation_index_by_index():
    env = Grid()
    obs, _ = env.reset(seed=2)
    vehicle = env.libsumo.vehicle
    edges = [
        f"{road}_{k}" for road in ("E0", "E1", "W0", "W1", "N0", "N1", "S0", "S1") for k in range(3)
    ]
    inside = 0
    for action in noise(env, 300, seed=2):
        obs = env.step(action)[0]
        for car in range(28):
            name = str(car)
            if not env.on_road[car]:
                entry = edges.index(f"{np.repeat(edges[::3], [6] * 4 + [1] * 4)[car]}") + 1
                expected = 0.0, 1.0, entry / 24
            else:
                edge, x = vehicle.getRoadID(name), vehicle.getLanePosition(name)
                expected = vehicle.getSpeed(name) / 30, 0.0, 0.0
                inside += edge[0] == ":"
                if edge[0] != ":":
                    long = 100.0 if edge.endswith("_2") else 300.0
                    expected = expected[0], (long - x) / 300, (edges.index(edge) + 1) / 24
            assert obs[[car, 28 + car, 56 + car]] == pytest.approx(expected, abs=1e-6)
        lights = [
            env.libsumo.trafficlight.getRedYellowGreenState(c) for c in ("c00", "c10", "c01", "c11")
        ]
        assert obs[88:92].tolist() == [float(s[1] in "Gy") for s in lights]
        assert obs[92:].tolist() == [float("y" in s) for s in lights]
    assert inside > 50
    env.close()


def test_grid_lights_to_the_second():
    """One request: 3 s of yellow that ignore further requests, then at least 1 s of green."""
    env = Grid()
    env.reset(seed=0)
    start = list(env.axis)
    show = env.libsumo.trafficlight.getRedYellowGreenState
    ask = np.array([1.0, -1.0, -1.0, -1.0])
    shown, ages = [], []
    for _ in range(9):
        obs = env.step(ask)[0]
        shown.append(show("c00"))
        ages.append(round(60 * float(obs[84])))
    yellow, green = (("yryr", "rGrG"), ("ryry", "GrGr"))[start[0]]
    back = ("ryry", "GrGr") if start[0] == 0 else ("yryr", "rGrG")
    assert shown == [yellow] * 3 + [green] + [back[0]] * 3 + [back[1], yellow]
    assert ages == [1, 2, 3, 1, 2, 3, 4, 1, 2]
    assert env.axis[1:] == start[1:]
    assert [round(60 * float(age)) for age in obs[85:88]] == [9, 9, 9]
    for _ in range(70):
        obs, _, _, _, info = env.step(-np.ones(4))
    assert obs[84:88].tolist() == [1.0] * 4  # shown up to 60 s
    assert info["cost"] == 1.0
    env.close()


def test_grid_red_age_and_cost_against_a_slow_reference():
    """Red ages counted from the light strings alone; cost = share of lights above 5 s."""
    env = Grid()
    env.reset(seed=5)
    show = env.libsumo.trafficlight.getRedYellowGreenState
    history = {c: [show(c)] for c in ("c00", "c10", "c01", "c11")}
    costs = []
    for action in noise(env, 400, seed=6, mean=-0.3):
        obs, _, _, _, info = env.step(action)
        ages = []
        for light, strings in history.items():
            strings.append(show(light))
            axis_red = strings[-1].index("r") % 2
            age = 0
            while age < len(strings) - 1 and strings[-1 - age][axis_red] == "r":
                age += 1  # the string at reset is no step
            ages.append(age)
        assert np.rint(60 * obs[84:88]).tolist() == [min(age, 60) for age in ages]
        assert info["cost"] == np.mean([age > 5 for age in ages])
        costs.append(info["cost"])
    assert 0.1 < np.mean(costs) < 0.6
    env.close()


def test_grid_actions_are_clipped_and_thresholded_at_zero():
    env = Grid()
    traces = []
    for scale in (1.0, 50.0):
        env.reset(seed=1)
        traces.append(trace(env, scale * noise(env, 100, seed=3)))
    assert traces[0] == traces[1]
    env.reset(seed=1)
    env.step(np.zeros(4))
    assert env.yellow == [0] * 4, "0 asks for nothing"
    with pytest.raises(ValueError, match="finite"):
        env.step(np.full(4, np.nan))
    env.close()


def test_bottleneck_observation_index_by_index():
    env = Bottleneck()
    env.reset(seed=2)
    vehicle = env.libsumo.vehicle
    first = {"e1": 0, "e2": 4, "e3": 16, "e4": 28, "e5": 34}
    lanes = {"e1": 4, "e2": 4, "e3": 4, "e4": 2, "e5": 1}
    third = {"e1": 100.0, "e2": 310 / 3, "e3": 140 / 3, "e4": 280 / 3, "e5": 155.0}
    exits = []
    for action in noise(env, 300, seed=2):
        obs, reward, _, _, info = env.step(action)
        exits.append(info["exits"])
        speeds = [[] for _ in range(35)]
        total = 0.0
        for name in vehicle.getIDList():
            edge, lane = vehicle.getLaneID(name).rsplit("_", 1)
            total += vehicle.getSpeed(name)
            if edge in first:
                segment = int(vehicle.getLanePosition(name) / third[edge])
                speeds[first[edge] + lanes[edge] * segment + int(lane)].append(
                    vehicle.getSpeed(name)
                )
        assert obs[:35] == pytest.approx([len(s) / 20 for s in speeds])
        assert obs[35:70] == pytest.approx(
            [np.mean(s) / 50 if s else 0.0 for s in speeds], abs=1e-6
        )
        assert reward == pytest.approx(1.8 * total / 1065.29)
        if len(exits) >= 20:
            assert obs[70] == pytest.approx(sum(exits[-20:]) * 360 / 2000)
    assert sum(exits) > 30
    env.close()


def test_bottleneck_caps_rule_on_edges_2_and_3_only():
    """The cap that SUMO uses in a step follows from where the car was before it."""
    env = Bottleneck()
    env.reset(seed=3)
    vehicle, cap_of = env.libsumo.vehicle, env.libsumo.vehicletype.getMaxSpeed
    ruled = 0
    for action in noise(env, 400, seed=4, std=0.8):
        expected = []
        for k in range(6):
            edge, lane = (vehicle.getLaneID(str(54 + k)) or "e1_0").rsplit("_", 1)
            cap = 23.0
            if edge in ("e2", "e3"):
                half = {"e2": 155.0, "e3": 70.0}[edge]
                x = vehicle.getLanePosition(str(54 + k))
                index = 8 * (edge == "e3") + 4 * (x > half) + int(lane)
                cap = 0.5 * 46 ** ((1 + np.clip(action[index], -1, 1)) / 2)
                ruled += 1
            expected.append(cap)
        env.step(action)
        assert [cap_of(f"av{k}") for k in range(6)] == pytest.approx(expected, rel=1e-12)
    assert ruled > 400
    assert speed_cap(3.4)(None)[0] == pytest.approx(0.0, abs=2e-3)
    env.close()


@pytest.mark.parametrize("slow_speed", [3.0, 5.0])
def test_bottleneck_low_speed_clock_against_a_slow_reference(slow_speed):
    """Cost from the recorded speeds of the humans: more than 20 steps in a row below the limit."""
    env = Bottleneck(slow_speed=slow_speed)
    env.reset(seed=3)
    vehicle = env.libsumo.vehicle
    speeds, costs = [], []
    for action in noise(env, 500, seed=4):
        info = env.step(action)[4]
        here = set(vehicle.getIDList())
        speeds.append([vehicle.getSpeed(str(i)) if str(i) in here else np.inf for i in range(54)])
        costs.append(info["cost"])
    slow = np.array(speeds) < slow_speed
    for t in range(60, 500):  # by then no clock reaches back into the warm-up unless it is > 20
        crawled = [slow[t - 20 : t + 1, i].all() for i in range(54)]
        assert costs[t] == np.mean(crawled)
    assert np.mean(costs) > 0.05
    env.close()


@BOTH
def test_truncated_at_the_horizon(env_class):
    env = env_class(horizon=30)
    env.reset(seed=0)
    flags = [seen[2] for seen in trace(env, noise(env, 30))]
    assert flags == [False] * 29 + [True]
    assert env.reset()[1]["cost"] == 0.0
    assert not env.step(noise(env, 1)[0])[3]
    env.close()


def test_same_seed_same_bits_in_another_process():
    code = f"""
import hashlib, sys
import numpy as np
sys.path.insert(0, {str(ROOT)!r})
from envs.bottleneck import Bottleneck
from envs.grid import Grid
for env in (Grid(), Bottleneck()):
    seen = hashlib.sha256(env.reset(seed=int(sys.argv[1]))[0].tobytes())
    for action in np.random.default_rng(0).normal(0, 0.37, (300, *env.action_space.shape)):
        obs, reward, _, _, info = env.step(action)
        seen.update(obs.tobytes() + np.float64([reward, info["cost"]]).tobytes())
    env.reset()
    print(seen.hexdigest(), env.x.sum())
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([sys.executable, "-c", code, seed], **pipes) for seed in "778"]
    texts = [run.communicate() for run in runs]
    assert [error for _, error in texts] == [""] * 3, "SUMO prints nothing"
    assert texts[0] == texts[1]
    lines = [text.splitlines() for text, _ in texts]
    assert len(lines[0]) == 2, "SUMO prints nothing"
    assert lines[0][0] != lines[2][0] and lines[0][1] != lines[2][1]


@pytest.mark.parametrize(
    ("env_class", "mean", "std"),
    [(Grid, 0.0, 0.37), (Grid, -0.5, 0.3), (Bottleneck, 0.0, 0.37), (Bottleneck, 1.0, 0.0)],
)
def test_environments_of_one_process_take_turns_exactly(env_class, mean, std):
    """Two of a kind and one of the other, in turns, see what each sees alone."""
    env, twin, other = env_class(), env_class(), (Bottleneck if env_class is Grid else Grid)()
    actions = noise(env, 400, 5, mean, std)
    env.reset(seed=3)
    alone = trace(env, actions)
    x = env.x.copy()
    env.reset(seed=3)
    twin.reset(seed=4)
    other.reset(seed=5)
    in_turns = []
    for t, action in enumerate(actions):
        in_turns += trace(env, [action])
        if t % 9 == 0:
            twin.step(action)
        if t % 50 == 0:
            other.step(np.zeros(other.action_space.shape))
    assert in_turns == alone
    assert np.array_equal(env.x, x)
    for one in (env, twin, other):
        one.close()


@BOTH
def test_two_in_a_sync_vector_env(env_class):
    envs = SyncVectorEnv([env_class] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=11)
    actions = np.stack([noise(envs.envs[0], 40, seed=s) for s in (0, 1)], axis=1)
    rows = [envs.step(a)[0] for a in actions]
    envs.close()
    for row in range(2):
        env = env_class()
        env.reset(seed=11 + row)
        for t in range(40):
            assert np.array_equal(env.step(actions[t, row])[0], rows[t][row])
        env.close()


@pytest.mark.parametrize(
    ("env_class", "mean", "std"),
    [(Grid, -0.4, 0.3), (Bottleneck, 0.0, 0.37), (Bottleneck, 1.0, 0.0)],
)
def test_snapshots_are_exact(env_class, mean, std, tmp_path):
    torch = pytest.importorskip("torch")
    env, fresh = env_class(), env_class()
    with pytest.raises(RuntimeError, match="reset"):
        env.get_state()
    with pytest.raises(RuntimeError, match="reset"):
        env.step(np.zeros(env.action_space.shape))
    actions = noise(env, 360, 7, mean, std)
    env.reset(seed=6)
    expected = trace(env, actions)
    env.reset(seed=6)
    replayed = 0
    for t in range(0, 300, 23):
        state = env.get_state()
        replayed += len(state["actions"]) > 0
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in state.items()}
        torch.save(plain, tmp_path / "state.pt")
        fresh.set_state(torch.load(tmp_path / "state.pt", weights_only=True))
        assert trace(fresh, actions[t : t + 60]) == expected[t : t + 60]
        assert trace(env, actions[t : t + 23]) == expected[t : t + 23]
    if env_class is Bottleneck:
        assert replayed > 0, "states that SUMO cannot save exactly were met"
    # the generator is part of the state: the next episode is the same too
    fresh.set_state(env.get_state())
    assert np.array_equal(env.reset()[0], fresh.reset()[0])
    with pytest.raises(ValueError, match="not of"):
        (Bottleneck if env_class is Grid else Grid)().set_state(state)
    env.close()
    fresh.close()


def test_a_long_run_without_reset_keeps_its_history_short():
    env = Grid(horizon=10**9)
    env.reset(seed=0)
    trace(env, noise(env, 2100))
    assert len(env._since) < 1002
    env.close()


@BOTH
def test_workers_obey_the_vector_rule(env_class):
    """Rows equal single envs; cost and final_obs are the truth also where an episode ends."""
    name = env_class.__name__
    envs = make_workers(name, 2, seed=21, horizon=25)
    assert (envs.num_envs, envs.cost_limit, envs.recommended_num_envs) == (2, 0.1, 1)
    assert envs.recommended_damping == 0.1
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    obs, _ = envs.reset()
    actions = np.random.default_rng(0).normal(0, 0.37, (60, 2, *envs.single_action_space.shape))
    actions = actions.astype(np.float32)
    rows, state = [obs], None
    for t, action in enumerate(actions):
        if t == 33:
            state = envs.get_state()
        rows.append(envs.step(action))
    envs.set_state(state)
    again = [envs.step(action) for action in actions[33:]]
    for old, new in zip(rows[34:], again, strict=True):
        assert np.array_equal(old[0], new[0])
        assert np.array_equal(old[4]["cost"], new[4]["cost"])
    envs.close()
    for row in range(2):
        env = env_class(horizon=25)
        assert np.array_equal(env.reset(seed=21 + row)[0], rows[0][row])
        for action, seen in zip(actions, rows[1:], strict=True):
            obs, reward, _, truncated, info = env.step(action[row])
            got, rewards, _, truncations, infos = seen
            assert infos["cost"].dtype == np.float64
            assert infos["final_obs"].shape == got.shape
            assert infos["final_obs"].dtype == np.float32
            assert np.array_equal(infos["final_obs"][row], obs)
            assert (rewards[row], truncations[row]) == (reward, truncated)
            assert (infos["cost"][row], infos["exits"][row]) == (info["cost"], info["exits"])
            if truncated:
                obs, _ = env.reset()
            assert np.array_equal(got[row], obs)
        env.close()


def test_a_killed_worker_is_one_line_and_no_orphan():
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from envs.sumo import make_workers
envs = make_workers("Grid", 2, seed=0)
envs.reset()
print(*[p.pid for p in envs.processes], flush=True)
envs.step(envs.action_space.sample())
os.kill(envs.processes[1].pid, signal.SIGKILL)
for _ in range(3):
    envs.step(envs.action_space.sample())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    errors = run.stderr.strip().splitlines()
    assert errors[-1] == "ChildProcessError: a SUMO worker process died: worker 1 (exit code -9)"
    assert run.stderr.count("Traceback") == 1
    assert not any(alive(int(pid)) for pid in run.stdout.split())


def test_workers_end_when_their_parent_is_killed():
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from envs.sumo import make_workers
envs = make_workers("Grid", 2, seed=0)
envs.reset()
print(*[p.pid for p in envs.processes], flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2 and all(map(alive, workers))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.time() + 10
    while any(map(alive, workers)) and time.time() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_clear_errors(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(sumo, "ASSETS", tmp_path)
    monkeypatch.setattr("envs.grid.ASSETS", tmp_path)
    with pytest.raises(FileNotFoundError, match="SUMO input file missing: .*grid.net.xml"):
        Grid()
    assets = ROOT / "envs" / "assets"
    shutil.copy(assets / "grid.rou.xml", tmp_path)
    text = (assets / "grid.net.xml").read_text()
    (tmp_path / "grid.net.xml").write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match="network file broken: .*grid.net.xml"):
        Grid()
    (tmp_path / "grid.net.xml").write_text(text.replace('id="W0_1_0"', 'id="W0_1_9"'))
    with pytest.raises(ValueError, match="network file broken: .*W0_1"):
        Grid()
    monkeypatch.setitem(sys.modules, "libsumo", None)
    with pytest.raises(ImportError, match="pip install libsumo"):
        Grid()
    with pytest.raises(ValueError, match="horizon 0"):
        Bottleneck(horizon=0)
    with pytest.raises(ValueError, match="render_mode 'human'"):
        Bottleneck(render_mode="human")
    with pytest.raises(ValueError, match="'Ring'"):
        make_workers("Ring", 2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("env_class", "shape"), [(Grid, (944, 944, 3)), (Bottleneck, (192, 1072, 3))]
)
def test_rendered_frames_show_cars_and_lights(env_class, shape):
    env = env_class(render_mode="rgb_array")
    env.reset(seed=0)
    trace(env, noise(env, 20))
    frame = env.render()
    assert frame.shape == shape
    assert frame.dtype == np.uint8
    colours, counts = np.unique(frame.reshape(-1, 3), axis=0, return_counts=True)
    pixels = {tuple(c): n for c, n in zip(colours.tolist(), counts.tolist(), strict=True)}
    if env_class is Grid:  # 5 m x 4 m at 1 m a pixel; 16 bars of 4 m x 8.4 m
        assert pixels[255, 255, 255] == pytest.approx(20 * env.on_road.sum(), rel=0.25)
        bars = sum(pixels.get(c, 0) for c in ((235, 50, 40), (50, 220, 90), (255, 205, 40)))
        assert bars == pytest.approx(16 * 4 * 8.4, rel=0.2)
    else:  # 5 m at 2 pixels a metre x 9 pixels
        assert pixels[255, 255, 255] == pytest.approx(90 * env.on_road[:54].sum(), rel=0.15)
        assert pixels[240, 50, 40] == pytest.approx(90 * env.on_road[54:].sum(), rel=0.25)
    start = time.perf_counter()
    for _ in range(10):
        env.render()
    assert (time.perf_counter() - start) / 10 < 0.05
    env.close()
    assert env_class().render() is None


def test_import_stays_light():
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import envs.grid, envs.bottleneck
assert "libsumo" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["grid", "bottleneck"])
def test_networks_come_from_their_sources(name):
    """Every edge, length, lane and connection of the plain files is in the network."""
    import xml.etree.ElementTree as ElementTree

    def read(kind):
        return ElementTree.parse(ROOT / "envs" / "assets" / f"{name}.{kind}.xml").getroot()

    net = read("net")
    edges = {e.get("id"): e for e in net.iter("edge") if e.get("function") != "internal"}
    plain = {e.get("id"): e for e in read("edg").iter("edge")}
    assert edges.keys() == plain.keys()
    for key, edge in plain.items():
        lanes = list(edges[key].iter("lane"))
        assert len(lanes) == int(edge.get("numLanes"))
        assert all(float(lane.get("length")) == float(edge.get("length")) for lane in lanes)
        assert all(float(lane.get("speed")) == float(edge.get("speed")) for lane in lanes)
    what = ("from", "to", "fromLane", "toLane")
    links = {tuple(c.get(k) for k in what) for c in net.iter("connection") if c.get("via")}
    assert links == {tuple(c.get(k) for k in what) for c in read("con").iter("connection")}
    assert "<!--" not in (ROOT / "envs" / "assets" / f"{name}.net.xml").read_text()
