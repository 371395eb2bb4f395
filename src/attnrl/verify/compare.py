"""When do two expression trees denote the same answer? True, False, or None where this module cannot tell."""

from __future__ import annotations

from fractions import Fraction
from math import gcd

from attnrl.verify import realset
from attnrl.verify.number import UndefinedError, evaluate, exact, sample_points, symbols
from attnrl.verify.relations import assigned, closing_value, conversions, evaluated, is_name
from attnrl.verify.tree import SCALARS, Node, negative
from attnrl.verify.units import bare, differ, scaled
from attnrl.verify.values import infinite, same_value

MAX_ITEMS = 40  # of an unordered list that is matched item by item
INEQUALITIES = frozenset(("<", ">", "<=", ">=", "!="))


def same(gold: Node, answer: Node) -> bool | None:
    """Whether the answer is the gold.

    >>> from attnrl.verify.parse import parse
    >>> same(parse(r"\\sqrt{12}"), parse(r"2\\sqrt{3}")), same(parse("(1,2)"), parse("[1,2]"))
    (True, False)
    """
    gold, answer = _unwrap_membership(gold), _unwrap_membership(answer)
    if _is_region(gold) or _is_region(answer):
        verdict = _same_region(gold, answer)
        if verdict is not None:
            return verdict
    if gold.kind in ("list", "set") or answer.kind in ("list", "set") or _has_sign(gold) or _has_sign(answer):
        return _same_items(gold, answer)
    if gold.kind == "rel" or answer.kind == "rel":
        return _same_relation(gold, answer)
    if gold.kind == "unit" or answer.kind == "unit":
        return same_value(scaled(gold), scaled(answer)) if differ(gold, answer) else same(bare(gold), bare(answer))
    gold, answer = _without_point_name(gold, answer)
    if gold.kind in SCALARS and answer.kind in SCALARS and not (_rows(gold) and _rows(answer)):
        return same_value(gold, answer)
    return _same_structure(gold, answer)


def _unwrap_membership(node: Node) -> Node:
    """x in S is S."""
    if node.kind == "rel" and node.value == ("in",) and is_name(node.args[0]):
        return node.args[1]
    return node


# regions of the line


def _is_region(node: Node) -> bool:
    if node.kind == "list":
        return realset.joining(node) is not None and all(_is_region(arg) for arg in node.args)
    if node.kind == "rel":
        return all(sign in INEQUALITIES for sign in node.value)  # type: ignore[attr-defined]
    return node.kind in ("setop", "field", "empty")


def _same_region(gold: Node, answer: Node) -> bool | None:
    """Intervals, unions and inequalities by the set of numbers they denote; None where one is no such set."""
    names = {realset.variable(gold), realset.variable(answer)} - {None}
    if len(names) > 1:
        return False
    if gold.kind == answer.kind == "rel" and realset.variable(gold) and not realset.variable(answer):
        return False  # the gold is solved for its variable, the answer is not
    gold, answer = _as_set(gold, answer), _as_set(answer, gold)
    try:
        left, right = realset.spans(gold), realset.spans(answer)
    except UndefinedError:
        return None
    if left is None or right is None:
        return None
    return realset.same_spans(left, right)


def _as_set(node: Node, other: Node) -> Node:
    """A bare list beside a union or difference is the set of its items."""
    listed = node.kind == "list" and node.value != "or" and all(arg.kind in SCALARS for arg in node.args)
    return Node("set", node.args) if listed and other.kind == "setop" else node


# lists and sets


def _has_sign(node: Node) -> bool:
    """Whether a plus-minus sign stands in the tree, lists and sets apart."""
    if node.kind in ("list", "set", "group", "matrix"):
        return False
    return node.kind == "pm" or any(_has_sign(arg) for arg in node.args)


def _with_sign(node: Node, plus: bool) -> Node:
    if node.kind == "pm":
        inner = _with_sign(node.args[0], plus)
        return inner if plus == (node.value == "pm") else negative(inner)
    return Node(node.kind, tuple(_with_sign(arg, plus) for arg in node.args), node.value) if node.args else node


