"""ACPO learns what it should: known optima of ConstrainedLQR, and a short PointGather run."""

import csv
from functools import partial

import numpy as np
import pytest
import torch

import acpo_continuous as acpo
import envs
from envs.lqr import ConstrainedLQR


def train(tmp_path, **flags):
    """Run the script's main; returns (args, agent, rows of progress.csv)."""
    flags = {"env_id": "ConstrainedLQR", "batch_size": 4096, "eval_every": 0, **flags}
    if flags["env_id"] == "ConstrainedLQR":  # the default floor's noise alone costs 0.165 of 0.2
        flags |= {"log_std_min": -3.0}
    args = acpo.Args(run_dir=str(tmp_path), save_every=0, **flags)
    run = acpo.main(args)
    env = envs.make_vec(args.env_id, 1)
    m = np.size(args.cost_limit or env.cost_limit)
    sizes = env.single_observation_space.shape[0], env.single_action_space.shape[0], m
    agent = acpo.Agent(*sizes, args.hidden_sizes, args.log_std_init)
    agent.load_state_dict(torch.load(f"{run}/checkpoint.pt", weights_only=True)["agent"])
    with open(f"{run}/progress.csv") as file:
        return args, agent, list(csv.DictReader(file))


def linear_policy(agent):
    """(k, offset, sigma) of the line u = offset - k x closest to the policy where x lives."""
    x = np.linspace(-3, 3, 121)
    with torch.no_grad():
        u = ConstrainedLQR.u_max * agent.policy(agent.normalize(x[:, None]))[0][:, 0].numpy()
    weight = np.exp(-0.25 * x * x)  # square root of a normal density with variance 1
    slope, offset = np.polyfit(x, u, 1, w=weight)
    return -slope, offset, ConstrainedLQR.u_max * agent.log_std.exp().item()


def mean(rows, name, share=0.2):
    return np.mean([float(row[name]) for row in rows[-max(1, int(share * len(rows))) :]])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lqr_reaches_the_constrained_optimum(tmp_path, seed):
    # Small steps and many environments: a steady last iterate
    flags = {"total_timesteps": 400_000, "log_std_init": -1.5, "delta": 0.003, "num_envs": 64}
    _, agent, rows = train(tmp_path, seed=seed, **flags)
    k, offset, sigma = linear_policy(agent)
    best = ConstrainedLQR.solution(limit=0.2, sigma=sigma)
    J, J_C, _ = ConstrainedLQR.evaluate(k, sigma, offset)
    print(f"k {k:.4f} ({best['gain']:.4f}), J {J:.4f} ({best['J']:.4f}), J_C {J_C:.4f}")
    assert k == pytest.approx(best["gain"], rel=0.05)
    assert J_C <= 0.2 * 1.08  # of this one iterate; the average over the last updates:
    assert mean(rows, "charts/avg_cost") <= 0.2 * 1.02
    assert best["J"] - 0.06 <= J


@pytest.mark.slow
def test_lqr_recovers_from_an_infeasible_start(tmp_path):
    """With a wide policy the first cost is about three times the limit."""
    _, agent, rows = train(tmp_path, total_timesteps=300_000, log_std_init=-1.3)
    cost = [float(row["charts/avg_cost"]) for row in rows]
    cases = [float(row["dual/case"]) for row in rows]
    assert cost[0] > 2 * 0.2 and cases[0] == 2  # violated by more than one update can repair
    assert mean(rows, "charts/avg_cost") <= 0.2 * 1.03
    assert mean(rows, "charts/avg_reward") > mean(rows[:1], "charts/avg_reward") + 1.0


@pytest.mark.slow
def test_lqr_with_a_loose_limit_reaches_the_unconstrained_optimum(tmp_path):
    # J is flat around its maximum: with delta 0.01 the last iterate is still 0.1 away from it.
    flags = {"total_timesteps": 400_000, "log_std_init": -1.5, "cost_limit": (5.0,), "delta": 0.004}
    _, agent, _ = train(tmp_path, **flags)
    k, offset, sigma = linear_policy(agent)
    assert k == pytest.approx(0.9, rel=0.08) and abs(offset) < 0.1  # J is flat around 0.9:
    best = ConstrainedLQR.solution(limit=5.0, sigma=sigma)["J"]
    assert ConstrainedLQR.evaluate(k, sigma, offset)[0] > 1.01 * best


@pytest.mark.slow
def test_lqr_with_two_constraints(tmp_path, monkeypatch):
    """At these limits both constraints are active at the optimum."""
    task = partial(ConstrainedLQR, limit=0.2, second_limit=0.44)
    monkeypatch.setitem(envs.BATCHED, "TwoCostLQR", task)
    flags = {"env_id": "TwoCostLQR", "total_timesteps": 400_000, "log_std_init": -1.5}
    _, agent, rows = train(tmp_path, **flags)
    k, offset, sigma = linear_policy(agent)
    best = ConstrainedLQR.solution(limit=0.2, second_limit=0.44, sigma=sigma)
    J, J_C, J_C2 = ConstrainedLQR.evaluate(k, sigma, offset)
    print(f"k {k:.4f} ({best['gain']:.4f}), offset {offset:.4f} ({best['offset']:.4f}), J {J:.4f}")
    assert k == pytest.approx(best["gain"], rel=0.08)
    assert J_C <= 0.2 * 1.08 and J_C2 <= 0.44 * 1.08  # of this one iterate; over the last updates:
    assert mean(rows, "charts/avg_cost") <= 0.2 * 1.02
    assert mean(rows, "charts/avg_cost_2") <= 0.44 * 1.02
    assert best["J"] - 0.1 <= J


@pytest.mark.slow
def test_point_gather_learns_within_the_limit(tmp_path):
    _, _, rows = train(tmp_path, env_id="PointGather", total_timesteps=500_000)
    assert mean(rows, "charts/avg_reward") >= 10 * mean(rows[:1], "charts/avg_reward")
    assert mean(rows, "charts/avg_cost") <= 1.25 * 0.01
