"""A long training per task: does it leak memory, file handles or processes, does it get slower?

    python benchmark/soak.py                                     # 1e6 steps of each task
    python benchmark/soak.py --envs PointCircle --steps 200_000
    python benchmark/soak.py --envs Grid --num-envs 2            # SUMO in worker processes

The script runs as a process of its own; whenever a row is added to its progress.csv, /proc tells
how much memory (resident), how many open files (both with its children) and how many children it
has.
What it has after a tenth of the run is compared with the last tenth. Exit code 1 if a bound is
broken. The bound on speed is on steps per CPU second, which other work on the machine does not
change; steps per second of both tenths are printed too. Linux only.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
MEMORY, SPEED = 0.05, 0.25  # the largest growth of memory and loss of speed, as shares
KEPT = ("files", "children")  # of these there may never be more


@dataclass
class Sample:
    """What a process and its children have when they have done `step` steps."""

    step: int
    clock: float
    cpu: float  # seconds, those of children that have ended included
    memory: int  # bytes
    files: int
    children: int


def family(pid: int) -> list[int]:
    """A process, its children, theirs, ..."""
    pids = [pid]
    for parent in pids:
        try:
            text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:  # it has ended
            continue
        pids += map(int, text.split())
    return pids


def sample(pid: int, step: int) -> Sample:
    pids, cpu, memory, files = family(pid), 0.0, 0, 0
    for one in pids:
        try:
            numbers = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            memory += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * PAGE
            files += len(os.listdir(f"/proc/{one}/fd"))
        except OSError:  # it has just ended
            continue
        cpu += sum(map(int, numbers[11:15])) / TICKS  # utime, stime, cutime, cstime
    return Sample(step, time.monotonic(), cpu, memory, files, len(pids) - 1)


def last_step(where: Path) -> int:
    """The step of the last whole row."""
    for path in where.glob("*/progress.csv"):
        rows = path.read_text().split("\n")[1:-1]
        return int(rows[-1].split(",")[0]) if rows else 0
    return 0


def soak(script: str, env_id: str, steps: int, batch: int, num_envs: int) -> list[Sample]:
    """Train, and take a sample after every iteration but the last, which the summary follows."""
    often = max(1, steps // batch // 20)  # evaluations: the first well before the first tenth ends
    flags = {"env-id": env_id, "total-timesteps": steps, "batch-size": batch, "eval-every": often}
    flags |= {"eval-episodes": 2, "eval-steps": 200, "num-envs": num_envs}
    samples = []
    with tempfile.TemporaryDirectory() as where:
        words = [sys.executable, str(ROOT / f"{script}.py"), "--run-dir", where]
        words += [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
        with (
            open(f"{where}/output", "w+") as output,
            subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output) as process,
        ):
            while process.poll() is None:
                step = last_step(Path(where))
                if (samples[-1].step if samples else 0) < step <= steps - batch:
                    samples.append(sample(process.pid, step))
                time.sleep(0.02)
            if process.returncode:
                output.seek(0)
                sys.exit(f"{env_id}: exit code {process.returncode}\n{output.read()[-2000:]}")
    return samples


def judge(samples: list[Sample], steps: int) -> tuple[dict, list[str]]:
    """(numbers for the table, the bounds that are broken)."""
    tenths = [[s for s in samples if low <= s.step / steps < low + 0.1] for low in (0.0, 0.1, 0.9)]
    if min(map(len, tenths)) < 2:
        sys.exit("too few samples for tenths: more --steps or a smaller --batch-size")
    first, early, late = tenths
    # Files are opened and closed all the time: the fewest that were open are those that stay.
    memory = early[0].memory, late[-1].memory
    files, children = ([min(getattr(s, x) for s in t) for t in (early, late)] for x in KEPT)
    wall, cpu = ([rate(t, clock) for t in (first, late)] for clock in ("clock", "cpu"))
    broken = []
    if memory[1] > (1.0 + MEMORY) * memory[0]:
        broken.append(f"memory grew by more than {MEMORY:.0%}")
    for name, (before, after) in zip(KEPT, (files, children), strict=True):
        if after > before:
            broken.append(f"{name}: {before} -> {after}")
    if cpu[1] < (1.0 - SPEED) * cpu[0]:
        broken.append(f"more than {SPEED:.0%} slower")
    row = {"MB at 10 %": f"{memory[0] / 1e6:.0f}", "MB at the end": f"{memory[1] / 1e6:.0f}"}
    row |= {"files": "{} {}".format(*files), "children": "{} {}".format(*children)}
    row |= {"steps/s": "{:.0f} {:.0f}".format(*wall), "steps/CPU s": "{:.0f} {:.0f}".format(*cpu)}
    return row, broken


def rate(samples: list[Sample], clock: str) -> float:
    first, last = samples[0], samples[-1]
    return (last.step - first.step) / max(getattr(last, clock) - getattr(first, clock), 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", default="acpo_continuous")
    tasks = ["PointCircle", "AntCircle", "Grid", "Bottleneck"]
    parser.add_argument("--envs", nargs="+", default=tasks)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--num-envs", type=int, default=0, help="0: what the task recommends")
    parser.add_argument("--out", help="a CSV file for the table")
    args = parser.parse_args()
    if args.steps < 40 * args.batch_size:  # four samples a tenth
        parser.error(f"--steps {args.steps}: must be at least 40 times --batch-size")
    table, verdicts = [], []
    for env_id in args.envs:
        samples = soak(args.script, env_id, args.steps, args.batch_size, args.num_envs)
        row, broken = judge(samples, args.steps)
        verdicts += broken
        table.append({"task": env_id, "steps": args.steps, **row})
        table[-1]["broken"] = "; ".join(broken) or "nothing"
        if len(table) == 1:
            print(f"| {' | '.join(table[0])} |")
            print("---".join(["|"] * (len(table[0]) + 1)))
        print(f"| {' | '.join(map(str, table[-1].values()))} |", flush=True)
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)
    sys.exit(1 if verdicts else 0)


if __name__ == "__main__":
    main()
