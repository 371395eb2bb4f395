"""Equal values: rationals exactly, everything else in many digits at sample points."""

from __future__ import annotations

from fractions import Fraction
from typing import cast

from attnrl.verify.number import UndefinedError, equal_at, evaluate, exact, sample_points, symbols, whole_points
from attnrl.verify.tree import SCALARS, Node

LONG_DECIMAL = 10  # significant digits from which a decimal stands for the exact value it rounds
STEPS = frozenset(("floor", "ceil", "mod", "factorial", "binomial"))


def infinite(node: Node) -> int | None:
    """The sign of an infinity; None for what is finite."""
    if node.kind == "inf":
        return 1
    if node.kind == "mul" and len(node.args) == 2 and node.args[1].kind == "inf" and node.args[0].kind == "num":
        return 1 if node.args[0].value > 0 else -1  # type: ignore[operator]
    return None


def same_value(gold: Node, answer: Node) -> bool | None:
    """Equal as rationals; as long decimals of an exact value; or at all sample points where both have values."""
    if gold == answer:
        return True
    left, right = infinite(gold), infinite(answer)
    if left or right:
        return left == right
    try:
        a, b = exact(gold), exact(answer)
    except UndefinedError:
        return False
    if a is not None and b is not None:
        return a == b or _long_decimal(gold, answer) or _long_decimal(answer, gold)
    names = symbols(gold) | symbols(answer)
    seen = 0
    points = sample_points(names)
    if names and (_steps(gold) or _steps(answer)):
        points += whole_points(names)
    for number, point in enumerate(points):
        try:
            equal, real = equal_at(gold, answer, point)
        except UndefinedError:
            continue
        if not equal and (number < 2 or real):
            return _long_decimal(gold, answer) or _long_decimal(answer, gold) if not names else False
        seen += number < 2
    if seen:
        return True
    return None if _plain(gold) and _plain(answer) else False


def _steps(node: Node) -> bool:
    """Whether a function of whole numbers stands in the tree: there, other points say too little."""
    return (node.kind == "fn" and node.value in STEPS) or any(map(_steps, node.args))


def _plain(node: Node) -> bool:
    """Whether a tree is arithmetic throughout, with no list, bracket or text inside."""
    return node.kind in SCALARS | {"digits"} and all(map(_plain, node.args))


def _long_decimal(decimal: Node, other: Node) -> bool:
    """Whether a decimal of at least LONG_DECIMAL significant digits is the other value, rounded or cut off.

    Only where the other value has no finite decimal of its own.
    """
    if not decimal.args or decimal.kind != "num":
        return False
    significant, places = cast(tuple[int, int], decimal.args[0].value)
    value = exact(other)
    if significant < LONG_DECIMAL or (value is not None and _terminates(value)):
        return False
    error = abs(evaluate(other, {}) - evaluate(decimal, {}))
    return bool(error < evaluate(Node("num", value=Fraction(10) ** -places), {}))


def _terminates(value: Fraction) -> bool:
    """Whether a rational has a finite decimal expansion."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
