"""Made-up tasks: arithmetic word problems over a dependency graph, with worked solutions.

A problem defines quantities by one another in shuffled order, some of them not needed, and asks for one of them. Who
answers must plan backwards from the asked quantity and then compute forwards. Every single step is a look-up or one
entry of an arithmetic table, so that small models can learn it; the length of the chain is what makes a task hard.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from attnrl.config import TaskConfig
from attnrl.data import forks
from attnrl.data.records import Record
from attnrl.data.task_graph import NAMES, SIGNS, Graph, Quantity, apply, draw_graph
from attnrl.errors import ConfigError

__all__ = ["NAMES", "Task", "as_records", "make_task", "make_tasks"]

Split = Literal["train", "test"]
G = TypeVar("G")

SENTENCES: dict[str, str] = {
    "given": "There are {value} {name}.",
    "more": "There are {value} more {name} than {first}.",
    "fewer": "There are {value} fewer {name} than {first}.",
    "times": "There are {value} times as many {name} as {first}.",
    "plus": "There are as many {name} as {first} plus {second}.",
    "minus": "There are as many {name} as {first} minus {second}.",
}
LINES: dict[str, str] = {
    "given": "- {name}: {value}",
    "more": "- {name}: {value} more than {first}",
    "fewer": "- {name}: {value} fewer than {first}",
    "times": "- {name}: {value} times {first}",
    "plus": "- {name}: {first} plus {second}",
    "minus": "- {name}: {first} minus {second}",
}
EQUATIONS: dict[str, str] = {
    "given": "- {name} = {value}",
    "more": "- {name} = {first} + {value}",
    "fewer": "- {name} = {first} - {value}",
    "times": "- {name} = {first} * {value}",
    "plus": "- {name} = {first} + {second}",
    "minus": "- {name} = {first} - {second}",
}
WORDINGS: dict[str, dict[str, str]] = {"sentences": SENTENCES, "list": LINES, "equations": EQUATIONS}
MODULUS = "All counts are modulo {modulus}."
QUESTION = "How many {name} are there?"
TEST_BUCKETS = 16  # one problem in this many belongs to the test split
# The settings that choose a problem, in the order in which they are hashed: another order would give other tasks. The
# seed has a place of its own, and errors touch solutions only.
HASHED = (
    "operations", "modulus", "largest", "distractors", "sides", "givens", "checks", "slips", "plan_entries", "wording",
    "kinds", "names",
)  # fmt: skip
HASHED_WITH_FORKS = (*HASHED, "forks", "routine")  # doubts and style, as errors, touch solutions only


@dataclass(frozen=True, slots=True)
class Task:
    r"""A problem with its worked solution.

    >>> spec = TaskConfig(operations=(2, 2), distractors=(1, 1), sides=(0, 0), checks=(1, 1))
    >>> task = make_task(spec, "train", 3)
    >>> print(task.problem.replace(". ", ".\n"))
    All counts are modulo 23.
    There are 5 more hats than stones.
    There are 1 maps.
    There are 7 times as many stones as maps.
    There are 2 fewer bells than stones.
    How many bells are there?
    >>> print(task.solution.replace("\n\n", "\n"))
    Plan: bells from stones, stones from maps, maps known.
    Take maps = 1
    Then stones = maps * 7 = 1 * 7 = 7
    Check: stones = 1 * 7 = 7, right
    Then bells = stones - 2 = 7 - 2 = 5
    So bells = \boxed{5}.
    """

    problem: str
    solution: str  # steps apart by blank lines: plan, computations, checks, boxed answer
    answer: str
    operations: int  # computations the answer needs
    split: Split
    key: str
    decisive: tuple[int, ...] = ()  # numbers of the decisive steps of the solution, from 0; tasks with forks have some

    @property
    def difficulty(self) -> int:
        """1 (up to 4 operations) to 5 (17 to 20)."""
        return (self.operations + 3) // 4


def make_task(spec: TaskConfig, split: Split, index: int, seed: int | None = None) -> Task:
    """Task number `index` of a split: the same for the same arguments, on every machine; a seed overrules the config's.

    The hash of a problem's content decides whether it belongs to train or test, and graphs are drawn until one fits.
    Train and test are therefore disjoint for any two seeds and specs; a problem with its sentences in another order or
    wording stays in its split.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"split = {split!r}: must be 'train' or 'test'")
    if index < 0:
        raise ConfigError(f"index = {index}: must be at least 0")
    settings = tuple(getattr(spec, name) for name in (HASHED_WITH_FORKS if spec.forks else HASHED))
    number = spec.seed if seed is None else seed
    digest = hashlib.sha256(repr((settings, number, split, index)).encode()).digest()
    rng = random.Random(int.from_bytes(digest, "big"))
    if spec.forks:
        return _fork_task(spec, rng, split)
    graph, key = _of_split(lambda: draw_graph(spec, rng), lambda g: g.key(spec.modulus), split)
    operations = sum(q.kind is not None for q in graph.trace)
    problem, solution = write_problem(spec, graph, rng), write_solution(spec, graph, rng)
    return Task(problem, solution, str(graph.asked.value), operations, split, key)


def _of_split(draw: Callable[[], G], identity: Callable[[G], str], split: Split) -> tuple[G, str]:
    """The first drawn graph whose identity belongs to the split, and that identity."""
    for _ in range(100 * TEST_BUCKETS):
        graph = draw()
        key = identity(graph)
        if (int(key, 16) % TEST_BUCKETS == 0) == (split == "test"):
            return graph, key
    raise ConfigError(f"these task settings have hardly any {split} problems; widen a range or allow more names")


