"""Tables and figures of a folder that benchmark/run.py has filled.

    python benchmark/report.py runs/benchmark/quick
    python benchmark/report.py runs/benchmark/practical --out benchmark/results/practical
    python benchmark/report.py runs/benchmark/practical runs/benchmark/hold --steps 1000000
    python benchmark/report.py benchmark/results/practical runs/benchmark/practical \\
        --out benchmark/results/practical                  # an earlier report, and what is new

Writes results.csv (one row per run), curves.csv (at most 100 rows per run), results.md (algorithm x
task at a glance, then one row for each pair, means over seeds) and PNG figures: curves_TASK, curves
(all tasks), scatter, throughput and, for each swept flag, sweep_FLAG. Runs that are not finished
are left out, and it says how many. Page: docs/benchmark.md.
"""

import csv
import json
import math
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, NoReturn

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tyro

NAMES = {
    "acpo_continuous": "ACPO",
    "cpo_continuous": "CPO",
    "pcpo_continuous": "PCPO",
    "atrpo_lagrangian": "ATRPO-Lagrangian",
    "ppo_lagrangian": "PPO-Lagrangian",
    "bvf_ppo": "BVF-PPO",
}
TASKS = (
    "PointCircle",
    "PointGather",
    "AntCircle",
    "AntGather",
    "Grid",
    "Bottleneck",
    "ConstrainedLQR",
)
FEASIBLE = 1.1  # a mean cost of up to this times the limit counts as within it
POINTS = 100  # points of a learning curve; each is the mean of as many iterations as that takes
RESAMPLES = 10_000  # of the bootstrap
IDENTITY = ("env_id", "algorithm", "sweep", "seed")  # what tells a run from the others
CURVE = ("global_step", "reward", "cost")
BESIDE = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "fontsize": 8}  # of a whole figure
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0)}


@dataclass
class Args:
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]  # --out of run.py or of this program
    out: Path | None = None  # where to write (None: report/ in the first folder)
    steps: int = 0  # read longer runs only up to here, to compare at equal steps (0: all of them)


@dataclass
class Run:
    """What one training came to. Reward and cost are means over the last 20 % of it."""

    env_id: str
    algorithm: str
    sweep: str  # such as "recovery-t=0.5"; "" where nothing was swept
    seed: int
    steps: int
    reward: float  # per step, of the exploring policy
    cost: float
    limit: float
    violation: float  # share of iterations with a cost above the limit
    eval_reward: float  # of the last evaluation, mean action; nan where there was none
    eval_cost: float
    steps_per_second: float
    seconds: float
    commit: str
    curve: dict[str, np.ndarray] = field(repr=False)  # global_step, reward, cost
    values: dict[str, str] = field(repr=False)  # the swept flags

    @property
    def minutes(self) -> float:
        return self.seconds / 60.0

    @property
    def group(self) -> tuple[str, str, str]:
        return self.env_id, self.algorithm, self.sweep


def refuse(why: str) -> NoReturn:
    print(f"error: {why}", file=sys.stderr)
    sys.exit(2)


def read_progress(path: Path, steps: int = 0) -> dict[str, np.ndarray]:
    """Columns of progress.csv, up to a number of steps unless 0; an empty cell is nan."""
    with open(path) as file:
        rows = [row for row in csv.DictReader(file) if not 0 < steps < int(row["global_step"])]
    if steps and not rows:
        refuse(f"{path}: has no iteration within --steps {steps}")
    return {tag: np.array([float(row[tag] or "nan") for row in rows]) for tag in rows[0]}


