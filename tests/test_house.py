"""The house rules hold, and their checks would catch a breach."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnrl.config import keys
from attnrl.launch.models import ENGINES
from attnrl.launch.parts import KINDS
from attnrl.reward import REWARDS
from attnrl.schedules import SCHEDULES

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
        ("iteration.py", "import attnrl.schedules"),
        ("schedules.py", "import attnrl.local"),
        ("schedules.py", "import attnrl.verify"),
        ("trainer.py", "import attnrl.local.backend"),
        ("trainer.py", "import attnrl.verify"),
        ("algo/adaptive.py", "import attnrl.reward"),
        ("backend.py", "import attnrl.local"),
        ("local/backend.py", "import attnrl.launch"),
        ("policy/losses.py", "import attnrl.local"),
        ("scoring/plan.py", "import attnrl.policy.rates"),
        ("verl_engine/settings.py", "import attnrl.local.models"),
        ("ranks/arrival.py", "import attnrl.local.models"),
        ("ranks/session.py", "import ray"),
        ("ranks/share.py", "import attnrl.reward"),
        ("schedules.py", "import attnrl.ranks.arrival"),
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


def named_parts(text: str, names: set[str]) -> list[str]:
    """Where a source names a part as a string, or imports the function of one from algo/."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and node.value in names:
            found.append(f"{node.lineno} names {node.value!r}")
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnrl.algo"):
            found += [f"{node.lineno} imports {n.name}" for n in node.names if n.name in FUNCTIONS]
    return found


TABLES = {**KINDS, "engine": ENGINES, "reward": REWARDS, "schedule": SCHEDULES}
FUNCTIONS = {part.__name__ for table in KINDS.values() for part in table.values()}


def test_the_loop_names_no_part() -> None:
    """Names of parts stand in configs and in the tables of their own modules, nowhere in the loop; a schedule's stands
    in the table of schedules.py.
    """
    outside = {*ENGINES, *REWARDS, "vllm"}  # algo/ has tables of its own
    every = {name for table in TABLES.values() for name in table} | outside
    assert {"oracle", "fci", "tree", "local", "top_entropy", "on_policy"} <= every
    folder = ROOT / "src/attnrl"
    looked_at = [(folder / name, every) for name in ("backend.py", "iteration.py", "trainer.py")]
    looked_at.append((folder / "schedules.py", every - {*SCHEDULES}))
    looked_at += [(file, outside) for file in (folder / "algo").glob("*.py")]
    assert len(looked_at) > 10
    for file, names in looked_at:
        found = named_parts(file.read_text(), names)
        if file.parent.name == "algo":  # its modules are made of one another
            found = [line for line in found if "imports" not in line]
        assert not found, f"{file.name}: {found}"


@pytest.mark.parametrize(
    "line",
    ["from attnrl.algo.branching import fci", 'rule = "oracle"', 'x = {"top_entropy": 1}'],
)
def test_a_planted_name_of_a_part_is_found(line: str) -> None:
    every = {name for table in TABLES.values() for name in table}
    text = (ROOT / "src/attnrl/iteration.py").read_text() + f"\n{line}\n"
    (found,) = named_parts(text, every)
    assert found.startswith(str(text.count("\n")))


# Fields outside config/ that have the name of a key and are no second declaration of it.
OTHER_THINGS = {
    "Sampling": "a value of the seam: what an engine is asked to draw with",
    "Scoring": "a value of the seam: what a scoring forward is asked for",
    "Parts": "what an iteration is made of, put together from a config",
    "Passes.temperature": "of the policy whose log-probs are taken",
    "State.generated_tokens": "drawn so far",
    "Process.memory_mb": "of one worker that runs",
    "WarmupOptions": "a supervised training has a learning rate and a budget of its own",
    "Warmup": "its losses so far, and its sampler",
    "Plan": "a prompt's trunks, and where they branch",
    "Verdict": "what a response earned, and the rule of the verifier that decided",
    "Response": "the same, of a stored response",
    "Graph": "the sentences of one made-up problem",
    "Clock.errors": "verdicts that are errors, counted",
    "Record.system": "the words of one row",
    "Report.ks": "those that an evaluation was made with",
    "Shape.width": "of a model",
    "PathAttention.kinds": "kernels that ran",
    "SamplerStats.fused": "whether kernels ran",
    "View.threads": "of a server",
    "PairFile.template": "of the user's own pairs",
    "WarmupFlags.template": "of the user's own pairs",
    "DataFlags.clean": "a file to write",
    "DataFlags.columns": "of the files that are reported on; there is no config",
    "TasksFlags.tasks": "the section itself",
    "ReportFlags.iterations": "which of a run's to show",
    "CheckFlags.prompts": "how many to look at",
}


