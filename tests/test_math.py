"""The mathematics of acpo_continuous.py against exact answers."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from acpo_continuous import (
    Agent,
    compute_gae,
    conjugate_gradient,
    fisher_vector_product,
    flat,
    line_search,
    recovery_step,
    solve_dual,
    surrogate_gradients,
    surrogates,
)

torch.manual_seed(0)


# --- the dual ------------------------------------------------------------------------------------


def problem(rng, n=6, m=1, kind="random"):
    """(H, g, A (n, m), c, delta): a random linearised problem of the given kind."""
    root = rng.normal(size=(n, n))
    H = root @ root.T + 0.1 * np.eye(n)
    g, A = rng.normal(size=n), rng.normal(size=(n, m))
    delta = 10.0 ** rng.uniform(-4, -1)
    reach = np.sqrt(2 * delta * np.einsum("im,ij,jm->m", A, np.linalg.inv(H), A))
    c = reach * rng.uniform(-1.5, 1.2, size=m)
    if kind == "zero_c":
        c = np.zeros(m)
    elif kind == "parallel":
        g = A @ rng.uniform(0.5, 2.0, size=m) * rng.choice([-1, 1])
    elif kind == "duplicate" and m > 1:
        A[:, 1], c[1] = A[:, 0], c[0]
    elif kind == "contradictory" and m > 1:
        A[:, 1], c[0], c[1] = -A[:, 0], 0.3 * reach[0], 0.3 * reach[0]
    elif kind == "hair_feasible":
        c[0] = reach[0] * (1 - 1e-7)
    elif kind == "hair_infeasible":
        c[0] = reach[0] * (1 + 1e-7)
    elif kind == "no_cost_gradient":
        A[:, 0] = 0.0
    elif kind == "no_reward_gradient":
        g = np.zeros(n)
    # the units of g and of each (a, c) are arbitrary
    scales = 10.0 ** rng.uniform(-3, 3, size=m)
    return H, g * 10.0 ** rng.uniform(-3, 3), A * scales, c * scales, delta


def ours(H, g, A, c, delta):
    inverse = np.linalg.inv(H)
    v, w = inverse @ g, inverse @ A
    lam, mu, case = solve_dual(g @ v, A.T @ v, A.T @ w, c, delta)
    return None if case == "recovery" else (v - w @ mu) / lam, lam, mu, case


def reference(H, g, A, c, delta):
    """The same problem by SLSQP in the whitened space y = L'x / sqrt(2 delta), |y| <= 1.

    First the smallest |y| that meets the cost constraints decides whether there is a solution.
    Returns (x or None, smallest |y|).
    """
    L = np.linalg.cholesky(H)
    gw = np.linalg.solve(L, g)
    Aw = np.linalg.solve(L, A) * np.sqrt(2 * delta)
    norm = np.maximum(np.linalg.norm(Aw, axis=0), 1e-300)
    Aw, cw = Aw / norm, c / norm
    gw = gw / max(np.linalg.norm(gw), 1e-300)
    cost = {"type": "ineq", "fun": lambda y: -(cw + Aw.T @ y), "jac": lambda y: -Aw.T}
    start = np.zeros(len(g))
    low = minimize(
        lambda y: 0.5 * y @ y,
        start,
        jac=lambda y: y,
        constraints=[cost],
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 500},
    )
    met = (cw + Aw.T @ low.x <= 1e-8 * (1 + np.abs(cw))).all()
    shortest = np.linalg.norm(low.x) if met else np.inf
    if shortest > 1:
        return None, shortest
    ball = {"type": "ineq", "fun": lambda y: 1 - y @ y, "jac": lambda y: -2 * y}
    best = None
    for first in (low.x * 0.999, start, gw * 0.9):
        result = minimize(
            lambda y: -gw @ y,
            first,
            jac=lambda y: -gw,
            constraints=[cost, ball],
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 500},
        )
        y = result.x
        ok = (cw + Aw.T @ y <= 1e-7).all() and y @ y <= 1 + 1e-7
        if ok and (best is None or gw @ y > gw @ best):
            best = y
    return np.linalg.solve(L.T, best) * np.sqrt(2 * delta), shortest


KINDS = ("random", "zero_c", "parallel", "duplicate", "contradictory", "no_reward_gradient")


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 2, 3])
def test_dual_agrees_with_an_independent_solver(m):
    rng = np.random.default_rng(m)
    cases = []
    for trial in range(1020):
        kind = "random" if trial < 600 else KINDS[trial % len(KINDS)]
        H, g, A, c, delta = problem(rng, m=m, kind=kind)
        x, lam, mu, case = ours(H, g, A, c, delta)
        x_ref, shortest = reference(H, g, A, c, delta)
        cases.append(case)
        if abs(shortest - 1) < 1e-6:
            continue  # feasible or not by less than the reference's own precision
        assert (x is None) == (x_ref is None), (trial, kind, shortest)
        if x is None:
            continue
        size = np.sqrt(2 * delta * (g @ np.linalg.solve(H, g)))
        reach = np.sqrt(2 * delta * np.einsum("im,ij,jm->m", A, np.linalg.inv(H), A))
        assert g @ x >= g @ x_ref - 2e-5 * size, (trial, kind)  # as good as the reference
        assert 0.5 * x @ H @ x <= delta * (1 + 1e-6)
        assert (c + A.T @ x <= 1e-6 * (np.abs(c) + reach)).all()
    assert {"trust_region", "boundary", "recovery"} <= set(cases)
    assert min(cases.count(case) for case in set(cases)) > 50


@pytest.mark.parametrize("m", [1, 2, 3])
def test_dual_meets_the_conditions_of_optimality(m):
    """Stationarity holds by construction of x; here: complementary slackness and signs."""
    rng = np.random.default_rng(10 + m)
    active = 0
    for _ in range(1000):
        H, g, A, c, delta = problem(rng, m=m)
        x, lam, mu, case = ours(H, g, A, c, delta)
        if x is None:
            continue
        scale = np.sqrt(np.einsum("im,ij,jm->m", A, np.linalg.inv(H), A))
        gap = (c + A.T @ x) / (np.sqrt(2 * delta) * scale)
        assert lam > 0 and (mu >= 0).all()
        assert (gap <= 1e-7).all()
        np.testing.assert_allclose(
            gap * mu * scale / np.sqrt(g @ np.linalg.solve(H, g)), 0, atol=1e-6
        )
        np.testing.assert_allclose(0.5 * x @ H @ x, delta, rtol=1e-6)
        assert (case == "boundary") == bool((mu > 0).any())
        active += case == "boundary"
    assert active > 100


def test_dual_one_constraint_closed_form():
    """mu = max(0, (lam c + r) / s), PLUS r; the value of the dual is minus that of the primal."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        H, g, A, c, delta = problem(rng)
        x, lam, mu, case = ours(H, g, A, c, delta)
        inverse = np.linalg.inv(H)
        q, r, s = g @ inverse @ g, (A.T @ inverse @ g)[0], (A.T @ inverse @ A)[0, 0]
        if case == "recovery":
            assert c[0] > np.sqrt(2 * delta * s)
            continue
        np.testing.assert_allclose(
            mu[0], max(0.0, (lam * c[0] + r) / s), rtol=1e-6, atol=1e-9 * np.sqrt(q / s)
        )
        dual = -(q - 2 * r * mu[0] + mu[0] ** 2 * s) / (2 * lam) + mu[0] * c[0] - lam * delta
        np.testing.assert_allclose(dual, -g @ x, rtol=1e-6, atol=1e-9 * np.sqrt(2 * delta * q))
        # The KL term as printed in the paper, lam delta / 2, does not close the gap.
        assert abs(dual + 0.5 * lam * delta + g @ x) > 0.4 * lam * delta


