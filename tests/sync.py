"""What the six scripts have in common, and a tool that keeps it equal to the byte.

    python tests/sync.py          # lists what has drifted; exit code 1 if anything has
    python tests/sync.py --fix    # rewrites the copies from the first script of each row

A segment is a named piece of a script, compared as text, comments included:

    mlp              a top-level function or class, decorators included
    Agent.policy     a method of Agent
    Args.seed        the line of a field
    main: Critics    a paragraph of main, called by the first two words of its first line
    tail             what follows main
"""

import ast
import difflib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPO, ACPO, PCPO = "cpo_continuous", "acpo_continuous", "pcpo_continuous"
ATRPO, PPO, BVF = "atrpo_lagrangian", "ppo_lagrangian", "bvf_ppo"
SCRIPTS = (CPO, ACPO, PCPO, ATRPO, PPO, BVF)
NATURAL = (CPO, ACPO, PCPO, ATRPO)  # those that solve for their step with H

# Segment -> rows of scripts with the same text; --fix copies from the first script of a row. A row
# of one script is an exception: its text is its own. No carrier of a segment may be left out.
ROWS: dict[str, list[tuple[str, ...]]] = {
    "Critics": [SCRIPTS],
    "Agent": [(CPO, ACPO, PCPO, ATRPO, PPO), (BVF,)],  # bvf_ppo: a layer behind the network
    "Agent.__init__": [(CPO, ACPO, PCPO, ATRPO, PPO), (BVF,)],
    "Agent.normalize": [SCRIPTS],
    "Agent.update_normalizer": [SCRIPTS],
    "Agent.policy": [(CPO, ACPO, PCPO, ATRPO, PPO), (BVF,)],
    "Agent.policy_parameters": [SCRIPTS],
    "Agent.values": [SCRIPTS],
    "mlp": [SCRIPTS],
    "compute_gae": [SCRIPTS],
    "flat": [NATURAL],
    "surrogate_gradients": [NATURAL],
    "fisher_vector_product": [NATURAL],
    "conjugate_gradient": [NATURAL],
    "solve_dual": [(CPO, ACPO)],
    "recovery_step": [(CPO, ACPO)],
    "line_search": [NATURAL],
    "update_multiplier": [(ATRPO, PPO)],
    "log_prob": [(PPO, BVF)],
    "clipped_loss": [(PPO, BVF)],
    "surrogates": [SCRIPTS],
    "evaluate": [SCRIPTS],
    "save_checkpoint": [SCRIPTS],
    "load_checkpoint": [SCRIPTS],
    "main: env eval_env": [NATURAL, (PPO,), (BVF,)],  # the first lines: networks and optimisers
    "main: A new": [(CPO, ACPO, PCPO), (ATRPO,), (PPO,), (BVF,)],  # what a checkpoint holds
    "main: Storage of": [(CPO, PCPO), (ACPO,), (ATRPO,), (PPO,), (BVF,)],
    "main: iterations args": [(CPO, PCPO, PPO, BVF), (ACPO, ATRPO)],  # the rollout: what an end is
    "main: Advantages by": [(CPO, PCPO), (ACPO,), (ATRPO,), (PPO, BVF)],
    "main: Policy": [(CPO,), (ACPO,), (PCPO,), (ATRPO,), (PPO,), (BVF,)],
    "main: Critics": [(CPO, ACPO, PCPO, ATRPO, PPO), (BVF,)],
    "main: Evaluation of": [SCRIPTS],
    "main: Log with": [(CPO, ACPO, PCPO), (ATRPO, PPO), (BVF,)],  # which tags are NaN
    "main: Save": [(CPO, ACPO, PCPO), (ATRPO,), (PPO,), (BVF,)],
    "main: env close": [SCRIPTS],
    "tail": [SCRIPTS],
}
# A field has one text in all scripts but for these, where the same flag means something else.
ROWS |= {
    "Args.gamma": [(CPO, PCPO, PPO), (BVF,)],  # bvf_ppo: the costs have a discount of their own
    "Args.delta": [NATURAL, (PPO, BVF)],  # a radius that holds, or where an update ends early
    "Args.hold": [(CPO, ACPO), (PCPO,)],  # pcpo_continuous: nothing to recover
    "Args.ell": [(ATRPO,), (PPO,)],  # the paper's table gives each its own values
}
# Where a paragraph is not equal it is nearly so: (segment, script, base) -> lines that differ.
NEAR = {
    ("main: env eval_env", PPO, CPO): 1,
    ("main: env eval_env", BVF, PPO): 3,
    ("main: A new", ATRPO, CPO): 1,
    ("main: A new", PPO, ATRPO): 1,
    ("main: A new", BVF, PPO): 1,
    ("main: Storage of", ACPO, CPO): 2,
    ("main: Storage of", ATRPO, ACPO): 2,
    ("main: Storage of", PPO, ATRPO): 3,
    ("main: Storage of", BVF, PPO): 4,
    ("main: iterations args", ACPO, CPO): 3,
    ("main: Advantages by", ACPO, CPO): 7,
    ("main: Advantages by", ATRPO, ACPO): 1,
    ("main: Advantages by", PPO, CPO): 1,
    ("main: Log with", ATRPO, CPO): 3,
    ("main: Log with", BVF, PPO): 1,
    ("main: Save", ATRPO, CPO): 1,
    ("main: Save", PPO, ATRPO): 1,
    ("main: Save", BVF, PPO): 1,
}


