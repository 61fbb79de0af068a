"""The statements of the ACPO paper on small MDPs, exactly: which hold, which do not, what is true.

No sampling (but for one test of the estimator) and no training: everything follows from transition
matrices in float64. Statements have the paper's numbers. Page: docs/theory.md.
"""
# ruff: noqa: SIM300 (J is a value here, not a constant)

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, nnls
from scipy.special import rel_entr, softmax

from acpo_continuous import compute_gae, line_search, recovery_step, solve_dual

# --- exact quantities; any number of leading batch dimensions ------------------------------------


class Evaluation(NamedTuple):
    P: np.ndarray  # (.., S, S) transition matrix under the policy
    d: np.ndarray  # (.., S) stationary distribution
    J: np.ndarray  # (..,) average reward per step
    Z: np.ndarray  # (.., S, S) fundamental matrix (I - P + 1 d')^-1
    V: np.ndarray  # (.., S) bias, with d'V = 0
    A: np.ndarray  # (.., S, A) advantage


def evaluate(P, pi, r) -> Evaluation:
    """P (.., S, A, S), pi (.., S, A), r (.., S, A) a reward or a cost."""
    P_pi, r_pi = np.einsum("...sa,...sat->...st", pi, P), (pi * r).sum(-1)
    identity = np.eye(P.shape[-1])
    left = np.swapaxes(identity - P_pi + 1.0, -1, -2)  # d (I - P + 11') = 1'
    d = np.linalg.solve(left, np.ones((*left.shape[:-1], 1)))[..., 0]
    J = (d * r_pi).sum(-1)
    Z = np.linalg.inv(identity - P_pi + d[..., None, :])
    V = np.einsum("...st,...t->...s", Z, r_pi - J[..., None])
    Q = r - J[..., None, None] + np.einsum("...sat,...t->...sa", P, V)
    return Evaluation(P_pi, d, J, Z, V, Q - V[..., None])


def tv(p, q):
    return 0.5 * np.abs(p - q).sum(-1)


def kl(p, q):
    return rel_entr(p, q).sum(-1)


def kemeny(Z):
    """Tr Z - 1 = sum over i >= 2 of 1 / (1 - lambda_i): Kemeny's constant less one."""
    return np.trace(Z, axis1=-2, axis2=-1) - 1.0


def ergodicity(Z):
    """Largest total variation between two rows of Z: the sharpest constant of this kind."""
    return tv(Z[..., :, None, :], Z[..., None, :, :]).max((-1, -2))


def sigma(P_pi):
    """The paper's constant, max over i >= 2 of |1 - lambda_i|^-1/2."""
    gaps = np.sort(np.abs(1.0 - np.linalg.eigvals(P_pi)), axis=-1)
    return gaps[..., 1] ** -0.5


def sigma_star_two_states(P):
    """max over ALL policies of sigma: 1 - lambda_2 = P(0 to 1) + P(1 to 0) is least at a vertex."""
    return (P[..., 0, :, 1].min(-1) + P[..., 1, :, 0].min(-1)) ** -0.5


def random_mdps(rng, batch, S, A, sticky=True):
    """P, r and C; in sticky ones, some actions leave a state only once in up to 50 steps."""
    P = rng.dirichlet(np.full(S, 0.5), (batch, S, A)) * 0.99 + 0.01 / S
    if sticky:
        leave = 10.0 ** rng.uniform(-1.7, 0.0, (batch, S, A, 1))
        P = leave * P + (1.0 - leave) * np.eye(S)[:, None]
    return P, *rng.normal(size=(2, batch, S, A))


def random_policies(rng, batch, S, A):
    """A policy, often close to deterministic, and another one at a distance of 1e-3 to 1."""
    pi, other = rng.dirichlet(np.full(A, 0.3), (2, batch, S)) * 0.99 + 0.01 / A
    step = 10.0 ** rng.uniform(-3.0, 0.0, (batch, S, 1))
    return pi, (1.0 - step) * pi + step * other


SIZES = [(2, 2), (3, 2), (5, 3), (8, 4)]  # states, actions
BATCH = 2000  # MDPs of each size


def pair(S, A, seed=0, sticky=True):
    """(P, r, C, pi, pi', evaluation of pi, of pi') for BATCH random MDPs."""
    rng = np.random.default_rng(seed)
    P, r, C = random_mdps(rng, BATCH, S, A, sticky)
    pi, pi_new = random_policies(rng, BATCH, S, A)
    return P, r, C, pi, pi_new, evaluate(P, pi, r), evaluate(P, pi_new, r)


def stay_go(p=0.01):
    """Two states; "stay" (0) leaves w.p. p, "go" (1) w.p. 1 - p, so all policies are ergodic."""
    leave = np.array([p, 1.0 - p])
    stay = 1.0 - leave
    return np.stack([np.stack([stay, leave], -1), np.stack([leave, stay], -1)])