def test_dual_edges():
    one, zero = np.ones(1), np.zeros(1)
    S = np.ones((1, 1))
    assert (
        solve_dual(1.0, zero, S, np.array([0.1415]), 0.01)[2] == "recovery"
    )  # sqrt(2 delta) = .14142
    assert solve_dual(1.0, zero, S, np.array([0.1414]), 0.01)[2] == "boundary"
    # c = 0 and the reward gradient raises the cost: stay on the edge
    lam, mu, case = solve_dual(1.0, 0.5 * one, S, zero, 0.01)
    assert case == "boundary" and mu[0] == pytest.approx(0.5)
    # no cost gradient: a plain trust-region step if c <= 0, nothing to be done if c > 0
    assert solve_dual(1.0, zero, 0 * S, -one, 0.01)[2] == "trust_region"
    assert solve_dual(1.0, zero, 0 * S, one, 0.01)[2] == "recovery"
    # no reward gradient: do nothing if feasible, else the shortest step that restores
    lam, mu, case = solve_dual(0.0, zero, S, -0.05 * one, 0.01)
    assert case == "trust_region" and mu[0] == 0
    lam, mu, case = solve_dual(0.0, zero, S, 0.05 * one, 0.01)
    assert case == "boundary" and -mu[0] / lam == pytest.approx(-0.05)
    # g = 2a: the answer is x = -(c/s) w, found through a tiny lam without losing it
    lam, mu, case = solve_dual(4.0, 2 * one, S, 0.05 * one, 0.01)
    assert case == "boundary" and (2 - mu[0]) / lam == pytest.approx(-0.05, rel=1e-6)
    # contradictory: a_2 = -a_1, both violated
    S2 = np.array([[1.0, -1.0], [-1.0, 1.0]])
    assert solve_dual(1.0, np.zeros(2), S2, np.full(2, 0.01), 0.01)[2] == "recovery"
    # by a hair
    for case_kind, wanted in (("hair_feasible", "boundary"), ("hair_infeasible", "recovery")):
        rng = np.random.default_rng(5)
        for _ in range(100):
            assert ours(*problem(rng, kind=case_kind))[3] == wanted


