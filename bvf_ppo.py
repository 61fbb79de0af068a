"""BVF-PPO: constraints by backward value functions (Satija, Amortila and Pineau, ICML 2020).

In a task with discount gamma, maximise the discounted reward subject to an average cost per step
J_C(pi) <= l, which becomes a constraint at every state: what was spent before s plus what will be
spent from s on stays within the budget. With the costs discounted by gamma_C both ways and times
1 - gamma_C, so that they are costs per step,

    B(s)     = (1 - gamma_C) E[sum over k >= 1 of gamma_C^(k-1) C_(t-k) | s_t = s]
    Q_C(s,u) = (1 - gamma_C) E[sum over k >= 0 of gamma_C^k C_(t+k) | s_t = s, u_t = u]
    B(s) + Q_C(s, m(s)) <= 2 l     for the mean action m(s), at every s

and as both have the mean J_C(pi), the constraint at every state implies J_C(pi) <= l. A layer on
top of the policy network moves its mean action to the closest one that meets the constraint,
linearised at the previous policy; PPO trains the network through that layer.

    python bvf_ppo.py --env-id PointCircle --cost-gamma 0.9

Differs from ppo_lagrangian.py in the constraint (lines marked "BVF:"): a layer in the policy in
place of a multiplier. One cost only. Page: docs/bvf_ppo.md.
"""

