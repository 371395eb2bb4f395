"""Change one thing in the code, run the tests of its file, and see whether they notice.

    python benchmarks/mutations.py [FILE ...] [--sample 60] [--seed 0] [--output mutations.json]

FILE is a path under src/attnrl, by default all of TESTS. Each mutant is compiled from the changed syntax tree and runs
in a forked child of a process that has imported pytest, numpy and hypothesis once. A mutant is killed where a test
fails or the limit passes; survivors are printed with the line they change. Mutants whose behaviour cannot differ are
listed with their reason in mutations_equivalent.toml and do not count; texts of errors, annotations, docstrings,
asserts (strict= of zip among them) and the options of dataclasses are not mutated.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
EQUIVALENT = Path(__file__).with_name("mutations_equivalent.toml")

LOOP = [
    "tests/test_schedules.py",
    "tests/test_iteration.py",
    "tests/test_grading.py",
    "tests/test_overlap.py",
    "tests/test_updates.py",
    "tests/algo/test_promises.py",
]
TESTS: dict[str, list[str]] = {  # cheapest first
    "algo/samples.py": ["tests/algo/test_samples.py"],
    "algo/forest.py": ["tests/algo/test_forest.py"],
    "algo/statistics.py": ["tests/algo/test_statistics.py"],
    "algo/branching.py": ["tests/algo/test_branching.py", "tests/algo/test_parts.py", "tests/algo/test_reasons.py"],
    "algo/adaptive.py": ["tests/algo/test_adaptive.py", "tests/algo/test_parts.py"],
    "backend.py": ["tests/test_backend.py", "tests/test_iteration.py", "tests/test_overlap.py"],
    "iteration.py": LOOP,
    "schedules.py": LOOP,
    "verify/pool.py": ["tests/verify/test_workers.py"],
    "policy/losses.py": ["tests/policy/test_losses.py"],
    "policy/objective.py": ["tests/policy/test_losses.py"],
}
THIRD_PARTY = (
    "pytest",
    "numpy",
    "hypothesis",
    "pydantic",
    "pyarrow.parquet",
    "rich.console",
    "_pytest.assertion.rewrite",
)

COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"any": "all", "all": "any", "min": "max", "max": "min"}
PLAIN_DECORATORS = {"dataclass", "property", "contextmanager", "staticmethod"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: where, what, and the module's code with it."""

    line: int
    change: str  # "function: text before [old -> new] text after"
    code: CodeType


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one statement, to be made in place."""

    function: str
    statement: ast.stmt
    make: Callable[[], Any]
    removes: bool = False


def mutants(path: Path, sample: int, seed: int) -> tuple[list[Mutant], int]:
    """Mutants of a file in the order of its lines, at most `sample` of them, and how many there are in all."""
    source = path.read_text()
    count = len(list(changes(ast.parse(source))))
    numbers = range(count) if count <= sample else sorted(random.Random(seed).sample(range(count), sample))
    found = []
    for number in numbers:
        tree = ast.parse(source)
        change = list(changes(tree))[number]
        before = said(change.statement)
        change.make()
        after = "" if change.removes else said(change.statement)
        code = compile(ast.fix_missing_locations(tree), str(path), "exec")
        found.append(Mutant(change.statement.lineno, f"{change.function}: {difference(before, after)}", code))
    return sorted(found, key=lambda m: m.line), count


def said(statement: ast.stmt) -> str:
    """A statement's text on one line, without the body of a compound one."""
    shown = copy.deepcopy(statement)
    for name in ("body", "orelse", "finalbody"):
        if isinstance(getattr(shown, name, None), list):
            setattr(shown, name, [ast.Pass()] if name == "body" else [])
    if isinstance(shown, ast.Try):
        shown.handlers = [ast.ExceptHandler(None, None, [ast.Pass()])]
    return " ".join(ast.unparse(ast.fix_missing_locations(shown)).split())