# --- what holds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("S, A", SIZES)
def test_bellman_equations_and_policy_difference(S, A):
    """Lemma 3.1: J(pi') - J(pi) = E_{d', pi'} A, to rounding."""
    _, r, _, pi, pi_new, old, new = pair(S, A, sticky=False)
    np.testing.assert_allclose(np.einsum("bs,bst->bt", old.d, old.P), old.d, atol=1e-13)
    assert (old.d > 0.0).all()
    np.testing.assert_allclose((old.d * old.V).sum(-1), 0.0, atol=1e-12)
    np.testing.assert_allclose((pi * old.A).sum(-1), 0.0, atol=1e-12)
    difference = (new.d * (pi_new * old.A).sum(-1)).sum(-1)
    np.testing.assert_allclose(difference, new.J - old.J, atol=1e-12)
    assert np.abs(new.J - old.J).max() > 0.5  # there was something to explain


@pytest.mark.parametrize("S, A", SIZES)
def test_surrogate_bounds_with_the_kemeny_constant(S, A):
    """Lemma 3.2 as printed; Lemma 3.3, Proposition 3.4 and Corollary 3.5 with Tr Z' - 1."""
    P, _, C, pi, pi_new, old, new = pair(S, A)
    d_shift, mean_tv = tv(new.d, old.d), (old.d * tv(pi_new, pi)).sum(-1)
    sharp, corrected = ergodicity(new.Z), kemeny(new.Z)
    assert (sharp <= corrected * (1 + 1e-12)).all()
    assert (d_shift <= sharp * mean_tv * (1 + 1e-9)).all()  # Lemma 3.3, corrected
    assert (d_shift / (sharp * mean_tv)).max() > 0.4  # and not by a wide margin
    for one, other in ((old, new), (evaluate(P, pi, C), evaluate(P, pi_new, C))):
        change = (pi_new * one.A).sum(-1)  # E_{a ~ pi'} A(s, a)
        error = np.abs(other.J - one.J - (one.d * change).sum(-1))
        epsilon = np.abs(change).max(-1)
        slack = 1e-12 * np.abs(one.A).max((-1, -2))
        assert (error <= 2 * epsilon * d_shift + slack).all()  # Lemma 3.2
        assert (error <= 2 * epsilon * corrected * mean_tv + slack).all()  # Proposition 3.4


@pytest.mark.parametrize("S, A", SIZES)
def test_pinsker_and_jensen(S, A):
    """Equation 9: E TV <= sqrt(E KL / 2)."""
    _, _, _, pi, pi_new, old, _ = pair(S, A)
    mean_tv = (old.d * tv(pi_new, pi)).sum(-1)
    mean_kl = (old.d * kl(pi_new, pi)).sum(-1)
    assert (mean_tv <= np.sqrt(mean_kl / 2.0)).all()