def _items(node: Node) -> list[Node]:
    """The elements an unordered answer lists; plus-minus gives two."""
    if node.kind in ("list", "set"):
        return [item for arg in node.args for item in ([arg] if arg.kind == "set" else _items(arg))]
    if node.kind == "rel" and len(node.args) == 2 and node.args[1].kind in ("set", "list") and is_name(node.args[0]):
        return _items(node.args[1])
    return [_with_sign(node, True), _with_sign(node, False)] if _has_sign(node) else [node]


def _same_items(gold: Node, answer: Node) -> bool | None:
    for one, other in ((gold, answer), (answer, gold)):
        if other.kind == "list" and other.value == "or" and one.kind in SCALARS:
            return _all_same((one,) * len(other.args), other.args)  # 1/2 or 0.5: one value in two spellings
        if one.kind == "rel" and other.kind == "list" and (ordered := _in_order(one, other)):
            return _all_same(*ordered)  # p = 3, q = 7 for (p, q) = (3, 7)
        if one.kind == "group" and one.value == "()" and other.kind == "list" and _assignments(other):
            return _all_same(one.args, other.args)  # x = 1, y = 2 for (1, 2)
    if gold.kind == answer.kind == "list" and _names_apart(gold) and not any(map(assigned, answer.args)):
        return _all_same(gold.args, answer.args)  # 4 and 5, in this order, for r = 4, s = 5
    if {gold.value, answer.value} == {"or", "and"} and any(_is_region(arg) for arg in gold.args + answer.args):
        return False
    left, right = _items(gold), _items(answer)
    if gold.kind == "set" or answer.kind == "set":
        left, right = list(dict.fromkeys(left)), list(dict.fromkeys(right))
    if len(left) != len(right):
        return False
    if len(left) > MAX_ITEMS:
        left, right = sorted(left, key=_order), sorted(right, key=_order)
        return _all_same(tuple(left), tuple(right))
    undecided = False
    for item in left:
        for at, other in enumerate(right):
            verdict = same(item, other)
            undecided |= verdict is None
            if verdict:
                del right[at]
                break
        else:
            return None if undecided else False
    return True


def _order(node: Node) -> tuple[float, str]:
    value = exact(node)
    return (float(value) if value is not None else 0.0, repr(node))


def _assignments(node: Node) -> bool:
    sides = [assigned(arg) for arg in node.args]
    names = [repr(side[0]) for side in sides if side]
    return len(set(names)) == len(node.args)


def _names_apart(node: Node) -> bool:
    """Whether a list gives values to different letters: r = 4, s = 5, but not the roots x_1 = 4, x_2 = 5."""
    sides = [assigned(arg) for arg in node.args]
    letters = {str(side[0].value).partition("_")[0] for side in sides if side and side[0].kind == "sym"}
    return len(letters) == len(sides)


def _in_order(tuple_rel: Node, listed: Node) -> tuple[tuple[Node, ...], tuple[Node, ...]] | None:
    """The values of (p, q) = (3, 7) beside those of q = 7, p = 3 in the order of the names; None where these differ."""
    statement = assigned(tuple_rel)
    if statement is None or not statement[0].kind == statement[1].kind == "group" or not _assignments(listed):
        return None
    values = dict(side for arg in listed.args if (side := assigned(arg)))
    names = statement[0].args
    if set(names) != set(values) or len(names) != len(statement[1].args):
        return None
    return statement[1].args, tuple(values[name] for name in names)


def _all_same(gold: tuple[Node, ...], answer: tuple[Node, ...]) -> bool | None:
    if len(gold) != len(answer):
        return False
    verdicts = []
    for a, b in zip(gold, answer, strict=True):
        verdicts.append(same(a, b))
        if verdicts[-1] is False:
            return False
    return None if None in verdicts else True


# relations


