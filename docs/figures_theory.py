"""Draws the figures of docs/theory.md from the exact quantities of tests/test_theory.py.

python docs/figures_theory.py
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import test_theory as theory  # noqa: E402

TRUTH, PRINTED, CORRECTED = "black", "#d1495b", "#2274a5"
plt.rcParams.update(
    {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
)
plt.rcParams.update({"grid.alpha": 0.25, "legend.frameon": False})


def save(figure, name: str) -> None:
    figure.savefig(ROOT / "docs" / "images" / name, dpi=130)
    plt.close(figure)


def bounds() -> None:
    """Lemma 3.3 on one family of MDPs, Proposition 3.4 on random ones."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")

    leave = np.logspace(-3, np.log10(0.4), 60)
    truth, printed, corrected = [], [], []
    for p in leave:
        P, pi, pi_new, old, new = theory.counter_example(p)
        truth.append(theory.tv(new.d, old.d) / (old.d * theory.tv(pi_new, pi)).sum())
        printed.append(theory.sigma_star_two_states(P))
        corrected.append(theory.kemeny(new.Z))
    left.plot(leave, corrected, color=CORRECTED, lw=5, alpha=0.4, label="corrected: Tr Z' - 1")
    left.plot(leave, truth, color=TRUTH, label="truth: TV(d', d) / E TV(π', π)")
    left.plot(leave, printed, color=PRINTED, ls="--", lw=2, label="printed: σ*")
    below = np.array(printed) < np.array(truth)
    left.fill_between(leave, printed, truth, where=below, color=PRINTED, alpha=0.12)
    left.annotate("printed bound\nbelow the truth", (2.2e-3, 40), color=PRINTED, ha="center")
    left.set(xscale="log", yscale="log", xlabel="p: probability that “stay” leaves its state")
    left.set(ylabel="sensitivity of the stationary distribution", title="Lemma 3.3, two states")
    left.legend(loc="upper right")

    rng = np.random.default_rng(0)
    P, r, pi, pi_new = theory.slow_mdps(rng, 1500)
    old, new = theory.evaluate(P, pi, r), theory.evaluate(P, pi_new, r)
    change = (pi_new * old.A).sum(-1)
    error = np.abs(new.J - old.J - (old.d * change).sum(-1))
    unit = 2 * np.abs(change).max(-1) * (old.d * theory.tv(pi_new, pi)).sum(-1)
    fine = np.logspace(-7, 1.5, 2)
    style = {"s": 9, "alpha": 0.6, "linewidths": 0}
    printed = unit * theory.sigma_star_two_states(P)
    right.scatter(
        error, unit * theory.kemeny(new.Z), color=CORRECTED, label="corrected: Tr Z' - 1", **style
    )
    share = 100 * (printed < error).mean()
    right.scatter(
        error, printed, color=PRINTED, label=f"printed: σ* (below in {share:.0f} %)", **style
    )
    right.plot(fine, fine, color=TRUTH, lw=1)
    right.annotate("a bound must lie\nabove this line", (0.05, 3e-5), ha="center")
    right.set(xscale="log", yscale="log", xlim=(1e-6, 10), ylim=(1e-6, 30))
    right.set(xlabel="truth: |J(π') - J(π) - surrogate|", ylabel="bound on it")
    right.set_title("Proposition 3.4, 1,500 random slow MDPs")
    right.legend(loc="upper left", markerscale=2)
    save(figure, "theory_bounds.png")