@pytest.mark.parametrize("S, A", [(2, 2), (5, 3)])
def test_gradient_of_the_surrogate_is_the_gradient_of_J(S, A):
    """So g and a are exact; and the natural gradient of a tabular softmax is the advantage."""
    rng = np.random.default_rng(1)
    P, r, _ = (x[0] for x in random_mdps(rng, 1, S, A))
    theta = rng.normal(size=(S, A))
    pi = softmax(theta, -1)
    now = evaluate(P, pi, r)
    step, finite = 1e-5, np.zeros((S, A))
    for s, a in itertools.product(range(S), range(A)):
        shift = np.zeros((S, A))
        shift[s, a] = step
        up, down = (evaluate(P, softmax(theta + x, -1), r).J for x in (shift, -shift))
        finite[s, a] = (up - down) / (2 * step)
    g = now.d[:, None] * pi * now.A
    np.testing.assert_allclose(g, finite, atol=1e-8 * np.abs(now.A).max())
    fisher = np.zeros((S * A, S * A))
    for s in range(S):
        block = slice(s * A, (s + 1) * A)
        fisher[block, block] = now.d[s] * (np.diag(pi[s]) - np.outer(pi[s], pi[s]))
    np.testing.assert_allclose(fisher @ now.A.ravel(), g.ravel(), atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
def test_sampled_average_gae_converges_to_the_advantage(lam):
    """Equation 22 with the exact V is unbiased at every lambda; without it, only its limit is."""
    rng = np.random.default_rng(2)
    P, r, _ = (x[0] for x in random_mdps(rng, 1, 3, 2, sticky=False))
    pi = rng.dirichlet(np.ones(2), 3) * 0.8 + 0.1
    exact = evaluate(P, pi, r)
    steps, chains = 300, 2000
    states, actions = np.zeros((2, steps + 1, chains), int)
    states[0] = rng.choice(3, chains, p=exact.d)
    P_sum, pi_sum = P.cumsum(-1), pi.cumsum(-1)
    for i in range(steps):
        actions[i] = (rng.random(chains)[:, None] > pi_sum[states[i], :-1]).sum(-1)
        states[i + 1] = (rng.random(chains)[:, None] > P_sum[states[i], actions[i], :-1]).sum(-1)
    rewards = torch.as_tensor(r[states[:-1], actions[:-1]])
    keep = 200  # the sum of the last hundred steps is cut short

    def estimate(V):
        values = torch.as_tensor(V[states])
        parts = rewards, values[:-1], values[1:], torch.zeros(steps, chains)
        gae = compute_gae(*parts, rewards.mean(), 1.0, lam)[:keep].numpy()
        index = states[:keep], actions[:keep]
        sums, counts = np.zeros((2, 3, 2))
        np.add.at(sums, index, gae)
        np.add.at(counts, index, 1.0)
        return sums / counts

    assert np.abs(estimate(exact.V) - exact.A).max() < 0.03 < 0.02 * np.ptp(exact.A)
    # V = 0 gives the exact sum over k of lam^k E[r_{t+k} - J], which is not the advantage
    tail = np.linalg.solve(np.eye(3) - lam * exact.P, (pi * r).sum(-1) - exact.J)
    biased = r - exact.J + lam * P @ tail
    assert np.abs(estimate(np.zeros(3)) - biased).max() < 0.03
    assert np.abs(biased - exact.A).max() > 0.1


def test_discounted_quantities_converge_and_the_discounted_bound_diverges():
    """(1-gamma) J_gamma -> J and A_gamma -> A, but the bound of CPO -> -infinity. [Lemma A.1]"""
    P, r, _, pi, pi_new, old, new = (x for x in pair(4, 2, seed=3, sticky=False))
    start, identity = np.full(4, 0.25), np.eye(4)
    epsilon = np.abs((pi_new * old.A).sum(-1)).max(-1)
    mean_tv = (old.d * tv(pi_new, pi)).sum(-1)
    errors, bounds = [], []
    for horizon in (1e2, 1e3, 1e4):
        gamma = 1.0 - 1.0 / horizon

        def discounted(P_pi, policy, gamma=gamma):
            r_pi = (policy * r).sum(-1)[..., None]
            return np.linalg.solve(identity - gamma * P_pi, r_pi)[..., 0]

        V = discounted(old.P, pi)
        A = r + gamma * np.einsum("bsat,bt->bsa", P, V) - V[..., None]
        J, J_new = (1 - gamma) * V @ start, (1 - gamma) * discounted(new.P, pi_new) @ start
        d = np.linalg.solve(
            np.swapaxes(identity - gamma * old.P, -1, -2), np.tile(start[:, None], (BATCH, 1, 1))
        )[..., 0] * (1 - gamma)
        change = (pi_new * A).sum(-1)
        penalty = 2 * gamma * np.abs(change).max(-1) * horizon * (d * tv(pi_new, pi)).sum(-1)
        bound = (d * change).sum(-1) - penalty  # [eq.3], times 1 - gamma
        assert (bound <= J_new - J + 1e-10).all()  # true for every gamma, and worth nothing soon
        errors.append(max(np.abs(J - old.J).max(), np.abs(A - old.A).max()))
        bounds.append(bound / horizon)
    assert errors[0] < 2.0 and errors[1] < errors[0] / 8 and errors[2] < errors[1] / 8
    np.testing.assert_allclose(bounds[2], -2 * epsilon * mean_tv, rtol=2e-2, atol=1e-3)
    # the average bound is finite and informative where the discounted one is not
    surrogate = (old.d * (pi_new * old.A).sum(-1)).sum(-1)
    average = surrogate - 2 * epsilon * kemeny(new.Z) * mean_tv
    assert (average <= new.J - old.J + 1e-10).all() and (average > bounds[2] * horizon).all()


# --- Lemma 3.3, Proposition 3.4 and Corollary 3.5 as printed --------------------------------------


def counter_example(p=0.01):
    """stay_go(p), pi always stays, pi' goes with probability p in state 0; reward 1 for (0, go)."""
    P, r = stay_go(p), np.array([[0.0, 1.0], [0.0, 0.0]])
    pi, pi_new = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[1.0 - p, p], [1.0, 0.0]])
    return P, pi, pi_new, evaluate(P, pi, r), evaluate(P, pi_new, r)


def test_lemma_3_3_fails():
    """TV(d', d) is 4.65 times what sigma* allows; Kemeny's constant allows 2 % more than it."""
    P, pi, pi_new, old, new = counter_example()
    d_shift, mean_tv = tv(new.d, old.d), (old.d * tv(pi_new, pi)).sum(-1)
    grid = np.linspace(0.0, 1.0, 21)  # sigma* is the largest sigma of ALL policies
    policies = [[[1 - x, x], [1 - y, y]] for x, y in itertools.product(grid, grid)]
    chains = np.einsum("bsa,sat->bst", np.array(policies), P)
    sigma_star = sigma(chains).max()
    assert sigma_star == pytest.approx(sigma_star_two_states(P)) == pytest.approx(0.02**-0.5)
    assert d_shift == pytest.approx(0.164430, abs=1e-6)
    assert mean_tv == pytest.approx(0.005)
    assert d_shift > sigma_star * mean_tv  # printed: <=
    assert d_shift / mean_tv == pytest.approx(32.886, abs=1e-3)
    assert sigma_star == pytest.approx(7.0711, abs=1e-4)
    assert d_shift <= kemeny(new.Z) * mean_tv and kemeny(new.Z) == pytest.approx(33.557, abs=1e-3)