def _same_relation(gold: Node, answer: Node) -> bool | None:
    if gold.kind != "rel" and any(same(gold, side) for side in conversions(answer)):
        return True
    gold, answer = evaluated(gold), evaluated(answer)
    if gold.kind != "rel" and answer.kind != "rel":
        return same(gold, answer)
    if gold.kind != "rel":
        verdicts = [same(gold, value) for value in closing_value(answer)]
        return True if True in verdicts else (None if None in verdicts else False)
    if answer.kind != "rel":
        statement = assigned(gold)
        return same(statement[1], answer) if statement else False
    left, right = assigned(gold), assigned(answer)
    if left and right:
        right = _renamed(left[0], right)
        if _same_name(left[0], right[0], left[1]):
            verdict = same(left[1], right[1])
            if verdict is not False or not symbols(left[1]):
                return verdict
        elif not symbols(left[1]):
            return False
    elif left and not symbols(left[1]):
        return False  # the gold is solved, the answer is not
    return _same_locus(gold, answer)


def _renamed(gold: Node, answer: tuple[Node, Node]) -> tuple[Node, Node]:
    """f(x) = x + 1 as a statement about f(n), where the gold calls the argument n."""
    name, value = answer
    if not (gold.kind == name.kind == "ufn" and gold.value == name.value and len(gold.args) == len(name.args) == 1):
        return answer
    new, old = gold.args[0], name.args[0]
    if new == old or new.kind != "sym" or old.kind != "sym" or str(new.value) in symbols(value):
        return answer
    return gold, _replaced(value, old, new)


def _replaced(node: Node, old: Node, new: Node) -> Node:
    if node == old:
        return new
    return Node(node.kind, tuple(_replaced(arg, old, new) for arg in node.args), node.value) if node.args else node


def _same_name(gold: Node, answer: Node, value: Node) -> bool:
    if gold == answer or "text" in (gold.kind, answer.kind):
        return True
    if gold.kind == answer.kind == "sym":
        return str(gold.value).casefold() == str(answer.value).casefold()
    functions = [node for node in (gold, answer) if node.kind in ("ufn", "mul")]
    others = [node for node in (gold, answer) if node.kind == "sym" and node.value in ("y", "f")]
    return len(functions) + len(others) == 2


def _same_locus(gold: Node, answer: Node) -> bool | None:
    """Equations and inequalities by their difference of sides, up to a constant factor (positive for inequalities)."""
    gold, answer = (Node("rel", tuple(map(bare, node.args)), node.value) for node in (gold, answer))
    if len(gold.args) != 2 or len(answer.args) != 2:
        return _same_chain(gold, answer)
    if any(arg.kind not in SCALARS for node in (gold, answer) for arg in node.args):
        return _same_chain(gold, answer)
    left, right = str(gold.value[0]), str(answer.value[0])  # type: ignore[index]
    a, b = (Node("add", (node.args[0], negative(node.args[1]))) for node in (gold, answer))
    if symbols(a) != symbols(b):
        return False
    ratio = None
    for point in sample_points(symbols(a))[:3]:
        try:
            top, bottom = evaluate(a, point), evaluate(b, point)
        except UndefinedError:
            continue
        if not bottom or not top:
            return None
        if ratio is not None and abs(top / bottom - ratio) > abs(ratio) * 1e-25:
            return False
        ratio = top / bottom
    if ratio is None:
        return None
    if left == right == "=" or left == right == "!=":
        return True
    return bool(right == (left if ratio.real > 0 else realset.FLIPPED.get(left)))


def _same_chain(gold: Node, answer: Node) -> bool | None:
    for sides, signs in (
        (answer.args, answer.value),
        (answer.args[::-1], tuple(realset.FLIPPED.get(s, s) for s in reversed(answer.value))),  # type: ignore[call-overload]
    ):
        if signs == gold.value and _all_same(gold.args, sides):
            return True
    return False


# other structures