import copy
import io
import itertools
import os
import time
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
    gamma: float = 0.999  # discount per step of the reward
    gae_lambda: float = 0.9  # GAE parameter of the reward advantage
    cost_gae_lambda: float = 0.9  # GAE parameter of the cost advantages
    delta: float = 0.02  # KL at which an update ends early (nats)
    cost_gamma: float = 0.99  # discount per step of the costs, backward and forward
    clip_coef: float = 0.2  # eps of the clipped surrogate
    policy_learning_rate: float = 3e-4  # Adam step size of the policy
    policy_epochs: int = 10  # passes over the batch per update
    policy_minibatch: int = 256  # samples per policy step
    max_grad_norm: float = 0.5  # bound on the length of a policy gradient
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
        # BVF: Q_C - J_C and B - J_C in units of the limit, and the copies that the layer uses
        self.q_c = mlp(obs_size + act_size, hidden, 1, gain=0.01)
        self.b_c = mlp(obs_size, hidden, 1, gain=0.01)
        self.frozen = nn.ModuleList(copy.deepcopy(x) for x in (self.actor_mean, self.q_c, self.b_c))
        self.register_buffer("spent", torch.zeros(()))  # J_C / l, measured on the last batch
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

    @torch.enable_grad()
    def constraint(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """m_b (n, act), the gradient of Q_C there (n, act) and the slack 2 l - B - Q_C (n, 1)."""
        actor, q_c, b_c = self.frozen
        m_b = actor(obs).detach().requires_grad_()
        q = q_c(torch.cat([obs, m_b], 1).float())
        (gradient,) = torch.autograd.grad(q.sum(), m_b)
        slack = 2.0 - 2.0 * self.spent - b_c(obs.float()) - q
        return m_b.detach(), gradient, slack.detach().double()

    def policy(self, obs: torch.Tensor, constraint=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean (n, act) and standard deviation (act,) of the action, behind the safety layer."""
        constraint, std = constraint or self.constraint(obs), self.log_std.exp()
        return safety_layer(self.actor_mean(obs), *constraint, std.detach()), std

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


def log_prob(mean: torch.Tensor, std: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """(n,), summed over the dimensions of the action, up to a constant."""
    return -(0.5 * ((actions - mean) / std) ** 2 + torch.log(std)).sum(-1)


def clipped_loss(log_ratio: torch.Tensor, advantages: torch.Tensor, clip: float) -> torch.Tensor:
    """The negative of PPO's surrogate: no gain from a ratio outside [1 - clip, 1 + clip]."""
    ratio = torch.exp(log_ratio)
    return -torch.min(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages).mean()


def safety_layer(mean, m_b, gradient, slack, bound) -> torch.Tensor:
    """The m closest to mean with gradient'(m - m_b) <= slack.

    No component is moved by more than bound: the linear model of Q_C holds near m_b only.
    """
    excess = ((mean - m_b) * gradient).sum(-1, keepdim=True) - slack
    nu = excess.clamp(min=0.0) / (gradient.square().sum(-1, keepdim=True) + 1e-8)
    return mean - torch.minimum(torch.maximum(nu * gradient, -bound), bound)


def backward_returns(costs, values, starts, gamma, lam):
    """(T, N) targets of B: e_t = C_{t-1} + gamma [(1 - lam) B(s_{t-1}) + lam e_{t-1}].

    It runs forward in time, values: B of the states. Where there is no past in the batch, in the
    first row and after a truncation (starts = 1), it bootstraps from the state's own value.
    """
    returns = values.clone()
    for t in range(1, len(costs)):
        past = costs[t - 1] + gamma * ((1.0 - lam) * values[t - 1] + lam * returns[t - 1])
        returns[t] = torch.where(starts[t] == 1.0, values[t], past)
    return returns


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
    if m > 1:
        envs.refuse("env_id", args.env_id, f"has {m} costs; the safety layer is for one")
    agent = Agent(obs_size, act_size, m, args.hidden_sizes, args.log_std_init).to(args.device)
    optimizer = torch.optim.Adam(agent.critics.parameters(), args.critic_learning_rate, fused=True)
    optimizer.add_param_group({"params": [*agent.q_c.parameters(), *agent.b_c.parameters()]})
    ascent = torch.optim.Adam(agent.policy_parameters(), args.policy_learning_rate, eps=1e-5)
    to_device = partial(torch.as_tensor, dtype=torch.float64, device=args.device)

    # A new run, or one that goes on where its last checkpoint was written
    log = envs.Log(args, __file__)
    state = {"iteration": 0, "seconds": 0.0, "cumulative_cost": 0.0}
    state |= {"L_c": np.nan, "rho_c": np.nan, "env": None}
    saved = load_checkpoint(log.folder) if args.resume else None
    if saved:
        state = saved
        log.same_flags(state["args"])
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        ascent.load_state_dict(state["ascent"])
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
    alive = np.zeros((num_steps, num_envs, 1))
    gammas = to_device([args.gamma, args.cost_gamma])
    lambdas = to_device([args.gae_lambda] + [args.cost_gae_lambda] * m)
    box = to_device(env.single_action_space.low), to_device(env.single_action_space.high)

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
            # Both ends cut the sum; V is 0 after a termination, and a truncation bootstraps.
            dones[t], alive[t, :, 0] = terminated | truncated, ~terminated
        log.finite(f"{args.env_id} gave", raw_next_obs, signals)
        rollout_time = time.perf_counter() - clock

        # Advantages, by the critics as they were before this batch
        clock = time.perf_counter()
        b_obs, b_next_obs = (agent.normalize(x).flatten(0, 1) for x in (raw_obs, raw_next_obs))
        with torch.no_grad():
            b_values, b_next_values = agent.values(b_obs.float()), agent.values(b_next_obs.float())
        values, next_values = b_values.view(signals.shape), b_next_values.view(signals.shape)
        rho = to_device(signals).mean((0, 1))
        criterion = 0.0, gammas, lambdas  # a discounted sum: no average to subtract
        # The mean of V dwarfs what V says of a state: the critics leave it out, it is solved for.
        live = to_device(alive)
        gap = (to_device(signals) + gammas * live * next_values - values).mean((0, 1))
        constant = gap / (1.0 - gammas * live.mean())
        values, next_values = values + constant, (next_values + constant) * live
        chain = to_device(signals), values, next_values, to_device(dones)[..., None]
        advantages = compute_gae(*chain, *criterion).flatten(0, 1)
        targets = advantages + b_values
        targets -= targets.mean(0)
        explained = 1.0 - (targets - b_values).var(0) / targets.var(0)
        advantages -= advantages.mean(0)
        c = (rho_c := rho[1:].cpu().numpy()) - limit

        # BVF: what was spent before each state, less J_C, which is measured: learned, it would lag
        unit = (1.0 - args.cost_gamma) / max(limit[0], 1e-6)
        b_spent = agent.b_c(b_obs.float()).detach().view(num_steps, num_envs).double()
        starts = to_device(np.roll(dones * alive[..., 0], 1, 0))  # truncated the step before
        costs = to_device((signals[..., 1] - rho_c[0]) * unit)
        returns = backward_returns(costs, b_spent, starts, args.cost_gamma, args.cost_gae_lambda)

        # Policy
        b_actions, b_means = (to_device(x.reshape(-1, act_size)) for x in (actions, means))
        # BVF: the reward where the constraint holds at the previous policy's action, else the cost
        b_constraint = agent.constraint(b_obs)
        b_slack, scaled = b_constraint[2][:, 0], advantages / (advantages.std(0) + 1e-8)
        mixed = torch.where(b_slack >= 0.0, scaled[:, 0], -scaled[:, 1])
        q = accepted = backtracks = np.nan  # no H, no line search
        log_prob_k = log_prob(b_means, std_k, b_actions)
        for _ in range(args.policy_epochs):
            for mb_inds in torch.randperm(args.batch_size).split(args.policy_minibatch):
                constraint = tuple(x[mb_inds] for x in b_constraint)
                new = log_prob(*agent.policy(b_obs[mb_inds], constraint), b_actions[mb_inds])
                loss = clipped_loss(new - log_prob_k[mb_inds], mixed[mb_inds], args.clip_coef)
                ascent.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.policy_parameters(), args.max_grad_norm)
                ascent.step()
            L_r, L_c, kl = surrogates(agent, b_obs, b_actions, advantages, b_means, std_k)
            if kl > args.delta:  # PPO: the clip bounds the gain of a step, not its length
                break
        agent.log_std.data.clamp_(min=args.log_std_min)

        # Critics
        agent.value_scale.lerp_(targets.std(0).float() + 1e-6, 1.0 / iteration)
        f_obs, f_targets, f_spent = b_obs.float(), targets.float(), returns.view(-1, 1).float()
        executed = torch.cat([b_obs, b_actions.clamp(*box)], 1).float()
        to_come = (targets[:, 1:] * unit).float()
        for _ in range(args.critic_epochs):
            for mb_inds in torch.randperm(args.batch_size).split(args.critic_minibatch):
                errors = (agent.values(f_obs[mb_inds]) - f_targets[mb_inds]) / agent.value_scale
                losses = errors.square().mean(0)
                q_error = agent.q_c(executed[mb_inds]) - to_come[mb_inds]
                b_error = agent.b_c(f_obs[mb_inds]) - f_spent[mb_inds]
                optimizer.zero_grad()
                (losses.sum() + q_error.square().mean() + b_error.square().mean()).backward()
                optimizer.step()
        agent.spent.copy_(rho[1] / max(limit[0], 1e-6))
        for copied, net in zip(agent.frozen, (agent.actor_mean, agent.q_c, agent.b_c), strict=True):
            copied.load_state_dict(net.state_dict())
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
            "dual/c": c[0], "dual/lam": np.nan, "dual/mu": np.nan,
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
        state |= {"L_c": L_c[0].item(), "rho_c": rho_c[0].item()}
        due = args.save_every and not iteration % args.save_every or stop or iteration == iterations
        if due:
            parts = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            parts |= {"random": torch.get_rng_state(), "args": asdict(args)}
            parts |= {"ascent": ascent.state_dict()}
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