def test_proposition_3_4_fails():
    """Also Corollary 3.5, which is the same with a cost in place of the reward."""
    P, pi, pi_new, old, new = counter_example()
    change, mean_tv = (pi_new * old.A).sum(-1), (old.d * tv(pi_new, pi)).sum(-1)
    error = np.abs(new.J - old.J - (old.d * change).sum(-1))
    epsilon = np.abs(change).max()
    printed = 2 * sigma_star_two_states(P) * epsilon * mean_tv
    corrected = 2 * kemeny(new.Z) * epsilon * mean_tv
    assert new.J - old.J == pytest.approx(3.3557e-3, abs=1e-7)
    assert error == pytest.approx(1.6443e-3, abs=1e-7)
    assert printed == pytest.approx(0.7071e-3, abs=1e-7)
    assert corrected == pytest.approx(3.3557e-3, abs=1e-7)
    assert printed < error <= corrected


@pytest.mark.parametrize("S", [2, 3, 5, 8])
def test_where_the_proof_of_lemma_3_3_slips(S):
    """T_1 = |I - M D^-1|_inf is Tr Z - 1, at least sqrt(2) times its printed upper bound.

    sum_i 1 / (1 - lambda_i) against (1 / S) sum_i (1 - lambda_i)^-1/2: term by term the ratio is
    S (1 - lambda_i)^-1/2 >= 2 / sqrt(2), as a real eigenvalue is at least -1.
    """
    rng = np.random.default_rng(4)
    weights = rng.exponential(size=(BATCH, S, S)) ** 3
    weights += np.swapaxes(weights, -1, -2)  # reversible, so the spectrum is real
    P = weights / weights.sum(-1, keepdims=True)
    Z = evaluate(P[:, :, None], np.ones((BATCH, S, 1)), np.zeros((BATCH, S, 1))).Z
    # M D^-1 = I - Z + E Z_dg, with M the mean first passage times and D the mean return times
    T_1 = np.abs(Z - np.diagonal(Z, axis1=-2, axis2=-1)[:, None, :]).sum(-1)
    np.testing.assert_allclose(T_1, np.tile(kemeny(Z)[:, None], S), rtol=1e-9)
    gaps = np.sort(1.0 - np.linalg.eigvals(P).real, axis=-1)[:, 1:]
    np.testing.assert_allclose((1 / gaps).sum(-1), kemeny(Z), rtol=1e-8)
    assert (T_1[:, 0] >= np.sqrt(2.0) * (gaps**-0.5).sum(-1) / S).all()


def slow_mdps(rng, batch):
    """(P, r, pi, pi') with two states, like the counter-example: "stay" leaves once in 10 to 1,000
    steps, "go" at least every other step, and both policies go at most once in ten."""
    leave = np.stack([10.0 ** rng.uniform(-3, -1, (batch, 2)), rng.uniform(0.5, 1, (batch, 2))], -1)
    P = np.stack([1.0 - leave, leave], -1)
    P[:, 1] = P[:, 1, :, ::-1]
    go = 10.0 ** rng.uniform(-4, -1, (2, batch, 2))
    return P, rng.normal(size=(batch, 2, 2)), *np.stack([1.0 - go, go], -1)


def test_printed_bounds_fail_on_random_slow_mdps():
    """Share of 20,000 on which Lemma 3.3 and Proposition 3.4 fail as printed; corrected: none."""
    P, r, pi, pi_new = slow_mdps(np.random.default_rng(5), 20_000)
    old, new = evaluate(P, pi, r), evaluate(P, pi_new, r)
    d_shift, mean_tv = tv(new.d, old.d), (old.d * tv(pi_new, pi)).sum(-1)
    change = (pi_new * old.A).sum(-1)
    error = np.abs(new.J - old.J - (old.d * change).sum(-1))
    unit = 2 * np.abs(change).max(-1)
    sigma_star, corrected = sigma_star_two_states(P), kemeny(new.Z)
    slack = 1e-11 * np.abs(old.A).max((-1, -2))
    assert (d_shift > sigma_star * mean_tv).mean() == pytest.approx(0.82, abs=0.01)
    assert (error > unit * sigma_star * mean_tv).mean() == pytest.approx(0.42, abs=0.01)
    assert (d_shift <= corrected * mean_tv * (1 + 1e-9)).all()
    assert (error <= unit * corrected * mean_tv + slack).all()


