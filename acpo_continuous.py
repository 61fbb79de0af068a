"""ACPO: Average-Constrained Policy Optimization (Agnihotri, Jain and Luo, ICML 2024), in one file.

In a never-ending task, maximise the average reward per step J(pi) subject to an average cost per
step J_C(pi) <= l. With the bias V and the advantage A(s,a) = r - J + E V(s') - V(s), an update
solves the problem linearised at the present policy, with g and a the gradients of the reward and
the cost surrogate, H the Fisher matrix and c = J_C - l:

    maximise g'x   subject to   c + a'x <= 0   and   0.5 x'Hx <= delta               [ACPO eq.13]

If that has a solution, x = H^-1 (g - a mu) / lam with the exact multipliers [eq.14, 15]. If not,
x = -sqrt(2 delta) [t H^-1 a / sqrt(a'H^-1 a) + (1-t) H^-1 g / sqrt(g'H^-1 g)] [eq.16] recovers.
A line search on the true surrogates and KL follows either way; then the critics are fitted.

    python acpo_continuous.py --env-id PointGather
    python acpo_continuous.py --env-id AntGather --recovery-t 0.75
    python acpo_continuous.py --resume runs/PointGather__acpo_continuous__1__1700000000

Differs from cpo_continuous.py in the criterion (lines marked "ACPO:"): averages take the place of
discounted sums, and recovery has a second term. Page: docs/acpo_continuous.md.
"""

import csv
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal, NoReturn

import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs


@dataclass
class Args:
    env_id: str = "PointGather"  # one of ours (see envs/) or package.module:EnvId with info["cost"]
    seed: int = 1  # of networks, actions and environments
    total_timesteps: int = 1_500_000  # environment steps, all environments together
    num_envs: int = 0  # environments side by side (0: what the environment recommends)
    batch_size: int = 8192  # environment steps per policy update
    cost_limit: tuple[float, ...] = ()  # l per step and constraint (empty: the environment's own)
    gae_lambda: float = 0.9  # GAE parameter of the reward advantage
    cost_gae_lambda: float = 0.9  # GAE parameter of the cost advantages
    delta: float = 0.01  # KL trust-region radius (nats)
    recovery_t: float = 0.75  # t of eq.16: 1 only lowers cost, 0 only lowers reward
    dual: Literal["crossfit", "literal", "violated"] = "crossfit"  # how q, r, S are estimated
    integral_gain: float = 0.1  # share of each violation that tightens the limit from then on
    fisher_samples: int = 1024  # states of the batch on which H is computed
    cg_iterations: int = 10  # conjugate-gradient iterations per linear system
    cg_damping: float = 0.1  # added to the diagonal of H
    backtrack_coef: float = 0.75  # factor on the step per line-search trial
    backtrack_iterations: int = 10  # trials after the full step
    critic_learning_rate: float = 2e-3  # Adam step size of the critics
    critic_epochs: int = 8  # passes over the batch per update
    critic_minibatch: int = 256  # samples per critic step
    hidden_sizes: tuple[int, ...] = (64, 32)  # tanh layers of the policy and of each critic
    log_std_init: float = -0.5  # initial log standard deviation of the policy (action units)
    log_std_min: float = -3.0  # its floor
    eval_every: int = 20  # iterations between evaluations (0: never)
    eval_episodes: int = 10  # trajectories per evaluation
    eval_steps: int = 1000  # steps per trajectory
    save_every: int = 1  # iterations between checkpoints (0: only at the end)
    resume: str = ""  # folder of a run to go on with; its flags are then the defaults
    capture_video: bool = False  # write video.gif of the final policy
    track: bool = False  # log to Weights & Biases too (pip install wandb)
    run_dir: str = "runs"  # where the folder of this run is made
    device: str = "cpu"  # torch device of the networks


def refuse(flag: str, value, why) -> NoReturn:
    """One line that names the flag, its value and what is wrong; exit code 2."""
    print(f"error: --{flag.replace('_', '-')} {value}: {why}", file=sys.stderr)
    sys.exit(2)


