"""The scripts stay short, and neighbours stay close: the diff of two scripts is a lesson.

Changed lines are counted as `diff old new | grep -c '^[<>]'` counts them: a replaced line is two.
"""

import ast
import re
import sys
from pathlib import Path

import pytest
from sync import ACPO, ATRPO, BVF, CPO, PCPO, PPO, SCRIPTS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LINES = {CPO: 520, ACPO: 520, PCPO: 520, ATRPO: 520, PPO: 460, BVF: 470}  # the last: no line search
CHANGES = {
    (CPO, ACPO): 60,
    (CPO, PCPO): 95,  # 33 of them are solve_dual, which disappears
    (ACPO, ATRPO): 130,
    (ATRPO, PPO): 165,  # 84 of them are what a step with H needs, which disappears
    (PPO, BVF): 130,
}
KEYS = {ACPO: "ACPO", PCPO: "PCPO", ATRPO: "LAG", PPO: "PPO", BVF: "BVF"}
IMPORT_NAMES = {"pillow": "PIL"}  # of packages that are imported by another name


def source(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


def distance(old: str, new: str) -> int:
    """The fewest lines that can go and come to make one text of the other."""
    a, b = old.splitlines(), new.splitlines()
    common = [0] * (len(b) + 1)  # of the a read so far and b[:j]: the longest common subsequence
    for line in a:
        before = common
        common = [0]
        for j, other in enumerate(b):
            common.append(before[j] + 1 if line == other else max(before[j + 1], common[j]))
    return len(a) + len(b) - 2 * common[-1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_length(script):
    assert len(source(script).splitlines()) <= LINES[script]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_distance_between_neighbours(old, new):
    lines = distance(source(old), source(new))
    print(f"{old} -> {new}: {lines} changed lines")
    assert 10 < lines <= CHANGES[old, new]


def test_what_counts_as_a_change():
    old = "import a\n\n\ndef f():\n    return 1\n\n\nx = 1\n"
    assert distance(old, old) == 0
    assert distance(old, old.replace("return 1", "return 3")) == 2
    assert distance(old, old.replace("def f():\n    return 1\n\n\n", "")) == 4
    assert distance(old, old.replace("x = 1", "x = 1\ny = 2\nz = 3")) == 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_readme_states_these_numbers(script):
    """Lines of each script, and of its diff to the base as `diff` counts them (within 5 %)."""
    (row,) = (line for line in README.splitlines() if line.startswith(f"| [{script}.py]"))
    _, _, _, _, lines, difference, *_ = (cell.strip() for cell in row.split("|"))
    assert int(lines) == len(source(script).splitlines())
    bases = {new: old for old, new in CHANGES}
    if script in bases:
        stated = re.fullmatch(rf"`diff {bases[script]}.py {script}.py` \((\d+)\)", difference)
        fewest = distance(source(bases[script]), source(script))
        assert fewest <= int(stated[1]) <= 1.05 * fewest


@pytest.mark.parametrize("script", SCRIPTS)
def test_own_lines_are_marked(script):
    """grep "# KEY:" reads as the algorithm; cpo_continuous.py is the base and marks nothing."""
    marks = re.findall(r"# ([A-Z]+): ", source(script))
    allowed = {"DEVIATION", "ACPO", "LAG", "PPO", KEYS.get(script)}  # and what the base has marked
    assert set(marks) <= allowed, marks
    if script == CPO:
        assert set(marks) <= {"DEVIATION"}
    else:
        assert marks.count(KEYS[script]) >= 2, marks
        words = " ".join(source(script).split())
        assert f'marked "{KEYS[script]}:"' in words  # the docstring says how to find them


def imported(tree: ast.AST) -> set[str]:
    """Names of the packages imported anywhere in a file."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("script", SCRIPTS)
def test_imports(script):
    """The standard library, what requirements.txt lists, and envs; never another script."""
    required = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    packages = {IMPORT_NAMES.get(name, name) for name in required}
    names = imported(ast.parse(source(script)))
    assert not names & set(SCRIPTS)
    assert names <= sys.stdlib_module_names | packages | {"envs"}, names
    assert {"torch", "numpy", "envs"} <= names


def reads(tree: ast.AST) -> set[str]:
    """x of every args.x that is read, also as self.args.x, outside functions called check."""
    found = set()
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = getattr(node.value, "id", getattr(node.value, "attr", None))
            if owner == "args" and id(node) not in skipped:
                found.add(node.attr)
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read(script):
    """By the script or by envs/runs.py, which makes the environments and the folder from flags."""
    tree = ast.parse(source(script))
    (args,) = (node for node in tree.body if getattr(node, "name", "") == "Args")
    fields = {field.target.id for field in args.body}
    outside = reads(ast.parse((ROOT / "envs" / "runs.py").read_text()))
    assert len(fields) > 25
    assert fields <= reads(tree) | outside, fields - reads(tree) - outside
    assert reads(tree) <= fields, "read, but not a flag"


def test_reads_finds_what_it_should():
    text = (
        "def check(args):\n    args.a\ndef main(args):\n    args.b = 1\n    self.args.c + args.d\n"
    )
    assert reads(ast.parse(text)) == {"c", "d"}