def test_the_root_survives_in_kl_form_to_first_order():
    """Reversible P_pi: dTV(d', d) <= sqrt((1 + lambda_2) / (1 - lambda_2)) d sqrt(KL / 2).

    The directions tried are random ones and the worst one, u(s, a) = h(s') - E h(s') with h = Z f,
    f = sign of the change, in an MDP where the action is the next state.
    """
    rng = np.random.default_rng(6)
    S = 4
    weights = rng.exponential(size=(BATCH, S, S)) ** 3 + 1e-3
    weights += np.swapaxes(weights, -1, -2)
    weights += 30.0 * np.eye(S) * rng.uniform(size=(BATCH, 1, 1))
    pi = weights / weights.sum(-1, keepdims=True)
    P = np.tile(np.eye(S), (BATCH, S, 1, 1))
    old = evaluate(P, pi, pi)
    lambda_2 = np.sort(np.linalg.eigvals(old.P).real, axis=-1)[:, -2]
    rate = np.sqrt((1 + lambda_2) / (1 - lambda_2))
    largest = 0.0
    signs = [np.array(f) for f in itertools.product([-1.0, 1.0], repeat=S)][1:-1]
    for f in [None] * 10 + signs:
        h = rng.normal(size=(BATCH, S, S)) if f is None else (old.Z @ f)[:, None, :]
        u = h - (pi * h).sum(-1, keepdims=True)  # pi' = pi (1 + t u)
        d_dot = 0.5 * np.abs(np.einsum("bs,bsa,bat->bt", old.d, pi * u, old.Z)).sum(-1)
        kl_dot = 0.5 * np.sqrt((old.d * (pi * u**2).sum(-1)).sum(-1))  # d/dt of sqrt(KL / 2)
        ratio = d_dot / (rate * kl_dot)
        largest = max(largest, ratio.max())
    assert 0.9 < largest <= 1.0 + 1e-9


# --- Theorem 3.6 ----------------------------------------------------------------------------------


def test_theorem_3_6_reward_part_fails_from_an_infeasible_policy():
    """States do not matter, r = C = 1{action 1}, pi_k plays it half the time, limit 0.4."""
    P, r = np.full((2, 2, 2), 0.5), np.array([[0.0, 1.0], [0.0, 1.0]])
    pi, pi_new, limit = np.full((2, 2), 0.5), np.tile([0.6, 0.4], (2, 1)), 0.4
    old, new = evaluate(P, pi, r), evaluate(P, pi_new, r)
    delta = (old.d * kl(pi_new, pi)).sum()
    assert delta == pytest.approx(0.02014, abs=1e-5)
    # 0.4 in both states is the only policy with KL <= delta that meets the constraint
    x, y = np.meshgrid(*[np.linspace(0.001, 0.999, 999)] * 2)
    mean_kl = 0.5 * sum(kl(np.stack([1 - z, z], -1), np.array([0.5, 0.5])) for z in (x, y))
    allowed = ((x + y) / 2 <= limit + 1e-12) & (mean_kl <= delta + 1e-12)
    assert allowed.sum() == 1 and x[allowed] == pytest.approx(0.4) and y[allowed] == x[allowed]
    change = (pi_new * old.A).sum(-1)
    nu, beta = sigma(new.P) * np.abs(change).max(), old.J - limit
    alpha = 1.0 / (2.0 * (old.d * (pi * old.A**2).sum(-1)).sum())
    printed, with_alpha = (-np.sqrt(2 * (delta + v)) * nu for v in (beta**2, alpha * beta**2))
    corrected = (old.d * change).sum() - np.sqrt(2 * delta) * kemeny(new.Z) * np.abs(change).max()
    assert new.J - old.J == pytest.approx(-0.1)
    assert printed == pytest.approx(-0.0246, abs=1e-4)
    assert with_alpha == pytest.approx(-0.0283, abs=1e-4)
    assert new.J - old.J < with_alpha < printed  # printed: >=
    assert corrected <= new.J - old.J


def cost_counter_example(w=0.1, step=0.01):
    """stay_go, C = 1{stay}; pi_k goes with probability w and meets its limit with equality.

    The reward is made so that the optimum of equation 10 goes more in state 0, less in state 1.
    """
    P, C = stay_go(), np.array([[1.0, 0.0], [1.0, 0.0]])
    pi = np.tile([1.0 - w, w], (2, 1))
    pi_new = np.array([[1.0 - w - step, w + step], [1.0 - w + step, w - step]])
    r = np.log(pi_new / pi) + kl(pi, pi_new)[:, None]  # E_pi r(s) = 0, so A = r: a pure tilt
    return P, C, r, pi, pi_new


def test_theorem_3_6_cost_part_fails_from_a_feasible_policy():
    """The violation is 1.26 times what is printed, with V_max = 0: the safety guarantee."""
    P, C, r, pi, pi_new = cost_counter_example()
    old, new, old_r = evaluate(P, pi, C), evaluate(P, pi_new, C), evaluate(P, pi, r)
    limit = old.J
    assert limit == pytest.approx(0.9)
    delta = (old.d * kl(pi_new, pi)).sum()
    # the optimum of equation 10 without the cost constraint, which it meets
    np.testing.assert_allclose(pi_new, tilt(pi, old_r.A, 1.0), atol=1e-12)
    change = (pi_new * old.A).sum(-1)
    assert (old.d * change).sum() == pytest.approx(0.0, abs=1e-12)
    epsilon = np.abs(change).max()
    printed = np.sqrt(2 * delta) * sigma(new.P) * epsilon
    violation = new.J - limit
    assert violation == pytest.approx(9.0741e-4, abs=1e-8)
    assert printed == pytest.approx(7.1776e-4, abs=1e-8)
    assert violation / printed == pytest.approx(1.264, abs=1e-3)  # printed: <= 1
    assert violation <= np.sqrt(2 * delta) * kemeny(new.Z) * epsilon