def test_dual_is_invariant_to_units():
    rng = np.random.default_rng(6)
    for m in (1, 2):
        for _ in range(200):
            H, g, A, c, delta = problem(rng, m=m)
            x = ours(H, g, A, c, delta)[0]
            y = ours(H, 1e3 * g, A * 1e-2, c * 1e-2, delta)[0]
            assert (x is None) == (y is None)
            if x is not None:
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7 * np.abs(x).max())


# --- recovery ------------------------------------------------------------------------------------


def recover(H, g, A, c, delta, t):
    inverse = np.linalg.inv(H)
    B = np.column_stack([g, A])
    gram = B.T @ inverse @ B
    Hinv = torch.as_tensor(inverse @ B)
    return recovery_step(Hinv[:, 0], Hinv[:, 1:], gram, c, delta, t).numpy(), gram


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_recovery_kl_and_first_order_changes(t):
    rng = np.random.default_rng(7)
    for _ in range(200):
        H, g, A, c, delta = problem(rng)
        x, gram = recover(H, g, A, np.abs(c), delta, t)
        q, r, s = gram[0, 0], gram[0, 1], gram[1, 1]
        rho = r / np.sqrt(q * s)
        kl = delta * (t**2 + (1 - t) ** 2 + 2 * t * (1 - t) * rho)
        np.testing.assert_allclose(0.5 * x @ H @ x, kl, rtol=1e-6, atol=1e-12 * delta)
        root = np.sqrt(2 * delta)
        np.testing.assert_allclose(
            A[:, 0] @ x,
            -root * np.sqrt(s) * (t + (1 - t) * rho),
            rtol=1e-6,
            atol=1e-9 * root * np.sqrt(s),
        )
        np.testing.assert_allclose(
            g @ x, -root * np.sqrt(q) * (t * rho + 1 - t), rtol=1e-6, atol=1e-9 * root * np.sqrt(q)
        )