def last_fifth(values: np.ndarray) -> float:
    """The mean over the last 20 % of the iterations, as in the summary of a script."""
    return float(values[-max(1, len(values) // 5) :].mean())


def last_seen(values: np.ndarray) -> float:
    """The last number that exists."""
    seen = values[np.isfinite(values)]
    return float(seen[-1]) if len(seen) else math.nan


def commits_of(record: dict, arguments: dict) -> str:
    """The commit that started the run, those that resumed it, and whether they tell all."""
    attempts = record["attempts"]
    found = dict.fromkeys([arguments["commit"], *(attempt["commit"] for attempt in attempts)])
    names = "+".join(commit[:7] or "unknown" for commit in found)
    dirty = any(attempt["uncommitted_changes"] for attempt in attempts)
    return f"{names} with uncommitted changes" if dirty else names


def read_record(path: Path) -> tuple[dict, tuple]:
    """A record.json, and who it is of: the values of IDENTITY."""
    try:
        record = json.loads(path.read_text())
        task = record["env_id"].split(":")[-1].replace("/", "-")
        sweep = ", ".join(f"{flag}={value}" for flag, value in record["sweep"].items())
        return record, (task, record["algorithm"], sweep, record["seed"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        refuse(f"{path}: cannot be read ({error!r})")


def read_run(folder: Path, who: tuple, record: dict, steps: int = 0) -> Run:
    try:
        progress = read_progress(folder / "progress.csv", steps)
        arguments = json.loads((folder / "args.json").read_text())
        reward, cost = (progress[f"charts/avg_{x}"] for x in ("reward", "cost"))
        step, limit = progress["global_step"], progress["charts/cost_limit"]
        rate = float(progress["charts/SPS"][-1])
        return Run(
            *who,
            steps=int(step[-1]),
            reward=last_fifth(reward),
            cost=last_fifth(cost),
            limit=float(limit[-1]),
            violation=float((cost > limit).mean()),
            eval_reward=last_seen(progress["eval/avg_reward"]),
            eval_cost=last_seen(progress["eval/avg_cost"]),
            steps_per_second=rate,
            seconds=float(step[-1]) / rate,
            commit=commits_of(record, arguments),
            curve={"global_step": step, "reward": reward, "cost": cost},
            values=record["sweep"],
        )
    except (OSError, ValueError, LookupError) as error:
        refuse(f"{folder}: cannot be read ({error!r})")


def read_report(folder: Path) -> list[Run]:
    """The runs of an earlier report: its results.csv and curves.csv."""
    try:
        curves = {}
        with open(folder / "curves.csv") as file:
            for row in csv.DictReader(file):
                who = tuple(row.pop(name) for name in IDENTITY)
                curves.setdefault(who, []).append([float(x) for x in row.values()])
        runs = []
        with open(folder / "results.csv") as file:
            for row in csv.DictReader(file):
                curve = np.array(curves[tuple(row[name] for name in IDENTITY)]).T
                known = {f.name: f.type(row[f.name]) for f in fields(Run) if f.name in row}
                swept = dict(part.split("=") for part in row["sweep"].split(", ") if part)
                runs.append(Run(**known, curve=dict(zip(CURVE, curve, strict=True)), values=swept))
        return runs
    except (OSError, ValueError, LookupError, TypeError) as error:
        refuse(f"{folder}: is not a report that can be read ({error!r})")


def read_runs(folders: tuple[Path, ...], steps: int = 0) -> tuple[list[Run], int]:
    """The runs that are finished in some folder, the later one counts; and how many are in none."""
    runs, total, unfinished = {}, 0, set()
    for folder in folders:
        found, records = [], sorted(folder.glob("*/record.json"))
        if (folder / "results.csv").exists():
            if steps:
                refuse(f"--steps {steps}: {folder} is a report, which knows whole runs only")
            found = read_report(folder)
        elif not records:
            refuse(f"{folder}: is no folder with a results.csv or with runs of benchmark/run.py")
        for path in records:
            record, who = read_record(path)
            if record["folder"] and any(x["exit_code"] == 0 for x in record["attempts"]):
                found.append(read_run(path.parent / record["folder"], who, record, steps))
            else:
                unfinished.add(who)
        runs |= {(*run.group, run.seed): run for run in found}
        total += len(found)
    if total > len(runs):
        print(f"runs of an earlier folder that a later one has replaced: {total - len(runs)}")
    return list(runs.values()), len(unfinished - runs.keys())


def position(names, name: str) -> tuple[int, str]:
    """Sorts by a given order, and unknown names by themselves behind it."""
    order = list(names)
    return (order.index(name) if name in order else len(order)), name


def group_runs(runs: list[Run]) -> dict[tuple[str, str, str], list[Run]]:
    """(task, algorithm, sweep) -> its runs by seed; tasks and algorithms in their usual order."""

    def key(run: Run) -> tuple:
        swept = [(flag, as_number(value), value) for flag, value in run.values.items()]
        return position(TASKS, run.env_id), position(NAMES, run.algorithm), swept, run.seed

    groups = {}
    for run in sorted(runs, key=key):
        groups.setdefault(run.group, []).append(run)
    return groups


def check(groups: dict[tuple, list[Run]]) -> None:
    """Refuse seeds of one group that were not trained for the same, or not as long."""
    remedies = {"limit": "report them apart", "steps": "choose --steps N to read all up to N"}
    for (task, *who), runs in groups.items():
        for name, remedy in remedies.items():
            seeds = {}
            for run in runs:
                seeds.setdefault(getattr(run, name), []).append(str(run.seed))
            found = (f"{name} {x:,} (seed {', '.join(those)})" for x, those in seeds.items())
            if len(seeds) > 1:
                refuse(f"{task}, {label(*who)}: {' and '.join(found)}: {remedy}")
        if len({tuple(blocks(run.curve["global_step"]).round()) for run in runs}) > 1:
            refuse(f"{task}, {label(*who)}: its seeds differ in --batch-size: report them apart")


def as_number(text: str) -> float:
    """For sorting: words come after all numbers."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def bootstrap(values, level: float = 0.95) -> tuple[float, float] | None:
    """The interval of the mean by resampling with replacement; None for a single value."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return None
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_of(runs: list[Run], name: str) -> float:
    return float(np.mean([getattr(run, name) for run in runs]))


def best_feasible(groups: dict[tuple, list[Run]]) -> set[tuple]:
    """Of each task with a single limit, the groups of highest mean reward that hold it."""
    best = set()
    for members in by_task(groups).values():
        if len(limits_of(members)) == 1:
            rewards = {key: mean_of(x, "reward") for key, x in members.items() if holds(x)}
            best |= {key for key in rewards if rewards[key] == max(rewards.values())}
    return best


def holds(runs: list[Run]) -> bool:
    return mean_of(runs, "cost") <= FEASIBLE * mean_of(runs, "limit")


def limits_of(groups: dict[tuple, list[Run]]) -> list[float]:
    return sorted({run.limit for runs in groups.values() for run in runs})


def label(algorithm: str, sweep: str) -> str:
    name = NAMES.get(algorithm, algorithm)
    return f"{name}, {sweep}" if sweep else name


def cell(runs: list[Run], name: str, form: str = ".3g") -> str:
    """Mean over seeds with its interval, such as `0.65 [0.57, 0.73]`."""
    values = [getattr(run, name) for run in runs]
    text, interval = format(np.mean(values), form), bootstrap(values)
    if interval:
        text += f" [{interval[0]:{form}}, {interval[1]:{form}}]"
    return text


def markdown(groups: dict[tuple, list[Run]], unfinished: int, figures: list[str]) -> str:
    commits = sorted({run.commit for runs in groups.values() for run in runs})
    lines = [
        "| task | algorithm | n | steps | reward per step | cost per step | limit "
        "| iterations in violation | steps/s | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    bold = best_feasible(groups)
    for key, runs in groups.items():
        task, algorithm, sweep = key
        name = label(algorithm, sweep)
        columns = [
            task,
            f"**{name}**" if key in bold else name,
            str(len(runs)),
            f"{mean_of(runs, 'steps'):,.0f}",
            cell(runs, "reward"),
            cell(runs, "cost"),
            f"{mean_of(runs, 'limit'):g}",
            cell(runs, "violation", ".0%"),
            cell(runs, "steps_per_second", ",.0f"),
            cell(runs, "minutes", ".1f"),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    lines += [
        "",
        "Reward and cost: mean over the last 20 % of training, of the exploring policy. Means over",
        "n seeds, in brackets 95 % bootstrap intervals over the seeds (none for n = 1). Bold: the",
        f"highest mean reward of a task among mean costs of at most {FEASIBLE:g} times the limit.",
        f"Commit: {'; '.join(commits)}. Runs left out as not finished: {unfinished}.",
        "",
    ]
    return "\n".join(lines + [f"![{name[:-4]}]({name})" for name in figures]) + "\n"


def span(values: list) -> str:
    return " to ".join(f"{x:g}" for x in sorted({min(values), max(values)}))


def glance(groups: dict[tuple, list[Run]]) -> str:
    """One row per algorithm, one column per task: reward and its interval, and the cost."""
    tasks, bold = by_task(groups), best_feasible(groups)
    heads = []
    for task, members in tasks.items():
        limit, seeds = span(limits_of(members)), span([len(runs) for runs in members.values()])
        heads.append(f"{task}: limit {limit}, n = {seeds}")
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(tasks)) + "|"]
    for who in dict.fromkeys(key[1:] for key in groups):
        cells = [label(*who)]
        for task in tasks:
            runs = groups.get((task, *who), [])
            text = f"{cell(runs, 'reward', '#.3g')} at {mean_of(runs, 'cost'):.2g}" if runs else "-"
            if runs and not holds(runs):
                text = f"*{text}*"
            cells.append(f"**{text}**" if (task, *who) in bold else text)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Reward per step with its interval, at this cost per step. Bold: the best within"]
    lines += [f"{FEASIBLE:g} times the limit. Italic: beyond it. Terms: see below.", ""]
    return "\n".join(lines) + "\n"


def write_csv(out: Path, groups: dict[tuple, list[Run]]) -> None:
    """results.csv and curves.csv, from which read_report makes the same runs again."""
    rows = [asdict(run) for runs in groups.values() for run in runs]
    points = []
    for row in rows:
        curve, _ = row.pop("curve"), row.pop("values")
        who = [row[name] for name in IDENTITY]
        for step, *values in zip(*(blocks(curve[name]) for name in CURVE), strict=True):
            points.append([*who, f"{step:.0f}", *(f"{x:.5g}" for x in values)])
    tables = {"results": [[*rows[0]], *([*row.values()] for row in rows)]}
    tables["curves"] = [[*IDENTITY, *CURVE], *points]
    for name, table in tables.items():
        with open(out / f"{name}.csv", "w", newline="") as file:
            csv.writer(file).writerows(table)


def blocks(values: np.ndarray, points: int = POINTS) -> np.ndarray:
    """(n, ...) -> at most `points` means of equally many consecutive entries; a rest is dropped."""
    size = math.ceil(len(values) / points)
    whole = len(values) // size * size
    return values[:whole].reshape(-1, size, *values.shape[1:]).mean(1)


def mean_curve(runs: list[Run], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps, mean over seeds, standard deviation over seeds: 0 for one seed)."""
    steps = blocks(runs[0].curve["global_step"])
    curves = np.array([blocks(run.curve[name]) for run in runs])
    spread = curves.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(steps))
    return steps, curves.mean(0), spread


def by_task(groups: dict[tuple, list[Run]]) -> dict[str, dict[tuple, list[Run]]]:
    tasks = {}
    for key, runs in groups.items():
        tasks.setdefault(key[0], {})[key] = runs
    return tasks


def colors_of(groups: dict[tuple, list[Run]]) -> dict[str, tuple]:
    """label -> colour, the same in all figures."""
    labels = list(dict.fromkeys(label(*key[1:]) for key in groups))
    colors = plt.colormaps["tab10" if len(labels) <= 10 else "tab20"].colors
    if len(labels) > len(colors):
        colors = plt.colormaps["turbo"](np.linspace(0.0, 1.0, len(labels)))
    return dict(zip(labels, colors, strict=False))


def save(figure, path: Path) -> str:
    figure.savefig(path, dpi=100, bbox_inches="tight")  # grows by the legend that stands outside
    plt.close(figure)
    return path.name


def plot_curves(axes, task: str, groups: dict[tuple, list[Run]], colors: dict) -> None:
    """Reward and cost of one task into two axes: means over seeds, one standard deviation."""
    for axis, name in zip(axes, ("reward", "cost"), strict=True):
        for (_, *who), runs in groups.items():
            steps, mean, spread = mean_curve(runs, name)
            steps, color = steps / 1e6, colors[label(*who)]
            axis.plot(steps, mean, color=color, label=f"{label(*who)} (n = {len(runs)})")
            axis.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.15, lw=0)
        axis.set(
            xlabel="environment steps (millions)", ylabel=f"average {name} per step", title=task
        )
    for limit in limits_of(groups):
        axes[1].axhline(limit, color="black", linestyle="--", label=f"limit {limit:g}")


def draw_curves(out: Path, task: str, groups: dict[tuple, list[Run]], colors: dict) -> str:
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    plot_curves(axes, task, groups, colors)
    figure.legend(*axes[1].get_legend_handles_labels(), **BESIDE)
    return save(figure, out / f"curves_{task}.png")


def draw_all_curves(out: Path, groups: dict[tuple, list[Run]], colors: dict) -> str:
    """The curves of all tasks in one figure: rewards above, costs below."""
    tasks = by_task(groups)
    width = max(6.4, 3.2 * len(tasks))
    shape = {"figsize": (width, 6.0), "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(2, len(tasks), **shape)
    for column, (task, part) in zip(axes.T, tasks.items(), strict=True):
        plot_curves(column, task, part, colors)
        column[0].set(xlabel="")
        limit = limits_of(part)[-1]
        column[1].set(ylim=(0.0, 3.0 * limit), title="")  # the limit in view, not the first updates
    for axis in axes[:, 1:].flat:
        axis.set(ylabel="")
    lines = [plt.Line2D([], [], color=x) for x in colors.values()]
    lines += [plt.Line2D([], [], linestyle="--", color="black")]
    ncols = max(1, round(width / (0.5 + 0.075 * max(map(len, colors)))))  # inches, roughly
    figure.legend(lines, [*colors, "limit"], ncols=ncols, **BELOW)
    return save(figure, out / "curves.png")


def draw_scatter(out: Path, groups: dict[tuple, list[Run]], colors: dict) -> str:
    """A small dot per run, a large one for the mean over its seeds."""
    tasks = by_task(groups)
    figure, axes = panels(len(tasks))
    for axis, (task, members) in zip(axes, tasks.items(), strict=True):
        for (_, *who), runs in members.items():
            costs, rewards = [run.cost for run in runs], [run.reward for run in runs]
            color = colors[label(*who)]
            axis.scatter(costs, rewards, s=12, color=color, alpha=0.6)
            axis.scatter(np.mean(costs), np.mean(rewards), s=70, color=color, edgecolor="black")
        for limit in limits_of(members):
            axis.axvline(limit, color="black", linestyle="--")
        axis.set(xlabel="cost per step", ylabel="reward per step", title=task)
        axis.axhline(0.0, color="0.85", zorder=0)  # in view, or 1 % would look like 50
        axis.locator_params(axis="x", nbins=4)
    dots = [plt.Line2D([], [], marker="o", linestyle="", color=x) for x in colors.values()]
    dots += [plt.Line2D([], [], linestyle="--", color="black")]
    figure.legend(dots, [*colors, "limit"], **BESIDE)
    return save(figure, out / "scatter.png")


def draw_throughput(out: Path, groups: dict[tuple, list[Run]], colors: dict) -> str:
    tasks = by_task(groups)
    figure, axes = panels(len(tasks))
    for axis, (task, members) in zip(axes, tasks.items(), strict=True):
        names = [label(*key[1:]) for key in members]
        rates = [mean_of(runs, "steps_per_second") for runs in members.values()]
        axis.barh(names, rates, color=[colors[name] for name in names])
        axis.invert_yaxis()
        axis.set(xlabel="steps per second", title=task)
    return save(figure, out / "throughput.png")


def draw_sweep(out: Path, flag: str, groups: dict[tuple, list[Run]]) -> str:
    """Final reward and cost against the values of a flag; dots are runs, bars the intervals."""
    tasks = {}  # task -> algorithm and what else was swept -> value of the flag -> runs
    for (task, algorithm, _), runs in groups.items():
        others = {name: x for name, x in runs[0].values.items() if name != flag}
        if flag in runs[0].values:
            who = label(algorithm, ", ".join(f"{name}={x}" for name, x in others.items()))
            line = tasks.setdefault(task, {}).setdefault(who, {})
            line[runs[0].values[flag]] = runs
    shape = {"figsize": (11, 3.6 * len(tasks)), "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(len(tasks), 2, **shape)
    for row, (task, lines) in zip(axes, tasks.items(), strict=True):
        values = {x for line in lines.values() for x in line}
        ticks = sorted(values, key=lambda x: (as_number(x), x))
        for axis, name in zip(row, ("reward", "cost"), strict=True):
            for i, (who, line) in enumerate(lines.items()):
                draw_line(axis, name, who, f"C{i}", [(ticks.index(x), line[x]) for x in line])
            axis.set_xticks(range(len(ticks)), ticks)
            axis.set(xlabel=flag, ylabel=f"{name} per step, last 20 %", title=task)
        limits = {run.limit for line in lines.values() for runs in line.values() for run in runs}
        for limit in limits:
            row[1].axhline(limit, color="black", linestyle="--", label=f"limit {limit:g}")
        row[1].legend(fontsize=8)
    return save(figure, out / f"sweep_{flag}.png")


def draw_line(axis, name: str, who: str, color: str, points: list[tuple[int, list[Run]]]) -> None:
    """One algorithm in a sweep: (position on the axis, its runs) by value."""
    points = sorted(points, key=lambda point: point[0])
    axis.plot(
        [x for x, _ in points],
        [mean_of(runs, name) for _, runs in points],
        color=color,
        marker="o",
        label=who,
    )
    for x, runs in points:
        values = [getattr(run, name) for run in runs]
        axis.scatter([x] * len(values), values, s=10, color=color, alpha=0.5)
        interval = bootstrap(values)
        if interval:
            axis.vlines(x, *interval, color=color)


def panels(n: int):
    """A figure and n axes, three in a row."""
    columns = min(n, 3)
    rows = math.ceil(n / columns)
    shape = {"figsize": (1 + 4 * columns, 3.6 * rows), "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(rows, columns, **shape)
    for axis in axes.flat[n:]:
        axis.remove()
    return figure, axes.flat[:n]


def main(args: Args) -> None:
    if not args.folders:
        refuse("no folder is given: name the --out of benchmark/run.py, or an earlier report")
    runs, unfinished = read_runs(args.folders, args.steps)
    if not runs:
        names = ", ".join(map(str, args.folders))
        refuse(f"{names}: has no finished run of benchmark/run.py ({unfinished} unfinished)")
    groups = group_runs(runs)
    check(groups)
    out = args.out or args.folders[0] / "report"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--out {out}: must be a folder to write into ({error.strerror})")
    colors = colors_of(groups)
    figures = [draw_curves(out, task, part, colors) for task, part in by_task(groups).items()]
    draws = draw_all_curves, draw_scatter, draw_throughput
    figures += [draw(out, groups, colors) for draw in draws]
    flags = dict.fromkeys(flag for run in runs for flag in run.values)
    figures += [draw_sweep(out, flag, groups) for flag in flags]
    write_csv(out, groups)
    text = f"{glance(groups)}\n{markdown(groups, unfinished, figures)}"
    (out / "results.md").write_text(text)
    print(text)
    print(f"{len(runs)} runs: {out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