def tilt(pi, A, lam):
    """pi exp(A / lam), normalised: the optimum of equation 10 at the multiplier lam of the KL."""
    lam = np.asarray(lam)[..., None, None]
    return softmax(np.log(pi) + A / lam, -1)


@pytest.mark.parametrize("S, A", SIZES)
def test_theorem_3_6_corrected(S, A):
    """J(pi') - J(pi) >= L* - sqrt(2 delta) nu and J_C(pi') <= l + sqrt(2 delta) nu_C.

    nu has Tr Z' - 1 in place of sigma, L* is the optimal surrogate. pi exp((A - mu A_C) / lam) IS
    the optimum of equation 10 for the delta and the limit that it meets with equality, so lam and
    mu are drawn and delta and the limit follow. The larger mu, the more pi violates that limit.
    """
    rng = np.random.default_rng(7)
    P, r, C, pi, *_ = pair(S, A, seed=8)
    old, old_c = evaluate(P, pi, r), evaluate(P, pi, C)
    mu, lam = 10.0 ** rng.uniform(-1, 1, BATCH), 10.0 ** rng.uniform(-1, 2, BATCH)
    mixed = old.A - mu[:, None, None] * old_c.A
    lam *= np.sqrt((old.d * (pi * mixed**2).sum(-1)).sum(-1))
    pi_new = tilt(pi, mixed, lam)
    new, new_c = evaluate(P, pi_new, r), evaluate(P, pi_new, C)
    delta = (old.d * kl(pi_new, pi)).sum(-1)
    change, change_c = (pi_new * old.A).sum(-1), (pi_new * old_c.A).sum(-1)
    best, limit = (old.d * change).sum(-1), old_c.J + (old.d * change_c).sum(-1)
    radius = np.sqrt(2 * delta)
    nu, nu_c = (kemeny(new.Z) * np.abs(x).max(-1) for x in (change, change_c))
    slack = 1e-11 * np.abs(mixed).max((-1, -2))
    assert (new.J - old.J >= best - radius * nu - slack).all()
    assert (new_c.J <= limit + radius * nu_c + slack).all()
    infeasible = old_c.J > limit
    assert 100 < infeasible.sum() < BATCH
    assert (best[~infeasible] >= 0.0).all()  # pi_k itself is allowed, so nothing is given up
    # as printed, from infeasible policies: V_max = alpha beta^2, in units of KL
    alpha = 0.5 / (old.d * (pi * old_c.A**2).sum(-1)).sum(-1)
    V_max = alpha * np.maximum(old_c.J - limit, 0.0) ** 2
    printed = -np.sqrt(2 * (delta + V_max)) * sigma(new.P) * np.abs(change).max(-1)
    assert (new.J - old.J < printed)[infeasible].any()


# --- Lemma A.3 ------------------------------------------------------------------------------------


def shortest_step(A, c):
    """KL of the shortest step that meets c + A'x <= 0, H = I: the maximum of mu'c - 0.5 mu'A'A mu.

    Least distance programming: with u >= 0 minimising |E u - f|, E = [-A; -c]', f = (0, .., 0, 1).
    """
    E = np.vstack([-A, c[None]])
    f = np.zeros(len(E))
    f[-1] = 1.0
    u, _ = nnls(E, f)
    residual = E @ u - f
    x = -residual[:-1] / residual[-1]
    return x, 0.5 * x @ x


def test_lemma_A_3_fails_with_two_constraints():
    """The two half-planes meet far away: KL 0.5 is needed, the largest alpha beta^2 is 0.005."""
    A, c = np.array([[1.0, -1.0], [0.1, 0.1]]), np.array([0.1, 0.1])
    x, needed = shortest_step(A, c)
    np.testing.assert_allclose(x, [0.0, -1.0], atol=1e-12)
    assert (c + A.T @ x <= 1e-12).all() and needed == pytest.approx(0.5)
    V_max = (c**2 / (2 * (A**2).sum(0))).max()
    assert V_max == pytest.approx(0.01 / 2.02)
    assert needed > 0.01 + V_max  # delta = 0.01, the usual radius