def test_recovery_with_two_constraints_is_the_shortest_way():
    rng = np.random.default_rng(8)
    for _ in range(100):
        H, g, A, c, delta = problem(rng, m=2)
        c = np.abs(c)
        x, gram = recover(H, g, A, c, delta, 1.0)
        np.testing.assert_allclose(0.5 * x @ H @ x, delta, rtol=1e-6)
        scale = np.sqrt(np.diag(gram)[1:])
        S, d = gram[1:, 1:] / np.outer(scale, scale), c / scale  # the dual of the shortest step
        best = minimize(
            lambda mu, S=S, d=d: 0.5 * mu @ S @ mu - mu @ d,
            np.ones(2),
            jac=lambda mu, S=S, d=d: S @ mu - d,
            bounds=[(0, None)] * 2,
            options={"ftol": 1e-15, "gtol": 1e-10},
        )
        wanted = -np.linalg.solve(H, A) @ (best.x / scale)
        cosine = wanted @ H @ x / np.sqrt(wanted @ H @ wanted * (x @ H @ x))
        assert cosine > 1 - 1e-6


def test_recovery_without_cost_gradient_does_nothing():
    zero = torch.zeros(3)
    x = recovery_step(torch.ones(3), torch.zeros(3, 1), np.diag([1.0, 0.0]), np.ones(1), 0.01, 0.75)
    assert torch.equal(x, zero.double()) or torch.equal(x, zero)


# --- Fisher matrix, conjugate gradient, gradients ------------------------------------------------


@pytest.fixture
def agent():
    torch.manual_seed(1)
    agent = Agent(3, 2, 1, (5, 4), -0.4)
    with torch.no_grad():
        agent.log_std += torch.tensor([0.3, -0.2])
        agent.actor_mean[-1].weight *= 30
    return agent


def test_fisher_vector_product_is_the_hessian_of_the_kl(agent):
    obs = torch.randn(40, 3, dtype=torch.float64)
    parameters = agent.policy_parameters()
    mean_k, std_k = (x.detach() for x in agent.policy(obs))
    mean, std = agent.policy(obs)
    var = (std / std_k) ** 2
    kl = 0.5 * (var + ((mean - mean_k) / std_k) ** 2 - 1 - torch.log(var)).sum(-1).mean()
    gradient = flat(torch.autograd.grad(kl, parameters, create_graph=True))
    assert kl.item() == 0 and gradient.abs().max() < 1e-15
    hessian = torch.stack(
        [flat(torch.autograd.grad(row, parameters, retain_graph=True)) for row in gradient]
    )
    identity = torch.eye(len(hessian), dtype=torch.float64)
    for damping in (0.0, 0.1):
        fvp = fisher_vector_product(agent, obs, damping)
        product = torch.stack([fvp(column) for column in identity])
        torch.testing.assert_close(product, hessian + damping * identity, rtol=1e-10, atol=1e-12)


def test_fisher_vector_product_is_gauss_newton(agent):
    obs = torch.randn(20, 3, dtype=torch.float64)
    weights = list(agent.actor_mean.parameters())
    mean, std = agent.policy(obs)
    J = torch.stack(
        [flat(torch.autograd.grad(y, weights, retain_graph=True)) for y in mean.flatten()]
    )
    precision = (std.detach() ** -2).repeat(20)
    fisher = torch.block_diag(J.T @ (precision[:, None] * J) / 20, 2 * torch.eye(2, dtype=J.dtype))
    v = torch.randn(len(fisher), dtype=torch.float64)
    torch.testing.assert_close(fisher_vector_product(agent, obs, 0.0)(v), fisher @ v)