def check(args: Args, num_envs: int, m: int, limit: np.ndarray) -> None:
    """Refuse what cannot work, before anything is written. m: costs that the environment gives."""
    limit_ok = len(limit) == m and np.isfinite(limit).all() and (limit >= 0).all()
    batch_ok = num_envs >= 1 and args.batch_size % num_envs == 0 and args.batch_size >= 2 * num_envs
    rules = {
        "num_envs": (args.num_envs >= 0, ">= 0"),
        "batch_size": (batch_ok, f"a multiple, 2 or more, of the {num_envs} environments"),
        "total_timesteps": (args.total_timesteps >= args.batch_size, "at least --batch-size"),
        "cost_limit": (limit_ok, f"a number >= 0 for each of the {m} costs"),
        "hidden_sizes": (min(args.hidden_sizes, default=1) >= 1, "all >= 1"),
    }
    for allowed, low, high, names in (
        (">= 1", 1, 1e300, "fisher_samples cg_iterations critic_epochs critic_minibatch"),
        (">= 1", 1, 1e300, "eval_episodes eval_steps"),
        (">= 0", 0, 1e300, "seed cg_damping integral_gain backtrack_iterations"),
        (">= 0", 0, 1e300, "eval_every save_every"),
        ("> 0", 1e-300, 1e300, "delta critic_learning_rate"),
        ("finite", -1e300, 1e300, "log_std_init log_std_min"),
        ("in [0, 1]", 0, 1, "recovery_t"),
        ("in [0, 1)", 0, 1 - 1e-12, "gae_lambda cost_gae_lambda"),
        ("in (0, 1)", 1e-12, 1 - 1e-12, "backtrack_coef"),
    ):
        rules |= {name: (low <= getattr(args, name) <= high, allowed) for name in names.split()}
    for name, (ok, allowed) in rules.items():
        if not ok:
            refuse(name, getattr(args, name), f"must be {allowed}")


