"""ConstrainedLQR: a task whose constrained optimum is known in closed form."""

import numpy as np

from envs.batch import BatchEnv
from envs.render import draw_lqr


class ConstrainedLQR(BatchEnv):
    """
    ## Description
    Keep a noisy scalar near zero with a limited control effort: x' = a x + b u + w, w ~ N(0, W).
    The best policy among all is linear and known in closed form (`solution`), so a learner can be
    compared with the exact answer.

    ## Action Space
    `Box(-1, 1, (1,))`: u / 3. (At the default limit the optimal u practically never exceeds 3, and
    without a limit once in 10^3 steps, so the bound does not disturb the closed form.)

    ## Observation Space
    | index | meaning |
    |---|---|
    | 0 | x |

    ## Rewards
    -Q x^2, with the x before the step (the one that was observed).

    ## Cost
    u^2. With `second_limit`: also (u - 0.5)^2, which pulls the control off centre.

    ## Constraint
    Average cost per step <= `limit` (0.2), and <= `second_limit` for the second cost if given.

    ## Starting State
    x ~ N(0, W).

    ## Episode End
    Never terminated; truncated after `horizon` steps.

    ## Arguments
    `a=0.9`, `b=1`, `W=1`, `Q=1`, `limit=0.2`, `second_limit=None`, `horizon=1000`,
    `render_mode=None | "rgb_array"`.
    """

    u_max = 3.0
    u_target = 0.5

    def __init__(
        self,
        num_envs: int = 1,
        a: float = 0.9,
        b: float = 1.0,
        W: float = 1.0,
        Q: float = 1.0,
        limit: float = 0.2,
        second_limit: float | None = None,
        **kwargs,
    ):
        super().__init__(num_envs, obs_size=1, act_size=1, **kwargs)
        if not (abs(a) < 1 and b != 0 and W > 0 and Q > 0 and limit > 0):
            raise ValueError(
                f"ConstrainedLQR needs |a| < 1, b != 0 and W, Q, limit > 0, "
                f"got a={a}, b={b}, W={W}, Q={Q}, limit={limit}"
            )
        self.a, self.b, self.W, self.Q = a, b, W, Q
        self.cost_limit = limit if second_limit is None else (limit, second_limit)
        self.x = np.zeros(num_envs)

    def arrays(self) -> dict[str, np.ndarray]:
        return {**super().arrays(), "x": self.x}

    def _start(self, rows: np.ndarray) -> None:
        self.x[rows] = np.sqrt(self.W) * self.random.normal(rows, 1)[:, 0]

    def _advance(self, actions: np.ndarray):
        u = self.u_max * actions[:, 0]
        rewards = -self.Q * self.x * self.x
        costs = u * u
        if isinstance(self.cost_limit, tuple):
            costs = np.stack([costs, (u - self.u_target) ** 2], axis=1)
        noise = np.sqrt(self.W) * self.random.normal(self.all_rows, 1)[:, 0]
        self.x[:] = self.a * self.x + self.b * u + noise
        return rewards, costs, {}

    def _observe(self) -> np.ndarray:
        return self.x.astype(np.float32)[:, None]

    def render_row(self, row: int) -> np.ndarray:
        return draw_lqr(self, row)

    @staticmethod
    def evaluate(k, sigma=0.0, offset=0.0, a=0.9, b=1.0, W=1.0, Q=1.0):
        """(J, J_C, J_C2) per step of u = offset - k x + sigma z, exactly; |a - b k| < 1."""
        variance = (W + b * b * sigma * sigma) / (1 - (a - b * k) ** 2)
        mean_x = b * offset / (1 - a + b * k)
        mean_u = offset - k * mean_x
        effort = k * k * variance + sigma * sigma
        second = effort + (mean_u - ConstrainedLQR.u_target) ** 2
        return -Q * (variance + mean_x**2), effort + mean_u**2, second

    @staticmethod
    def solution(a=0.9, b=1.0, W=1.0, Q=1.0, limit=0.2, sigma=0.0, second_limit=None):
        """The constrained optimum among policies with exploration noise sigma (0: among all).

        Returns a dict: gain k and offset of u = offset - k x + sigma z, J, and the multipliers mu,
        a tuple with one per constraint.

        The noise of x and the effort e = E[(u - mean u)^2] - sigma^2 spent on it determine the
        gain (`gain_of`); a mean control m moves x by b m / (1 - a). So the problem is to minimise
        Q X(e) + Q (b m / (1 - a))^2 subject to e + m^2 <= l1 and e + (m - 0.5)^2 <= l2 (sigma^2
        taken off both), which is convex in (e, m).
        """
        noise, target = W + (b * sigma) ** 2, ConstrainedLQR.u_target

        def gain_of(e):
            if e >= a * a * noise / (b * b):  # enough to cancel a x altogether
                return a / b
            root = np.sqrt((a * b * e) ** 2 + e * (1 - a * a) * (noise + e * b * b))
            return (a * b * e + root) / (noise + e * b * b)

        def price_of(e):  # -dJ/de: what one more unit of effort is worth
            h = 1e-6 * e
            variance = [noise / (1 - (a - b * gain_of(e + d)) ** 2) for d in (h, -h)]
            return Q * (variance[1] - variance[0]) / (2 * h)

        def answer(e, m, mu):
            k = float(gain_of(e))
            offset = m * (1 - a + b * k) / (1 - a)
            J = ConstrainedLQR.evaluate(k, sigma, offset, a, b, W, Q)[0]
            return {"gain": k, "offset": float(offset), "J": float(J), "mu": mu}

        l1 = limit - sigma * sigma
        if l1 <= 0:
            raise ValueError(f"no policy with noise sigma={sigma} meets limit={limit}")
        cancel = a * a * noise / (b * b)  # the effort of the unconstrained optimum
        e = min(l1, cancel)
        mu1 = price_of(l1) if l1 < cancel else 0.0
        if second_limit is None:
            return answer(e, 0.0, (float(mu1),))
        l2 = second_limit - sigma * sigma
        if l2 <= 0:
            raise ValueError(f"no policy with noise sigma={sigma} meets {second_limit=}")
        if e + target**2 <= l2:  # the first optimum meets the second constraint
            return answer(e, 0.0, (float(mu1), 0.0))
        drift = Q * (b / (1 - a)) ** 2
        # Both active: the difference of the constraints gives m. Stationarity in m and e:
        # drift m + mu1 m + mu2 (m - target) = 0 and mu1 + mu2 = price.
        m = (l1 - l2 + target**2) / (2 * target)
        e = l1 - m * m
        if e > 0:
            price = price_of(e) if e < cancel else 0.0
            mu2 = (drift + price) * m / target
            if mu2 >= 0 and price - mu2 >= 0:
                return answer(e, m, (float(price - mu2), float(mu2)))
        # Only the second: bisect on m, for which the two conditions agree.
        low, high = max(0.0, target - np.sqrt(l2)), target
        for _ in range(200):
            m = (low + high) / 2
            e = l2 - (m - target) ** 2
            too_far = drift * m > price_of(e) * (target - m)
            low, high = (low, m) if too_far else (m, high)
        if e + m * m > l1 * (1 + 1e-9):
            raise ValueError(f"no policy meets limit={limit} and second_limit={second_limit}")
        return answer(e, m, (0.0, float(price_of(e))))