@pytest.mark.parametrize("damping", [0.01, 0.1, 1.0])
def test_what_noise_alone_makes_of_q(agent, damping):
    """Advantages that know nothing of the actions still give q = tr(H (H + damping)^-1) / n.

    Where q is not well above it, the step is mostly noise.
    """
    n, draws, repeats = 300, 60, 10
    obs = torch.randn(n, 3, dtype=torch.float64)
    mean, std = (x.detach() for x in agent.policy(obs))
    damped = torch.stack(
        [fisher_vector_product(agent, obs, damping)(e) for e in torch.eye(56, dtype=torch.float64)]
    )
    H = damped - damping * torch.eye(56)
    expected = torch.trace(torch.linalg.solve(damped, H)).item() / n
    q = []
    for _ in range(repeats):
        noise = torch.randn(n, draws, dtype=torch.float64)
        g = surrogate_gradients(agent, obs, mean + std * torch.randn_like(mean), noise)
        q += (g * torch.linalg.solve(damped, g.T).T).sum(1).tolist()
    assert np.mean(q) == pytest.approx(expected, rel=0.08)


def test_conjugate_gradient_against_a_direct_solve():
    rng = np.random.default_rng(0)
    for n, scale in itertools.product((1, 5, 30), (1e-8, 1.0, 1e8)):
        root = rng.normal(size=(n, n))
        H = torch.as_tensor(root @ root.T + np.eye(n))
        b = torch.as_tensor(scale * rng.normal(size=n))
        x = conjugate_gradient(lambda v, H=H: H @ v, b, 4 * n)
        torch.testing.assert_close(x, torch.linalg.solve(H, b), rtol=1e-6, atol=1e-8 * scale)
    assert torch.equal(conjugate_gradient(lambda v: v, torch.zeros(3), 10), torch.zeros(3))


def test_conjugate_gradient_stops_at_negative_curvature():
    H = torch.diag(torch.tensor([1.0, -1.0]))
    x = conjugate_gradient(lambda v: H @ v, torch.tensor([1.0, 2.0]), 10)
    assert torch.equal(x, torch.zeros(2))  # the first direction has curvature -3


def test_surrogate_gradients_are_those_of_the_surrogates(agent):
    obs, actions = torch.randn(30, 3).double(), torch.randn(30, 2).double()
    advantages = torch.randn(30, 3).double()
    theta_k = tuple(x.detach() for x in agent.policy(obs))
    gradients = surrogate_gradients(agent, obs, actions, advantages)
    parameters = agent.policy_parameters()
    start = flat(parameters).detach().clone()
    direction = torch.randn_like(start)
    values = []
    for sign in (1, -1):
        torch.nn.utils.vector_to_parameters(start + sign * 1e-5 * direction, parameters)
        L_r, L_c, _ = surrogates(agent, obs, actions, advantages, *theta_k)
        values.append(np.array([L_r, *L_c]))
    slope = (values[0] - values[1]) / 2e-5
    np.testing.assert_allclose(slope, (gradients @ direction).numpy(), rtol=1e-6, atol=1e-9)


def test_surrogates_start_at_ratio_one_and_kl_zero(agent):
    obs, actions = torch.randn(30, 3).double(), torch.randn(30, 2).double()
    advantages = torch.randn(30, 2).double()
    theta_k = tuple(x.detach() for x in agent.policy(obs))
    L_r, L_c, kl = surrogates(agent, obs, actions, advantages, *theta_k)
    np.testing.assert_allclose([L_r, *L_c], advantages.mean(0), rtol=1e-14)
    assert kl == 0.0
    # against torch's own KL(new || old)
    old = torch.distributions.Normal(*theta_k)
    with torch.no_grad():
        for p in agent.policy_parameters():
            p += 0.05 * torch.randn_like(p)
    new = torch.distributions.Normal(*agent.policy(obs))
    exact = torch.distributions.kl_divergence(new, old).sum(-1).mean().item()
    _, _, kl = surrogates(agent, obs, actions, advantages, *theta_k)
    assert kl == pytest.approx(exact, rel=1e-12) and kl > 1e-3