def _fork_task(spec: TaskConfig, rng: random.Random, split: Split) -> Task:
    graph, key = _of_split(lambda: forks.draw_fork(spec, rng), lambda g: g.key, split)
    operations = len(graph.parts) - len(graph.decisive)
    lines = [MODULUS.format(modulus=spec.modulus), *(f"- {line}" for line in graph.lines)]
    problem = "\n".join([*lines, QUESTION.format(name=graph.asked)])
    solution = forks.write_fork(spec, graph, rng)
    return Task(problem, solution, str(graph.answer()), operations, split, key, graph.decisive)


def make_tasks(spec: TaskConfig, split: Split, count: int, seed: int | None = None) -> list[Task]:
    """The first `count` different tasks of a split."""
    found: dict[str, Task] = {}
    for index in range(10 * count + 1000):
        task = make_task(spec, split, index, seed)
        found.setdefault(task.key, task)
        if len(found) == count:
            return list(found.values())
    raise ConfigError(f"these task settings have fewer than {count} different {split} problems; ask for less")


def as_records(spec: TaskConfig, split: Split, count: int, seed: int | None = None) -> list[Record]:
    """Tasks as records, so that they take the same path to prompts as any data set (with the template `{problem}`)."""
    return [
        Record(task.problem, (task.answer,), "tasks", f"tasks/{split}:{row}", columns(task))
        for row, task in enumerate(make_tasks(spec, split, count, seed), start=1)
    ]


def columns(task: Task) -> dict[str, object]:
    """The columns of a task's row beside problem and answer."""
    decisive = {"decisive": list(task.decisive)} if task.decisive else {}
    return {"operations": task.operations, "difficulty": task.difficulty, "split": task.split, **decisive}


def write_problem(spec: TaskConfig, graph: Graph, rng: random.Random) -> str:
    """The definitions in random order, and the question."""
    templates = WORDINGS[spec.wording]
    opening = [] if spec.modulus is None else [MODULUS.format(modulus=spec.modulus)]
    body = [
        templates[q.kind or "given"].format(
            name=q.name, first=q.first, second=q.second, value=q.value if q.kind is None else q.constant
        )
        for q in graph.all
    ]
    rng.shuffle(body)
    separator = " " if spec.wording == "sentences" else "\n"
    return separator.join([*opening, *body, QUESTION.format(name=graph.asked.name)])


def write_solution(spec: TaskConfig, graph: Graph, rng: random.Random) -> str:
    """Plan, computations, checks and the boxed answer, apart by blank lines.

    With `errors` the writer goes wrong in some computations without noticing, and goes on from there.
    """
    trace = graph.trace
    values = _believed_values(spec, graph, rng)
    entries = [_plan_entry(q) for q in trace]
    size = spec.plan_entries
    steps = [f"Plan: {', '.join(entries[i : i + size])}." for i in range(0, len(entries), size)]
    operations = [q for q in reversed(trace) if q.kind is not None]
    checked: dict[str, list[Quantity]] = {}  # after the computation of this name, re-compute these
    for _ in range(min(rng.randint(*spec.checks), len(operations))):
        place = rng.randrange(len(operations))
        checked.setdefault(operations[place].name, []).append(operations[rng.randint(0, place)])
    for q in reversed(trace):
        if q.kind is None:
            steps.append(f"Take {q.name} = {q.value}")
            continue
        sign, sums = SIGNS[q.kind], _sums(q, values)
        slip = spec.slips > 0 and rng.random() < spec.slips
        value = values[q.name]
        shown = _other(value, spec, rng) if slip else value
        steps.append(f"Then {q.name} = {q.first} {sign} {q.operand} = {sums} = {shown}")
        if slip:
            steps.append(f"Check: {q.name} = {sums} = {value}, not {shown}")
        for other in checked.get(q.name, []):
            steps.append(f"Check: {other.name} = {_sums(other, values)} = {values[other.name]}, right")
    steps.append(f"So {graph.asked.name} = \\boxed{{{values[graph.asked.name]}}}.")
    return "\n\n".join(steps)


def _believed_values(spec: TaskConfig, graph: Graph, rng: random.Random) -> dict[str, int]:
    """What the writer takes each quantity to be: the truth, unless `errors` struck in it or in one it stands on."""
    values = {q.name: q.value for q in graph.all}
    if not spec.errors:
        return values
    for q in reversed(graph.trace):
        if q.kind is None:
            continue
        second = values[q.second] if q.second else q.constant
        values[q.name] = apply(spec, q.kind, values[q.first], second)
        if rng.random() < spec.errors:
            values[q.name] = _other(values[q.name], spec, rng)
    return values


def _other(value: int, spec: TaskConfig, rng: random.Random) -> int:
    """Another count than this."""
    return (value + rng.randrange(1, spec.numbers)) % spec.numbers


def _plan_entry(quantity: Quantity) -> str:
    if quantity.kind is None:
        return f"{quantity.name} known"
    return f"{quantity.name} from {quantity.first}" + (f" and {quantity.second}" if quantity.second else "")


def _sums(quantity: Quantity, values: dict[str, int]) -> str:
    """The computation in numbers, without its result."""
    assert quantity.kind is not None
    second = values[quantity.second] if quantity.second else quantity.constant
    return f"{values[quantity.first]} {SIGNS[quantity.kind]} {second}"
