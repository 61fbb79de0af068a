"""Grid: four traffic lights, a closed fleet of cars, and a limit on how long anyone sees red."""

import gymnasium as gym
import numpy as np

from envs.sumo import ASSETS, SumoEnv, fill_boxes, path_lengths

ROADS = ("E0", "E1", "W0", "W1", "N0", "N1", "S0", "S1")  # heading, row or column
LIGHTS = ("c00", "c10", "c01", "c11")  # column, row; row 0 is the southern one
CROSSINGS = {  # the lights that a road meets, in driving order
    "E0": (0, 1), "W0": (1, 0), "E1": (2, 3), "W1": (3, 2),
    "N0": (0, 2), "S0": (2, 0), "N1": (1, 3), "S1": (3, 1),
}  # fmt: skip
# SUMO's light strings list the approaches southbound, westbound, northbound, eastbound
GREEN, YELLOW = ("GrGr", "rGrG"), ("yryr", "ryry")  # by axis: 0 north-south, 1 east-west
TOP_SPEED = 30.0  # m/s, of every car
YELLOW_TIME = 3  # s
RED_LIMIT = 5  # s; an older red costs
RED_SHOWN = 60  # s; the observation shows no older age


class Grid(SumoEnv):
    """Four crossings with lights on two rows and two columns of roads, 28 cars that never leave.

    ## Description
    Two eastbound, two westbound, two northbound and two southbound one-lane roads meet at 2 x 2
    crossings with traffic lights, which cut the plane into 3 x 3 blocks. A road has 300 m before its
    first crossing, 300 m between the two, 100 m after, and no turns. The agent runs the four lights;
    it should keep the traffic moving without leaving anyone at red for more than 5 s. The east-west
    roads carry most of the cars, so giving them long greens pays, and that is what the constraint
    forbids. Cars follow SUMO's IDM model. One step is 1 s.

    ## Action Space
    Box(-1, 1, (4,)), one number for each light in the order south-west, south-east, north-west,
    north-east. A number above 0 asks for a switch: the axis that has green shows yellow for 3 s,
    beginning now, then the other axis gets green for at least 1 s. A light that shows yellow ignores
    its number, in the step in which it turns green too.

    ## Observation Space
    | index | meaning | unit |
    |---|---|---|
    | 0-27 | speed of car i | 30 m/s |
    | 28-55 | distance of car i to its next stop line; on the last edge, to its end; 0 in a crossing | 300 m |
    | 56-83 | number 1..24 of the edge car i is on, road by road; 0 in a crossing | 24 |
    | 84-87 | age of the red at light j: time since right of way last changed, at most 60 s | 60 s |
    | 88-91 | axis with right of way at light j: 0 north-south, 1 east-west | |
    | 92-95 | 1 if that axis shows yellow | |

    Cars 0-23 are on E0, E1, W0, W1 (6 each), cars 24-27 on N0, N1, S0, S1 (1 each); row and column 0
    are the southern and the western ones. A car that waits to enter is shown at the start of its
    road with speed 0. All entries are in [0, 1].

    ## Rewards
    Mean speed of all cars / 30 m/s, where a car that waits to enter counts as 0. In a closed fleet
    the exits per second are 28 * mean speed / 737.6 m in the long run: the average of this reward is
    the throughput, but it is there at every step. `info["exits"]` counts the cars that left.

    ## Cost
    Share of the four lights whose present red is older than 5 s, in [0, 1]. One axis of a light is
    red at any time, so the cost is a function of the observation: a green of g s followed by 3 s of
    yellow costs max(0, g + 3 - 5) / (g + 3) on average.

    ## Constraint
    Average cost at most `cost_limit` = 0.1 per step.

    ## Starting State
    On every road the cars stand evenly spaced over the first 600 m with a random offset and drive
    as fast as is safe. Every light gives green to a randomly chosen axis. A car that reaches the
    end of its road enters it again at its start, with a new speed factor N(1, 0.1).

    ## Episode End
    Never terminated. Truncated every `horizon` steps.

    ## Arguments
    - `horizon`: steps until truncation.
    - `cars_per_road`: cars on each east-west and on each north-south road. With n cars in all the
      observation has 3 n + 12 entries, in the same order.
    - `render_mode`: None or "rgb_array".
    """  # noqa: E501

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    cost_limit = 0.1
    _own_state = ("axis", "yellow", "red_age")

    def __init__(
        self,
        horizon: int = 1000,
        cars_per_road: tuple[int, int] = (6, 1),
        render_mode: str | None = None,
    ) -> None:
        if len(cars_per_road) != 2 or not all(1 <= n <= 40 for n in cars_per_road):
            raise ValueError(f"cars_per_road {cars_per_road}: two numbers from 1 to 40")
        self.cars_on = [cars_per_road[road[0] in "NS"] for road in ROADS]
        self.road_of = np.repeat(np.arange(8), self.cars_on)  # (fleet,)
        fleet = len(self.road_of)
        super().__init__("grid", 1.0, fleet, horizon, render_mode)
        lengths = [
            path_lengths(ASSETS / "grid.net.xml", [f"{road}_{k}" for k in range(3)], lane=0)
            for road in ROADS
        ]
        self.ends = np.cumsum(
            lengths[0]
        )  # (5,) m along a road: edge, crossing, edge, crossing, edge
        if not all(np.array_equal(lengths[0], other) for other in lengths):
            raise ValueError("network file broken: the eight roads of the grid differ in length")
        # by car and lane of its road, flat (fleet * 5,): edge number / 24, and the two coefficients
        # of the distance to the stop line, a - b * x, in 300 m; all 0 in a crossing
        on_edge = np.array([1.0, 0.0, 1.0, 0.0, 1.0])
        number = 3 * self.road_of[:, None] + np.array([1, 0, 2, 0, 3])
        self.edge_number = (number * on_edge / 24.0).ravel()
        self.stop_line = np.tile(self.ends * on_edge / 300.0, fleet)
        self.per_metre = np.tile(on_edge / 300.0, fleet)
        self.first_lane = 5 * np.arange(fleet)
        self.axis, self.yellow, self.red_age = [0] * 4, [0] * 4, [0] * 4  # yellow, red_age: s
        self.action_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.observation_space = gym.spaces.Box(0.0, 1.0, (3 * fleet + 12,), np.float32)
        self._background: np.ndarray | None = None
        self._show = self.libsumo.trafficlight.setRedYellowGreenState

    def step(self, action: np.ndarray):
        action = self._ready(action)
        axis, yellow, red_age = self.axis, self.yellow, self.red_age
        for j in range(4):
            if yellow[j] == YELLOW_TIME:  # right of way changes, and with it who sees red
                axis[j], yellow[j], red_age[j] = 1 - axis[j], 0, 0
                self._show(LIGHTS[j], GREEN[axis[j]])
            elif yellow[j]:
                yellow[j] += 1
            elif action[j] > 0.0:
                yellow[j] = 1
                self._show(LIGHTS[j], YELLOW[axis[j]])
            red_age[j] += 1
        exits = self._advance()
        self.t += 1
        reward = float(self.speed.sum()) / len(self.ids) / TOP_SPEED
        cost = sum(age > RED_LIMIT for age in red_age) / 4.0
        truncated = self.t >= self.horizon
        return self._observe(), reward, False, truncated, {"cost": cost, "exits": exits}

    def _observe(self) -> np.ndarray:
        n = len(self.ids)
        lane = self.ends[:-1].searchsorted(self.x) + self.first_lane  # (fleet,)
        obs = np.empty(3 * n + 12, np.float32)
        obs[:n] = self.speed / TOP_SPEED
        obs[n : 2 * n] = self.stop_line.take(lane) - self.per_metre.take(lane) * self.x
        obs[2 * n : 3 * n] = self.edge_number.take(lane)
        obs[3 * n :] = [
            *[min(age, RED_SHOWN) / RED_SHOWN for age in self.red_age],
            *self.axis,
            *[shown > 0 for shown in self.yellow],
        ]
        return obs

    def _place(self) -> None:
        self.axis = self.np_random.integers(2, size=4).tolist()
        self.yellow, self.red_age = [0] * 4, [0] * 4
        self._restore()
        first = np.concatenate([[0], np.cumsum(self.cars_on)])
        for road, n in enumerate(self.cars_on):
            offset = self.np_random.random()
            for k in range(n):
                edge, x = divmod(600.0 * (k + offset) / n, 300.0)
                x = min(round(x, 2), 299.0)
                car = first[road] + k
                self.x[car] = x + (self.ends[1] if edge else 0.0)
                self._add(car, f"{ROADS[road]}_{int(edge)}", "car", 0, x, "max")
        self._advance()  # the cars appear

    def _enter(self, car: int) -> None:
        self._add(car, f"{ROADS[self.road_of[car]]}_0", "car", 0, 0.0, "max")

    def _restore(self) -> None:
        for j, light in enumerate(LIGHTS):
            self._show(light, (YELLOW if self.yellow[j] else GREEN)[self.axis[j]])

    def render(self) -> np.ndarray | None:
        """A frame (944, 944, 3) seen from above, north up, 1 m a pixel; cars are drawn too wide."""
        if self.render_mode is None:
            return None
        end, roads = self.ends, np.arange(8)
        if self._background is None:
            self._background = np.full((944, 944, 3), (38, 50, 42), np.uint8)
            fill_boxes(self._background, self._boxes(roads, 0.0, end[4], 0.0, 9.4), (92, 92, 98))
            for start, stop in ((0.0, end[0]), (end[1], end[2])):
                line = self._boxes(roads, start, stop, -0.5, 0.5)
                fill_boxes(self._background, line, (190, 180, 120))
        frame = self._background.copy()
        colour = {True: (235, 50, 40), False: (50, 220, 90)}
        for k in range(2):  # first and second crossing of every road
            bars = self._boxes(roads, end[2 * k], end[2 * k] + 4.0, 0.8, 9.2)
            for road, bar in zip(ROADS, bars[:, None], strict=True):
                j = CROSSINGS[road][k]
                red = self.axis[j] != (road[0] in "EW")
                yellow = self.yellow[j] and not red
                fill_boxes(frame, bar, (255, 205, 40) if yellow else colour[red])
        front, cars = self.x[self.on_road], self.road_of[self.on_road]
        fill_boxes(frame, self._boxes(cars, front - 5.0, front, 3.0, 7.0), (255, 255, 255))
        return frame

    def _boxes(self, roads, start, stop, left, right) -> np.ndarray:
        """Pixel boxes (n, 4) of strips along roads: from start to stop (m along each road), from
        left to right (m to the right of the centre line between the two directions)."""
        heading = np.array([ROADS[road][0] for road in roads])
        row = np.array([int(ROADS[road][1]) for road in roads])
        half = self.ends[4] / 2 + (self.ends[0] - 100.0) / 2  # start of a road to the middle
        forward = np.where(np.isin(heading, ["E", "N"]), 1.0, -1.0)
        across = np.where(np.isin(heading, ["W", "N"]), 1.0, -1.0)  # where right is, on the axis
        along = np.stack([forward * (start - half), forward * (stop - half)])
        side = (row - 0.5) * (self.ends[2] - self.ends[0])
        beside = np.stack([side + across * left, side + across * right])
        east_west = np.isin(heading, ["E", "W"])
        x, y = np.where(east_west, along, beside), np.where(east_west, beside, along)
        pixels = [472 + x.min(0), 472 - y.max(0), 472 + x.max(0), 472 - y.min(0)]
        return np.stack(pixels, axis=1)