class Agent(nn.Module):
    """A Gaussian policy, a critic of the reward and a critic of the m costs; they share nothing.

    The policy is in float64, as its update subtracts nearly equal numbers; the critics in float32.
    Where reward and costs stand in one tensor, column 0 is the reward and 1 .. m are the costs.
    """

    def __init__(self, obs_size: int, act_size: int, m: int, hidden: tuple, log_std: float):
        super().__init__()
        self.actor_mean = mlp(obs_size, hidden, act_size, gain=0.01).double()
        self.log_std = nn.Parameter(torch.full((act_size,), log_std, dtype=torch.float64))
        self.critic_r = mlp(obs_size, hidden, 1, gain=1.0)
        self.critic_c = mlp(obs_size, hidden, m, gain=1.0)
        self.register_buffer("value_scale", torch.ones(1 + m))  # unit of the critics' outputs
        self.register_buffer("obs_mean", torch.zeros(obs_size, dtype=torch.float64))
        self.register_buffer("obs_var", torch.ones(obs_size, dtype=torch.float64))
        self.register_buffer("obs_count", torch.tensor(1e-4, dtype=torch.float64))

    def normalize(self, obs: np.ndarray) -> torch.Tensor:
        obs = torch.as_tensor(obs, dtype=torch.float64, device=self.obs_mean.device)
        return ((obs - self.obs_mean) / torch.sqrt(self.obs_var + 1e-8)).clamp(-10.0, 10.0)

    def policy(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean (n, act) and standard deviation (act,) of the action."""
        return self.actor_mean(obs), self.log_std.exp()

    def log_prob(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """(n,), summed over the dimensions of the action, up to a constant."""
        mean, std = self.policy(obs)
        return -(0.5 * ((actions - mean) / std) ** 2 + self.log_std).sum(-1)

    def policy_parameters(self) -> list[nn.Parameter]:
        return [*self.actor_mean.parameters(), self.log_std]

    def scaled_values(self, obs: torch.Tensor) -> torch.Tensor:
        """(n, 1 + m) values in units of value_scale; obs in float32."""
        return torch.cat([self.critic_r(obs), self.critic_c(obs)], 1)

    @torch.no_grad()
    def values(self, obs: torch.Tensor) -> torch.Tensor:
        """(n, 1 + m): V of the reward and V_C of the costs, in raw units."""
        return (self.scaled_values(obs.float()) * self.value_scale).double()

    @torch.no_grad()
    def rescale_values(self, spread: torch.Tensor) -> None:
        """Change the unit of the critics' outputs, not the values that they give."""
        ratio, self.value_scale = self.value_scale / spread, spread
        for critic, part in ((self.critic_r, ratio[:1]), (self.critic_c, ratio[1:])):
            critic[-1].weight *= part[:, None]
            critic[-1].bias *= part

    @torch.no_grad()
    def update_normalizer(self, obs: torch.Tensor) -> None:
        """Merge mean and variance of raw observations (n, obs) into the running ones."""
        count, mean, var = len(obs), obs.mean(0), obs.var(0, unbiased=False)
        total, shift = self.obs_count + count, mean - self.obs_mean
        spread = self.obs_var * self.obs_count + var * count
        self.obs_var.copy_((spread + shift**2 * self.obs_count * count / total) / total)
        self.obs_mean += shift * count / total
        self.obs_count.copy_(total)


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


def symmetric(matrix: torch.Tensor) -> np.ndarray:
    """CG leaves B'H^-1 B symmetric only up to its residual."""
    return ((matrix + matrix.T) / 2.0).cpu().numpy()


def surrogate_gradients(agent: Agent, obs, actions, advantages) -> torch.Tensor:
    """(k, parameters): the gradient of mean[ratio A] at ratio 1 for each column of advantages."""
    parameters = agent.policy_parameters()
    losses = (agent.log_prob(obs, actions)[:, None] * advantages).mean(0)
    return torch.stack(
        [flat(torch.autograd.grad(x, parameters, retain_graph=True)) for x in losses]
    )


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


def solve_dual(q: float, r: np.ndarray, S: np.ndarray, c: np.ndarray, delta: float):
    """(lam, mu, case): the maximiser of g'x with c + A'x <= 0, 0.5 x'Hx <= delta. [ACPO eq.15]

    With q = g'H^-1 g, r = A'H^-1 g, S = A'H^-1 A the step is x = (H^-1 g - H^-1 A mu) / lam. Each
    set W of constraints is tried as the active one: given W the optimum is closed form, and the
    first that meets all conditions of optimality is the answer, as the problem is convex.
    """
    m, root = len(c), np.sqrt(2.0 * delta)
    scale = np.sqrt(np.clip(np.diag(S), 0.0, None))  # H-norm of each H^-1 a_i
    slack = 1e-9 * (np.abs(c) + root * scale)
    floor = 1e-6 * np.sqrt(max(q, 1e-300)) / root  # lam = 0 where g is in the span of active a's
    for W in map(list, (W for k in range(m + 1) for W in itertools.combinations(range(m), k))):
        if (scale[W] == 0.0).any():
            continue  # a cost without a gradient cannot be active
        S_W = S[np.ix_(W, W)] / np.outer(scale[W], scale[W])
        if W and np.linalg.eigvalsh(S_W)[0] < 1e-10:
            continue  # the same constraint twice: a smaller set does the work
        inverse, r_W, c_W = np.linalg.inv(S_W), r[W] / scale[W], c[W] / scale[W]
        A = max(q - r_W @ inverse @ r_W, 0.0)
        B = 2.0 * delta - c_W @ inverse @ c_W  # what W leaves of the trust region
        if B < -1e-12 * delta:  # noqa: SIM300
            continue
        lam = max(np.sqrt(A / max(B, 1e-12 * delta)), floor)
        mu_W = inverse @ (r_W + lam * c_W)  # PLUS r: g ascends
        if (mu_W < -1e-9 * (np.sqrt(q) + lam * root)).any():
            continue
        mu = np.zeros(m)
        mu[W] = np.maximum(mu_W, 0.0) / scale[W]
        if (c + (r - S @ mu) / lam <= slack).all():
            return float(lam), mu, "boundary" if W else "trust_region"
    return float("nan"), np.zeros(m), "recovery"


def cross_fit(gram: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """gram - noise, made positive definite in units of gram's diagonal."""
    unit = np.sqrt(np.diag(gram)) + 1e-300
    values, vectors = np.linalg.eigh((gram - noise) / np.outer(unit, unit))
    return (vectors * np.maximum(values, 1e-6)) @ vectors.T * np.outer(unit, unit)


def recovery_step(Hinv_g, Hinv_A, gram: np.ndarray, c: np.ndarray, delta: float, t: float):
    """-sqrt(2 delta) [t w / |w| + (1-t) v / |v|] with |.| the H-norm, so KL <= delta. [ACPO eq.16]

    v = H^-1 g; w = H^-1 A mu, where mu >= 0 maximises mu'c - 0.5 mu'S mu: the direction of the
    shortest step that meets all constraints, H^-1 a if there is one. gram = [[q, r'], [r, S]].
    """
    q, S, mu = gram[0, 0], gram[1:, 1:], np.zeros(len(c))
    for i in [*range(len(c))] * (1 if len(c) == 1 else 100):  # coordinate ascent
        if S[i, i] > 0.0:
            mu[i] = max(0.0, mu[i] + (c[i] - S[i] @ mu) / S[i, i])
    norm = np.sqrt(mu @ S @ mu)
    if norm == 0.0:
        return torch.zeros_like(Hinv_g)  # no policy nearby changes the cost
    w = Hinv_A @ torch.as_tensor(mu / norm, device=Hinv_A.device)
    return -np.sqrt(2.0 * delta) * (t * w + (1.0 - t) * Hinv_g / max(np.sqrt(q), 1e-300))


@torch.no_grad()
def surrogates(agent: Agent, obs, actions, advantages, mean_k, std_k, log_prob_k):
    """(L_r, L_c (m,), KL): mean[ratio A] and the mean KL(new || old) from theta_k. [ACPO eq.10]"""
    mean, std = agent.policy(obs)
    ratio = torch.exp(agent.log_prob(obs, actions) - log_prob_k)
    L = (ratio[:, None] * advantages).mean(0).cpu().numpy()
    var = (std / std_k) ** 2
    kl = 0.5 * (var + ((mean - mean_k) / std_k) ** 2 - 1.0 - torch.log(var)).sum(-1).mean()
    return L[0], L[1:], kl.item()


def line_search(agent: Agent, x, surrogates: Callable, c: np.ndarray, delta, coef, trials):
    """Shorten x until it holds what it promises; restore the policy exactly if it never does.

    It asks for KL <= delta, L_c <= max(0, -c) and, where no constraint is violated, L_r >= 0.
    Returns (accepted, backtracks, L_r, L_c, KL).
    """
    parameters = agent.policy_parameters()
    start = flat(parameters).detach().clone()
    for j in range(trials + 1):
        nn.utils.vector_to_parameters(start + coef**j * x, parameters)
        L_r, L_c, kl = surrogates()
        reward_ok = L_r >= 0.0 or (c > 0.0).any()
        if kl <= delta and reward_ok and (L_c <= np.maximum(0.0, -c)).all():  # NaN fails too
            return True, j, L_r, L_c, kl
    nn.utils.vector_to_parameters(start, parameters)
    return False, trials + 1, 0.0, np.zeros(len(c)), 0.0


@torch.no_grad()
def evaluate(agent: Agent, env, episodes: int, steps: int, seed: int, deterministic: bool):
    """Average reward (episodes,) and costs (episodes, m) per step, from the start state."""
    generator = torch.Generator().manual_seed(seed)  # the training's random numbers stay untouched
    rewards, costs = [], []
    for first in range(0, episodes, env.num_envs):
        obs, _ = env.reset(seed=seed + first)
        sum_r, sum_c = 0.0, 0.0
        for _ in range(steps):
            actions, std = agent.policy(agent.normalize(obs))
            if not deterministic:
                actions = actions + std * torch.randn(actions.shape, generator=generator).to(std)
            obs, reward, _, _, infos = env.step(actions.cpu().numpy())
            sum_r = sum_r + infos.get("raw_reward", reward)
            sum_c = sum_c + infos["cost"].reshape(env.num_envs, -1)
        rewards.append(sum_r / steps)
        costs.append(sum_c / steps)
    return np.concatenate(rewards)[:episodes], np.concatenate(costs)[:episodes]


def save_checkpoint(path: str, state: dict) -> None:
    """Written beside the old one, then renamed: at any moment one whole file is there."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def plot_curves(rows: list[dict], limit: float, path: str) -> None:
    """Average reward and average cost per step against environment steps, with the limit."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 4), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), ("reward", "cost"), strict=True):
        for group, label in (("charts", "training"), ("eval", "evaluation, mean action")):
            points = [(row["global_step"], row[f"{group}/avg_{name}"]) for row in rows]
            points = np.array([(float(x), float(y)) for x, y in points if y]).reshape(-1, 2)
            axis.plot(points[:, 0], points[:, 1], label=label)
        axis.set(xlabel="environment steps", ylabel=f"average {name} per step")
    axis.axhline(limit, color="black", linestyle="--", label="limit")
    axis.legend()
    figure.savefig(path)
    plt.close(figure)


def main(args: Args) -> str:
    """Train; returns the folder of the run."""
    torch.set_num_threads(1)  # the matrices are small, and the physics uses the other cores
    try:
        probe = envs.make_vec(args.env_id, 1)
        probe.reset(seed=0)
        m = probe.step(np.zeros((1, *probe.single_action_space.shape)))[-1]["cost"].size
    except ValueError as error:
        refuse("env_id", args.env_id, error)
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        refuse("device", args.device, str(error).splitlines()[0])
    num_envs = args.num_envs or probe.recommended_num_envs
    own = () if probe.cost_limit is None else np.ravel(probe.cost_limit)
    limit = np.array(args.cost_limit or own, np.float64)
    eval_rows = args.eval_episodes if probe.recommended_num_envs > 1 else 1
    probe.close()
    check(args, num_envs, m, limit)
    num_steps = args.batch_size // num_envs
    iterations = args.total_timesteps // args.batch_size
    seed = args.seed * 1_000_000  # row i of an env has seed + i: no two runs share random numbers
    env = envs.make_vec(args.env_id, num_envs, seed=seed, stagger=True)
    eval_env = envs.make_vec(args.env_id, eval_rows)
    obs_size, act_size = env.single_observation_space.shape[0], env.single_action_space.shape[0]
    torch.manual_seed(args.seed)
    agent = Agent(obs_size, act_size, m, args.hidden_sizes, args.log_std_init).to(args.device)
    critics = [*agent.critic_r.parameters(), *agent.critic_c.parameters()]
    optimizer = torch.optim.Adam(critics, lr=args.critic_learning_rate, fused=True)

    script = os.path.splitext(os.path.basename(__file__))[0]
    name = f"{args.env_id.split(':')[-1]}__{script}__{args.seed}__{int(time.time())}"
    run_dir = args.resume or os.path.join(args.run_dir, name)
    progress = f"{run_dir}/progress.csv"
    state = {"iteration": 0, "seconds": 0.0, "cumulative_cost": 0.0, "integral": [0.0] * m}
    state |= {"L_c": np.nan, "rho_c": np.nan, "env": None}
    if args.resume:
        state = torch.load(f"{run_dir}/checkpoint.pt", weights_only=True)
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        with open(progress) as file:
            lines = file.readlines()[: state["iteration"] + 1]  # what came later is done again
        with open(f"{progress}.tmp", "w") as file:
            file.writelines(lines)
        os.replace(f"{progress}.tmp", progress)
    else:
        os.makedirs(run_dir)
        packages = ("torch", "numpy", "gymnasium", "mujoco", "libsumo")
        here = os.path.dirname(os.path.abspath(__file__))
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True)
        record = {"args": asdict(args), "commit": git.stdout.strip()}
        record["versions"] = {name: importlib.metadata.version(name) for name in packages}
        with open(f"{run_dir}/args.json", "w") as file:
            json.dump(record, file, indent=2)
    if state["env"] is not None:
        envs.restore(env, state["env"])
        obs = state["obs"].numpy()
    else:
        obs, _ = env.reset()
        if args.resume:
            print(f"{args.env_id} has no get_state: the run goes on with new episodes")
    if args.track:
        import wandb

        wandb.init(project="acpo", name=name, config=asdict(args), sync_tensorboard=True)
    step = state["iteration"] * args.batch_size
    writer = SummaryWriter(run_dir, purge_step=step + 1 if args.resume else None)
    bar = tqdm(total=iterations * args.batch_size, initial=step, unit="step", dynamic_ncols=True)
    seconds = state["seconds"]
    started = time.perf_counter() - seconds

    # Storage of one batch, filled in place
    raw_obs = np.zeros((num_steps, num_envs, obs_size), np.float32)
    raw_next_obs = np.zeros_like(raw_obs)
    actions = np.zeros((num_steps, num_envs, act_size))
    signals = np.zeros((num_steps, num_envs, 1 + m))  # reward, costs
    raw_rewards, dones = np.zeros((2, num_steps, num_envs))
    halves = np.ones((num_steps, num_envs))  # +1 and -1: two independent halves of the batch
    halves[:, num_envs // 2 :] = -1.0
    halves[: num_steps // 2] *= -1.0 if num_envs == 1 else 1.0
    device = agent.log_std.device
    to_device = partial(torch.as_tensor, dtype=torch.float64, device=device)
    b_halves = to_device(halves.reshape(-1, 1))
    lambdas = to_device([args.gae_lambda] + [args.cost_gae_lambda] * m)

    for iteration in range(state["iteration"] + 1, iterations + 1):
        # Rollout: one forward pass per vector step; the observation statistics stand still.
        clock = time.perf_counter()
        noise = torch.randn(num_steps, num_envs, act_size, dtype=torch.float64).to(device)
        for t in range(num_steps):
            raw_obs[t] = obs
            with torch.no_grad():
                mean, std = agent.policy(agent.normalize(obs))
            actions[t] = (mean + std * noise[t]).cpu().numpy()  # clipped by the env, not here
            obs, rewards, terminated, truncated, infos = env.step(actions[t])
            signals[t, :, 0], signals[t, :, 1:] = rewards, infos["cost"].reshape(num_envs, m)
            raw_rewards[t] = infos.get("raw_reward", rewards)  # without potential shaping
            # ACPO: V is not 0 at an end: a termination is a transition to the reset state. A
            # truncation cuts the sum of eq.22 and bootstraps from where the chain would have gone.
            raw_next_obs[t] = np.where(terminated[:, None], obs, infos["final_obs"])
            dones[t] = truncated
        rollout_time = time.perf_counter() - clock

        # Advantages, by the critics as they were before this batch
        clock = time.perf_counter()
        b_obs = agent.normalize(raw_obs.reshape(-1, obs_size))
        b_values = agent.values(b_obs)
        b_next_values = agent.values(agent.normalize(raw_next_obs.reshape(-1, obs_size)))
        values, next_values = b_values.view(signals.shape), b_next_values.view(signals.shape)
        rho = to_device(signals).mean((0, 1))  # ACPO: J and J_C are the means of the whole batch
        rho_gamma_lambda = rho, 1.0, lambdas  # ACPO: no discount
        advantages = compute_gae(
            to_device(signals), values, next_values, to_device(dones)[..., None], *rho_gamma_lambda
        ).flatten(0, 1)
        targets = advantages + b_values
        targets -= targets.mean(0)  # ACPO: V is defined up to a constant; do not let it drift
        advantages -= advantages.mean(0)
        advantages[:, 0] /= advantages[:, 0].std() + 1e-8  # never the costs': a'x has the unit of c
        c = rho[1:].cpu().numpy() - limit

        # Policy
        b_actions = to_device(actions.reshape(-1, act_size))
        b_fisher = b_obs[:: max(1, args.batch_size // args.fisher_samples)]
        fvp = fisher_vector_product(agent, b_fisher, args.cg_damping)
        solve = partial(conjugate_gradient, fvp, iterations=args.cg_iterations)
        gradients = surrogate_gradients(agent, b_obs, b_actions, advantages)  # g, a_1, .., a_m
        Hinv = torch.stack([solve(b) for b in gradients])
        gram = symmetric(gradients @ Hinv.T)
        estimate = gram
        if args.dual == "crossfit":
            # DEVIATION: in sample, q, r and S contain the gradients' noise squared, and the step
            # meets the constraint by fitting noise. With g_1, a_1 and g_2, a_2 from two halves of
            # the batch g_1'H^-1 a_2 does not: it is g'H^-1 a - d_g'H^-1 d_a, d the half difference.
            spread = surrogate_gradients(agent, b_obs, b_actions, advantages * b_halves)
            estimate = cross_fit(
                gram, symmetric(spread @ torch.stack([solve(d) for d in spread]).T)
            )
        q, r, S = estimate[0, 0], estimate[1:, 0], estimate[1:, 1:]
        # DEVIATION: what violation the update leaves is integrated into a tighter limit.
        integral = np.clip(np.array(state["integral"]) + args.integral_gain * c, 0.0, limit)
        lam, mu, case = solve_dual(q, r, S, c + integral, args.delta)
        if args.dual == "violated" and (c > 0.0).any():
            case = "recovery"  # DEVIATION: even where the linearised problem has a solution
        if case == "recovery":
            x = recovery_step(Hinv[0], Hinv[1:].T, gram, c + integral, args.delta, args.recovery_t)
        else:
            weights = np.array([1.0, *-mu]) / lam
            length = np.sqrt(0.5 * weights @ gram @ weights / args.delta)  # 1 if literal
            x = to_device(weights / max(length, 1.0)) @ Hinv  # [ACPO eq.14]
        with torch.no_grad():
            theta_k = (*agent.policy(b_obs), agent.log_prob(b_obs, b_actions))
        promise = partial(surrogates, agent, b_obs, b_actions, advantages, *theta_k)
        search = args.delta, args.backtrack_coef, args.backtrack_iterations
        accepted, backtracks, L_r, L_c, kl = line_search(agent, x, promise, c, *search)
        agent.log_std.data.clamp_(min=args.log_std_min)

        # Critics
        explained = 1.0 - (targets - b_values).var(0) / targets.var(0)
        spread = targets.std(0).float().clamp(min=1e-6)
        agent.rescale_values(torch.lerp(agent.value_scale, spread, 0.1 if iteration > 1 else 1.0))
        f_obs, f_targets = b_obs.float(), (targets / agent.value_scale).float()
        for _ in range(args.critic_epochs):
            for mb_inds in torch.randperm(args.batch_size).split(args.critic_minibatch):
                errors = agent.scaled_values(f_obs[mb_inds]) - f_targets[mb_inds]
                losses = errors.square().mean(0)
                optimizer.zero_grad()
                losses.sum().backward()
                optimizer.step()
        agent.update_normalizer(to_device(raw_obs).flatten(0, 1))
        update_time = time.perf_counter() - clock

        # Evaluation of the mean action, as in the paper, and of the policy that is constrained
        clock = time.perf_counter()
        row = {}
        for kind, deterministic in (("eval/avg", True), ("eval/stochastic_avg", False)):
            numbers = ["", "", "", ""]
            if args.eval_every and (iteration % args.eval_every == 0 or iteration == iterations):
                sizes = args.eval_episodes, args.eval_steps, seed + 500_000
                e_r, e_c = evaluate(agent, eval_env, *sizes, deterministic)
                numbers = [e_r.mean(), e_c[:, 0].mean(), e_r.std(), e_c[:, 0].std()]
            names = ("_reward", "_cost", "_reward_std", "_cost_std")
            row |= {kind + name: number for name, number in zip(names, numbers, strict=True)}
        eval_time = time.perf_counter() - clock

        # Log
        step, seconds = iteration * args.batch_size, time.perf_counter() - started
        rho_c, total_cost = rho[1].item(), state["cumulative_cost"] + signals[..., 1].sum().item()
        # fmt: off
        row |= {
            "charts/avg_reward": raw_rewards.mean(), "charts/avg_cost": rho_c,
            "charts/cost_limit": limit[0], "charts/cumulative_cost": total_cost,
            "charts/SPS": step / seconds,
            "losses/surrogate_r": L_r, "losses/surrogate_c": L_c[0],
            "losses/value_r": losses[0].item(), "losses/value_c": losses[1].item(),
            "losses/explained_variance_r": explained[0].item(),
            "losses/explained_variance_c": explained[1].item(), "losses/kl": kl,
            "losses/entropy": (agent.log_std + 0.5 * np.log(2 * np.pi * np.e)).sum().item(),
            "dual/c": c[0], "dual/lam": lam, "dual/mu": mu[0], "dual/q": q, "dual/r": r[0],
            "dual/s": S[0, 0], "dual/integral": integral[0],
            "dual/case": ("trust_region", "boundary", "recovery").index(case),
            # of the update before this batch
            "dual/predicted_dc": state["L_c"], "dual/realised_dc": rho_c - state["rho_c"],
            "linesearch/accepted": float(accepted), "linesearch/backtracks": backtracks,
            "time/rollout": rollout_time, "time/update": update_time, "time/eval": eval_time,
        }
        # fmt: on
        row |= {f"charts/avg_cost_{i}": rho[i].item() for i in range(2, m + 1)}
        for tag, value in row.items():
            if value != "":
                writer.add_scalar(tag, value, step)
        with open(progress, "a") as file:
            header = ",".join(["global_step", *row]) + "\n"
            file.write(
                (header if iteration == 1 else "") + ",".join(map(str, [step, *row.values()]))
            )
            file.write("\n")
        shown = f"reward {row['charts/avg_reward']:.4g}, cost {rho_c:.4g} (limit {limit[0]:g})"
        bar.set_postfix_str(shown, refresh=False)
        bar.update(args.batch_size)

        # Save
        state = {"iteration": iteration, "seconds": seconds, "cumulative_cost": total_cost}
        state |= {"L_c": float(L_c[0]), "rho_c": rho_c, "integral": integral.tolist()}
        if iteration == iterations or (args.save_every and iteration % args.save_every == 0):
            parts = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            parts |= {"random": torch.get_rng_state(), "args": asdict(args)}
            parts |= {"env": envs.snapshot(env), "obs": torch.as_tensor(obs)}
            save_checkpoint(f"{run_dir}/checkpoint.pt", state | parts)

    bar.close()
    writer.close()
    env.close()
    eval_env.close()
    if args.capture_video:
        act = lambda obs: agent.policy(agent.normalize(obs))[0].detach().cpu().numpy()  # noqa: E731
        envs.record_gif(args.env_id, act, f"{run_dir}/video.gif", seed=seed)
    with open(progress) as file:
        rows = list(csv.DictReader(file))
    plot_curves(rows, limit[0], f"{run_dir}/curves.png")
    last = rows[-max(1, len(rows) // 5) :]
    reward, cost = (
        np.mean([float(x[f"charts/avg_{k}"]) for x in last]) for k in ("reward", "cost")
    )
    print(f"{args.env_id}: {step:,} steps in {seconds:.0f} s ({step / seconds:,.0f} steps/s)")
    print(f"last 20 %: reward {reward:.4g} and cost {cost:.4g} per step (limit {limit[0]:g})")
    print(f"learning curves: {run_dir}/curves.png")
    return run_dir


def parse() -> Args:
    """The command line; with --resume, the flags of that run are the defaults."""
    args = tyro.cli(Args)
    if args.resume:
        if not os.path.exists(f"{args.resume}/checkpoint.pt"):
            refuse("resume", args.resume, "there is no checkpoint.pt in that folder")
        with open(f"{args.resume}/args.json") as file:
            stored = json.load(file)["args"] | {"resume": args.resume}
        stored = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        args = tyro.cli(Args, default=Args(**stored))
    return args


if __name__ == "__main__":
    main(parse())
