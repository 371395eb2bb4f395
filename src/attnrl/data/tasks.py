"""Made-up tasks: arithmetic word problems over a dependency graph, with worked solutions.

A problem defines quantities by one another in shuffled order, some of them not needed, and asks for one of them. Who
answers must plan backwards from the asked quantity and then compute forwards. Every single step is a look-up or one
entry of an arithmetic table, so that small models can learn it; the length of the chain is what makes a task hard.

The graph is a main chain (each quantity from the one before it and a constant or a second quantity) and side chains
that join it. A solution traces the main chain from the asked quantity down, then the side chains in the order in which
the trace met them. Its computations are that trace read backwards: an order that is always computable, and each next
line follows from the text so far by one look-up.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from attnrl.data.records import Record
from attnrl.errors import ConfigError
from attnrl.types import content_hash

Split = Literal["train", "test"]
Kind = Literal["more", "fewer", "times", "plus", "minus"]

NAMES: tuple[str, ...] = tuple(
    (
        "apples bells birds boats books boxes cards chairs clocks coins cups dolls drums flags forks gems hats jars keys "
        "kites lamps maps masks mugs nuts pears pens pins plates plums rings ropes rugs shells shoes spoons stars stones "
        "tents toys"
    ).split()
)
KINDS: tuple[Kind, ...] = ("more", "fewer", "times", "plus", "minus")
SIGNS: dict[Kind, str] = {"more": "+", "fewer": "-", "times": "*", "plus": "+", "minus": "-"}
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
MODULUS = "All counts are modulo {modulus}."
QUESTION = "How many {name} are there?"
CONSTANTS = (2, 9)  # range of the constants in "3 more", "3 fewer", "3 times"
TEST_BUCKETS = 16  # one problem in this many belongs to the test split


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What tasks look like. Ranges are inclusive.

    >>> TaskSpec(operations=(2, 4), modulus=11).numbers
    11
    """

    operations: tuple[int, int] = (4, 12)  # computations the asked quantity needs, 1 to 20
    modulus: int | None = 23  # counts are taken modulo this; None: plain counts from 0 to `largest`
    largest: int = 99  # largest count when there is no modulus
    distractors: tuple[int, int] = (0, 4)  # quantities the asked one does not need
    sides: tuple[int, int] = (0, 1)  # side chains that join the main chain; needs the kinds plus or minus
    givens: int = 3  # most given counts that serve as second operands
    checks: tuple[int, int] = (0, 2)  # re-computations of an earlier count in the solution
    slips: float = 0.0  # chance that a computation first goes wrong and is corrected by a check
    plan_entries: int = 3  # quantities per step of the plan
    wording: Literal["sentences", "list"] = "sentences"  # a list costs a third fewer prompt tokens
    kinds: tuple[Kind, ...] = KINDS  # operations in use
    names: int = len(NAMES)  # size of the vocabulary of names, at most 40

    def __post_init__(self) -> None:
        for key, bottom, top in (("operations", 1, 20), ("distractors", 0, 20), ("sides", 0, 4), ("checks", 0, 20)):
            low, high = getattr(self, key)
            if not bottom <= low <= high <= top:
                raise ConfigError(f"{key} = {(low, high)}: give a range within {bottom} to {top}, smallest first")
        if self.modulus is not None and not 5 <= self.modulus <= 1000:
            raise ConfigError(f"modulus = {self.modulus}: must be 5 to 1000, or None for plain counts")
        if self.modulus is None and self.largest < 2 * CONSTANTS[1]:
            raise ConfigError(f"largest = {self.largest}: must be at least {2 * CONSTANTS[1]}")
        if not 0.0 <= self.slips < 1.0:
            raise ConfigError(f"slips = {self.slips}: must be at least 0 and below 1")
        if self.plan_entries < 1 or self.givens < 0:
            raise ConfigError("plan_entries must be at least 1 and givens at least 0")
        if self.wording not in ("sentences", "list"):
            raise ConfigError(f"wording = {self.wording!r}: must be 'sentences' or 'list'")
        if not self.kinds or set(self.kinds) - set(KINDS) or not {"more", "fewer"} <= set(self.kinds):
            raise ConfigError(f"kinds = {self.kinds}: must hold 'more' and 'fewer', and only {', '.join(KINDS)}")
        if self.sides[1] and not {"plus", "minus"} & set(self.kinds):
            raise ConfigError("sides above 0 need 'plus' or 'minus' among the kinds: a side chain joins by one of them")
        if not self.most_names <= self.names <= len(NAMES):
            raise ConfigError(
                f"names = {self.names}: these tasks need {self.most_names} names (operations + 1 + sides + givens + "
                f"distractors) and there are {len(NAMES)}; lower one of the ranges"
            )

    @property
    def most_names(self) -> int:
        """The number of names the largest task of this kind uses."""
        return self.operations[1] + 1 + self.sides[1] + self.givens + self.distractors[1]

    @property
    def numbers(self) -> int:
        """The number of counts that can occur: 0 to numbers - 1."""
        return self.largest + 1 if self.modulus is None else self.modulus


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity of a problem: a given count, or one operation on others.

    >>> Quantity("lamps", 8, "more", "coins", constant=3).operand
    '3'
    """

    name: str
    value: int
    kind: Kind | None = None  # None: given
    first: str = ""
    second: str = ""  # of plus and minus
    constant: int = 0  # of more, fewer and times

    @property
    def operand(self) -> str:
        """The second operand as it is written: a name or a constant."""
        return self.second or str(self.constant)


@dataclass(frozen=True, slots=True)
class Graph:
    """The quantities of one problem.

    >>> Graph(((Quantity("coins", 5), Quantity("lamps", 8, "more", "coins", constant=3)),)).asked.name
    'lamps'
    """

    chains: tuple[tuple[Quantity, ...], ...]  # bottom first; the main chain, then the sides as the trace meets them
    givens: tuple[Quantity, ...] = ()  # second operands that are given
    distractors: tuple[Quantity, ...] = ()

    @property
    def asked(self) -> Quantity:
        return self.chains[0][-1]

    @property
    def all(self) -> tuple[Quantity, ...]:
        return tuple(q for chain in self.chains for q in chain) + self.givens + self.distractors

    @property
    def trace(self) -> list[Quantity]:
        """From the asked quantity down, then the side chains: no quantity stands after one that it needs."""
        return [q for chain in self.chains for q in reversed(chain)]

    def key(self, modulus: int | None) -> str:
        """Identity of the problem, whatever its wording and the order of its sentences."""
        return content_hash(str(modulus), self.asked.name, *sorted(_definition(q) for q in self.all))


@dataclass(frozen=True, slots=True)
class Task:
    r"""A problem with its worked solution.

    >>> spec = TaskSpec(operations=(2, 2), distractors=(1, 1), sides=(0, 0), checks=(1, 1))
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
    difficulty: int  # 1 (up to 4 operations) to 5 (17 to 20)
    split: Split
    key: str

    @property
    def prompt(self) -> str:
        """The problem and a line break: what stands before the response."""
        return self.problem + "\n"