def test_lemma_A_3_corrected():
    """KL after the projection <= delta + KL of the shortest step, for any number of constraints."""
    rng = np.random.default_rng(9)
    ratios, printed_fails, single = [], 0, 0
    for _ in range(3000):
        m, n = rng.integers(1, 4), 3
        A, c = rng.normal(size=(n, m)), rng.normal(size=m)
        improve = rng.normal(size=n) * 10.0 ** rng.uniform(-1.5, 0.5)
        delta = 0.5 * improve @ improve
        _, needed = shortest_step(A, c)
        move, _ = shortest_step(A, c + A.T @ improve)  # projection of the improved point
        projected = 0.5 * (improve + move) @ (improve + move)
        ratios.append(projected / (delta + needed))
        V_max = (np.maximum(c, 0.0) ** 2 / (2 * (A**2).sum(0))).max()
        fails = projected > (delta + V_max) * (1 + 1e-9)
        printed_fails, single = printed_fails + fails, single + (fails and m == 1)
    assert 0.99 < max(ratios) <= 1.0 + 1e-9
    assert printed_fails > 100 and single == 0  # for one constraint the printed form is right


# --- the linear programme over occupancy measures -------------------------------------------------


def occupancy_lp(P, r, costs, limits):
    """(J*, policy, multipliers): maximise sum rho r over stationary rho with sum rho C_i <= l_i."""
    S, A = r.shape
    flow = np.repeat(np.eye(S), A, 0).T - P.reshape(S * A, S).T  # out of s' minus into s'
    result = linprog(
        -r.ravel(),
        A_ub=costs.reshape(-1, S * A),
        b_ub=limits,
        A_eq=np.vstack([flow, np.ones(S * A)]),
        b_eq=[*np.zeros(S), 1.0],
        method="highs-ds",
    )
    assert result.success
    rho = result.x.reshape(S, A)
    return -result.fun, rho / rho.sum(-1, keepdims=True), -result.ineqlin.marginals


