"""ATRPO with a Lagrangian: average-reward TRPO (Zhang and Ross, ICML 2021), in one file.

In a never-ending task, maximise the average reward per step J(pi) subject to an average cost per
step J_C(pi) <= l. With the bias V, the advantage A(s,a) = r - J + E V(s') - V(s), the gradients g
and a of the reward and the cost surrogate, the Fisher matrix H and c = J_C - l, an update follows
a mixture of both, with a fixed weight ell as in the ACPO paper. Its objective

    (1 - ell) g'x - ell [c + a'x + 0.5 x'Hx - delta]                                 [ACPO eq.23]

has the maximiser x = H^-1 ((1 - ell) g - ell a) / ell, shortened to 0.5 x'Hx <= delta.
The limit l is a constant in it: a fixed ell does not know the limit. With `--adaptive` the
multiplier mu = ell / (1 - ell) rises and falls with the measured violation instead.

    python atrpo_lagrangian.py --env-id PointCircle --adaptive

Differs from acpo_continuous.py in the update (lines marked "LAG:"): one mixed advantage in place of
two constraints. Page: docs/atrpo_lagrangian.md.
"""

import io
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
import torch.nn as nn

import envs


@dataclass
class Args:
    env_id: str = "PointGather"  # one of ours (see envs/) or package.module:EnvId with info["cost"]
    seed: int = 1  # of networks, actions and environments
    total_timesteps: int = 0  # environment steps, all together (0: what the task recommends)
    num_envs: int = 0  # environments side by side (0: what the environment recommends)
    batch_size: int = 4096  # environment steps per policy update
    cost_limit: tuple[float, ...] = ()  # l per step and constraint (empty: the environment's own)
    gae_lambda: float = 0.9  # GAE parameter of the reward advantage
    cost_gae_lambda: float = 0.9  # GAE parameter of the cost advantages
    delta: float = 0.04  # KL trust-region radius (nats)
    ell: float | None = None  # cost weight (None: AntCircle .6, AntGather .45, Grid .45, else .5)
    adaptive: bool = False  # learn the multiplier ell / (1 - ell) from the measured cost
    multiplier_rate: float = 0.5  # with --adaptive: its change per update and relative violation
    fisher_samples: int = 1024  # states of the batch on which H is computed
    cg_iterations: int = 10  # conjugate-gradient iterations per linear system
    cg_damping: float | None = None  # added to the diagonal of H (None: what the task recommends)
    backtrack_coef: float = 0.75  # factor on the step per line-search trial
    backtrack_iterations: int = 10  # trials after the full step
    critic_learning_rate: float = 2e-3  # Adam step size of the critics
    critic_epochs: int = 5  # passes over the batch per update
    critic_minibatch: int = 256  # samples per critic step
    hidden_sizes: tuple[int, ...] = (64, 32)  # tanh layers of the policy and of each critic
    log_std_init: float = -0.5  # initial log standard deviation of the policy (action units)
    log_std_min: float = -2.0  # its floor
    eval_every: int = 40  # iterations between evaluations (0: never)
    eval_episodes: int = 10  # trajectories per evaluation
    eval_steps: int = 1000  # steps per trajectory
    save_every: int = 1  # iterations between checkpoints (0: only at the end)
    resume: str = ""  # folder of a run to go on with; its flags are then the defaults
    capture_video: bool = False  # write video.gif of the final policy
    track: bool = False  # log to Weights & Biases too (pip install wandb)
    run_dir: str = "runs"  # where the folder of this run is made
    device: str = "cpu"  # torch device of the networks