def path_of(script: str, root: Path) -> Path:
    return root / f"{script}.py"


@functools.cache
def spans(text: str) -> dict[str, tuple[int, int]]:
    """Name of each segment -> its first line and the one after its last, counted from 0."""
    found: dict[str, tuple[int, int]] = {}
    lines, tree = text.splitlines(), ast.parse(text)

    def add(name: str, start: int, end: int) -> None:
        if name in found:
            raise ValueError(f"two segments are called {name!r}")
        found[name] = start, end

    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if node.name == "main":
            for start, end in paragraphs(lines, node.body[1].lineno - 1, node.end_lineno):
                words = re.findall(r"\w+", lines[start])[:2]
                add(f"main: {' '.join(words)}", start, end)
            add("tail", node.end_lineno, len(lines))
        elif node.name == "Args":
            for field in node.body:
                add(f"Args.{field.target.id}", field.lineno - 1, field.end_lineno)
        else:
            add(node.name, first_line(node), node.end_lineno)
            for part in node.body if node.name == "Agent" else ():
                if isinstance(part, ast.FunctionDef):
                    add(f"Agent.{part.name}", first_line(part), part.end_lineno)
    return found


def first_line(node: ast.FunctionDef | ast.ClassDef) -> int:
    return min(part.lineno for part in (node, *node.decorator_list)) - 1


def paragraphs(lines: list[str], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans of the lines between blank ones. A comment above a statement is part of its own."""
    while start > 0 and lines[start - 1].strip().startswith("#"):
        start -= 1
    for i in range(start, end + 1):
        if i == end or not lines[i].strip():
            if start < i:
                yield start, i
            start = i + 1


def segments(text: str) -> dict[str, str]:
    """Name -> text."""
    lines = text.splitlines(keepends=True)
    return {name: "".join(lines[start:end]) for name, (start, end) in spans(text).items()}


def read(root: Path = ROOT) -> dict[str, dict[str, str]]:
    """Script -> its segments."""
    return {script: segments(path_of(script, root).read_text()) for script in SCRIPTS}


def all_rows(found: dict[str, dict[str, str]]) -> dict[str, list[tuple[str, ...]]]:
    """ROWS with the fields that are not listed there, each of which has one text."""
    names = dict.fromkeys(name for parts in found.values() for name in parts)
    rows = dict(ROWS)
    for name in names:
        if name.startswith("Args.") and name not in rows:
            rows[name] = [tuple(script for script in SCRIPTS if name in found[script])]
    return rows


def changed(old: str, new: str) -> int:
    """Lines that differ: those of an insertion or a deletion, the longer side of a replacement."""
    a, b = old.splitlines(), new.splitlines()
    codes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in codes if kind != "equal")


def drift(root: Path = ROOT) -> list[str]:
    """One line for each rule that is broken; empty if the scripts are in step."""
    found, problems = read(root), []
    rows = all_rows(found)
    for name in dict.fromkeys(name for parts in found.values() for name in parts):
        carriers = {script for script in SCRIPTS if name in found[script]}
        listed = {script for row in rows.get(name, []) for script in row}
        if len(carriers) > 1 and carriers - listed:
            problems.append(f"{name}: not in the table: {', '.join(sorted(carriers - listed))}")
    for name, groups in rows.items():
        texts = []
        for row in groups:
            missing = [script for script in row if name not in found[script]]
            problems += [f"{name}: {script} has none" for script in missing]
            here = [script for script in row if script not in missing]
            texts += [found[script][name] for script in here[:1]]
            for script in here[1:]:
                if found[script][name] != texts[-1]:
                    problems.append(f"{name}: {script} differs from {here[0]}")
        if len(set(texts)) < len(texts):
            problems.append(f"{name}: two rows of the table have the same text")
    for (name, script, base), lines in NEAR.items():
        got = changed(found[base].get(name, ""), found[script].get(name, ""))
        if got != lines:
            problems.append(f"{name}: {script} differs from {base} in {got} lines, not {lines}")
    return problems


def fix(root: Path = ROOT) -> list[str]:
    """Rewrite what differs from the first script of its row; returns what was rewritten."""
    done = []
    for name, groups in all_rows(read(root)).items():
        for first, *others in groups:
            wanted = segments(path_of(first, root).read_text())[name]
            for script in others:
                path = path_of(script, root)
                text = path.read_text()
                start, end = spans(text)[name]
                lines = text.splitlines(keepends=True)
                if "".join(lines[start:end]) != wanted:
                    path.write_text("".join([*lines[:start], wanted, *lines[end:]]))
                    done.append(f"{name}: {script} rewritten from {first}")
    return done


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--fix"]):
        sys.exit(__doc__)
    rewritten = fix() if sys.argv[1:] else []
    found = drift()
    print(*rewritten, *found or ["in step"], sep="\n")
    sys.exit(bool(found))