def difference(before: str, after: str, around: int = 48) -> str:
    """What changed, in its words.

    >>> difference("return a < b", "return a <= b")
    'return a [< -> <=] b'
    """
    old, new = before.split(" "), after.split(" ") if after else []
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    stop = 0
    while stop < min(len(old), len(new)) - start and old[-1 - stop] == new[-1 - stop]:
        stop += 1
    middle = f"[{' '.join(old[start : len(old) - stop])} -> {' '.join(new[start : len(new) - stop])}]"
    left, right = " ".join(old[:start])[-around:].strip(), " ".join(old[len(old) - stop :])[:around].strip()
    return " ".join(part for part in (left, middle, right) if part)


def changes(tree: ast.Module) -> Iterator[Change]:
    """Every change of a module."""
    for function, block, index in statements(tree):
        statement = block[index]
        yield from statement_changes(function, block, index)
        for node in expressions(statement):
            for make in expression_changes(node):
                yield Change(function, statement, make)


def statements(node: ast.AST, function: str = "module") -> Iterator[tuple[str, list[ast.stmt], int]]:
    """(function, block, index) of every statement."""
    for name in ("body", "orelse", "finalbody", "handlers"):
        block = getattr(node, name, None)
        if not isinstance(block, list):
            continue
        for index, child in enumerate(block):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.ClassDef) else function
            if name != "handlers":
                yield inner, block, index
            yield from statements(child, inner)


def statement_changes(function: str, block: list[ast.stmt], index: int) -> Iterator[Change]:
    statement = block[index]

    def remove() -> None:
        block[index] = ast.copy_location(ast.Pass(), statement)

    def negate() -> None:
        statement.test = ast.UnaryOp(ast.Not(), statement.test)  # type: ignore[attr-defined]

    gone = isinstance(statement, ast.AugAssign | ast.Raise | ast.Continue | ast.Break)
    called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    stored = isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name)
    if gone or called or stored:
        yield Change(function, statement, remove, removes=True)
    if isinstance(statement, ast.Return) and ast.unparse(statement) not in ("return", "return None"):
        yield Change(function, statement, lambda: setattr(statement, "value", ast.Constant(None)))
    if isinstance(statement, ast.If | ast.While):
        yield Change(function, statement, negate)
    if isinstance(statement, ast.FunctionDef):
        for i, decorator in enumerate(statement.decorator_list):
            if not plain(decorator):
                yield Change(function, statement, lambda i=i: statement.decorator_list.pop(i))  # type: ignore[misc]


def plain(decorator: ast.expr) -> bool:
    """Whether a decorator is Python's own, whose options are not what is tested."""
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(name, "id", "") in PLAIN_DECORATORS


def expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement itself, without those of the statements in its body, annotations and texts."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return  # a docstring
    if isinstance(statement, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom):
        return
    todo: list[ast.AST] = []
    for name, value in ast.iter_fields(statement):
        if name in ("body", "orelse", "finalbody", "handlers", "annotation", "returns", "type_params"):
            continue
        if name == "decorator_list":
            value = [d for d in value if not plain(d)]
        todo += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)]
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.JoinedStr | ast.arg):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue  # of zip: an assert
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") in ("Literal", "Callable", "dict"):
            continue  # a type
        yield node
        todo += list(ast.iter_child_nodes(node))