def two_state_cmdp():
    """State 0 pays 1 and leaves w.p. 0.5; in state 1, "slow" leaves w.p. 0.2, "fast" w.p. 0.9
    at cost 1."""
    P = np.array([[[0.5, 0.5], [0.5, 0.5]], [[0.2, 0.8], [0.9, 0.1]]])
    return P, np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([[0.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize("limit", [0.0, 0.05, 0.2, 0.3, 5 / 14, 0.5])
def test_lp_of_the_two_state_cmdp_has_the_closed_form(limit):
    P, r, C = two_state_cmdp()
    best, pi, multiplier = occupancy_lp(P, r, C[None], [limit])
    binding = min(limit, 5 / 14)
    assert best == pytest.approx(2 / 7 + binding)
    assert pi[1, 1] == pytest.approx(0.7 * binding / (0.5 - 0.7 * binding))
    if limit != 5 / 14:  # at the corner every multiplier in [0, 1] is right
        assert multiplier[0] == pytest.approx(1.0 if limit < 5 / 14 else 0.0)
    assert evaluate(P, pi, r).J == pytest.approx(best)
    assert evaluate(P, pi, C).J == pytest.approx(binding)


@pytest.mark.parametrize("m", [1, 2])
def test_lp_policy_attains_the_value_and_randomises_in_at_most_m_states(m):
    rng = np.random.default_rng(10)
    randomised = 0
    for _ in range(30):
        P, r, _ = (x[0] for x in random_mdps(rng, 1, 5, 3))
        costs = rng.uniform(size=(m, 5, 3))
        reference = rng.dirichlet(np.ones(3), 5)
        limits = np.array([evaluate(P, reference, C).J for C in costs])
        best, pi, multipliers = occupancy_lp(P, r, costs, limits)
        assert evaluate(P, pi, r).J == pytest.approx(best, abs=1e-9)
        values = np.array([evaluate(P, pi, C).J for C in costs])
        assert (values <= limits + 1e-9).all()
        assert ((pi > 1e-9).sum(-1) > 1).sum() <= m
        assert best >= evaluate(P, reference, r).J
        # complementary slackness, and no policy has more of r - mu'C than the optimum
        np.testing.assert_allclose(multipliers * (limits - values), 0.0, atol=1e-9)
        lagrangian = r - np.einsum("i,isa->sa", multipliers, costs)
        assert evaluate(P, pi, lagrangian).A.max() < 1e-8
        randomised += ((pi > 1e-9).sum(-1) > 1).sum()
    assert randomised > 5


# --- ACPO with exact gradients, by the functions of the training script ---------------------------


class Tabular:
    """A softmax policy with one logit per state and action."""

    def __init__(self, pi):
        self.theta = torch.nn.Parameter(torch.log(torch.as_tensor(pi)))

    def policy_parameters(self):
        return [self.theta]

    def policy(self):
        return torch.softmax(self.theta.detach(), -1).numpy()


def acpo(pi, P, r, costs, limits, updates=200, delta=0.01, t=0.75, adapt=True, shrink=0.97):
    """Exact ACPO: (J (n,), J_C (n, m), cases, accepted (n,), final policy), J before each update.

    H^-1 g = A_r and H^-1 a_i = A_{C_i}, so the Gram matrix is a mean of their products. With adapt,
    delta shrinks and the dual aims at limit - delta max |A_C|: the size of what the linear model
    leaves out. Without it, delta is fixed and the dual aims at the limit itself.
    """
    agent, rows = Tabular(pi), []
    for _ in range(updates):
        pi = agent.policy()
        values = [evaluate(P, pi, signal) for signal in (r, *costs)]
        d, A = values[0].d, np.stack([value.A for value in values])  # (1 + m, S, A)
        J_C = np.array([value.J for value in values[1:]])
        c, margin = J_C - limits, delta * np.abs(A[1:]).max((1, 2)) * adapt
        gram = np.einsum("s,sa,isa,jsa->ij", d, pi, A, A)
        lam, mu, case = solve_dual(gram[0, 0], gram[1:, 0], gram[1:, 1:], c + margin, delta)
        Hinv = torch.as_tensor(A.reshape(len(A), -1))
        if case == "recovery":
            x = recovery_step(Hinv[0], Hinv[1:].T, gram, c + margin, delta, t)
        else:
            x = torch.as_tensor(np.array([1.0, *-mu]) / lam) @ Hinv

        def surrogates(pi=pi, d=d, A=A):
            pi_new = agent.policy()
            L = np.einsum("s,sa,isa->i", d, pi_new, A)
            return L[0], L[1:], (d * kl(pi_new, pi)).sum()

        floor, ceiling = -np.inf if (c > 0.0).any() else 0.0, np.maximum(0.0, -c)
        accepted, *_ = line_search(agent, x, surrogates, floor, ceiling, delta, 0.75, 10)
        rows.append((values[0].J, J_C, case, accepted))
        delta *= shrink if adapt else 1.0
    J, J_C, cases, accepted = zip(*rows, strict=True)
    return np.array(J), np.array(J_C), cases, np.array(accepted), agent.policy()


@pytest.mark.parametrize("fast", [0.02, 0.5, 0.98])  # feasible, infeasible, far from feasible
def test_acpo_reaches_the_optimum_of_the_two_state_cmdp(fast):
    P, r, C = two_state_cmdp()
    start, limit = np.array([[0.5, 0.5], [1.0 - fast, fast]]), 0.2
    J, J_C, cases, accepted, pi = acpo(start, P, r, C[None], [limit], 60, adapt=False)
    assert (cases[0] == "recovery") == (fast > 0.1)
    assert J[-1] == pytest.approx(2 / 7 + 0.2, abs=1e-9)  # 0.485714
    assert J_C[-1, 0] == pytest.approx(0.2, abs=1e-9)
    assert pi[1, 1] == pytest.approx(7 / 18, abs=1e-9)  # 0.388889
    violated = J_C[:, 0] > limit
    if fast == 0.02:
        assert not (J_C[:, 0] > limit + 1e-3).any()  # once inside, it stays
        assert (np.diff(J) >= -1e-9).all()
    else:  # every update before the limit is reached lowers the cost, and it is reached for good
        reached = int(np.argmin(violated))
        assert violated[:reached].all() and (np.diff(J_C[: reached + 1, 0]) < 0.0).all()
        assert reached < 15 and (J_C[reached:, 0] <= limit + 1e-3).all()


def random_cmdp(seed, m):
    """(P, r, costs, limits) that some policy meets, and starts: uniform, costly, cheap."""
    rng = np.random.default_rng([12, seed, m])
    P, r, _ = (x[0] for x in random_mdps(rng, 1, 4, 3))
    costs, reference = rng.uniform(size=(m, 4, 3)), rng.dirichlet(np.ones(3), 4)
    limits = np.array([evaluate(P, reference, C).J for C in costs])
    free = np.full(m, 9.0)
    ends = [occupancy_lp(P, sign * costs.sum(0), costs, free)[1] for sign in (1.0, -1.0)]
    starts = [np.full((4, 3), 1 / 3), *(0.9 * end + 0.1 / 3 for end in ends)]
    return (P, r, costs, limits), starts


@pytest.mark.parametrize("m, t", [(1, 0.75), (2, 1.0)])
@pytest.mark.parametrize("seed", range(4))
def test_acpo_reaches_the_optimum_of_random_cmdps(seed, m, t):
    problem, starts = random_cmdp(seed, m)
    limits = problem[-1]
    best, _, _ = occupancy_lp(*problem)
    feasible = []
    for start in starts:
        J, J_C, *_ = acpo(start, *problem, t=t)
        assert best - J[0] > 0.05 and abs(J[-1] - best) < 1e-3
        assert (J_C[-100:] <= limits + 1e-6).all()
        feasible.append((J_C[0] <= limits).all())
    assert not feasible[1] and (feasible[2] or m == 2)  # the costly start, the cheap one


def test_acpo_with_a_fixed_radius_jams_on_the_boundary():
    """Along an active constraint a'x = -c = 0: any curvature of the surrogate fails the search."""
    problem, starts = random_cmdp(4, 1)
    best, _, multiplier = occupancy_lp(*problem)
    J, J_C, _, accepted, _ = acpo(starts[0], *problem, adapt=False)
    assert multiplier[0] > 0.1 and not accepted[-100:].any()
    assert best - J[-1] > 0.4 and abs(J_C[-1, 0] - problem[-1][0]) < 1e-3
    assert best - acpo(starts[0], *problem)[0][-1] < 1e-3
