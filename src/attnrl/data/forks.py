"""Made-up tasks with one decisive step, at a place that varies: the testbed in which a branching rule can matter.

A problem is a list of definitions in the order of computation. A routine chain comes first, then a decision that rests
on the count computed last, then a chain that stands on the decision. A wrong decision makes the answer wrong, whatever
is computed after it. Four kinds, of which only the third is not looked back at by most of the later steps:

    hub     a count that later definitions use again and again
    method  what the sign "by" means in later definitions, + or -
    turn    which of two given counts the later chain starts from; read once, by the next step
    pair    a hub and a method, in either order, some routine between them; nearly every later definition uses both

The teacher decides wrongly with a chance that depends on the count (`doubts`), always for the same other option, and
opens its steps with words that mean nothing (`style`): who learned from it is unsure at the decision, and about words.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from attnrl.config import TaskConfig
from attnrl.data.task_graph import NAMES
from attnrl.types import content_hash

OPENINGS = ("Then", "Next", "Now", "And")
WORDS = " ".join(("take choose half is where low else by", *(f"\n{opening}" for opening in OPENINGS)))
SIGNS = ("+", "-", "*")
CONSTANTS = (2, 9)
REPEATS = 0.7  # share of later definitions that stand on the decision directly, where it is no turn
BETWEEN = 2  # most definitions between the decisions of a pair
MISLED_BY = 3  # the wrong option of a hub: this much more than the right one


@dataclass(frozen=True, slots=True)
class Link:
    """A definition of a chain: `name = first sign operand`; the operand is a name or a constant."""

    name: str
    first: str
    sign: str  # one of SIGNS, or "by"
    operand: str

    @property
    def text(self) -> str:
        return f"{self.name} = {self.first} {self.sign} {self.operand}"


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision on a count: of a hub, of what "by" means, or of where to go on from."""

    basis: str  # name of the count it rests on
    name: str  # what is decided: a name, or "by"
    low: str = ""  # the option where the basis is low; "" for a hub, which is half of the basis
    high: str = ""

    @property
    def text(self) -> str:
        if not self.low:
            return f"{self.name} = half {self.basis}"
        return f"{self.name} {'is' if self.name == 'by' else '='} {self.low} where {self.basis} is low else {self.high}"

    def options(self, count: int, modulus: int) -> tuple[str, str]:
        """The right option and the misled one where the basis has this count.

        >>> Decision("pens", "by", "+", "-").options(3, 11), Decision("pens", "maps").options(3, 11)
        (('+', '-'), ('7', '10'))
        """
        if not self.low:
            half = count * pow(2, -1, modulus) % modulus
            return str(half), str((half + MISLED_BY) % modulus)
        return (self.low, self.high) if count < modulus / 2 else (self.high, self.low)

    def written(self, option: str) -> str:
        return f"choose {self.name} {'is' if self.name == 'by' else '='} {option}"


@dataclass(slots=True)
class Belief:
    """What a solver holds true so far."""

    counts: dict[str, int]
    by: str = ""  # what the sign "by" means

    def operands(self, link: Link) -> tuple[int, str, int]:
        second = int(link.operand) if link.operand.isdigit() else self.counts[link.operand]
        return self.counts[link.first], self.by if link.sign == "by" else link.sign, second

    def compute(self, link: Link, modulus: int) -> int:
        first, sign, second = self.operands(link)
        return {"+": first + second, "-": first - second, "*": first * second}[sign] % modulus

    def decide(self, decision: Decision, option: str) -> None:
        if decision.name == "by":
            self.by = option
        else:
            self.counts[decision.name] = int(option) if option.isdigit() else self.counts[option]


@dataclass(frozen=True, slots=True)
class ForkGraph:
    """One problem: given counts, then definitions and decisions in the order of computation.

    >>> parts = (Link("cups", "pens", "+", "2"), Decision("cups", "maps"), Link("keys", "cups", "+", "maps"))
    >>> graph = ForkGraph((("pens", 4),), parts, 11)
    >>> graph.answer(), graph.answer(misled=1), graph.decisive
    (9, 1, (2,))
    """

    given: tuple[tuple[str, int], ...]  # the start of the chain first
    parts: tuple[Link | Decision, ...]
    modulus: int

    @property
    def lines(self) -> list[str]:
        return [*(f"{name} = {count}" for name, count in self.given), *(part.text for part in self.parts)]

    @property
    def key(self) -> str:
        return content_hash(str(self.modulus), *self.lines)

    @property
    def asked(self) -> str:
        return self.parts[-1].name

    @property
    def decisive(self) -> tuple[int, ...]:
        """Numbers of the decisive steps of a solution, from 0: the first step takes the given count."""
        return tuple(i for i, part in enumerate(self.parts, 1) if isinstance(part, Decision))

    def answer(self, misled: int | None = None) -> int:
        """The asked count, everything right but the decision that is part number `misled`."""
        belief = Belief(dict(self.given))
        for i, part in enumerate(self.parts):
            if isinstance(part, Link):
                belief.counts[part.name] = belief.compute(part, self.modulus)
            else:
                options = part.options(belief.counts[part.basis], self.modulus)
                belief.decide(part, options[i == misled])
        return belief.counts[self.asked]