def doubled_knobs(text: str) -> list[str]:
    """The fields, Class.field, of classes in a source that declare what is a key of the config: with a default, with a
    name that is no everyday word, or two in one class. One everyday word alone (`reward`, `rule`) is another thing.
    """
    last = {key.rpartition(".")[2] for key in keys()} - {"name", "options", "weight", "about", "seed", "rows", "path"}
    found = []
    for node in ast.walk(ast.parse(text)):
        body = node.body if isinstance(node, ast.ClassDef) else []
        fields = [(f, f.target.id) for f in body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
        named = [(f, name) for f, name in fields if name in last]
        found += [f"{node.name}.{name}" for f, name in named if f.value is not None or "_" in name or len(named) > 1]  # type: ignore[attr-defined]
    return found


def test_no_knob_is_declared_twice() -> None:
    """A key of the config is declared in config/ alone: no other class has a field of that name without a reason."""
    found = {
        field: file
        for file in sources()
        if file.parent.name != "config"
        for field in doubled_knobs(file.read_text())
        if field.partition(".")[0] not in OTHER_THINGS and field not in OTHER_THINGS
    }
    assert not found, "\n".join(f"{file.relative_to(ROOT)}: {field}" for field, file in found.items())
    fields = {field for file in sources() for field in doubled_knobs(file.read_text())}
    stale = {*OTHER_THINGS} - fields - {field.partition(".")[0] for field in fields}
    assert not stale, f"listed for nothing: {stale}"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            "class SamplerKnobs:\n    top_p: float\n    temperature: float\n    gradient_checkpointing: bool",
            ["SamplerKnobs.top_p", "SamplerKnobs.temperature", "SamplerKnobs.gradient_checkpointing"],
        ),
        ("class Tuning:\n    gradient_checkpointing: bool", ["Tuning.gradient_checkpointing"]),
        ("class Tuning:\n    lr: float = 1e-6", ["Tuning.lr"]),
        ("class Tuning:\n    lr: float\n    schedule: str", ["Tuning.lr", "Tuning.schedule"]),
        ("class Paid:\n    reward: float\n    uid: str", []),
    ],
)
def test_a_planted_doubled_knob_is_found(lines: str, found: list[str]) -> None:
    text = (ROOT / "src/attnrl/local/sampler.py").read_text()
    assert doubled_knobs(text) == []
    assert doubled_knobs(f"{text}\n\n@dataclass\n{lines}\n") == found


def test_kernels_are_compiled_for_a_model_and_not_for_a_number_of_tokens() -> None:
    """Triton compiles once more for a number that is a multiple of 16, in the middle of a run, unless told not to."""
    triton = pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")
    names = ["attention.paged_triton", "attention.paths_triton", "scoring.fci_triton", "scoring.head_triton"]
    names += [f"local.{name}_triton" for name in ("draw", "fused", "learn", "products")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/attnrl").rglob("*.py"))
    launched = set(re.findall(r"(_\w+)\[\(", source))
    changing = {"T", "S", "tokens", "rows", "splits", "table_pitch", "pages"}  # from call to call
    found = set()
    for name in names:
        module = importlib.import_module(f"attnrl.{name}")
        for kernel, function in vars(module).items():
            if isinstance(function, triton.runtime.jit.JITFunction) and kernel in launched:
                kept = (p.name for p in function.params if not p.is_constexpr and not p.do_not_specialize)
                found |= {(kernel, parameter) for parameter in kept if parameter in changing}
    # rows of a step are powers of two; the others are a pitch, always a multiple of 16
    assert found == {("_product", "T"), ("_column_sums", "T"), ("_step_max", "T")}
