"""What an equation states: a name and its value, a closing value, or a contradiction."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import cast

from attnrl.verify.number import UndefinedError, exact, symbols
from attnrl.verify.tree import SCALARS, Node


def is_name(node: Node) -> bool:
    """Whether a left side only names what follows: x, f(x), AB, \\frac{NO}{BO}, (p, q, r), some words."""
    if node.kind in ("sym", "text", "const"):
        return True
    if node.kind in ("mul", "div", "group", "ufn", "deg") or (node.kind == "fn" and node.value == "abs"):
        return all(is_name(arg) for arg in node.args)
    return False


def assigned(node: Node) -> tuple[Node, Node] | None:
    """(name, value) of `name = ... = value`; None where the relation assigns nothing."""
    if node.kind != "rel" or any(sign not in ("=", "~") for sign in node.value):  # type: ignore[attr-defined]
        return None
    first, last = node.args[0], node.args[-1]
    if is_name(first):
        return first, last
    return (last, first) if last.kind == "sym" and len(node.args) == 2 else None


def closing_value(node: Node) -> list[Node]:
    """The values a relation may stand for where the gold is a plain value; none where it is an unsolved equation."""
    signs: tuple[str, ...] = node.value  # type: ignore[assignment]
    if any(sign not in ("=", "~") for sign in signs) or _contradicts(node):
        return []
    statement = assigned(node)
    if statement:
        return [statement[1]] if signs[-1] == "=" or len(node.args) == 2 else list(node.args[-2:])
    first, last = node.args[0], node.args[-1]
    if signs == ("~",):
        return [first, last]
    if not symbols(first):
        return [last]
    mixed = first.kind == "add" and any(not symbols(arg) for arg in first.args)
    zero = last.kind == "num" and last.value == 0
    return [] if mixed or zero or symbols(last) else [last]


def evaluated(node: Node) -> Node:
    """2 * 3 = 6 is 6: an equation of plain numbers states its last one."""
    if node.kind == "rel" and set(cast(tuple[str, ...], node.value)) == {"="} and not symbols(node):
        return node if _contradicts(node) else node.args[-1]
    return node


def _contradicts(node: Node) -> bool:
    """Whether an equation sets different numbers equal: 43 = 42. Rounding, and 0.5 = 50%, are no contradiction."""
    if "~" in cast(tuple[str, ...], node.value):
        return False
    try:
        values = [exact(arg) if arg.kind in SCALARS else None for arg in node.args]
    except UndefinedError:
        return True  # 1/0 = 42
    sides = [(arg, value) for arg, value in zip(node.args, values, strict=True) if value is not None]
    for (one, a), (other, b) in pairwise(sides):
        places = [
            cast(tuple[int, int], side.args[0].value)[1] for side in (one, other) if side.kind == "num" and side.args
        ]
        slack = Fraction(10) ** -min(places) if places else Fraction(0)
        if abs(a - b) > slack and a != 100 * b and b != 100 * a:
            return True
    return False