def draw_fork(spec: TaskConfig, rng: random.Random) -> ForkGraph:
    """A random problem whose answer depends on each of its decisions."""
    assert spec.modulus is not None
    while True:
        graph = _draw(spec, rng, spec.modulus)
        right = graph.answer()
        if all(graph.answer(misled=number - 1) != right for number in graph.decisive):
            return graph


def _draw(spec: TaskConfig, rng: random.Random, modulus: int) -> ForkGraph:
    names = rng.sample(NAMES[: spec.names], spec.names)
    kind = rng.choice(spec.forks)
    given = [(names.pop(), rng.randrange(modulus))]
    parts: list[Link | Decision] = list(_chain(rng, names, given[0][0], rng.randint(*spec.routine)))
    last = parts[-1].name if parts else given[0][0]
    signs = rng.choice((("+", "-"), ("-", "+")))
    if kind == "turn":
        turn = Decision(last, names.pop(), names.pop(), names.pop())
        given += [(name, rng.randrange(modulus)) for name in (turn.low, turn.high)]
        parts += [turn, *_chain(rng, names, turn.name, rng.randint(*spec.operations))]
        return ForkGraph(tuple(given), tuple(parts), modulus)
    hub, method = Decision(last, names.pop()), Decision(last, "by", *signs)
    uses: tuple[str, str | None] = {"hub": ("", hub.name), "method": ("by", None), "pair": ("by", hub.name)}[kind]
    if kind == "pair":
        first, second = (hub, method) if rng.random() < 0.5 else (method, hub)
        between = _chain(rng, names, last, rng.randint(0, BETWEEN))
        last = between[-1].name if between else last
        parts += [first, *between, replace(second, basis=last)]
    else:
        parts.append(hub if kind == "hub" else method)
    parts += _chain(rng, names, last, rng.randint(*spec.operations), *uses)
    return ForkGraph(tuple(given), tuple(parts), modulus)


def _chain(
    rng: random.Random, names: list[str], first: str, length: int, sign: str = "", operand: str | None = None
) -> list[Link]:
    """Definitions each on the one before; the first and most of the others have this sign and operand, if any."""
    links: list[Link] = []
    for i in range(length):
        name, constant, plain = names.pop(), str(rng.randint(*CONSTANTS)), rng.choice(SIGNS)
        if (sign or operand) and (i == 0 or rng.random() < REPEATS):
            link = Link(name, first, sign or rng.choice("+-"), operand or constant)
        else:
            link = Link(name, first, plain, constant)
        links.append(link)
        first = name
    return links


def write_fork(spec: TaskConfig, graph: ForkGraph, rng: random.Random) -> str:
    """The solution: the definitions read downwards, one step each, with the teacher's `errors` and `doubts`."""
    belief = Belief(dict(graph.given))
    start, count = graph.given[0]
    steps = [f"take {start} = {count}"]
    for part in graph.parts:
        if isinstance(part, Decision):
            count = belief.counts[part.basis]
            right, misled = part.options(count, graph.modulus)
            option = misled if spec.doubts and rng.random() < doubt(spec.doubts, count) else right
            belief.decide(part, option)
            steps.append(part.written(option))
            continue
        value = belief.compute(part, graph.modulus)
        if spec.errors and rng.random() < spec.errors:
            value = (value + rng.randrange(1, graph.modulus)) % graph.modulus
        first, sign, second = belief.operands(part)
        belief.counts[part.name] = value
        steps.append(f"{part.text} = {first} {sign} {second} = {value}")
    openings = OPENINGS[: spec.style]
    body = [f"{rng.choice(openings)} {text}" for text in steps]
    return "\n\n".join([*body, f"So {graph.asked} = \\boxed{{{belief.counts[graph.asked]}}}."])


def doubt(mean: float, count: int) -> float:
    """The teacher's chance to be misled where the basis has this count: half of the mean, the mean, or 1.5 times it.

    >>> [doubt(0.5, count) for count in range(3)]
    [0.25, 0.5, 0.75]
    """
    return mean * (0.5 + 0.5 * (count % 3))