def expression_changes(node: ast.AST) -> Iterator[Callable[[], Any]]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for new in COMPARE.get(type(op), ()):
                yield lambda i=i, new=new: node.ops.__setitem__(i, new())  # type: ignore[misc]
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield lambda: setattr(node, "op", other)
        for i in range(len(node.values)):
            yield lambda i=i: node.values.__setitem__(i, ast.Constant(isinstance(node.op, ast.And)))  # type: ignore[misc]
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield lambda: setattr(node, "op", ARITHMETIC[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield lambda: undo(node)
    if isinstance(node, ast.IfExp):
        yield lambda: swap(node)
    if isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "strict"):
                yield lambda i=i: node.keywords.pop(i)  # type: ignore[misc]
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            yield lambda: setattr(node, "func", ast.Name(NAMES[node.func.id], ast.Load()))  # type: ignore[attr-defined]
    if isinstance(node, ast.comprehension):
        for i in range(len(node.ifs)):
            yield lambda i=i: node.ifs.pop(i)  # type: ignore[misc]
    if isinstance(node, ast.Slice):
        for name in ("lower", "upper", "step"):
            if getattr(node, name) is not None:
                yield lambda name=name: setattr(node, name, None)  # type: ignore[misc]
    if isinstance(node, ast.Constant):
        yield from constant_changes(node)


def swap(node: ast.IfExp) -> None:
    node.body, node.orelse = node.orelse, node.body


def undo(node: ast.UnaryOp) -> None:
    """-x becomes +x; `not x` and `~x` become `not not x` and `~~x`."""
    if isinstance(node.op, ast.USub):
        node.op = ast.UAdd()
    else:
        node.operand = ast.UnaryOp(node.op, node.operand)


def constant_changes(node: ast.Constant) -> Iterator[Callable[[], None]]:
    value = node.value
    new: Any = None
    if isinstance(value, bool):
        new = not value
    elif isinstance(value, int | float):
        new = value + 1
    elif isinstance(value, str):
        new = value + "X"
    elif isinstance(value, bytes):
        new = value + b"X"
    if new is not None:
        yield lambda: setattr(node, "value", new)


@dataclass(slots=True)
class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a mutant's code."""

    name: str
    path: Path
    code: CodeType

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=str(self.path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self.path)
        exec(self.code, module.__dict__)  # noqa: S102


def imported_by(path: Path) -> set[str]:
    """The modules of attnrl that a file names in its imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def preload(target: str, tests: Sequence[str]) -> None:
    """Import what the tests need and what does not itself import the module under test."""
    files = {module_of(file): file for file in (SOURCE / "attnrl").rglob("*.py")}
    reached = {name: {*imported_by(file)} & {*files} for name, file in files.items()}
    for name in files:  # a package comes with its submodules
        reached[name] |= {".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 1)}
    dependents = {target}
    while more := {name for name, names in reached.items() if names & dependents} - dependents:
        dependents |= more
    torch = any("torch" in (ROOT / test).read_text() for test in tests)
    wanted = {name for test in [*tests, "tests/fakes.py"] for name in imported_by(ROOT / test)} | set(
        reached.get(target, ())
    )
    for name in THIRD_PARTY + (("torch",) if torch else ()):
        importlib.import_module(name)
    for name in sorted(wanted & {*files} - dependents):
        if torch or not needs_torch(name, reached, files):
            importlib.import_module(name)


def needs_torch(name: str, reached: dict[str, set[str]], files: dict[str, Path]) -> bool:
    seen, todo = {name}, [name]
    while todo:
        one = todo.pop()
        if "torch" in {n.split(".")[0] for n in imported_by(files[one])}:
            return True
        todo += reached[one] - seen
        seen |= reached[one]
    return False


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def outcome(mutated: Mutated, tests: Sequence[str], examples: int, cpu: int, wall: float) -> tuple[str, float]:
    """What became of the tests in a forked child ("killed", "survived" or "timeout"), and the seconds it used.

    Its limit is in seconds of its own CPU time, so that a busy machine is no reason; of wall time a generous one.
    """
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        try:
            os._exit(run_tests(mutated, tests, examples))
        finally:  # an error that pytest itself does not survive
            os._exit(1)
    said, used = "timeout", 0.0
    while time.monotonic() - began < wall:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            said, used = verdict(status), usage.ru_utime + usage.ru_stime
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what the tests left behind
    if not used:
        os.waitpid(child, 0)
    return said, used


def verdict(status: int) -> str:
    """What the end of a child says of its mutant; the end by one of its limits is a timeout.

    Any other end but a good one is a kill: the same command passes for the unchanged module.
    """
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    return "survived" if code == 0 else "killed"


def run_tests(mutated: Mutated, tests: Sequence[str], examples: int) -> int:
    import hypothesis
    import pytest

    quiet = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("MUTATIONS_LOUD"):
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    hypothesis.settings.register_profile(
        "mutants", max_examples=examples, deadline=None, derandomize=True, database=None, print_blob=False
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"  # read by tests/conftest.py
    sys.meta_path.insert(0, mutated)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--tb=no", *tests]))


def measure(file: str, *, sample: int, seed: int, examples: int) -> dict[str, Any]:
    """Kill rate of one file, and its survivors."""
    path, tests = SOURCE / "attnrl" / file, [t for t in TESTS[file] if (ROOT / t).exists()]
    chosen, count = mutants(path, sample, seed)
    preload(module_of(path), tests)
    unchanged = Mutated(module_of(path), path, compile(path.read_text(), str(path), "exec"))
    said, seconds = outcome(unchanged, tests, examples, 900, 900.0)
    if said != "survived":
        raise SystemExit(f"{file}: its tests do not pass without a mutant ({said})")
    cpu, wall = 10 + round(8 * seconds), 300.0 + 20 * seconds
    known = equivalents(file)
    results: dict[str, list[Mutant]] = {"killed": [], "survived": [], "timeout": [], "equivalent": []}
    for number, mutant in enumerate(chosen, 1):
        if mutant.change in known:
            results["equivalent"].append(mutant)
            continue
        said, spent = outcome(Mutated(module_of(path), path, mutant.code), tests, examples, cpu, wall)
        results[said].append(mutant)
        if said != "killed":
            print(f"  {number}/{len(chosen)} {said} {file}:{mutant.line} {mutant.change} ({spent:.0f} s)", flush=True)
    caught = len(results["killed"]) + len(results["timeout"])
    return {
        "file": file,
        "tests": tests,
        "mutants": count,
        "tried": len(chosen),
        "seed": seed,
        "killed": len(results["killed"]),
        "timeouts": len(results["timeout"]),
        "equivalent": len(results["equivalent"]),
        "survived": len(results["survived"]),
        "rate": caught / max(caught + len(results["survived"]), 1),
        "survivors": [f"{file}:{m.line} {m.change}" for m in results["survived"]],
    }


def equivalents(file: str) -> set[str]:
    """Changes of a file that were read and found to change nothing."""
    rows = tomllib.loads(EQUIVALENT.read_text())["mutant"] if EQUIVALENT.exists() else []
    return {row["change"] for row in rows if row["file"] == file}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--sample", type=int, default=60, help="mutants tried of a file, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=25, help="hypothesis examples of a property test")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if wrong := [file for file in args.files if file not in TESTS]:
        parser.error(f"no tests are named for {wrong[0]}; known are {', '.join(TESTS)}")
    os.chdir(ROOT)
    sys.path.insert(0, str(SOURCE))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = str(SOURCE)
    rows = []
    for file in args.files or TESTS:
        if args.one:
            print(json.dumps(measure(file, sample=args.sample, seed=args.seed, examples=args.examples)))
            return
        again = ["--one", "--sample", str(args.sample), "--seed", str(args.seed), "--examples", str(args.examples)]
        with subprocess.Popen([sys.executable, __file__, file, *again], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                print(last, end="", flush=True)
                last = line
        if process.returncode:
            raise SystemExit(process.returncode)
        rows.append(json.loads(last))
        shown = {k: v for k, v in rows[-1].items() if k not in ("survivors", "tests")}
        print(json.dumps(shown), flush=True)
        if args.output:
            args.output.write_text(json.dumps({"commit": commit(), "files": rows}, indent=2) + "\n")


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
