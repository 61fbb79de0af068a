"""What is meant to be equal in the six scripts is equal to the byte, and the tool keeps it so."""

import shutil
import subprocess
import sys

import pytest
import sync
from sync import ACPO, ATRPO, BVF, CPO, PCPO, PPO, SCRIPTS, path_of


@pytest.fixture
def copy(tmp_path):
    """A folder with the scripts, free to be damaged."""
    for script in SCRIPTS:
        shutil.copy(path_of(script, sync.ROOT), tmp_path)
    return tmp_path


def edit(root, script, old, new):
    path = path_of(script, root)
    text = path.read_text()
    assert text.count(old) == 1, (script, old, text.count(old))
    path.write_text(text.replace(old, new))


def test_the_scripts_are_in_step():
    assert sync.drift() == []


def test_the_whole_of_a_script_is_in_some_segment():
    """But for the docstring, the imports and the head of Args; so nothing can hide."""
    for script in SCRIPTS:
        lines = path_of(script, sync.ROOT).read_text().splitlines()
        spans = sync.spans("\n".join(lines))
        covered = {i for start, end in spans.values() for i in range(start, end)}
        head = lines.index("class Args:") + 1
        (main,) = (i for i, line in enumerate(lines) if line.startswith("def main("))
        left = [i for i, line in enumerate(lines) if line.strip() and i not in covered]
        assert [i for i in left if i >= head] == [main, main + 1], script


DAMAGE = {
    "a comment": (PCPO, "mlp", "np.sqrt(2))", "np.sqrt(2))  # He"),
    "a number": (ATRPO, "line_search", "range(trials + 1)", "range(trials)"),
    "a decorator": (PPO, "evaluate", "@torch.no_grad()\ndef evaluate", "def evaluate"),
    "a method": (BVF, "Agent.normalize", "(variance + 1e-8)", "(variance + 1e-7)"),
    "the default of a field": (ACPO, "Args.cg_damping", "float | None = None", "float | None = 9"),
    "the help of a field": (BVF, "Args.clip_coef", "# eps of the", "# epsilon of the"),
    "a field with two meanings": (BVF, "Args.delta", "delta: float = ", "delta: float = 9"),
    "a paragraph of main": (ATRPO, "main: Critics", "errors.square()", "errors.abs()"),
    "the last paragraph": (PCPO, "main: env close", "    eval_env.close()\n", ""),
    "the tail": (ACPO, "tail", "except (OSError", "except (ValueError"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_drift_is_found_and_fixed(copy, kind):
    script, name, old, new = DAMAGE[kind]
    before = {s: path_of(s, copy).read_text() for s in SCRIPTS}
    edit(copy, script, old, new)
    assert any(line.startswith(f"{name}: {script} differs") for line in sync.drift(copy))
    (line,) = (line for line in sync.fix(copy) if line.startswith(f"{name}: "))
    assert line.startswith(f"{name}: {script} rewritten from ")
    assert {s: path_of(s, copy).read_text() for s in SCRIPTS} == before
    assert sync.drift(copy) == [] and sync.fix(copy) == []


def test_the_command(copy):
    """As a user runs it, from another folder; the copies follow the first script of the row."""
    (copy / "tests").mkdir()
    shutil.copy(sync.__file__, copy / "tests")

    def tool(*flags):
        command = [sys.executable, str(copy / "tests" / "sync.py"), *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/")
        assert not done.stderr
        return done.returncode, done.stdout.splitlines()

    edit(copy, CPO, "def flat(tensors)", "@torch.no_grad()\n# two lines more\ndef flat(tensors)")
    copies = [script for script in sync.NATURAL if script != CPO]
    assert tool() == (1, [f"flat: {script} differs from {CPO}" for script in copies])
    rewritten = [f"flat: {script} rewritten from {CPO}" for script in copies]
    assert tool("--fix") == (0, [*rewritten, "in step"])
    assert tool() == (0, ["in step"])
    for script in sync.NATURAL:  # though the lines of all that follows have moved
        text = path_of(script, copy).read_text()
        assert text.count("# two lines more\ndef flat(tensors)") == 1
        compile(text, script, "exec")


def test_a_new_function_in_two_scripts_must_be_listed(copy):
    body = "def double(x):\n    return 2 * x\n\n\n"
    edit(copy, PCPO, "def project(", body + "def project(")
    assert sync.drift(copy) == []  # in one script it is nobody's copy
    other = body.replace("2 * x", "x + x")
    edit(copy, BVF, "def backward_returns(", other + "def backward_returns(")
    wanted = [f"double: not in the table: {BVF}, {PCPO}"]
    assert sync.drift(copy) == wanted
    sync.fix(copy)
    assert sync.drift(copy) == wanted  # nobody said which one is right


def test_a_function_that_is_gone_is_reported(copy):
    path = path_of(PPO, copy)
    path.write_text(path.read_text().replace("def log_prob(", "def log_density("))
    assert f"log_prob: {PPO} has none" in sync.drift(copy)


def test_a_paragraph_that_is_nearly_equal_may_not_drift_either(copy):
    edit(copy, BVF, "torch.set_rng_state(", "torch.random.set_rng_state(")
    assert sync.drift(copy) == [f"main: A new: {BVF} differs from {PPO} in 2 lines, not 1"]


def test_an_exception_that_is_none_any_more_is_reported(copy):
    edit(copy, BVF, "step of the reward\n", "step of reward and costs\n")
    assert sync.drift(copy) == ["Args.gamma: two rows of the table have the same text"]


def test_changed_lines():
    assert sync.changed("a\nb\nc", "a\nb\nc") == 0
    assert sync.changed("a\nb\nc", "a\nc") == 1
    assert sync.changed("a\nc", "a\nx\ny\nc") == 2
    assert sync.changed("a\nb\nc", "a\nx\ny\nz\nc") == 3  # one line replaced by three