class Critics(nn.Module):
    """k networks of one output side by side, (n, inputs) -> (n, k): one product a layer for all."""

    def __init__(self, k: int, inputs: int, hidden: tuple[int, ...]):
        super().__init__()
        layers = [*zip(*(mlp(inputs, hidden, 1, gain=1.0)[::2] for _ in range(k)), strict=True)]
        stacks = [torch.stack([part.weight.detach().T for part in layer]) for layer in layers]
        self.weights = nn.ParameterList(stacks)  # (k, in, out) each
        self.biases = nn.ParameterList(torch.zeros(k, 1, W.shape[-1]) for W in stacks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(len(self.biases[0]), 1, 1)  # a copy: products of an expanded one are slow
        for i, (W, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(b, torch.tanh(x) if i else x, W)
        return x[..., 0].T


class Agent(nn.Module):
    """A Gaussian policy, a critic of the reward and one of each of the m costs; they share nothing.

    The policy is in float64, as its update subtracts nearly equal numbers; the critics in float32.
    Where reward and costs stand in one tensor, column 0 is the reward and 1 .. m are the costs.
    """

    def __init__(self, obs_size: int, act_size: int, m: int, hidden: tuple, log_std: float):
        super().__init__()
        self.actor_mean = mlp(obs_size, hidden, act_size, gain=0.01).double()
        self.log_std = nn.Parameter(torch.full((act_size,), log_std, dtype=torch.float64))
        self.critics = Critics(1 + m, obs_size, hidden)
        self.register_buffer("value_scale", torch.ones(1 + m))  # unit of the critics' outputs
        self.register_buffer("obs_count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("obs_mean", torch.zeros(obs_size, dtype=torch.float64))
        self.register_buffer("obs_square", torch.ones(obs_size, dtype=torch.float64))

    def normalize(self, obs: np.ndarray) -> torch.Tensor:
        obs = torch.as_tensor(obs, dtype=torch.float64, device=self.obs_mean.device)
        variance = (self.obs_square - self.obs_mean**2).clamp(min=0.0)
        return ((obs - self.obs_mean) / torch.sqrt(variance + 1e-8)).clamp(-10.0, 10.0)

    def update_normalizer(self, obs: torch.Tensor) -> None:
        """Merge raw observations (n, obs) into the running moments."""
        self.obs_count += len(obs)
        self.obs_mean.lerp_(obs.mean(0), len(obs) / self.obs_count)
        self.obs_square.lerp_(obs.square().mean(0), len(obs) / self.obs_count)

    def policy(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean (n, act) and standard deviation (act,) of the action."""
        return self.actor_mean(obs), self.log_std.exp()

    def policy_parameters(self) -> list[nn.Parameter]:
        return [*self.actor_mean.parameters(), self.log_std]

    def values(self, obs: torch.Tensor) -> torch.Tensor:
        """(n, 1 + m): V of the reward and V_C of the costs, in raw units; obs in float32."""
        return self.critics(obs) * self.value_scale


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int, gain: float) -> nn.Sequential:
    layers, sizes = [], (inputs, *hidden, outputs)
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
        nn.init.orthogonal_(layers[-2].weight, gain if i == len(hidden) else np.sqrt(2))
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


def compute_gae(rewards, values, next_values, dones, rho, gamma, lam):
    """Advantages (T, N) or (T, N, k): A_t = delta_t + gamma lam A_{t+1}, cut at dones. [ACPO eq.22]

    delta_t = r_t - rho + gamma V(s_{t+1}) - V(s_t). Average criterion: rho = batch mean, gamma = 1;
    discounted: rho = 0, gamma < 1. rho and lam may differ by column.
    """
    deltas = rewards - rho + gamma * next_values - values
    keep = gamma * lam * (1.0 - dones)
    advantages, last = torch.zeros_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = last = deltas[t] + keep[t] * last
    return advantages


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def surrogate_gradients(agent: Agent, obs, actions, advantages) -> torch.Tensor:
    """(k, parameters): the gradient of mean[ratio A] at ratio 1 for each column of advantages."""
    parameters = agent.policy_parameters()
    mean, std = agent.policy(obs)
    log_prob = -(0.5 * ((actions - mean) / std) ** 2 + agent.log_std).sum(-1)
    losses = log_prob @ advantages / len(obs)
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    return torch.stack([flat(row) for row in rows])


def fisher_vector_product(agent: Agent, obs: torch.Tensor, damping: float) -> Callable:
    """Returns v -> (H + damping I) v, with H the mean Fisher matrix of the policy over obs.

    For a Gaussian H = J' diag(1 / sigma^2) J / n, J the Jacobian of the mean, and 2 on the diagonal
    for log sigma. J v comes from differentiating J'u, which is linear in u, along v.
    """
    weights = list(agent.actor_mean.parameters())
    mean = agent.actor_mean(obs)
    u = torch.zeros_like(mean, requires_grad=True)
    Jt_u = flat(torch.autograd.grad(mean, weights, u, create_graph=True))
    precision = torch.exp(-2.0 * agent.log_std.detach()) / len(obs)

    def fvp(v: torch.Tensor) -> torch.Tensor:
        (J_v,) = torch.autograd.grad(Jt_u, u, v[: len(Jt_u)], retain_graph=True)
        H_v = flat(torch.autograd.grad(mean, weights, precision * J_v, retain_graph=True))
        return torch.cat([H_v, 2.0 * v[len(Jt_u) :]]) + damping * v

    return fvp


def conjugate_gradient(fvp: Callable, b: torch.Tensor, iterations: int, tol: float = 1e-10):
    """x with fvp(x) = b, up to a residual of tol |b|."""
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    rr = residual @ residual
    stop = tol**2 * rr
    for _ in range(iterations):
        if rr <= stop:
            break
        H_d = fvp(direction)
        curvature = direction @ H_d
        if curvature <= 0.0:  # H is not positive along this direction: keep what we have
            break
        alpha = rr / curvature
        x += alpha * direction
        residual -= alpha * H_d
        rr, rr_old = residual @ residual, rr
        direction = residual + (rr / rr_old) * direction
    return x


def mixed_step(Hinv_g: torch.Tensor, q: float, ell: float, delta: float) -> torch.Tensor:
    """The maximiser H^-1 g / ell of g'x - ell 0.5 x'Hx, shortened to 0.5 x'Hx <= delta.

    g = (1 - ell) g_r - ell a is the gradient of the mixed surrogate, q = g'H^-1 g. [ACPO eq.23]
    """
    return Hinv_g * min(1.0 / max(ell, 1e-12), np.sqrt(2.0 * delta / max(q, 1e-300)))


def update_multiplier(mu: float, c: np.ndarray, limit: np.ndarray, rate: float) -> float:
    """Gradient ascent on the multiplier: mu + rate c / l, never below 0. c, l: cost per step."""
    return max(0.0, mu + rate * (c / np.maximum(limit, 1e-6)).max().item())


@torch.no_grad()
def surrogates(agent: Agent, obs, actions, advantages, mean_k, std_k) -> tuple:
    """(L_r, L_c (m,), KL): mean[ratio A] and the mean KL(new || old) from theta_k. [ACPO eq.10]"""
    mean, std = agent.policy(obs)
    z, z_k = (actions - mean) / std, (actions - mean_k) / std_k
    ratio = torch.exp((0.5 * (z_k**2 - z**2) + torch.log(std_k / std)).sum(-1))
    L = (ratio @ advantages / len(ratio)).cpu().numpy()
    var = (std / std_k) ** 2
    kl = 0.5 * (var + ((mean - mean_k) / std_k) ** 2 - 1.0 - torch.log(var)).sum(-1).mean()
    return L[0], L[1:], kl.item()


def line_search(agent: Agent, x, surrogates: Callable, floor, ceiling, delta, coef, trials):
    """Shorten x until L_r >= floor, L_c <= ceiling and KL <= delta; if never, restore the policy.

    It is restored bit for bit. Returns (accepted, backtracks, L_r, L_c, KL).
    """
    parameters = agent.policy_parameters()
    start = flat(parameters).detach().clone()
    for j in range(trials + 1):
        nn.utils.vector_to_parameters(start + coef**j * x, parameters)
        L_r, L_c, kl = surrogates()
        finite = np.isfinite([L_r, *L_c, kl]).all()
        if finite and L_r >= floor and (L_c <= ceiling).all() and kl <= delta:
            return True, j, L_r, L_c, kl
    nn.utils.vector_to_parameters(start, parameters)
    return False, trials + 1, 0.0, np.zeros(len(L_c)), 0.0


@torch.no_grad()
def evaluate(agent: Agent, env, episodes: int, steps: int, seed: int, deterministic: bool):
    """Average reward (episodes,) and costs (episodes, m) per step, from the start state."""
    generator = torch.Generator().manual_seed(seed)  # the training's random numbers stay untouched
    averages = []
    for first in range(0, episodes, env.num_envs):
        obs, _ = env.reset(seed=seed + first)
        total = 0.0
        for _ in range(steps):
            mean, std = agent.policy(agent.normalize(obs))
            noise = 0.0 if deterministic else torch.randn(mean.shape, generator=generator).to(std)
            obs, rewards, _, _, infos = env.step((mean + std * noise).cpu().numpy())
            rewards = infos.get("raw_reward", rewards)
            total = total + np.column_stack([rewards, infos["cost"].reshape(env.num_envs, -1)])
        averages.append(total / steps)
    averages = np.concatenate(averages)[:episodes]
    return averages[:, 0], averages[:, 1:]


def save_checkpoint(folder: str, state: dict) -> None:
    """Written beside the last one, which is kept as checkpoint.prev.pt, and then renamed."""
    path, data = f"{folder}/checkpoint", io.BytesIO()
    torch.save(state, data)  # not into the file: a full disk would give no OSError
    with open(f"{path}.tmp", "wb") as file:
        file.write(data.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    if os.path.exists(f"{path}.pt"):
        os.replace(f"{path}.pt", f"{path}.prev.pt")
    os.replace(f"{path}.tmp", f"{path}.pt")


def load_checkpoint(folder: str) -> dict | None:
    """What to go on from; None where the run was stopped before its first checkpoint."""
    paths = (f"{folder}/checkpoint.pt", f"{folder}/checkpoint.prev.pt")
    for path in filter(os.path.exists, paths):
        try:
            state = torch.load(path, "cpu", weights_only=True)  # never executes code
            return state | {k: state[k] for k in ("iteration", "args", "agent", "optimizer", "env")}
        except Exception as error:
            why = f"cannot be read ({type(error).__name__}); checkpoint.prev.pt is the one before"
            envs.refuse("resume", path, why)
    return None


def main(args: Args, stop: list[int] | tuple = ()) -> str:
    """Train; returns the folder of the run. A signal number in stop ends it after an iteration."""
    env, eval_env, limit = envs.make_pair(args)
    torch.set_num_threads(1)  # the matrices are small, and the physics uses the other cores
    torch.manual_seed(args.seed)
    m, num_envs, num_steps = len(limit), env.num_envs, args.batch_size // env.num_envs
    obs_size, act_size = env.single_observation_space.shape[0], env.single_action_space.shape[0]
    agent = Agent(obs_size, act_size, m, args.hidden_sizes, args.log_std_init).to(args.device)
    optimizer = torch.optim.Adam(agent.critics.parameters(), args.critic_learning_rate, fused=True)
    to_device = partial(torch.as_tensor, dtype=torch.float64, device=args.device)

    # A new run, or one that goes on where its last checkpoint was written
    log = envs.Log(args, __file__)
    state = {"iteration": 0, "seconds": 0.0, "cumulative_cost": 0.0, "mu": 0.0}
    state |= {"L_c": np.nan, "rho_c": np.nan, "env": None}
    saved = load_checkpoint(log.folder) if args.resume else None
    if saved:
        state = saved
        log.same_flags(state["args"])
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
    if state["env"] is not None:
        envs.restore(env, state["env"])
        obs = state["obs"].numpy()
    else:
        obs, _ = env.reset()
        if saved:
            print(f"{args.env_id} has no get_state: the run goes on with new episodes")
    log.begin(state["iteration"], state["seconds"])

    # Storage of one batch, filled in place
    raw_obs, raw_next_obs = np.zeros((2, num_steps, num_envs, obs_size), np.float32)
    actions, means = np.zeros((2, num_steps, num_envs, act_size))
    signals = np.zeros((num_steps, num_envs, 1 + m))  # reward, costs
    raw_rewards, dones = np.zeros((2, num_steps, num_envs))
    own = {"AntCircle": 0.6, "AntGather": 0.45, "Grid": 0.45}.get(args.env_id, 0.5)  # the paper's
    ell, mu = own if args.ell is None else args.ell, 0.0
    lambdas = to_device([args.gae_lambda] + [args.cost_gae_lambda] * m)

    iterations = args.total_timesteps // args.batch_size
    for iteration in range(state["iteration"] + 1, iterations + 1):
        # Rollout: one forward pass per vector step; the observation statistics stand still.
        clock = time.perf_counter()
        noise = torch.randn(num_steps, num_envs, act_size, dtype=torch.float64).to(args.device)
        for t in range(num_steps):
            raw_obs[t] = obs
            log.finite(f"{args.env_id} gave", obs)  # else the action would be NaN too
            with torch.no_grad():
                mean, std_k = agent.policy(agent.normalize(obs))
            means[t], actions[t] = mean.cpu(), (mean + std_k * noise[t]).cpu()
            obs, rewards, terminated, truncated, infos = env.step(actions[t])  # clips by itself
            signals[t, :, 0], signals[t, :, 1:] = rewards, infos["cost"].reshape(num_envs, m)
            raw_rewards[t] = infos.get("raw_reward", rewards)  # without shaping
            raw_next_obs[t] = np.where(terminated[:, None], obs, infos["final_obs"])
            # ACPO: V is not 0 at an end: a termination is a transition to the reset state. A
            # truncation cuts the sum of eq.22 and bootstraps from where the chain would have gone.
            dones[t] = truncated
        log.finite(f"{args.env_id} gave", raw_next_obs, signals)
        rollout_time = time.perf_counter() - clock

        # Advantages, by the critics as they were before this batch
        clock = time.perf_counter()
        b_obs, b_next_obs = (agent.normalize(x).flatten(0, 1) for x in (raw_obs, raw_next_obs))
        with torch.no_grad():
            b_values, b_next_values = agent.values(b_obs.float()), agent.values(b_next_obs.float())
        values, next_values = b_values.view(signals.shape), b_next_values.view(signals.shape)
        rho = to_device(signals).mean((0, 1))
        criterion = rho, 1.0, lambdas  # ACPO: subtract the averages of the batch, do not discount
        chain = to_device(signals), values, next_values, to_device(dones)[..., None]
        advantages = compute_gae(*chain, *criterion).flatten(0, 1)
        targets = advantages + b_values
        targets -= targets.mean(0)  # ACPO: V is defined up to a constant; do not let it drift
        explained = 1.0 - (targets - b_values).var(0) / targets.var(0)
        advantages -= advantages.mean(0)
        c = (rho_c := rho[1:].cpu().numpy()) - limit

        # Policy
        b_actions, b_means = (to_device(x.reshape(-1, act_size)) for x in (actions, means))
        every = max(1, args.batch_size // args.fisher_samples)  # steps, of all environments
        b_fisher = b_obs.view(num_steps, num_envs, -1)[::every].flatten(0, 1)
        fvp = fisher_vector_product(agent, b_fisher, args.cg_damping)
        if args.adaptive:
            mu = update_multiplier(state["mu"], c, limit, args.multiplier_rate)
            ell = mu / (1.0 + mu)
        # LAG: mixed in raw units: standardised apart, the weights would drift
        mixed = (1.0 - ell) * advantages[:, 0] - ell * advantages[:, 1:].sum(1)
        (g,) = surrogate_gradients(agent, b_obs, b_actions, mixed[:, None])
        Hinv_g = conjugate_gradient(fvp, g, args.cg_iterations)
        q = (g @ Hinv_g).item()
        x = mixed_step(Hinv_g, q, ell, args.delta)
        promise = partial(surrogates, agent, b_obs, b_actions, mixed[:, None], b_means, std_k)
        rules = 0.0, np.inf, args.delta  # LAG: no constraint
        search = *rules, args.backtrack_coef, args.backtrack_iterations
        accepted, backtracks, _, _, kl = line_search(agent, x, promise, *search)
        L_r, L_c, _ = surrogates(agent, b_obs, b_actions, advantages, b_means, std_k)
        agent.log_std.data.clamp_(min=args.log_std_min)

        # Critics
        agent.value_scale.lerp_(targets.std(0).float() + 1e-6, 1.0 / iteration)
        f_obs, f_targets = b_obs.float(), targets.float()
        for _ in range(args.critic_epochs):
            for mb_inds in torch.randperm(args.batch_size).split(args.critic_minibatch):
                errors = (agent.values(f_obs[mb_inds]) - f_targets[mb_inds]) / agent.value_scale
                losses = errors.square().mean(0)
                optimizer.zero_grad()
                losses.sum().backward()
                optimizer.step()
        agent.update_normalizer(to_device(raw_obs).flatten(0, 1))
        log.finite("the update gave", *agent.state_dict().values())
        update_time = time.perf_counter() - clock

        # Evaluation of the mean action, as in the paper, and of the policy that is constrained
        clock = time.perf_counter()
        row = {}
        for kind, deterministic in (("eval/avg", True), ("eval/stochastic_avg", False)):
            e_r, e_c = np.full((2, 1, 1), np.nan)
            if args.eval_every and (iteration % args.eval_every == 0 or iteration == iterations):
                sizes = args.eval_episodes, args.eval_steps, args.seed * 1_000_000 + 500_000
                e_r, e_c = evaluate(agent, eval_env, *sizes, deterministic)
                log.finite(f"{args.env_id} gave in the evaluation", e_r, e_c)
            row |= {f"{kind}_reward": e_r.mean(), f"{kind}_reward_std": e_r.std()}
            row |= {f"{kind}_cost": e_c[:, 0].mean(), f"{kind}_cost_std": e_c[:, 0].std()}
        eval_time = time.perf_counter() - clock

        # Log; with several constraints the tags show the first
        step = iteration * args.batch_size
        total_cost = state["cumulative_cost"] + signals[..., 1].sum().item()
        # fmt: off
        row |= {
            "charts/avg_reward": raw_rewards.mean(), "charts/avg_cost": rho_c[0],
            "charts/cost_limit": limit[0], "charts/cumulative_cost": total_cost,
            "losses/surrogate_r": L_r, "losses/surrogate_c": L_c[0], "losses/kl": kl,
            "losses/value_r": losses[0].item(), "losses/value_c": losses[1].item(),
            "losses/explained_variance_r": explained[0].item(),
            "losses/explained_variance_c": explained[1].item(),
            "losses/entropy": (agent.log_std + 0.5 * np.log(2 * np.pi * np.e)).sum().item(),
            "dual/c": c[0], "dual/lam": np.nan, "dual/mu": ell / max(1.0 - ell, 1e-12),
            "dual/q": q, "dual/r": np.nan, "dual/s": np.nan, "dual/integral": np.nan,
            "dual/case": np.nan,
            # of the update before this batch
            "dual/predicted_dc": state["L_c"], "dual/realised_dc": rho_c[0] - state["rho_c"],
            "linesearch/accepted": accepted, "linesearch/backtracks": backtracks,
            "time/rollout": rollout_time, "time/update": update_time, "time/eval": eval_time,
        } | {f"charts/avg_cost_{i + 1}": rho_c[i] for i in range(1, m)}
        # fmt: on
        log.write(step, row)

        # Save
        state = {"iteration": iteration, "seconds": log.seconds, "cumulative_cost": total_cost}
        state |= {"L_c": L_c[0].item(), "rho_c": rho_c[0].item(), "mu": mu}
        due = args.save_every and not iteration % args.save_every or stop or iteration == iterations
        if due:
            parts = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            parts |= {"random": torch.get_rng_state(), "args": asdict(args)}
            parts |= {"env": envs.snapshot(env), "obs": torch.as_tensor(obs)}
            save_checkpoint(log.folder, state | parts)
        if due and stop:  # a signal that came too late for the save ends the next iteration
            log.stopped(stop[0])

    env.close()
    eval_env.close()
    if args.capture_video:
        act = lambda obs: agent.policy(agent.normalize(obs))[0].detach().cpu().numpy()  # noqa: E731
        envs.record_gif(args.env_id, act, f"{log.folder}/video.gif", seed=args.seed)
    log.summary()
    return log.folder


if __name__ == "__main__":
    try:
        main(envs.parse(Args), envs.stop_signals())
    except (OSError, MemoryError) as error:  # a full disk, a simulator that died: in one line
        envs.fail(error)
