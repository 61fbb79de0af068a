"""Bottleneck: four lanes that merge into one, a few cars whose speed can be capped upstream."""

from bisect import bisect_left

import gymnasium as gym
import numpy as np

from envs.sumo import ASSETS, SumoEnv, fill_boxes, path_lengths

HUMANS, CONTROLLED = 54, 6
LANES = (4, 4, 4, 2, 1)  # of edges 1-5
SEGMENTS = (1, 3, 3, 3, 1)  # in which an edge is observed
CELLS = 35  # lane-segments: sum of LANES * SEGMENTS
FREE_SPEED = 23.0  # m/s, the speed limit and the cap of a controlled car where no action rules
SLOWEST = 0.5  # m/s, the cap at action -1
SLOW_STEPS = 20  # = 10 s; a human who has been slow for longer costs
OUTFLOW_STEPS = 20
WARM_UP_STEPS = 40


class Bottleneck(SumoEnv):
    """A one-way road of four lanes that merge into two and then one, with 60 cars that never leave.

    ## Description
    Five edges of 100, 310, 140, 280 and 155 m with 4, 4, 4, 2 and 1 lanes; at the ends of edges 3
    and 4 the lanes merge in pairs, in turns. 54 cars are driven by humans, 6 are controlled: the
    agent caps their speed on edges 2 and 3 and so meters the flow into the merges, where a crowd
    passes more slowly than an orderly stream. It should pass as many cars as possible without
    keeping the humans crawling for more than 10 s. Cars follow SUMO's IDM model and stay in their
    lane. One step is 0.5 s.

    ## Action Space
    Box(-1, 1, (16,)), the maximum speed of the controlled cars in one part of one lane each:
    v = 0.5 * 46 ** ((1 + a) / 2) m/s, that is 0.5 at -1, 3.4 at 0, 23 at 1.

    | index | where |
    |---|---|
    | 0-3 | edge 2, first half (155 m), lanes 0-3 |
    | 4-7 | edge 2, second half, lanes 0-3 |
    | 8-11 | edge 3, first half (70 m), lanes 0-3 |
    | 12-15 | edge 3, second half, lanes 0-3 |

    Lane 0 is the rightmost. Anywhere else the maximum is 23 m/s.

    ## Observation Space
    | index | meaning | unit |
    |---|---|---|
    | 0-34 | cars in lane-segment i | 20 |
    | 35-69 | their mean speed, 0 if there is none | 50 m/s |
    | 70 | outflow over the last 20 steps (10 s) | 2000 cars/h |

    Lane-segments are counted edge by edge, then segment by segment, then lane by lane:

    | i | edge | equal segments | lanes |
    |---|---|---|---|
    | 0-3 | 1 | 1 | 4 |
    | 4-15 | 2 | 3 | 4 |
    | 16-27 | 3 | 3 | 4 |
    | 28-33 | 4 | 3 | 2 |
    | 34 | 5 | 1 | 1 |

    Cars inside a merge are in no lane-segment. How long each human has been slow is not observed:
    the cost is not a function of the observation.

    ## Rewards
    Throughput in units of 2000 cars/h, (3600 / 2000) * sum of all speeds / 1065.29 m, the length of
    the road. In a closed fleet its long-run average is the outflow, but it is there at every step.
    `info["exits"]` counts the cars that left.

    ## Cost
    Share of the 54 humans whose speed has been below `slow_speed` for more than 10 s without a
    break (from the 21st such step on), in [0, 1]. The clock is cleared when a car leaves the road.

    ## Constraint
    Average cost at most `cost_limit` = 0.1 per step.

    ## Starting State
    15 rows of 4 cars from 10 m to 520 m at 10 m/s, humans and controlled cars shuffled, then 40
    steps (20 s) without control. A car that reaches the end of the road enters it again at its
    start, on a random lane, at 10 m/s, with a new speed factor N(1, 0.1).

    ## Episode End
    Never terminated. Truncated every `horizon` steps.

    ## Arguments
    - `horizon`: steps until truncation.
    - `slow_speed`: m/s, below which a human is slow.
    - `render_mode`: None or "rgb_array".
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    cost_limit = 0.1
    _own_state = ("lane", "caps", "slow_clock", "recent_exits")

    def __init__(
        self, horizon: int = 1000, slow_speed: float = 3.0, render_mode: str | None = None
    ) -> None:
        fleet = HUMANS + CONTROLLED
        super().__init__("bottleneck", 0.5, fleet, horizon, render_mode)
        self.slow_speed = slow_speed
        net, edges = ASSETS / "bottleneck.net.xml", [f"e{k}" for k in range(1, 6)]
        lengths = [path_lengths(net, edges, lane) for lane in range(4)]
        if not all(np.array_equal(lengths[0], other) for other in lengths):
            raise ValueError(f"network file broken: {net}: lanes differ in length")
        ends = np.cumsum(lengths[0])  # (9,) m along the road: edge, crossing, edge, ..., edge
        self.starts = np.concatenate([[0.0], ends[1::2]])  # (5,) of the edges
        self.stops = ends[::2]
        self.cell_ends, self.cell_of = self._cells()
        # zones 0-3 are ruled by actions 4 * zone + lane; the gap is the 10 cm between the edges
        half = ((self.starts[1:3] + self.stops[1:3]) / 2).tolist()
        starts, stops = self.starts.tolist(), self.stops.tolist()
        self.zone_ends = [starts[1], half[0], stops[1], starts[2], half[1], stops[2]]
        self.zone_of = [None, 0, 1, None, 2, 3, None]
        self.lane = np.zeros(fleet, np.int64)  # on edges 1-3; lane // 2 on edge 4
        self.caps = [FREE_SPEED] * CONTROLLED  # m/s
        self.slow_clock = np.zeros(HUMANS, np.int64)  # steps
        self.recent_exits = [0] * OUTFLOW_STEPS
        self.action_space = gym.spaces.Box(-1.0, 1.0, (16,), np.float32)
        high = np.ones(2 * CELLS + 1, np.float32)
        high[-1] = fleet * 360.0 / 2000.0  # the whole fleet within 10 s
        self.observation_space = gym.spaces.Box(np.zeros_like(high), high, dtype=np.float32)
        self._background: np.ndarray | None = None
        self._set_cap = self.libsumo.vehicletype.setMaxSpeed

    def _cells(self) -> tuple[np.ndarray, np.ndarray]:
        """The road cut into stretches: where they end (m), and their lane-segment for each lane
        (stretches, 4); CELLS stands for none."""
        ends, cells, first = [], [], 0
        for edge, (lanes, segments) in enumerate(zip(LANES, SEGMENTS, strict=True)):
            start, stop = self.starts[edge], self.stops[edge]
            for k in range(segments):
                ends.append(start + (stop - start) * (k + 1) / segments)
                cells.append([first + lane * lanes // 4 for lane in range(4)])
                first += lanes
            if edge < 4:
                ends.append(self.starts[edge + 1])
                cells.append([CELLS] * 4)
        return np.array(ends[:-1]), np.array(cells)

    def step(self, action: np.ndarray):
        action = self._ready(action)
        x, lane = self.x[HUMANS:].tolist(), self.lane[HUMANS:].tolist()
        for k in range(CONTROLLED):
            cap, zone = FREE_SPEED, self.zone_of[bisect_left(self.zone_ends, x[k])]
            if zone is not None:
                a = min(max(action[4 * zone + lane[k]], -1.0), 1.0)
                cap = SLOWEST * (FREE_SPEED / SLOWEST) ** ((1.0 + a) / 2.0)
            if cap != self.caps[k]:
                self._set_cap(f"av{k}", cap)
                self.caps[k] = cap
        exits = self._advance()
        self.t += 1
        reward = 3600.0 * float(self.speed.sum()) / self.stops[4] / 2000.0
        cost = float(np.count_nonzero(self.slow_clock > SLOW_STEPS)) / HUMANS
        truncated = self.t >= self.horizon
        return self._observe(), reward, False, truncated, {"cost": cost, "exits": exits}

    def _advance(self) -> int:
        exits = super()._advance()
        slow = self.on_road[:HUMANS] & (self.speed[:HUMANS] < self.slow_speed)
        self.slow_clock = (self.slow_clock + 1) * slow
        self.recent_exits = [*self.recent_exits[1:], exits]
        return exits

    def _observe(self) -> np.ndarray:
        cell = self.cell_of[self.cell_ends.searchsorted(self.x), self.lane]
        cell[~self.on_road] = CELLS
        count = np.bincount(cell, minlength=CELLS + 1)[:CELLS]
        total = np.bincount(cell, self.speed, minlength=CELLS + 1)[:CELLS]
        obs = np.empty(2 * CELLS + 1, np.float32)
        obs[:CELLS] = count / 20.0
        obs[CELLS:-1] = total / np.maximum(count, 1) / 50.0
        obs[-1] = sum(self.recent_exits) * 360.0 / 2000.0
        return obs

    def _place(self) -> None:
        self.caps = [FREE_SPEED] * CONTROLLED
        self.slow_clock[:] = 0
        self.recent_exits = [0] * OUTFLOW_STEPS
        places = [(x, lane) for x in np.linspace(10.0, 520.0, 15) for lane in range(4)]
        for car, place in enumerate(self.np_random.permutation(len(places))):
            x, self.lane[car] = places[place]
            edge = np.searchsorted([100.0, 410.0], x)
            x = round(x - (0.0, 100.0, 410.0)[edge], 2)
            self.x[car] = self.starts[edge] + x
            self._add(car, f"e{edge + 1}", self._kind(car), self.lane[car], x, "10")
        for _ in range(WARM_UP_STEPS):
            self._advance()

    def _enter(self, car: int) -> None:
        self.lane[car] = self.np_random.integers(4)
        self._add(car, "e1", self._kind(car), self.lane[car], 0.0, "10")

    def _kind(self, car: int) -> str:
        return "human" if car < HUMANS else f"av{car - HUMANS}"

    def _restore(self) -> None:
        for k, cap in enumerate(self.caps):
            self._set_cap(f"av{k}", cap)

    def _savable(self) -> bool:
        # A loaded car whose tail is still inside a merge is taken to have come from the other lane
        # at times: wait until no front is within a car's length (5 m) behind a merge.
        front = self.x[self.on_road, None] - self.starts[3:]
        return not np.any((front >= 0.0) & (front <= 5.0))

    def _task(self) -> str:
        return f"{super()._task()}, slow below {self.slow_speed} m/s"

    def render(self) -> np.ndarray | None:
        """A frame (192, 1072, 3) seen from above: the first half of the road, then the second."""
        if self.render_mode is None:
            return None
        merge = [self.stops[2], self.starts[3], self.stops[3], self.starts[4]]
        if self._background is None:
            self._background = self._draw_road(merge)
        frame = self._background.copy()
        middle = np.stack([self.lane - 1.5, self.lane // 2 - 0.5, 0.0 * self.lane])
        cars = np.flatnonzero(self.on_road)
        humans, controlled = cars[cars < HUMANS], cars[cars >= HUMANS]
        for cars, colour in ((humans, (255, 255, 255)), (controlled, (240, 50, 40))):
            side = [np.interp(self.x[c], merge, middle[[0, 1, 1, 2], c]) for c in cars]
            side, front = np.array(side), self.x[cars]
            fill_boxes(frame, self._boxes(front - 5.0, front, side - 0.3, side + 0.3), colour)
        return frame

    def _draw_road(self, merge: list[float]) -> np.ndarray:
        """The frame without cars; edges 2 and 3, where the actions rule, are bluish."""
        frame = np.full((192, 1072, 3), (38, 50, 42), np.uint8)
        metres = np.arange(0.0, self.stops[4], 0.5)
        half_width = np.interp(metres, merge, [2.0, 1.0, 1.0, 0.5])  # lanes
        controlled = (metres > self.starts[1]) & (metres < self.stops[2])
        for part, colour in ((~controlled, (92, 92, 98)), (controlled, (76, 92, 122))):
            strip, width = metres[part], half_width[part]
            fill_boxes(frame, self._boxes(strip, strip + 0.5, -width, width), colour)
        for edge, lanes in enumerate(LANES):
            dash = np.arange(self.starts[edge], self.stops[edge] - 3.0, 9.0)
            for line in np.arange(1 - lanes / 2, lanes / 2):
                low, high = np.full_like(dash, line - 0.04), np.full_like(dash, line + 0.04)
                fill_boxes(frame, self._boxes(dash, dash + 3.0, low, high), (180, 180, 180))
        return frame

    def _boxes(self, start, stop, low, high) -> np.ndarray:
        """Pixel boxes (n, 4): start to stop in m along the road, low to high in lanes from the
        middle, lane 0 (rightmost) at the bottom."""
        fold = self.stops[4] / 2
        row = (start + stop) / 2 > fold
        x, y = start - row * fold, 48.0 + 96.0 * row
        pixels = [2.0 * x, y - 15.0 * high, 2.0 * (x + stop - start), y - 15.0 * low]
        return np.stack(pixels, axis=1)