def trust_region() -> None:
    """Theorem 3.6: the reward from an infeasible policy, the cost from a feasible one."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")

    limits = np.linspace(0.1, 0.5, 60)
    P, r, pi = np.full((2, 2, 2), 0.5), np.array([[0.0, 1.0]] * 2), np.full((2, 2), 0.5)
    old, rows = theory.evaluate(P, pi, r), []
    for limit in limits:
        new = theory.evaluate(P, np.tile([1.0 - limit, limit], (2, 1)), r)
        delta = theory.kl(np.array([1.0 - limit, limit]), pi[0])
        change = limit - 0.5
        V_max = 2.0 * change**2  # alpha beta^2, alpha = 1 / (2 a'H^-1 a) = 2
        printed = -np.sqrt(2 * (delta + V_max)) * theory.sigma(new.P) * abs(change)
        corrected = change - np.sqrt(2 * delta) * theory.kemeny(new.Z) * abs(change)
        rows.append((new.J - old.J, printed, corrected))
    truth, printed, corrected = np.array(rows).T
    left.plot(limits, truth, color=TRUTH, label="truth: J(π') - J(π)")
    left.plot(limits, printed, color=PRINTED, ls="--", lw=2, label="printed lower bound")
    left.plot(limits, corrected, color=CORRECTED, lw=2, label="corrected lower bound")
    left.fill_between(limits, truth, printed, where=truth < printed, color=PRINTED, alpha=0.12)
    left.set(xlabel="cost limit l (the policy before has cost 0.5)", ylabel="change of the reward")
    left.set_title("Theorem 3.6, reward: from an infeasible policy")
    left.legend(loc="lower right")

    steps, rows = np.linspace(1e-4, 0.06, 60), []
    for step in steps:
        P, C, _, pi, pi_new = theory.cost_counter_example(step=step)
        old, new = theory.evaluate(P, pi, C), theory.evaluate(P, pi_new, C)
        epsilon = np.abs((pi_new * old.A).sum(-1)).max()
        radius = np.sqrt(2 * (old.d * theory.kl(pi_new, pi)).sum())
        constants = 1.0, theory.sigma(new.P) * epsilon * radius
        constants += (theory.kemeny(new.Z) * epsilon * radius,)
        rows.append(np.array(constants) * [new.J - old.J, 1.0, 1.0])
    truth, printed, corrected = np.array(rows).T
    right.plot(steps, truth, color=TRUTH, label="truth: J_C(π') - l")
    right.plot(steps, printed, color=PRINTED, ls="--", lw=2, label="printed upper bound")
    right.plot(steps, corrected, color=CORRECTED, lw=2, label="corrected upper bound")
    right.fill_between(steps, printed, truth, where=truth > printed, color=PRINTED, alpha=0.12)
    right.set(xlabel="change of the probability of “go” in either state", ylabel="violation")
    right.set_title("Theorem 3.6, cost: from a feasible policy")
    right.legend(loc="upper left")
    save(figure, "theory_trust_region.png")


def achievable(P, r, C, directions: int = 180) -> np.ndarray:
    """(k, 2): vertices (J_C, J) of the set that all stationary policies can reach."""
    points = []
    for angle in np.linspace(0.0, 2 * np.pi, directions, endpoint=False):
        mixed = np.cos(angle) * C + np.sin(angle) * r
        _, pi, _ = theory.occupancy_lp(P, mixed, C[None], [1e3])
        points.append((theory.evaluate(P, pi, C).J, theory.evaluate(P, pi, r).J))
    return np.array(points)


def paths(axis, problem, starts, limit) -> None:
    best = theory.occupancy_lp(*problem)[0]
    for (label, start, adapt), color in zip(
        starts, ("#2a9d5c", "#e08e26", "#7b4fa3"), strict=False
    ):
        J, J_C, cases, _, _ = theory.acpo(start, *problem, adapt=adapt)
        recovery = np.array(cases) == "recovery"
        axis.plot(J_C[:, 0], J, color=color, lw=1.5, zorder=3)
        axis.scatter(J_C[~recovery, 0], J[~recovery], s=16, color=color, zorder=4, label=label)
        axis.scatter(
            J_C[recovery, 0], J[recovery], s=24, fc="white", ec=color, zorder=4, linewidths=1.3
        )
    axis.axvline(limit, color=TRUTH, ls=":", lw=1.5)
    axis.scatter(
        [limit], [best], marker="*", s=220, color="gold", ec="black", zorder=5, label="optimum (LP)"
    )
    axis.scatter(
        [], [], s=24, fc="white", ec="grey", linewidths=1.3, label="recovery step from here"
    )
    axis.set(xlabel="average cost J_C", ylabel="average reward J")
    axis.legend(loc="lower right", fontsize=9.5)


def frontier() -> None:
    """ACPO with exact gradients on the two-state CMDP and on one with four states."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    P, r, C = theory.two_state_cmdp()
    levels = np.linspace(0.0, 0.45, 91)
    best = [theory.occupancy_lp(P, r, C[None], [x])[0] for x in levels]
    left.plot(levels, best, color="grey", lw=6, alpha=0.35, label="J*(l) = min(2/7 + l, 9/14)")
    table = lambda fast: np.array([[0.5, 0.5], [1.0 - fast, fast]])  # noqa: E731
    starts = [("from P(fast) = 0.02", table(0.02), False), ("from 0.98", table(0.98), False)]
    paths(left, (P, r, C[None], [0.2]), starts, 0.2)
    left.annotate("l = 0.2", (0.203, 0.66))
    left.set_title("Two states: all policies lie on the frontier")
    left.set(ylim=(0.27, 0.68))

    problem, (uniform, costly, cheap) = theory.random_cmdp(4, 1)
    P, r, costs, limits = problem
    region = achievable(P, r, costs[0])
    right.fill(*region.T, color="grey", alpha=0.15, lw=0)
    right.plot(*np.vstack([region, region[:1]]).T, color="grey", lw=1)
    starts = [("from a cheap policy", cheap, True), ("from a costly one", costly, True)]
    starts += [("fixed δ, no margin: jams", uniform, False)]
    paths(right, problem, starts, limits[0])
    right.annotate(f"l = {limits[0]:.3f}", (limits[0] + 0.005, region[:, 1].max()))
    right.set_title("Four states, three actions; grey: all policies")
    save(figure, "theory_frontier.png")


if __name__ == "__main__":
    bounds()
    trust_region()
    frontier()
