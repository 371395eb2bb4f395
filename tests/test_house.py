"""The house rules hold, and their checks would catch a breach."""

from __future__ import annotations

import ast
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


def test_one_broad_except_in_the_code_base() -> None:
    """The verifier's process boundary is the one place where anything may happen."""
    found = []
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            ):
                found.append(file.relative_to(ROOT).parts[2])
    assert found in (["verify"], []), found


def test_no_function_runs_text_as_code() -> None:
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "sympify", "parse_expr"), f"{file}:{node.lineno}"
