"""The house rules hold, and their checks would catch a breach."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command as c; c()"
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        ROOT / "src/attnrl", tmp_path / "src/attnrl", ignore=shutil.ignore_patterns("__pycache__", "assets")
    )
    return tmp_path


def test_the_layers_hold(copy: Path) -> None:
    answer = lint_imports(copy)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("algo/steps.py", "import attnrl.config"),
        ("types.py", "import attnrl.algo.steps"),
        ("verify/__init__.py", "import attnrl.data"),
        ("iteration.py", "import attnrl.local"),
        ("trainer.py", "import torch"),
        ("algo/forest.py", "import transformers"),
        ("scoring/plan.py", "import attnrl.config"),
        ("iteration.py", "import attnrl.reward"),
        ("iteration.py", "import attnrl.launch.parts"),
        ("trainer.py", "import attnrl.local.backend"),
        ("trainer.py", "import attnrl.verify"),
        ("algo/adaptive.py", "import attnrl.reward"),
        ("backend.py", "import attnrl.local"),
        ("local/backend.py", "import attnrl.launch"),
        ("policy/losses.py", "import attnrl.local"),
        ("scoring/plan.py", "import attnrl.policy.rates"),
        ("verl_engine/arrival.py", "import attnrl.local.models"),
        ("reward/builtin.py", "import attnrl.iteration"),
    ],
)
def test_a_planted_layer_violation_is_caught(copy: Path, module: str, line: str) -> None:
    file = copy / "src/attnrl" / module
    file.write_text(file.read_text() + f"\n{line}\n")
    answer = lint_imports(copy)
    assert answer.returncode != 0
    assert "BROKEN" in answer.stdout


def sources() -> list[Path]:
    return sorted((ROOT / "src/attnrl").rglob("*.py"))


def test_broad_excepts_stand_at_process_boundaries_alone() -> None:
    """Anything may happen where a user's file is imported (algo), in a thread or worker of a reward and on a cluster's
    ranks: all are told to the caller with the cause.
    """
    found = []
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or {"Exception", "BaseException"} & set(re.findall(r"\w+", ast.unparse(node.type)))
            ):
                found.append(file.relative_to(ROOT).parts[2])
    assert sorted(found) == ["algo", "reward", "verify", "verl_engine"], found


RUNS_TEXT = ("eval", "exec", "sympify", "parse_expr")


def runs_text(call: ast.Call) -> bool:
    """Whether a call, plain or of an attribute, may run text; `model.eval()` without an argument runs none."""
    if isinstance(call.func, ast.Name):
        return call.func.id in RUNS_TEXT
    return isinstance(call.func, ast.Attribute) and call.func.attr in RUNS_TEXT and bool(call.args or call.keywords)


@pytest.mark.parametrize("text", ["eval('1')", "builtins.eval(x)", "sympy.sympify(answer)", "a.b.parse_expr(s=t)"])
def test_a_call_that_runs_text_is_seen(text: str) -> None:
    assert any(runs_text(n) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call))


def test_no_function_runs_text_as_code() -> None:
    assert not runs_text(ast.parse("model.eval()").body[0].value)  # type: ignore[attr-defined]
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                assert not runs_text(node), f"{file}:{node.lineno}"


def test_the_loop_names_no_engine_no_reward_and_no_rule() -> None:
    """Names of parts stand in configs and in the tables of their own modules, nowhere in the loop."""
    from attnrl.algo.advantages import ESTIMATORS
    from attnrl.algo.branching import RULES
    from attnrl.algo.credit import CREDITS
    from attnrl.launch.models import ENGINES
    from attnrl.reward import REWARDS

    parts = {*ENGINES, *REWARDS, *RULES, *ESTIMATORS, *CREDITS, "vllm"}
    outside = {*ENGINES, *REWARDS, "vllm"}  # algo/ has tables of its own rules and estimators
    folder = ROOT / "src/attnrl"
    looked_at = 0
    for file, names in [
        (folder / "iteration.py", parts),
        (folder / "trainer.py", parts),
        *((file, outside) for file in (folder / "algo").glob("*.py")),
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                looked_at += 1
                assert node.value not in names, f"{file.name}:{node.lineno} names {node.value!r}"
    assert looked_at > 50


def test_no_knob_is_declared_twice() -> None:
    """A key of the config is declared in config/ alone: no class of options or flags has a field of that name."""
    from attnrl.config import keys

    other_things = {
        "WarmupOptions",  # a supervised training has a learning rate and a budget of its own
        "DataFlags.clean",  # a file to write
        "TasksFlags.tasks",  # the section itself
        "ReportFlags.iterations",  # which of a run's to show
        "CheckFlags.prompts",  # how many to look at
        "WarmupFlags.template",  # of the user's own pairs
    }

    last = {key.rpartition(".")[2] for key in keys()} - {"name", "options", "weight", "about", "seed", "rows", "path"}
    found = []
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ClassDef) or node.name in other_things or file.parent.name == "config":
                continue
            if not node.name.endswith(("Options", "Flags", "Config", "Settings", "Spec", "Arguments")):
                continue
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    name = line.target.id
                    if name in last and f"{node.name}.{name}" not in other_things:
                        found.append(f"{file.relative_to(ROOT)}: {node.name}.{name}")
    assert not found, "\n".join(found)