def _without_point_name(gold: Node, answer: Node) -> tuple[Node, Node]:
    """P(1, 2) beside a bare (1, 2) names the point."""
    if gold.kind == "group":
        return gold, _point(answer)
    return (_point(gold), answer) if answer.kind == "group" else (gold, answer)


def _point(node: Node) -> Node:
    if node.kind == "ufn" and len(node.args) > 1 and str(node.value).isupper():
        return Node("group", node.args, "()")
    if node.kind == "mul" and [arg.kind for arg in node.args] == ["sym", "group"] and node.args[1].value == "()":
        name = str(node.args[0].value).partition("_")[0].rstrip("'")
        return node.args[1] if len(name) == 1 and name.isupper() else node
    return node


def _rows(node: Node) -> tuple[tuple[Node, ...], ...] | None:
    """The rows of a matrix, also of one written [[1,2],[3,4]]."""
    if node.kind == "matrix" and not node.value:
        return tuple(row.args for row in node.args)
    if node.kind == "mul" and sum(arg.kind == "matrix" for arg in node.args) == 1:  # a number times a matrix
        (matrix,) = (arg for arg in node.args if arg.kind == "matrix")
        factors = tuple(arg for arg in node.args if arg is not matrix)
        rows = _rows(matrix)
        return rows and tuple(tuple(Node("mul", (*factors, entry)) for entry in row) for row in rows)
    if node.kind == "group" and node.args and all(arg.kind == "group" for arg in node.args):
        return tuple(arg.args for arg in node.args)
    return None


def _same_matrix(gold: Node, answer: Node) -> bool | None:
    if "det" in (gold.value, answer.value):
        return None
    left, right = _rows(gold), _rows(answer)
    for matrix, vector in ((left, answer), (right, gold)):
        if matrix and vector.kind == "group" and (len(matrix) == 1 or all(len(row) == 1 for row in matrix)):
            entries = tuple(entry for row in matrix for entry in row)
            if not any(arg.kind == "group" for arg in vector.args):
                pair = (entries, vector.args) if vector is answer else (vector.args, entries)
                return _all_same(*pair)
    if left is None or right is None or [len(row) for row in left] != [len(row) for row in right]:
        return False
    return _all_same(tuple(e for row in left for e in row), tuple(e for row in right for e in row))


def _same_structure(gold: Node, answer: Node) -> bool | None:
    kinds = {gold.kind, answer.kind}
    if "matrix" in kinds or any(arg.kind == "matrix" for node in (gold, answer) for arg in node.args):
        return _same_matrix(gold, answer)
    if kinds == {"group"}:
        return False if gold.value != answer.value else _all_same(gold.args, answer.args)
    if "inf" in kinds or any(infinite(node) is not None for node in (gold, answer)):
        return infinite(gold) == infinite(answer)
    if kinds == {"ratio"}:
        return _same_ratio(gold, answer)
    if len(kinds) == 1 and kinds & {"base", "text", "field", "empty", "dots"}:
        return gold.value == answer.value
    if kinds == {"setop"}:
        return True if gold == answer else None
    return False


def _is_time(node: Node) -> bool:
    values = [part.value for part in node.args if isinstance(part.value, Fraction) and part.value.denominator == 1]
    if len(values) != len(node.args) or len(values) != 2:
        return False
    hours, minutes = (value.numerator for value in values)
    return hours <= 24 and 10 <= minutes < 60 and gcd(hours, minutes) > 1


def _same_ratio(gold: Node, answer: Node) -> bool | None:
    """a : b equals ka : kb; with a zero in it, or hours and minutes not in lowest terms, it is a time of day."""
    if len(gold.args) != len(answer.args):
        return False
    if any(part.kind == "num" and part.value == 0 for part in gold.args + answer.args) or _is_time(gold):
        return _all_same(gold.args, answer.args)
    pairs = list(zip(gold.args, answer.args, strict=True))
    crosses = [same_value(Node("mul", (pairs[0][0], b)), Node("mul", (pairs[0][1], a))) for a, b in pairs[1:]]
    return False if False in crosses else (None if None in crosses else True)