# --- GAE -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rho", "gamma"), [("mean", 1.0), (0.0, 0.9)])
def test_gae_against_the_written_out_sum(rho, gamma):
    rng = np.random.default_rng(2)
    T, N, lam = 12, 3, 0.9
    rewards, values, next_values = (torch.as_tensor(x) for x in rng.normal(size=(3, T, N)))
    dones = torch.as_tensor((rng.random((T, N)) < 0.2).astype(float))
    rho = rewards.mean() if rho == "mean" else rho
    got = compute_gae(rewards, values, next_values, dones, rho, gamma, lam)
    for n in range(N):
        for t in range(T):
            total, weight = 0.0, 1.0
            for k in range(t, T):
                delta = rewards[k, n] - rho + gamma * next_values[k, n] - values[k, n]
                total += weight * delta
                weight *= gamma * lam
                if dones[k, n]:
                    break
            assert got[t, n].item() == pytest.approx(float(total), rel=1e-12, abs=1e-12)


def test_gae_columns_have_their_own_rho_and_lambda():
    x, v, w = (torch.randn(8, 2, 3).double() for _ in range(3))
    dones = torch.zeros(8, 2, 1).double()
    dones[4, 1] = 1
    rho, lam = torch.tensor([0.1, 0.2, 0.3]).double(), torch.tensor([0.5, 0.9, 0.0]).double()
    joint = compute_gae(x, v, w, dones, rho, 1.0, lam)
    for k in range(3):
        alone = compute_gae(x[..., k], v[..., k], w[..., k], dones[..., 0], rho[k], 1.0, lam[k])
        torch.testing.assert_close(joint[..., k], alone)


def test_gae_is_blind_to_a_constant_in_the_bias():
    rewards, values = torch.randn(10, 4).double(), torch.randn(11, 4).double()
    dones = torch.zeros(10, 4).double()
    args = rewards.mean(), 1.0, 0.95
    plain = compute_gae(rewards, values[:-1], values[1:], dones, *args)
    shifted = compute_gae(rewards, values[:-1] + 7, values[1:] + 7, dones, *args)
    torch.testing.assert_close(plain, shifted)


# --- line search ---------------------------------------------------------------------------------


def test_line_search_restores_bit_for_bit(agent):
    before = [p.clone() for p in agent.policy_parameters()]
    x = torch.randn(len(flat(before))).double()
    for bad in (
        (-1.0, [0.0], 0.0),
        (1.0, [0.1], 0.0),
        (1.0, [0.0], 1.0),
        (np.nan, [np.nan], np.nan),
        (np.inf, [0.0], 0.0),
    ):
        verdict = (bad[0], np.array(bad[1]), bad[2])
        accepted, backtracks, *_ = line_search(
            agent, x, lambda v=verdict: v, 0.0, np.array([0.05]), 0.01, 0.75, 10
        )
        assert not accepted and backtracks == 11
        assert all(
            torch.equal(a, b) for a, b in zip(before, agent.policy_parameters(), strict=True)
        )


def test_line_search_rules(agent):
    start = flat(agent.policy_parameters()).detach().clone()
    x = torch.full_like(start, 1e-3)

    def search(floor, ceiling, verdicts):
        torch.nn.utils.vector_to_parameters(start, agent.policy_parameters())
        answers = iter(verdicts)
        rules = floor, np.array([ceiling]), 0.01, 0.5, 5
        return line_search(agent, x, lambda: next(answers), *rules)

    ok = (1.0, np.array([0.0]), 0.01)
    accepted, backtracks, *_ = search(
        0.0, 0.1, [(1.0, np.array([0.0]), 0.02), (-1e-9, np.array([0.0]), 0.0), ok]
    )
    assert accepted and backtracks == 2
    torch.testing.assert_close(flat(agent.policy_parameters()).detach(), start + 0.25 * x)
    assert search(0.0, 0.1, [(1.0, np.array([0.1]), 0.0)])[1] == 0
    assert search(-np.inf, 0.0, [(1.0, np.array([1e-9]), 0.0), ok])[1] == 1
    assert search(-np.inf, 0.0, [(-1.0, np.array([-1e-9]), 0.0)])[1] == 0
