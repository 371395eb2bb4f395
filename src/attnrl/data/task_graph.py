"""The graphs of made-up tasks: quantities defined by one another, in chains that join.

The main chain makes each quantity from the one before it and a constant or a second quantity; side chains join it.
Tracing the main chain from the asked quantity down and then the side chains in the order in which the trace met them,
and reading that trace backwards, is an order of computation that always works, and each next line of it follows from
the text so far by one look-up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from attnrl.config import TaskConfig, TaskKind
from attnrl.types import content_hash

# fmt: off
NAMES: tuple[str, ...] = (
    "apples", "bells", "birds", "boats", "books", "boxes", "cards", "chairs", "clocks", "coins",
    "cups", "dolls", "drums", "flags", "forks", "gems", "hats", "jars", "keys", "kites",
    "lamps", "maps", "masks", "mugs", "nuts", "pears", "pens", "pins", "plates", "plums",
    "rings", "ropes", "rugs", "shells", "shoes", "spoons", "stars", "stones", "tents", "toys",
)
# fmt: on
SIGNS: dict[TaskKind, str] = {"more": "+", "fewer": "-", "times": "*", "plus": "+", "minus": "-"}
CONSTANTS = (2, 9)  # range of the constants in "3 more", "3 fewer", "3 times"


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity of a problem: a given count, or one operation on others.

    >>> Quantity("lamps", 8, "more", "coins", constant=3).operand
    '3'
    """

    name: str
    value: int
    kind: TaskKind | None = None  # None: given
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


def draw_graph(spec: TaskConfig, rng: random.Random) -> Graph:
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
    spec: TaskConfig,
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
            chain.append(Quantity(name, apply(spec, kind, first.value, second.value), kind, first.name, second.name))
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
    spec: TaskConfig, rng: random.Random, name: str, first: Quantity, seconds: Sequence[Quantity]
) -> Quantity:
    """An operation on `first` whose result is in range: more or fewer always gives one."""
    seconds = [q for q in seconds if q.name != first.name]
    while True:
        kind = rng.choice(spec.kinds)
        if kind in ("plus", "minus"):
            if not seconds:
                continue
            second = rng.choice(seconds)
            quantity = Quantity(name, apply(spec, kind, first.value, second.value), kind, first.name, second.name)
        else:
            constant = rng.randint(CONSTANTS[0], min(CONSTANTS[1], spec.numbers - 1))
            value = apply(spec, kind, first.value, constant)
            quantity = Quantity(name, value, kind, first.name, constant=constant)
        if 0 <= quantity.value < spec.numbers:
            return quantity


def apply(spec: TaskConfig, kind: TaskKind, first: int, second: int) -> int:
    """The count that an operation makes of two."""
    value = {"+": first + second, "-": first - second, "*": first * second}[SIGNS[kind]]
    return value if spec.modulus is None else value % spec.modulus


def _definition(quantity: Quantity) -> str:
    if quantity.kind is None:
        return f"{quantity.name}={quantity.value}"
    return f"{quantity.name}={quantity.kind} {quantity.first} {quantity.operand}"