def make_task(spec: TaskSpec, split: Split, index: int, seed: int = 0) -> Task:
    """Task number `index` of a split: the same for the same arguments, on every machine.

    The hash of a problem's content decides whether it belongs to train or test, and graphs are drawn until one fits.
    Train and test are therefore disjoint for any two seeds and specs; a problem with its sentences in another order or
    wording stays in its split.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"split = {split!r}: must be 'train' or 'test'")
    if index < 0:
        raise ConfigError(f"index = {index}: must be at least 0")
    digest = hashlib.sha256(repr((astuple(spec), seed, split, index)).encode()).digest()
    rng = random.Random(int.from_bytes(digest, "big"))
    while True:
        graph = draw_graph(spec, rng)
        key = graph.key(spec.modulus)
        if (int(key, 16) % TEST_BUCKETS == 0) == (split == "test"):
            break
    operations = sum(q.kind is not None for q in graph.trace)
    return Task(
        problem=write_problem(spec, graph, rng),
        solution=write_solution(spec, graph, rng),
        answer=str(graph.asked.value),
        operations=operations,
        difficulty=(operations + 3) // 4,
        split=split,
        key=key,
    )


def task_stream(spec: TaskSpec, split: Split, seed: int = 0, start: int = 0) -> Iterator[Task]:
    """Tasks start, start + 1, ... of a split, without end."""
    return (make_task(spec, split, index, seed) for index in itertools.count(start))


def make_tasks(spec: TaskSpec, split: Split, count: int, seed: int = 0) -> list[Task]:
    """The first `count` different tasks of a split.

    >>> [t.answer for t in make_tasks(TaskSpec(), "test", 3, seed=1)] == [
    ...     make_task(TaskSpec(), "test", i, seed=1).answer for i in range(3)
    ... ]
    True
    """
    tasks: dict[str, Task] = {}
    for index, task in enumerate(task_stream(spec, split, seed)):
        if len(tasks) >= count:
            break
        if index > 10 * count + 1000:
            raise ConfigError(f"these task settings have fewer than {count} different {split} problems; ask for less")
        tasks.setdefault(task.key, task)
    return list(tasks.values())


def as_records(tasks: Sequence[Task], source: str = "tasks") -> list[Record]:
    """The tasks as records, so that they go through the same prompt path as any data set (template `{problem}`)."""
    return [
        Record(
            problem=task.problem,
            answers=(task.answer,),
            source=source,
            where=f"{source}:{row}",
            info={"operations": task.operations, "difficulty": task.difficulty, "split": task.split},
        )
        for row, task in enumerate(tasks)
    ]


def draw_graph(spec: TaskSpec, rng: random.Random) -> Graph:
    """A random graph: chains, given second operands and distractors, every count in range."""
    while True:
        names = rng.sample(NAMES[: spec.names], spec.names)
        operations = rng.randint(*spec.operations)
        sides = min(rng.randint(*spec.sides), operations // 3)
        longest = max(1, operations // 2 // max(1, sides))
        lengths = [rng.randint(1, longest) for _ in range(sides)]
        givens: list[Quantity] = []
        side_chains = [_draw_chain(spec, rng, names, length, {}, givens) for length in lengths]
        main_length = operations - sum(lengths)
        joints = sorted(rng.sample(range(1, main_length + 1), sides), reverse=True)  # as the trace meets them
        joined = {joint: chain[-1] for joint, chain in zip(joints, side_chains, strict=True)}
        main = _draw_chain(spec, rng, names, main_length, joined, givens)
        if 0 <= main[-1].value < spec.numbers:
            break
    graph = Graph((tuple(main), *map(tuple, side_chains)), tuple(givens))
    distractors: list[Quantity] = []
    for _ in range(rng.randint(*spec.distractors)):
        known = [*graph.all, *distractors]
        if rng.random() < 0.3:
            distractors.append(Quantity(names.pop(), rng.randrange(spec.numbers)))
        else:
            distractors.append(_draw_operation(spec, rng, names.pop(), rng.choice(known), known))
    return Graph(graph.chains, graph.givens, tuple(distractors))


def _draw_chain(
    spec: TaskSpec,
    rng: random.Random,
    names: list[str],
    length: int,
    joined: dict[int, Quantity],
    givens: list[Quantity],
) -> list[Quantity]:
    """A given count and `length` operations, each on the one before; new given second operands go into `givens`.

    The chain ends early where a joint leaves the range of plain counts: the caller draws anew.
    """
    chain = [Quantity(names.pop(), rng.randrange(spec.numbers))]
    for position in range(1, length + 1):
        first, name = chain[-1], names.pop()
        if position in joined:
            second = joined[position]
            kind = rng.choice([kind for kind in spec.kinds if kind in ("plus", "minus")])
            chain.append(Quantity(name, _apply(spec, kind, first.value, second.value), kind, first.name, second.name))
            if not 0 <= chain[-1].value < spec.numbers:
                return chain
            continue
        if len(givens) < spec.givens and rng.random() < 0.3:
            given = Quantity(names[-1], rng.randrange(spec.numbers))
            chain.append(_draw_operation(spec, rng, name, first, [given]))
            if chain[-1].second:  # the operation took it
                givens.append(given)
                names.pop()
        else:
            chain.append(_draw_operation(spec, rng, name, first, [*chain[:-1], *givens]))
    return chain


def _draw_operation(
    spec: TaskSpec, rng: random.Random, name: str, first: Quantity, seconds: Sequence[Quantity]
) -> Quantity:
    """An operation on `first` whose result is in range: more or fewer always gives one."""
    seconds = [q for q in seconds if q.name != first.name]
    while True:
        kind = rng.choice(spec.kinds)
        if kind in ("plus", "minus"):
            if not seconds:
                continue
            second = rng.choice(seconds)
            quantity = Quantity(name, _apply(spec, kind, first.value, second.value), kind, first.name, second.name)
        else:
            constant = rng.randint(CONSTANTS[0], min(CONSTANTS[1], spec.numbers - 1))
            value = _apply(spec, kind, first.value, constant)
            quantity = Quantity(name, value, kind, first.name, constant=constant)
        if 0 <= quantity.value < spec.numbers:
            return quantity


def _apply(spec: TaskSpec, kind: Kind, first: int, second: int) -> int:
    value = {"+": first + second, "-": first - second, "*": first * second}[SIGNS[kind]]
    return value if spec.modulus is None else value % spec.modulus


def _definition(quantity: Quantity) -> str:
    if quantity.kind is None:
        return f"{quantity.name}={quantity.value}"
    return f"{quantity.name}={quantity.kind} {quantity.first} {quantity.operand}"


def write_problem(spec: TaskSpec, graph: Graph, rng: random.Random) -> str:
    """The definitions in random order, and the question."""
    templates = SENTENCES if spec.wording == "sentences" else LINES
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


def write_solution(spec: TaskSpec, graph: Graph, rng: random.Random) -> str:
    """Plan, computations, checks and the boxed answer, apart by blank lines."""
    values = {q.name: q.value for q in graph.all}
    trace = graph.trace
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
        shown = (q.value + rng.randrange(1, spec.numbers)) % spec.numbers if slip else q.value
        steps.append(f"Then {q.name} = {q.first} {sign} {q.operand} = {sums} = {shown}")
        if slip:
            steps.append(f"Check: {q.name} = {sums} = {q.value}, not {shown}")
        for other in checked.get(q.name, []):
            steps.append(f"Check: {other.name} = {_sums(other, values)} = {other.value}, right")
    steps.append(f"So {graph.asked.name} = \\boxed{{{graph.asked.value}}}.")
    return "\n\n".join(steps)


def _plan_entry(quantity: Quantity) -> str:
    if quantity.kind is None:
        return f"{quantity.name} known"
    return f"{quantity.name} from {quantity.first}" + (f" and {quantity.second}" if quantity.second else "")


def _sums(quantity: Quantity, values: dict[str, int]) -> str:
    """The computation in numbers, without its result."""
    assert quantity.kind is not None
    second = values[quantity.second] if quantity.second else quantity.constant
    return f"{values[quantity.first]} {SIGNS[quantity.kind]} {second}"
