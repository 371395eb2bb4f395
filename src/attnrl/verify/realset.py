"""Subsets of the real line as unions of intervals: what intervals, inequalities and set operations denote."""

from __future__ import annotations

from typing import Any

import mpmath

from attnrl.verify.number import UndefinedError, evaluate, symbols
from attnrl.verify.tokens import LimitError
from attnrl.verify.tree import Node
from attnrl.verify.values import infinite

Span = tuple[Any, bool, Any, bool]  # low end, closed there?, high end, closed there?
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}
INF = mpmath.inf
MAX_SPANS = 128  # of the parts of a set operation
LINE: Span = (-INF, False, INF, False)


def endpoint(node: Node) -> Any:
    """The real value of an end, infinities included; UndefinedError where it has variables or is not real."""
    if sign := infinite(node):
        return sign * INF
    if symbols(node):
        raise UndefinedError("an end with variables")
    value = evaluate(node, {})
    if mpmath.im(value):
        raise UndefinedError("an end that is not real")
    return mpmath.re(value)


def _same(a: Any, b: Any) -> bool:
    if mpmath.isinf(a) or mpmath.isinf(b):
        return bool(a == b)
    return bool(abs(a - b) <= max(abs(a), abs(b)) * mpmath.mpf(10) ** -30)


def merge(spans: list[Span]) -> list[Span]:
    """The union in order, overlapping and touching spans joined, empty ones dropped.

    >>> merge([(2, True, 3, True), (1, True, 2, False)])
    [(1, True, 3, True)]
    """
    spans = [s for s in spans if s[0] < s[2] or (_same(s[0], s[2]) and s[1] and s[3])]
    spans.sort(key=lambda s: (s[0], not s[1]))
    merged: list[Span] = []
    for low, low_in, high, high_in in spans:
        if merged:
            a, a_in, b, b_in = merged[-1]
            touches = low < b or (_same(low, b) and (low_in or b_in))
            if touches:
                end = (high, high_in or b_in) if _same(high, b) else max((b, b_in), (high, high_in), key=lambda e: e[0])
                merged[-1] = (a, a_in, end[0], bool(end[1]))
                continue
        merged.append((low, low_in, high, high_in))
    return merged


def complement(spans: list[Span]) -> list[Span]:
    """What a merged union leaves of the real line."""
    left: list[Span] = []
    low, low_in = -INF, False
    for a, a_in, b, b_in in merge(spans):
        left.append((low, low_in, a, not a_in and not mpmath.isinf(a)))
        low, low_in = b, not b_in and not mpmath.isinf(b)
    left.append((low, low_in, INF, False))
    return merge(left)


def intersect(a: list[Span], b: list[Span]) -> list[Span]:
    return complement(merge(complement(a) + complement(b)))


def variable(node: Node) -> str | None:
    """The name the inequality is about, where it is one: x in 1 < x <= 2."""
    if node.kind != "rel":
        return None
    names = [side.value for side in node.args if side.kind == "sym"]
    return str(names[0]) if len(names) == 1 else None


def _relation_spans(node: Node) -> list[Span] | None:
    signs: tuple[str, ...] = node.value  # type: ignore[assignment]
    if signs[-1:] == ("in",) and len(node.args) == 2:
        return spans(node.args[1])
    where = [at for at, side in enumerate(node.args) if side.kind == "sym"]
    if len(where) != 1 or any(sign not in FLIPPED for sign in signs):
        return None
    at = where[0]
    result = [LINE]
    for position, side in enumerate(node.args):
        if position == at:
            continue
        if abs(position - at) != 1:
            return None
        sign = FLIPPED[signs[position]] if position < at else signs[position - 1]
        result = intersect(result, _half_line(sign, endpoint(side)))
    return result


def _half_line(sign: str, end: Any) -> list[Span]:
    """The x with `x sign end`."""
    return {
        "<": [(-INF, False, end, False)],
        "<=": [(-INF, False, end, True)],
        ">": [(end, False, INF, False)],
        ">=": [(end, True, INF, False)],
        "=": [(end, True, end, True)],
        "!=": [(-INF, False, end, False), (end, False, INF, False)],
    }[sign]


def spans(node: Node) -> list[Span] | None:
    """The union a tree denotes; None where it denotes no subset of the line.

    Raises UndefinedError where an end has variables.
    """
    if node.kind == "group" and len(node.args) == 2:
        low, high = map(endpoint, node.args)
        brackets = str(node.value)
        return merge([(low, brackets[0] == "[", high, brackets[1] == "]")]) if low < high else None
    if node.kind == "field" and node.value == "R":
        return [LINE]
    if node.kind == "empty":
        return []
    if node.kind == "set":
        ends = [endpoint(arg) for arg in node.args]
        return merge([(end, True, end, True) for end in ends])
    if node.kind == "rel":
        return _relation_spans(node)
    if node.kind == "list" and joining(node):
        return _joined(node)
    if node.kind == "setop":
        left, right = map(spans, node.args)
        if left is None or right is None:
            return None
        if len(left) + len(right) > MAX_SPANS:
            raise LimitError("too many intervals")
        if node.value == "cup":
            return merge(left + right)
        return intersect(left, right if node.value == "cap" else complement(right))
    return None


def joining(node: Node) -> str | None:
    """How a list of inequalities is meant: "or", "and" about one variable (0 < x < 3, x != 1 too), else None."""
    if node.value == "or":
        return "or"
    names = {variable(arg) for arg in node.args}
    excludes = any(arg.kind == "rel" and arg.value == ("!=",) for arg in node.args)
    return "and" if len(names) == 1 and None not in names and (node.value == "and" or excludes) else None


def _joined(node: Node) -> list[Span] | None:
    """What inequalities joined by "or" allow, or by "and"; None where "and" leaves nothing: then it meant "or"."""
    parts = [spans(arg) for arg in node.args]
    if any(part is None for part in parts):
        return None
    found = [part for part in parts if part is not None]
    if sum(map(len, found)) > MAX_SPANS:
        raise LimitError("too many intervals")
    if joining(node) == "or":
        return merge([span for part in found for span in part])
    common = [LINE]
    for part in found:
        common = intersect(common, part)
    return common or None


def same_spans(a: list[Span], b: list[Span]) -> bool:
    """Whether two merged unions are the same set."""
    if len(a) != len(b):
        return False
    return all(
        x[1] == y[1] and x[3] == y[3] and _same(x[0], y[0]) and _same(x[2], y[2]) for x, y in zip(a, b, strict=True)
    )
