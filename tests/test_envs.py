"""The batched tasks against geometry, physics and formulas that can be worked out by hand."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from scipy import stats
from scipy.optimize import minimize
from scipy.spatial.transform import Rotation

import envs
import envs.render
from benchmark.controllers import apple_seeker, circle_follower, score
from envs.batch import RowRandom
from envs.bodies import AntBody, PointBody, mujoco, quaternion_yaw  # mujoco with GL chosen
from envs.gather import LATTICE
from envs.lqr import ConstrainedLQR

SIZES = {
    "PointCircle": (9, 2),
    "PointGather": (29, 2),
    "AntCircle": (32, 8),
    "AntGather": (52, 8),
    "ConstrainedLQR": (1, 1),
}
IDS = list(SIZES)
GATHER = ["PointGather", "AntGather"]
ANTS = ["AntCircle", "AntGather"]


def random_actions(env, steps, seed=0):
    """(steps, n, act), partly outside [-1, 1]: the env clips."""
    rng = np.random.default_rng(seed)
    return rng.uniform(-1.2, 1.2, (steps, *env.action_space.shape)).astype(np.float32)


def change(env, **arrays):
    """Overwrite parts of the state of a batch."""
    state = env.get_state()
    for name, value in arrays.items():
        state[name][...] = value
    env.set_state(state)


def place_point(env, position, yaw):
    """Put the points of a batch at positions (n, 2) with headings (n,)."""
    heading = np.stack([np.cos(yaw), np.sin(yaw)], axis=1)
    center = position + PointBody.lead * heading
    change(env, position=position, yaw=yaw, cos=heading[:, 0], sin=heading[:, 1], center=center)


# Sizes, limits, the Gymnasium interface


@pytest.mark.parametrize("env_id", IDS)
def test_sizes_limits_and_dtypes(env_id):
    obs_size, act_size = SIZES[env_id]
    env = envs.make_vec(env_id, 3, seed=0)
    obs, _ = env.reset()
    assert obs.shape == (3, obs_size) and obs.dtype == np.float32
    assert env.single_action_space == gym.spaces.Box(-1, 1, (act_size,), np.float32)
    obs, rewards, terminated, truncated, infos = env.step(np.zeros((3, act_size)))
    assert obs.shape == (3, obs_size) and obs.dtype == np.float32
    assert rewards.dtype == infos["cost"].dtype == np.float64
    assert infos["cost"].shape == rewards.shape == (3,)
    assert infos["final_obs"].shape == (3, obs_size)
    assert not terminated.any() and not truncated.any()
    limits = {"PointCircle": 0.1, "PointGather": 0.01, "AntCircle": 0.1, "AntGather": 0.002}
    single = gym.make(env_id).unwrapped
    assert env.cost_limit == single.cost_limit == limits.get(env_id, 0.2)
    number = 32 if "Ant" in env_id else 8
    assert env.recommended_num_envs == single.recommended_num_envs == number


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasium_check_env(env_id):
    check_env(gym.make(env_id, render_mode="rgb_array").unwrapped)


@pytest.mark.parametrize("env_id", IDS)
def test_actions_are_clipped_and_shapes_checked(env_id):
    one, two = envs.make_vec(env_id, 2), envs.make_vec(env_id, 2)
    one.reset(seed=4), two.reset(seed=4)
    wild = np.full(one.action_space.shape, 7.0) * [[1], [-1]]
    np.testing.assert_array_equal(one.step(wild)[0], two.step(np.clip(wild, -1, 1))[0])
    with pytest.raises(ValueError, match="actions must have the shape"):
        one.step(wild[0])


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_envs must be >= 0, got -1"):
        envs.make_vec("PointCircle", -1)
    with pytest.raises(ValueError, match="must be >= 1"):
        envs.make_vec("PointCircle", 1, horizon=0)
    with pytest.raises(ValueError, match="render_mode"):
        envs.make_vec("PointCircle", 1, render_mode="human")
    with pytest.raises(ValueError, match="not a state of PointCircle"):
        envs.make_vec("PointCircle", 2).set_state(envs.make_vec("PointCircle", 3).get_state())


# Episodes: truncation, final_obs, stagger


@pytest.mark.parametrize("env_id", IDS)
def test_truncation_final_obs_and_cost(env_id):
    env = envs.make_vec(env_id, 3, seed=0, horizon=4)
    obs, _ = env.reset()
    for t, action in enumerate(random_actions(env, 12), start=1):
        obs, _, terminated, truncated, infos = env.step(action)
        assert not terminated.any()
        assert truncated.all() if t % 4 == 0 else not truncated.any()
        assert np.isfinite(infos["cost"]).all()
        assert (infos["final_obs"] == obs).all() == (t % 4 != 0)
        if t % 4 == 0 and env_id != "ConstrainedLQR":  # a new episode: at its start again
            start = [0.0, getattr(env, "radius", 0.0)]
            assert np.abs(obs[:, :2] - start).max() < 0.06
            assert (infos["final_obs"] != obs).any(axis=1).all()


def test_stagger_spreads_the_ends_of_episodes():
    env = envs.make_vec("PointCircle", 4, seed=0, horizon=100, stagger=True)
    env.reset()
    np.testing.assert_array_equal(env.clock, [0, 25, 50, 75])
    ends = {3: [25, 125], 2: [50, 150], 1: [75, 175], 0: [100, 200]}
    for t in range(1, 201):
        truncated = env.step(np.zeros((4, 2)))[3]
        assert np.flatnonzero(truncated).tolist() == [r for r, at in ends.items() if t in at]
    plain = envs.make_vec("PointCircle", 4, seed=0, horizon=100)
    plain.reset()
    assert (plain.clock == 0).all()


# Seeds, rows, snapshots


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("n", [2, 9])
def test_row_i_is_the_single_env_with_seed_plus_i(env_id, n):
    steps, horizon = (120, 50) if env_id in ANTS else (60, 13)
    batch = envs.make_vec(env_id, n, seed=11, horizon=horizon)
    obs, _ = batch.reset()
    actions = random_actions(batch, steps)
    trace = [batch.step(action) for action in actions]
    if env_id in ANTS and n == 9:
        assert sum(s[4]["regenerated"].sum() for s in trace) > 0  # falls are covered, too
    for row in {0, n // 2, n - 1}:
        single = gym.make(env_id, horizon=horizon).unwrapped
        own, _ = single.reset(seed=11 + row)
        np.testing.assert_array_equal(own, obs[row])
        for action, (b_obs, b_rewards, _, b_truncated, infos) in zip(actions, trace, strict=True):
            own, reward, terminated, truncated, info = single.step(action[row])
            assert type(info["cost"]) is float
            assert (reward, info["cost"]) == (b_rewards[row], infos["cost"][row])
            assert (terminated, truncated) == (False, b_truncated[row])
            np.testing.assert_array_equal(own, infos["final_obs"][row])
            if truncated:
                own, _ = single.reset()
            np.testing.assert_array_equal(own, b_obs[row])


@pytest.mark.parametrize("env_id", IDS)
def test_seeds(env_id):
    def start(**kwargs):
        return envs.make_vec(env_id, 2, **kwargs)

    first = start(seed=5).reset()[0]
    np.testing.assert_array_equal(first, start().reset(seed=5)[0])
    np.testing.assert_array_equal(first, start().reset(seed=[5, 6])[0])
    np.testing.assert_array_equal(first[1], start(seed=6).reset()[0][0])
    assert (first != start(seed=7).reset()[0]).any()
    assert (start().reset()[0] != start().reset()[0]).any()  # no seed: fresh entropy
    env = start(seed=5)
    env.reset()
    assert (env.reset()[0] != first).any()  # the seed is used once, then the stream goes on


@pytest.mark.parametrize("env_id", IDS)
def test_snapshot_is_exact_and_survives_torch_save(env_id, tmp_path):
    env = envs.make_vec(env_id, 4, seed=2, horizon=70)
    env.reset()
    actions = random_actions(env, 120)
    for action in actions[:60]:
        env.step(action)
    state = env.get_state()
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    torch.save(tensors, tmp_path / "state.pt")
    expected = [env.step(action) for action in actions[60:]]

    other = envs.make_vec(env_id, 4, seed=99, horizon=70)
    other.reset()
    other.step(actions[0])
    other.set_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for action, (obs, rewards, _, truncated, infos) in zip(actions[60:], expected, strict=True):
        got = other.step(action)
        np.testing.assert_array_equal(got[0], obs)
        np.testing.assert_array_equal(got[1], rewards)
        np.testing.assert_array_equal(got[3], truncated)
        np.testing.assert_array_equal(got[4]["cost"], infos["cost"])
        np.testing.assert_array_equal(got[4]["final_obs"], infos["final_obs"])
    for name, array in env.get_state().items():
        np.testing.assert_array_equal(array, other.get_state()[name])


def test_snapshot_of_a_single_env_is_a_copy():
    env = gym.make("AntGather").unwrapped
    env.reset(seed=0)
    state = env.get_state()
    before = {name: array.copy() for name, array in state.items()}
    env.step(np.ones(8))
    for name in before:
        np.testing.assert_array_equal(before[name], state[name])
    one = env.step(np.ones(8))
    env.set_state(state)
    env.step(np.ones(8))
    two = env.step(np.ones(8))
    np.testing.assert_array_equal(one[0], two[0])
    assert one[1] == two[1]


# The random generators


def test_row_random_uniform():
    random = RowRandom(4)
    random.seed(range(4), [0, 1, 2, 3])  # neighbouring seeds must not give related streams
    u = random.uniform(np.arange(4), 200_000)
    assert u.min() >= 0 and u.max() < 1
    np.testing.assert_allclose(u.mean(axis=1), 0.5, atol=0.003)  # 4.6 standard errors
    np.testing.assert_allclose(u.var(axis=1), 1 / 12, atol=0.001)
    correlation = np.corrcoef(np.concatenate([u[:, :-1], u[:, 1:]]))  # rows, and rows shifted
    assert np.abs(correlation - np.eye(8)).max() < 0.012
    assert all(stats.kstest(row, "uniform").pvalue > 1e-3 for row in u)


def test_row_random_normal():
    random = RowRandom(2)
    random.seed(range(2), [7, 8])
    z = random.normal(np.arange(2), 200_000)
    np.testing.assert_allclose(z.mean(axis=1), 0, atol=0.01)
    np.testing.assert_allclose(z.var(axis=1), 1, atol=0.015)
    assert abs(np.corrcoef(z)[0, 1]) < 0.01
    assert all(stats.kstest(row, "norm").pvalue > 1e-3 for row in z)
    assert np.isfinite(z).all()


def test_row_random_streams_do_not_depend_on_other_rows():
    together, alone = RowRandom(3), RowRandom(1)
    together.seed(range(3), [1, 2, 3])
    alone.seed([0], [2])
    parts = [
        together.uniform(np.array([0, 1, 2]), 2)[1],
        together.uniform(np.array([0, 2]), 5)[0][:0],
        together.uniform(np.array([1]), 3)[0],
        together.normal(np.array([2, 1]), 2)[1],
    ]
    rows = np.array([0])
    expected = [alone.uniform(rows, 2)[0], alone.uniform(rows, 3)[0], alone.normal(rows, 2)[0]]
    np.testing.assert_array_equal(np.concatenate(parts), np.concatenate(expected))


# The point and its circle


def test_point_center_of_mass_is_that_of_the_model():
    model = mujoco.MjModel.from_xml_path(PointBody.model_file)
    data = mujoco.MjData(model)
    torso = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_BODY, "torso")
    for x, y, yaw in [(0, 0, 0), (3, -2, 1.2), (-5, 4, -2.5)]:
        data.qpos[:] = x, y, yaw
        mujoco.mj_forward(model, data)
        heading = np.array([np.cos(yaw), np.sin(yaw)])
        expected = np.array([x, y]) + PointBody.lead * heading
        np.testing.assert_allclose(data.subtree_com[torso][:2], expected, atol=1e-12)


def test_point_moves_by_hand():
    env = envs.make_vec("PointCircle", 1, seed=0)
    obs, _ = env.reset()
    yaw = np.arctan2(float(obs[0, 3]), float(obs[0, 2]))
    np.testing.assert_allclose(obs[0, :2], [0.0, 15.0])  # the top of the circle,
    assert abs(np.angle(-np.exp(1j * yaw))) < 0.05  # heading counter-clockwise
    x = y = 0.0
    place_point(env, np.zeros((1, 2)), np.array([yaw]))
    for a in np.random.default_rng(0).uniform(-1, 1, (400, 2)):
        yaw += 0.25 * a[1]  # the turn first
        dx, dy = a[0] * np.cos(yaw), a[0] * np.sin(yaw)
        x, y = x + dx, y + dy
        obs, rewards, _, _, infos = env.step(a[None])
        com = x + PointBody.lead * np.cos(yaw), y + PointBody.lead * np.sin(yaw)
        expected = [x, y, np.cos(yaw), np.sin(yaw), dx, dy, 0.25 * a[1], *com]
        np.testing.assert_allclose(obs[0], expected, atol=3e-6)
        reward = (x * dy - y * dx) / (1 + abs(np.sqrt(x * x + y * y) - 15))
        np.testing.assert_allclose(rewards[0], reward, atol=1e-9)
        assert infos["cost"][0] == (1.0 if abs(x) > 2.5 else 0.0)
        assert -np.pi <= env.body.yaw[0] < np.pi


def test_point_stops_at_a_wall_and_sees_what_it_really_moved():
    env = envs.make_vec("PointGather", 1)
    env.reset(seed=0)
    place_point(env, np.array([[5.5, 3.0]]), np.array([np.pi / 4]))
    obs, *_ = env.step(np.array([[1.0, 0.0]]))
    dx, dy = 0.5, np.sqrt(0.5)
    np.testing.assert_allclose(obs[0, [0, 1, 4, 5]], [6, 3 + dy, dx, dy], rtol=1e-6)


def test_a_point_that_leaves_the_circle_goes_on_at_the_edge_of_the_strip():
    """In a corner of walls it could stay for ever; carried to the start, it would leave for it."""
    env = envs.make_vec("PointCircle", 4)
    env.reset(seed=0)
    places = np.array([[19.5, 3.0], [-1.0, 19.9], [12.0, -15.9], [0.0, 19.0]])
    yaws = np.array([0.0, np.pi / 2, -np.pi / 2, np.pi / 2])
    place_point(env, places, yaws)
    obs, rewards, terminated, truncated, infos = env.step(np.tile([0.9, 0.0], (4, 1)))
    assert infos["regenerated"].tolist() == [True, True, True, False]  # 19.9 is inside
    assert not terminated.any() and not truncated.any()
    np.testing.assert_array_equal(infos["cost"], [1, 0, 1, 0])  # where it left counts
    np.testing.assert_array_equal(rewards[:3], -10.0)
    assert rewards[3] == pytest.approx(0.0, abs=1e-12)  # straight away from the origin
    edge = [[2.5, 3.0], [-1.0, 19.0], [2.5, -16.8], [0.0, 19.9]]
    np.testing.assert_allclose(obs[:, :2], edge, atol=1e-6)
    seen = np.arctan2(obs[:, 3], obs[:, 2])
    np.testing.assert_allclose(seen, yaws, atol=0.05)
    np.testing.assert_array_equal(obs[:3, 4:7], 0.0)  # the jump is not a displacement
    np.testing.assert_array_equal(obs, infos["final_obs"])


def test_circle_cost_starts_beyond_the_strip():
    env = envs.make_vec("PointCircle", 4)
    env.reset(seed=0)
    x = np.array([2.5, np.nextafter(2.5, 3), -2.5, -2.6])
    place_point(env, np.stack([x, np.zeros(4)], axis=1), np.zeros(4))
    np.testing.assert_array_equal(env.step(np.zeros((4, 2)))[4]["cost"], [0, 1, 0, 1])


def test_circle_follower():
    result = score("PointCircle", circle_follower, episodes=16, steps=1000, seed=0)
    assert (result["reward"] > 13).all() and (result["reward"] <= 15).all()
    assert (result["cost"] >= 0.88).all() and (result["cost"] <= 0.90).all()
    # On the circle itself: 1 - (2 / pi) asin(2.5 / 15) of its length lies outside the strip.
    assert abs(result["cost"].mean() - (1 - 2 / np.pi * np.arcsin(2.5 / 15))) < 0.005


# Gather: sensors, objects


def slow_sensors(center, yaw, places, apples):
    """Farthest object first, one after the other, so that the nearest overwrites its bin."""
    sensors = np.zeros((2, 10))
    order = sorted(range(len(places)), key=lambda k: -np.hypot(*(places[k] - center)))
    for k in order:
        dx, dy = places[k] - center
        distance = np.hypot(dx, dy)
        bearing = np.arctan2(dy, dx) - yaw
        while bearing > np.pi:
            bearing -= 2 * np.pi
        while bearing < -np.pi:
            bearing += 2 * np.pi
        if distance <= 6 and abs(bearing) <= np.pi / 2:
            index = min(int((bearing + np.pi / 2) / (np.pi / 10)), 9)
            sensors[0 if k < apples else 1, index] = 1 - distance / 6
    return sensors.ravel()


@pytest.mark.parametrize("env_id", GATHER)
def test_sensors_against_a_slow_reference(env_id):
    n, rng = 300, np.random.default_rng(1)
    env = envs.make_vec(env_id, n, seed=0)
    env.reset()
    cells = np.argsort(rng.random((n, 36)), axis=1)[:, : env.apples + env.bombs]
    if env_id == "PointGather":
        place_point(env, rng.uniform(-6, 6, (n, 2)), rng.uniform(-np.pi, np.pi, n))
    else:
        quaternion = rng.standard_normal((n, 4))
        quaternion /= np.linalg.norm(quaternion, axis=1, keepdims=True)
        positions = env.get_state()["positions"]
        positions[:, 3:7] = quaternion
        center3 = np.column_stack([rng.uniform(-6, 6, (n, 2)), np.full(n, 0.5)])
        change(env, positions=positions, center3=center3)
    change(env, cells=cells)
    sensors = env.sense()
    assert sensors.shape == (n, 20) and (sensors > 0).mean() > 0.05
    for row in range(n):
        expected = slow_sensors(
            env.body.center[row], env.body.yaw[row], LATTICE[cells[row]], env.apples
        )
        np.testing.assert_allclose(sensors[row], expected, atol=1e-12)


def cell(x, y):
    return int(np.flatnonzero((np.array([x, y]) == LATTICE).all(axis=1))[0])


def test_one_apple_ahead():
    env = envs.make_vec("PointGather", 1)
    env.reset(seed=0)
    far = [cell(-6, y) for y in range(-6, 6, 2)] + [cell(-4, y) for y in (-6, -4, -2)]
    change(env, cells=[[cell(4, 0), *far]])  # all else lies behind
    place_point(env, np.zeros((1, 2)), np.zeros(1))
    sensors = env.sense()[0]
    assert np.flatnonzero(sensors).tolist() == [5]  # bearing 0 is the edge of bins 4 and 5
    assert sensors[5] == pytest.approx(1 - (4 - PointBody.lead) / 6)
    assert sensors[5] == pytest.approx(1 / 3, abs=0.01)
    obs = env.step(np.zeros((1, 2)))[0][0]
    assert np.flatnonzero(obs[9:]).tolist() == [5]
    assert obs[14] == np.float32(sensors[5])


def test_a_bearing_of_90_degrees_stays_in_the_last_bin():
    env = envs.make_vec("PointGather", 2)
    env.reset(seed=0)
    env.body.center[:] = 0.0  # exactly under the objects at (0, 4) and (0, -4)
    env.body.yaw[:] = 0.0
    behind = [cell(-6, y) for y in range(-6, 6, 2)] + [cell(-4, y) for y in (-6, -4, -2)]
    env.cells[:] = [[cell(0, 4), *behind], [cell(0, -4), *behind]]
    left, right = env.sense()
    assert np.flatnonzero(left).tolist() == [9] and left[9] == pytest.approx(1 / 3)
    assert np.flatnonzero(right).tolist() == [0] and right[0] == pytest.approx(1 / 3)


@pytest.mark.parametrize("env_id", GATHER)
def test_objects_stay_many_and_apart(env_id):
    """Over 10^4 steps: constant numbers, never two on a cell, new ones at least 2 away."""
    n, steps = (50, 200) if env_id == "PointGather" else (100, 100)
    env = envs.make_vec(env_id, n, seed=0, horizon=10**6)
    env.reset()
    rng, moved, lost = np.random.default_rng(0), 0, 0
    for _ in range(steps):
        before = env.cells.copy()
        assert (np.diff(np.sort(before, axis=1), axis=1) > 0).all()
        if env_id == "PointGather":  # drives about, so that much is collected
            action = np.stack([np.full(n, 0.9), rng.uniform(-0.5, 1, n)], axis=1)
        else:
            action = rng.uniform(-1, 1, (n, 8))
        _, _, _, _, infos = env.step(action)
        assert env.cells.shape == (n, env.apples + env.bombs)
        rows, objects = np.nonzero(before != env.cells)
        away = LATTICE[env.cells[rows, objects]] - env.body.center[rows]
        assert (np.hypot(*away.T) >= 2).all()
        calm = ~infos["regenerated"]
        eaten = (before != env.cells)[calm]
        np.testing.assert_array_equal(
            infos["raw_reward"][calm], 10.0 * eaten[:, : env.apples].sum(axis=1)
        )
        np.testing.assert_array_equal(infos["cost"][calm], eaten[:, env.apples :].sum(axis=1))
        moved += len(rows)
        lost += (~calm).sum()
    assert moved > (100 if env_id == "PointGather" else 5)
    assert (lost > 0) == (env_id == "AntGather")


def test_reset_leaves_the_origin_empty_and_uses_every_other_cell():
    env = envs.make_vec("PointGather", 2000, seed=0)
    env.reset()
    count = np.bincount(env.cells.ravel(), minlength=36)
    assert count[cell(0, 0)] == 0
    others = np.delete(count, cell(0, 0))
    np.testing.assert_allclose(others, 2000 * 10 / 35, rtol=0.2)  # 4.5 standard errors of 24


def test_collecting_by_hand():
    """An apple at 0.99 is collected and pays 10, a bomb costs 1, one at a distance of 1 stays."""
    env = envs.make_vec("PointGather", 3, seed=0)
    env.reset()
    far = [cell(-6, y) for y in range(-6, 6, 2)] + [cell(-4, -6), cell(-4, -4)]
    env.cells[:] = [
        [cell(4, 4), far[0], *far[1:], cell(-2, -6)],
        [far[0], far[1], cell(4, 4), *far[2:], cell(-2, -6)],
        [cell(4, 4), far[0], *far[1:], cell(-2, -6)],
    ]
    x = 4 - PointBody.lead - np.array([0.99, 0.99, 1.0 + 1e-9])
    place_point(env, np.stack([x, np.full(3, 4.0)], axis=1), np.zeros(3))
    before = env.cells.copy()
    _, rewards, _, _, infos = env.step(np.zeros((3, 2)))
    np.testing.assert_array_equal(rewards, [10, 0, 0])
    np.testing.assert_array_equal(infos["cost"], [0, 1, 0])
    changed = before != env.cells
    assert np.argwhere(changed).tolist() == [[0, 0], [1, 2]]


def test_respawn_is_uniform_over_the_free_cells():
    n = 5000
    env = envs.make_vec("PointGather", n, seed=0)
    env.reset()
    layout = [cell(4, 4)] + [cell(-6, y) for y in range(-6, 6, 2)]
    layout += [cell(-4, -6), cell(-4, -4), cell(-4, -2)]
    env.cells[:] = layout
    place_point(env, np.tile([3.5, 4.0], (n, 1)), np.zeros(n))
    env.step(np.zeros((n, 2)))
    center = env.body.center[0]
    free = [c for c in range(36) if c not in layout and np.hypot(*(LATTICE[c] - center)) >= 2]
    count = np.bincount(env.cells[:, 0], minlength=36)
    assert count[free].sum() == n
    assert stats.chisquare(count[free]).pvalue > 1e-3


def test_progress_is_the_way_made_towards_the_nearest_apple_in_sight():
    """To the apple as it lay before the step: none is paid for the jump of a caught one."""
    plain = envs.make_vec("PointGather", 6, seed=0)
    shaped = envs.make_vec("PointGather", 6, seed=0, progress=2.0)
    plain.reset(), shaped.reset()

    caught = blind = 0
    for action in random_actions(plain, 900):
        apples = LATTICE[shaped.cells[:, : shaped.apples]]
        start, yaw = shaped.body.center.copy(), shaped.body.yaw.copy()
        reward, step = plain.step(action)[1], shaped.step(action)
        np.testing.assert_array_equal(step[4]["raw_reward"], reward)
        for row in range(6):
            bearing = np.arctan2(*(apples[row] - start[row]).T[::-1]) - yaw[row]
            way = np.linalg.norm(apples[row] - start[row], axis=1)
            seen = np.flatnonzero((np.cos(bearing) >= 0) & (way <= 6))
            closer = 0.0
            if seen.size:
                aim = seen[way[seen].argmin()]
                closer = way[aim] - np.linalg.norm(apples[row, aim] - shaped.body.center[row])
            assert step[1][row] - reward[row] == pytest.approx(2.0 * closer, abs=1e-9)
            blind += not seen.size
        caught += np.count_nonzero(reward)
    assert caught > 5 and 100 < blind < 5000
    assert envs.make_vec("AntGather", 1).progress == 2.0


def test_apple_seeker_shows_that_the_constraint_binds():
    greedy = score("PointGather", apple_seeker, episodes=32, steps=1000, seed=0)
    careful = score("PointGather", partial(apple_seeker, avoid=True), 32, 1000, seed=0)
    assert greedy["reward"].mean() > 0.7 and greedy["cost"].mean() > 0.015
    assert careful["reward"].mean() > 0.5 and careful["cost"].mean() < 0.01


# The ant


def test_yaw_from_the_quaternion():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((5000, 4))
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    axis = Rotation.from_quat(q[:, [1, 2, 3, 0]]).apply([1.0, 0.0, 0.0])
    flat = np.hypot(axis[:, 0], axis[:, 1]) > 0.05  # a vertical axis has no heading
    error = quaternion_yaw(q) - np.arctan2(axis[:, 1], axis[:, 0])
    error = (error + np.pi) % (2 * np.pi) - np.pi
    assert np.abs(error[flat]).max() < 1e-12 and flat.sum() > 4000
    upright = np.array([[np.cos(0.6), 0, 0, np.sin(0.6)]])
    assert quaternion_yaw(upright)[0] == pytest.approx(1.2, abs=1e-15)
    np.testing.assert_allclose(quaternion_yaw(-upright), quaternion_yaw(upright), atol=1e-15)


def own_frame(qpos, qvel, center):
    """What an ant observes of itself, by rotation matrices."""
    turn = Rotation.from_quat(qpos[[4, 5, 6, 3]]).as_matrix()
    ahead = turn[:2, 0] / np.linalg.norm(turn[:2, 0])  # the torso's x axis on the ground
    velocity = [ahead @ qvel[:2], ahead[0] * qvel[1] - ahead[1] * qvel[0], qvel[2]]
    parts = qpos[:3], ahead, turn[2, :2], qpos[7:], velocity, qvel[3:], center
    return np.concatenate(parts).astype(np.float32)


@pytest.mark.parametrize("env_id", ANTS)
def test_what_an_ant_feels_does_not_depend_on_its_heading(env_id):
    """The same pose and motion, turned about the vertical: only place and heading differ."""
    n = 8
    env = envs.make_vec(env_id, n, seed=1)
    env.reset()
    for t in range(5):
        env.step(np.random.default_rng(t).uniform(-1, 1, (n, 8)))
    qpos, qvel = env.body.positions[0].copy(), env.body.velocities[0].copy()
    for row, angle in enumerate(np.linspace(-3.0, 3.0, n)):
        turn = Rotation.from_euler("z", angle)
        turned = turn * Rotation.from_quat(qpos[[4, 5, 6, 3]])
        env.body.positions[row] = qpos
        env.body.positions[row, 3:7] = (-1.0) ** row * np.roll(turned.as_quat(), 1)  # q and -q
        env.body.velocities[row] = qvel
        env.body.velocities[row, :3] = turn.apply(qvel[:3])
    obs = env.body.observe()
    felt = [2, 5, 6, *range(7, 29)]
    np.testing.assert_allclose(obs[:, felt], np.tile(obs[0, felt], (n, 1)), atol=1e-12)
    headings = np.arctan2(obs[:, 4], obs[:, 3])
    np.testing.assert_allclose(np.angle(np.exp(1j * np.diff(headings))), 6.0 / 7.0, atol=1e-12)
    lean = np.hypot(obs[0, 5], obs[0, 6])
    tilt = Rotation.from_quat(qpos[[4, 5, 6, 3]]).as_matrix()[2, 2]
    assert lean > 0.01 and lean == pytest.approx(np.sqrt(1.0 - tilt**2), abs=1e-12)


@pytest.mark.parametrize("env_id", ANTS)
def test_ant_against_mujoco_by_hand(env_id):
    """States bit-equal to a loop over mj_step; observation, reward and cost recomputed."""
    n = 4
    env = envs.make_vec(env_id, n, seed=3, horizon=10**6)
    obs, _ = env.reset()
    model = AntBody.build_model(6.0 if env_id == "AntGather" else None)
    assert model.opt.integrator == mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    assert model.opt.timestep == 0.01 and model.nu == 8
    datas, ruler = [mujoco.MjData(model) for _ in range(n)], mujoco.MjData(model)

    def mass_center(data):
        ruler.qpos[:] = data.qpos
        mujoco.mj_kinematics(model, ruler)
        mujoco.mj_comPos(model, ruler)
        return ruler.subtree_com[1].copy()

    def copy_start(row):
        datas[row] = mujoco.MjData(model)
        datas[row].qpos[:] = env.body.positions[row]
        datas[row].qvel[:] = env.body.velocities[row]

    for row in range(n):
        copy_start(row)
    fallen = 0
    for t in range(150):
        if t == 0 and env_id == "AntCircle":  # start one ant at the edge of the strip
            positions = env.get_state()["positions"]
            positions[0, :2] = 3.0, 9.0
            change(env, positions=positions)
            env.body.physics.forward(stage=mujoco.mjtStage.mjSTAGE_POS)
            env.body.center3[:] = env.body.mass_center
            copy_start(0)
        action = np.random.default_rng(t).uniform(-1, 1, (n, 8)).astype(np.float32)
        before = [mass_center(data) for data in datas]
        obs, rewards, _, _, infos = env.step(action)
        for row, data in enumerate(datas):
            data.ctrl[:] = action[row]
            for _ in range(5):
                mujoco.mj_step(model, data)
            after = mass_center(data)
            up = Rotation.from_quat(data.qpos[[4, 5, 6, 3]]).as_matrix()[2, 2]
            lost = not (0.2 <= data.qpos[2] <= 1.0 and up >= 0)
            assert lost == infos["regenerated"][row]
            x, y = after[:2]
            if env_id == "AntCircle":
                vx, vy = (after - before[row])[:2] / 0.05
                reward = (x * vy - y * vx) / (1 + abs(np.hypot(x, y) - 10))
                expected = -10.0 if lost else reward
                np.testing.assert_allclose(rewards[row], expected, rtol=1e-10, atol=1e-10)
                assert infos["cost"][row] == float(abs(x) > 3)
            elif lost:
                assert infos["raw_reward"][row] == -10.0
            if lost:
                fallen += 1
                copy_start(row)
            else:
                np.testing.assert_array_equal(env.body.positions[row], data.qpos)
                np.testing.assert_array_equal(env.body.velocities[row], data.qvel)
                expected = own_frame(data.qpos, data.qvel, after)
                np.testing.assert_allclose(obs[row, :32], expected, rtol=1e-6, atol=1e-6)
    assert fallen > 0


@pytest.mark.parametrize("env_id", ANTS)
@pytest.mark.parametrize("how", ["flipped", "high", "escaped", "nan", "huge", "infinite"])
def test_a_lost_ant_regenerates(env_id, how):
    env, calm = (envs.make_vec(env_id, 3, seed=1, horizon=10**6) for _ in range(2))
    env.reset(), calm.reset()
    for _ in range(3):
        env.step(np.zeros((3, 8))), calm.step(np.zeros((3, 8)))
    state = env.get_state()
    positions, velocities = state["positions"], state["velocities"]
    if how == "flipped":
        positions[1, 3:7] = 0, 1, 0, 0
    elif how == "high":
        positions[1, 2] = 1.5
    elif how == "escaped":
        positions[1, 0] = 25.0
    else:
        velocities[1, 3] = {"nan": np.nan, "huge": 1e12, "infinite": np.inf}[how]
    env.set_state(state)
    obs, rewards, terminated, _, infos = env.step(np.zeros((3, 8)))
    expected_obs, expected_rewards, *_ = calm.step(np.zeros((3, 8)))
    assert infos["regenerated"].tolist() == [False, True, False]
    assert not terminated.any()
    raw = infos.get("raw_reward", rewards)
    assert raw[1] == -10.0 and np.isfinite(rewards).all()
    assert infos["cost"][1] == (1.0 if how == "escaped" and env_id == "AntCircle" else 0.0)
    np.testing.assert_array_equal(obs, infos["final_obs"])  # the chain goes on, no episode end
    assert np.isfinite(obs).all()
    edge = how == "escaped" and env_id == "AntCircle"  # of the strip: no lift back to the start
    stays = env_id == "AntCircle" and how in ("flipped", "high", "escaped")  # at its height
    height = 10.0 if stays else 0.0
    np.testing.assert_allclose(obs[1, :2], [3.0 if edge else 0.0, height], atol=0.05)
    assert abs(obs[1, 2] - 0.55) < 0.05
    assert (obs[1, 3:5] ** 2).sum() == pytest.approx(1, abs=1e-6)  # a heading
    assert np.abs(obs[1, 5:7]).max() < 0.1  # upright
    for row in (0, 2):  # the neighbours do not notice
        np.testing.assert_array_equal(obs[row], expected_obs[row])
        assert rewards[row] == expected_rewards[row]
    assert env.clock.tolist() == [4, 4, 4]
    for _ in range(20):
        obs, _, _, _, infos = env.step(np.zeros((3, 8)))
        assert np.isfinite(obs).all() and not infos["regenerated"].any()


@pytest.mark.parametrize("heading", [-3.0, -1.0, 0.0, 2.5])
def test_a_fallen_ant_of_the_circle_stands_up_where_it_is(heading):
    """Carried back to the start, it would learn to fall: the way back costs more than the 10."""
    env = envs.make_vec("AntCircle", 4, seed=1)
    env.reset()
    lying = Rotation.from_euler("ZX", [heading, np.pi])  # on its back
    env.body.positions[:, :3] = [2.5, -8.0, 0.5]
    env.body.positions[:, 3:7] = np.roll(lying.as_quat(), 1)
    env.body.positions[2, 0] = -5.0  # outside the strip
    env.body.positions[3, :2] = 19.0, -19.6  # beyond the reach
    env.body.center3[:] = env.body.positions[:, :3]
    obs, rewards, _, _, infos = env.step(np.zeros((4, 8)))
    assert infos["regenerated"].all() and (rewards == -10.0).all()
    expected = [[2.5, -8.0], [2.5, -8.0], [-3.0, -8.0], [3.0, -19.0]]
    np.testing.assert_allclose(obs[:, :2], expected, atol=0.2)
    assert infos["cost"].tolist() == [0.0, 0.0, 1.0, 1.0]  # where it fell counts
    before = env.body.center3.copy()
    _, rewards, _, _, infos = env.step(np.zeros((4, 8)))  # standing up was not paid as a way
    assert not infos["regenerated"].any() and np.abs(rewards).max() < 3.0
    assert np.abs(env.body.center3 - before).max() < 0.1
    env.body.positions[:, 3:7] = np.roll(lying.as_quat(), 1)
    env.body.positions[3, 0] = np.nan
    env.body.start(np.arange(4), env.body.place(np.arange(4)))
    for row, expected in enumerate([heading] * 3 + [0.0]):
        turn = Rotation.from_quat(np.roll(env.body.positions[row, 3:7], -1))
        assert turn.as_matrix()[2, 2] > 0.99
        assert abs(np.angle(np.exp(1j * (turn.as_euler("zyx")[0] - expected)))) < 0.1


def test_what_counts_as_lost():
    env = envs.make_vec("AntCircle", 8, seed=0)
    env.reset()
    tilt = [np.cos(np.pi / 4 - 0.01), np.sin(np.pi / 4 - 0.01), 0, 0]  # nearly on its side
    over = [np.cos(np.pi / 4 + 0.01), 0, np.sin(np.pi / 4 + 0.01), 0]  # just beyond
    body = env.body
    body.positions[:, 2] = [0.21, 0.19, 0.99, 1.01, 0.5, 0.5, 0.5, 0.5]
    body.positions[4, 3:7], body.positions[5, 3:7] = tilt, over
    body.center3[6, :2], body.center3[7, :2] = (12, 15.9), (12, 16.1)  # 19.9 and 20.1 away
    lost = [False, True, False, True, False, True, False, True]
    assert body.lost().tolist() == lost


def test_regeneration_clears_the_ground_around_the_start():
    env = envs.make_vec("AntGather", 1, seed=0, horizon=10**6)
    env.reset()
    positions = env.get_state()["positions"]
    positions[0, 3:7] = 0, 1, 0, 0
    center3 = env.get_state()["center3"]
    cells = np.arange(16)[None]
    cells[0, [0, 15]] = cell(0, 0), cell(0, 2)  # an apple and a bomb
    change(env, positions=positions, cells=cells, center3=center3)
    before = env.cells.copy()
    assert env.step(np.zeros((1, 8)))[4]["regenerated"][0]
    changed = np.flatnonzero(before != env.cells)
    assert 0 in changed
    away = np.hypot(*(LATTICE[env.cells[0]] - env.body.center[0]).T)
    assert (away >= 2).all() and len(set(env.cells[0])) == 16
    kept = np.hypot(*(LATTICE[before[0]] - env.body.center[0]).T) >= 2
    assert (before[0][kept] == env.cells[0][kept]).all()


def test_walls_hold_the_ant():
    env = envs.make_vec("AntGather", 2, seed=0, horizon=10**6)
    env.reset()
    state = env.get_state()
    state["positions"][:, :2] = [[5.2, 0], [0, -5.2]]
    state["velocities"][:, :2] = [[6, 0], [0, -6]]  # thrown at the wall
    env.set_state(state)
    for _ in range(40):
        _, _, _, _, infos = env.step(np.zeros((2, 8)))
        kept = ~infos["regenerated"]
        assert (np.abs(env.body.positions[kept, :2]) < 6.5).all()


# Long runs


def resident_megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize(
    "env_id",
    [pytest.param(i, marks=pytest.mark.slow) if i in ANTS else i for i in IDS],
)
def test_200_000_random_steps_stay_finite_and_do_not_grow(env_id):
    n, steps = 128, 1600
    env = envs.make_vec(env_id, n, seed=0, horizon=500, stagger=True)
    env.reset()
    actions = random_actions(env, 64)
    for t in range(steps):
        if t == steps // 4 and os.path.exists("/proc/self/statm"):
            before = resident_megabytes()
        obs, rewards, _, _, infos = env.step(actions[t % 64])
        assert np.isfinite(obs).all() and np.isfinite(rewards).all()
        assert np.isfinite(infos["cost"]).all() and np.isfinite(infos["final_obs"]).all()
    if os.path.exists("/proc/self/statm"):
        assert resident_megabytes() - before < 8


# Environments of others


TINY = '''
import gymnasium as gym
import numpy as np


class Tiny(gym.Env):
    """Observation (episode, t, action received). Ends after 3 steps, in turn by termination and
    truncation. The cost is 10 episode + t: every step has its own."""

    observation_space = gym.spaces.Box(-100, 100, (3,), np.float64)
    action_space = gym.spaces.Box(np.array([0.0]), np.array([10.0]), dtype=np.float64)
    episode = -1
    cost_limit = 0.3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t, self.seed = self.episode + 1, 0, seed
        return np.array([self.episode, 0.0, 0.0]), {}

    def step(self, action):
        self.t += 1
        end, kind = self.t == 3, self.episode % 2
        obs = np.array([self.episode, self.t, action[0]])
        info = {"cost": 10.0 * self.episode + self.t}
        return obs, -self.t, end and kind == 0, end and kind == 1, info


gym.register("Tiny-v0", entry_point=Tiny)
'''


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    (tmp_path / "someones_package.py").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path)
    yield "someones_package:Tiny-v0"
    gym.registry.pop("Tiny-v0", None)
    sys.modules.pop("someones_package", None)  # registers again when it is imported again


def test_a_third_party_env_may_recommend(tiny, monkeypatch):
    task = gym.make(tiny).unwrapped.__class__
    env = envs.make_vec(tiny)
    assert (env.num_envs, env.recommended_timesteps) == (1, 1_000_000)
    for name, value in (("num_envs", 3), ("timesteps", 5000), ("damping", 0.4)):
        monkeypatch.setattr(task, f"recommended_{name}", value, raising=False)
    env = envs.make_vec(tiny)
    assert (env.num_envs, env.recommended_timesteps, env.recommended_damping) == (3, 5000, 0.4)


def test_third_party_env_obeys_the_rules(tiny):
    env = envs.make_vec(tiny, 2, seed=7)
    obs, _ = env.reset()
    assert [e.unwrapped.seed for e in env.envs] == [7, 8]
    assert env.cost_limit == 0.3 and env.recommended_num_envs == 1
    assert env.recommended_damping == 0.1
    assert env.single_action_space == gym.spaces.Box(-1, 1, (1,), np.float32)
    assert env.metadata["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP
    for step in range(12):
        episode, t = step // 3, step % 3 + 1
        obs, rewards, terminated, truncated, infos = env.step(np.array([[-0.5], [2.0]]))
        end = t == 3
        np.testing.assert_array_equal(infos["cost"], [10 * episode + t] * 2)
        assert infos["cost"].dtype == np.float64
        np.testing.assert_array_equal(infos["final_obs"][:, :2], [[episode, t]] * 2)
        np.testing.assert_array_equal(infos["final_obs"][:, 2], [2.5, 10.0])  # rescaled, clipped
        np.testing.assert_array_equal(obs[:, :2], [[episode + end, 0 if end else t]] * 2)
        np.testing.assert_array_equal(rewards, [-t] * 2)
        np.testing.assert_array_equal(terminated, [end and episode % 2 == 0] * 2)
        np.testing.assert_array_equal(truncated, [end and episode % 2 == 1] * 2)
    assert env.get_state() is None
    env.close()


def test_counting_the_costs_leaves_the_rows_alone(tiny, monkeypatch):
    monkeypatch.setattr(gym.make(tiny).unwrapped.__class__, "cost_limit", None)
    env = envs.make_vec(tiny, 2)
    assert env.num_costs == 1 and [e.unwrapped.episode for e in env.envs] == [-1, -1]
    monkeypatch.setattr(envs.Adapter, "_probe", None)  # ours need none: it costs SUMO a world
    assert envs.make_vec("Grid", 1).num_costs == 1


def test_third_party_env_with_a_state_and_a_time_limit(tiny, monkeypatch):
    """A restored row is truncated when the one that went on is."""
    task = gym.make(tiny).unwrapped.__class__
    monkeypatch.setattr(task, "get_state", lambda self: {"t": self.t}, raising=False)
    env = envs.make_vec(tiny, 3, seed=0, max_episode_steps=2)
    env.reset()
    assert envs.snapshot(env) is None  # a state that cannot be put back is none
    monkeypatch.setattr(task, "set_state", lambda self, s: self.__dict__.update(s), raising=False)
    env.step(np.zeros((3, 1)))
    state = envs.snapshot(env)
    for other in (env, envs.make_vec(tiny, 3, seed=0, max_episode_steps=2)):
        envs.restore(other, state)
        _, rewards, _, truncated, _ = other.step(np.zeros((3, 1)))
        assert truncated.all() and (rewards == -2).all()
    for n in (1, 2, 6):  # 6: as many as there are snapshots and clocks
        with pytest.raises(ValueError, match=f"no state of {n} envs"):
            envs.restore(envs.make_vec(tiny, n, max_episode_steps=2), state)


def test_our_own_single_envs_also_work_through_the_adapter():
    batch = envs.make_vec("PointGather", 2, seed=3, horizon=20)
    makers = [partial(gym.make, "PointGather", horizon=20)] * 2
    adapted = envs.Adapter(makers, "PointGather", seed=3)
    np.testing.assert_array_equal(batch.reset()[0], adapted.reset()[0])
    for t, action in enumerate(random_actions(batch, 50)):
        one, two = batch.step(action), adapted.step(action)
        for a, b in zip(one[:4], two[:4], strict=True):
            np.testing.assert_array_equal(a, b)
        for key in ("cost", "final_obs"):
            np.testing.assert_array_equal(one[4][key], two[4][key])
        if t == 24:
            state = adapted.get_state()
    after = adapted.step(action)[0]
    adapted.set_state(state)
    for action in random_actions(batch, 50)[25:]:
        adapted.step(action)
    np.testing.assert_array_equal(adapted.step(action)[0], after)


def test_an_env_without_cost_gives_one_clear_error():
    with pytest.raises(ValueError, match="Pendulum-v1 puts no 'cost' into info"):
        envs.make_vec("Pendulum-v1", 1, seed=0)
    with pytest.raises(ValueError, match="action space Discrete"):
        envs.make_vec("CartPole-v1", 1)


def test_an_unknown_id_suggests_near_names():
    for wrong, right in [("PointCirle", "PointCircle"), ("antgather", "AntGather")]:
        with pytest.raises(ValueError, match=f"unknown environment '{wrong}'; did you.*{right}"):
            envs.make_vec(wrong, 1)
    with pytest.raises(ValueError, match="unknown environment 'no_such_package:Thing'"):
        envs.make_vec("no_such_package:Thing", 1)


def test_a_module_that_others_need_is_named(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="No module named 'no_such_dependency'"):
        envs.make_vec("needy:Thing-v0", 1)
    for name in ("need", "no_such_package.part", "envs.no_such_part"):
        with pytest.raises(ValueError, match=f"unknown environment '{name}:Thing-v0'"):
            envs.make_vec(f"{name}:Thing-v0", 1)


def test_ours_may_have_our_name_in_front():
    for env_id in IDS:
        assert type(envs.make_vec(f"envs:{env_id}", 2)) is type(envs.make_vec(env_id, 2))


def test_the_environment_recommends_how_many_and_how_long():
    for env_id in IDS:
        env = envs.make_vec(env_id)
        assert env.num_envs == env.recommended_num_envs >= 8 and env.num_costs == 1
        assert env.recommended_timesteps >= 400_000
        assert env.recommended_damping == (1.0 if "Ant" in env_id else 0.1)
    assert envs.make_vec("ConstrainedLQR", 2, second_limit=0.4).num_costs == 2


# ConstrainedLQR


def simulate(policy, n=2000, burn_in=100, steps=400, **kwargs):
    """Means per step and their standard errors, over n independent chains."""
    env = envs.make_vec("ConstrainedLQR", n, seed=0, horizon=10**6, **kwargs)
    obs, _ = env.reset()
    rows = []
    for t in range(burn_in + steps):
        obs, rewards, _, _, infos = env.step(policy(obs.astype(np.float64)) / 3.0)
        if t >= burn_in:
            rows.append(np.column_stack([rewards, infos["cost"]]))
    means = np.mean(rows, axis=0)  # (n, 1 + m)
    return means.mean(axis=0), means.std(axis=0) / np.sqrt(n)


@pytest.mark.parametrize("k, sigma, offset", [(0.38, 0, 0), (0.2, 0.3, 0), (0.5, 0.2, 0.1)])
def test_lqr_simulation_against_the_formula(k, sigma, offset):
    rng = np.random.default_rng(0)
    policy = lambda x: offset - k * x + sigma * rng.standard_normal(x.shape)  # noqa: E731
    mean, error = simulate(policy, second_limit=1.0)
    exact = np.array(ConstrainedLQR.evaluate(k, sigma, offset))
    assert (np.abs(mean - exact) < 4 * error).all(), (mean, exact, error)
    assert (error < 0.01).all()  # the test can tell something


def test_lqr_simulation_with_other_constants():
    constants = {"a": 0.7, "b": 0.5, "W": 0.4, "Q": 2.0}
    mean, error = simulate(lambda x: -0.6 * x, limit=0.1, **constants)
    exact = ConstrainedLQR.evaluate(0.6, **constants)[:2]
    assert (np.abs(mean - exact) < 4 * error).all()


def test_lqr_reward_and_cost_of_one_step_by_hand():
    env = envs.make_vec("ConstrainedLQR", 2, seed=0, Q=2.0, second_limit=0.3)
    assert env.cost_limit == (0.2, 0.3)
    x = env.reset()[0][:, 0]
    _, rewards, _, _, infos = env.step(np.array([[0.1], [-0.4]]))
    np.testing.assert_allclose(rewards, -2 * x**2, rtol=1e-6)
    expected = [[0.09, 0.04], [1.44, 2.89]]  # u = 0.3 and -1.2: u^2 and (u - 0.5)^2
    np.testing.assert_allclose(infos["cost"], expected, rtol=1e-12)


OPTIMA = [  # limit, sigma, gain, J, multiplier
    (0.05, 0.0, 0.147185, -2.30803, 15.861),
    (0.1, 0.0, 0.236631, -1.785902, 6.957),
    (0.2, 0.0, 0.382737, -1.365301, 2.529),
    (0.4, 0.0, 0.604142, -1.095929, 0.667),
    (0.81, 0.0, 0.9, -1.0, 0.0),
    (2.0, 0.0, 0.9, -1.0, 0.0),
    (0.1, 0.2, 0.162111, -2.283105, None),
    (0.2, 0.2, 0.319332, -1.569042, None),
    (0.4, 0.2, 0.551454, -1.183815, None),
]


@pytest.mark.parametrize("limit, sigma, gain, J, mu", OPTIMA)
def test_lqr_solution_against_known_numbers(limit, sigma, gain, J, mu):
    best = ConstrainedLQR.solution(limit=limit, sigma=sigma)
    assert best["gain"] == pytest.approx(gain, abs=1e-6)
    assert best["J"] == pytest.approx(J, abs=1e-5)
    assert best["offset"] == 0.0
    if mu is not None:
        assert best["mu"][0] == pytest.approx(mu, abs=1e-3)
    reward, cost, _ = ConstrainedLQR.evaluate(best["gain"], sigma)
    assert reward == best["J"] and cost <= limit + 1e-12
    if mu != 0.0:
        assert cost == pytest.approx(limit, abs=1e-12)


def lqr_optimum(limit, second_limit, sigma=0.0, **constants):
    """SLSQP over (gain, offset) with nothing but `evaluate`."""
    of = lambda v: ConstrainedLQR.evaluate(v[0], sigma, v[1], **constants)  # noqa: E731
    constraints = [
        {"type": "ineq", "fun": lambda v: limit - of(v)[1]},
        {"type": "ineq", "fun": lambda v: second_limit - of(v)[2]},
    ]
    found = [
        minimize(
            lambda v: -of(v)[0],
            start,
            constraints=constraints,
            bounds=[(1e-3, 1.5), (-1, 5)],
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        for start in ([0.2, 0.0], [0.4, 0.2], [0.3, 1.0])
    ]
    best = min((f for f in found if f.success), key=lambda f: f.fun)
    return best.x, -best.fun


TWO = [  # limit, second limit, which are active
    (0.2, 0.46, (True, False)),
    (0.2, 0.44, (True, True)),
    (0.2, 0.40, (False, True)),
    (0.4, 0.30, (False, True)),
    (0.2, 0.20, (False, True)),
]


@pytest.mark.parametrize("limit, second_limit, active", TWO)
@pytest.mark.parametrize("sigma", [0.0, 0.1])
def test_lqr_with_two_constraints_against_slsqp(limit, second_limit, active, sigma):
    limit, second_limit = limit + sigma**2, second_limit + sigma**2
    best = ConstrainedLQR.solution(limit=limit, second_limit=second_limit, sigma=sigma)
    (gain, offset), J = lqr_optimum(limit, second_limit, sigma)
    assert best["J"] == pytest.approx(J, abs=1e-6)
    assert best["gain"] == pytest.approx(gain, abs=2e-4)
    assert best["offset"] == pytest.approx(offset, abs=2e-4)
    _, cost, second = ConstrainedLQR.evaluate(best["gain"], sigma, best["offset"])
    assert cost <= limit + 1e-9 and second <= second_limit + 1e-9
    if sigma == 0.0:
        assert tuple(mu > 1e-9 for mu in best["mu"]) == active
    for i in range(2):  # a multiplier is the slope of the optimum in its limit
        h = 1e-5
        up, down = (
            ConstrainedLQR.solution(
                limit=limit + d * (i == 0), second_limit=second_limit + d * (i == 1), sigma=sigma
            )["J"]
            for d in (h, -h)
        )
        assert best["mu"][i] == pytest.approx((up - down) / (2 * h), rel=1e-3, abs=1e-3)


def test_lqr_with_other_constants_against_slsqp():
    constants = {"a": 0.7, "b": 0.5, "W": 0.4, "Q": 2.0}
    for limits in ((0.1, 0.34), (0.1, 0.31)):
        best = ConstrainedLQR.solution(limit=limits[0], second_limit=limits[1], **constants)
        (gain, offset), J = lqr_optimum(*limits, **constants)
        assert best["J"] == pytest.approx(J, abs=1e-6)
        assert best["gain"] == pytest.approx(gain, abs=2e-4)
        assert best["offset"] == pytest.approx(offset, abs=2e-4)


def test_lqr_says_when_there_is_no_answer():
    for kwargs in (
        {"limit": 0.01, "sigma": 0.2},
        {"limit": 0.01, "second_limit": 0.01},
        {"limit": 0.2, "second_limit": 0.01, "sigma": 0.2},
    ):
        with pytest.raises(ValueError, match="no policy"):
            ConstrainedLQR.solution(**kwargs)
    with pytest.raises(ValueError, match="a=1.1"):
        envs.make_vec("ConstrainedLQR", 1, a=1.1)


# Pictures


@pytest.mark.parametrize("env_id", IDS)
def test_pictures(env_id):
    env = envs.make_vec(env_id, 2, seed=0, render_mode="rgb_array")
    env.reset()
    if env_id.startswith("Point"):
        place_point(env, np.array([[4.0, 3.0], [-5.0, 1.0]]), np.array([1.0, -2.0]))
    elif env_id == "ConstrainedLQR":
        change(env, x=[2.0, -1.0])
    else:
        state = env.get_state()
        state["positions"][1, :2] += 3.0
        state["center3"][1, :2] += 3.0
        env.set_state(state)
    one, two = env.render()
    for picture in (one, two):
        assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
        assert picture.std() > 5 and len(np.unique(picture.reshape(-1, 3), axis=0)) >= 3
    assert (one != two).any(axis=2).sum() > 50  # the bodies stand in different places
    single = gym.make(env_id, render_mode="rgb_array")
    single.reset(seed=0)
    assert single.render().shape == one.shape
    assert gym.make(env_id).unwrapped.render() is None


@pytest.mark.parametrize("env_id", ["PointCircle", "PointGather", "AntCircle", "AntGather"])
def test_pictures_without_gl(env_id, monkeypatch):
    monkeypatch.setattr(envs.render, "open_scene", lambda body: None)
    env = envs.make_vec(env_id, 1, seed=0, render_mode="rgb_array")
    env.reset()
    picture = env.render()[0]

    def pixel(x, y, reach):
        scale = 480 / (2 * reach)
        return picture[int(240 - scale * y), int(240 + scale * x)] / 255

    if env_id.endswith("Gather"):
        for k, index in enumerate(env.cells[0]):
            color = envs.render.GREEN if k < env.apples else envs.render.RED
            np.testing.assert_allclose(pixel(*LATTICE[index], 7.5), color, atol=0.01)
    else:
        reach = env.radius + 3
        np.testing.assert_allclose(pixel(0, -env.radius, reach), envs.render.BLUE, atol=0.01)
        np.testing.assert_allclose(pixel(env.strip, 5, reach), envs.render.RED, atol=0.01)
    start = (0, env.radius, reach) if env_id.endswith("Circle") else (0, 0, 10)
    assert pixel(*start).max() < 0.3  # the body, dark, at the start


def test_picture_before_the_first_optimizer():
    """With a CUDA build of torch this was a segmentation fault: two LLVMs, one set of names."""
    code = """
import envs, torch
env = envs.make_vec("PointCircle", 1, seed=0, render_mode="rgb_array")
env.reset(), env.render()
torch.optim.Adam([torch.zeros(1, requires_grad=True)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(envs.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_rendering_does_not_disturb_the_chain():
    for env_id in IDS:
        one, two = (envs.make_vec(env_id, 1, seed=0, render_mode="rgb_array") for _ in range(2))
        one.reset(), two.reset()
        for t, action in enumerate(random_actions(one, 12)):
            a, b = one.step(action), two.step(action)
            if t % 6 == 0:
                one.render()
            np.testing.assert_array_equal(a[0], b[0])
            assert a[1] == b[1]
