"""What an equation states: a name and its value, a closing value, or a contradiction."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any, cast

from attnrl.verify.number import UndefinedError, evaluate, exact, symbols
from attnrl.verify.tokens import LimitError
from attnrl.verify.tree import SCALARS, Node
from attnrl.verify.units import Unit, bare, differ, scaled, unit


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
        looped = first.kind == "ufn" and any(_holds(side, first) for side in node.args[1:])
        return None if looped else (first, last)  # f(x) = 0 f(x) = ...: several statements run together
    return (last, first) if last.kind == "sym" and len(node.args) == 2 else None


def _holds(node: Node, part: Node) -> bool:
    return node == part or any(_holds(arg, part) for arg in node.args)


def closing_value(node: Node) -> list[Node]:
    """The values a relation may stand for where the gold is a plain value; none where it is an unsolved equation."""
    signs: tuple[str, ...] = node.value  # type: ignore[assignment]
    if signs == ("=", "mod"):
        return [node.args[1]]  # the remainder
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
    estimate = "~" in cast(tuple[str, ...], node.value)
    sides = [arg for arg in node.args if bare(arg).kind in SCALARS and not symbols(arg)]
    return any(_apart(one, other, estimate) for one, other in pairwise(sides))


def _apart(one: Node, other: Node, estimate: bool) -> bool:
    """Whether two sides are too far from each other to be equal, or to be an estimate: 41 is none of 42."""
    if (one.kind == "deg") != (other.kind == "deg"):
        return False  # 30 degrees = pi/6
    converted = differ(one, other)
    slack = max(_last_place(side, unit(side) if converted else None) for side in (one, other))
    literals = bare(one).kind == bare(other).kind == "num"
    one, other = (scaled(side) if converted else bare(side) for side in (one, other))
    try:
        a, b = (_value(side) for side in (one, other))
    except UndefinedError:
        return True  # 1/0 = 42
    except LimitError:
        return False
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        gap, size = abs(a - b), max(abs(a), abs(b))
        if estimate and literals and not converted:
            return gap >= (slack or 1)
        percent = not converted and 100 * min(abs(a), abs(b)) == size
        return gap > (size / 20 if estimate else slack) and not (percent and a * b > 0)
    a, b = evaluate(one, {}), evaluate(other, {})
    return bool(abs(a - b) > (abs(a) + abs(b)) * (0.05 if estimate else 1e-20) + float(slack))


def _value(node: Node) -> Any:
    """The exact value where there is one, else many digits of it."""
    value = exact(node)
    return evaluate(node, {}) if value is None else value


def _last_place(node: Node, size: Unit | None) -> Fraction:
    """What one in the last decimal place of a literal is worth, in its unit; 0 for whole numbers and the rest."""
    inner = bare(node)
    if inner.kind != "num" or not inner.args:
        return Fraction(0)
    place = Fraction(10) ** -cast(tuple[int, int], inner.args[0].value)[1]
    return place * size[1] if size else place


def conversions(node: Node) -> list[Node]:
    """The sides of an equation between units of one kind that holds: each says the same quantity."""
    if node.kind != "rel" or set(cast(tuple[str, ...], node.value)) != {"="} or _contradicts(node):
        return []
    found = [arg for arg in node.args if arg.kind == "unit"]
    return found if len(found) > 1 and all(differ(*pair) for pair in pairwise(found)) else []
