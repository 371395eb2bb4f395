"""The expression tree of an answer and its number literals."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from attnrl.verify.tokens import LimitError, words

MAX_DIGITS = 2000


@dataclass(frozen=True, slots=True)
class Node:
    """A tree node. `args` are its parts; `value` its own data (a Fraction, a name, an operator, brackets)."""

    kind: str
    args: tuple[Node, ...] = ()
    value: object = None


SCALARS = words("num sym const add mul div pow root fn ufn deg")  # kinds with a value
MINUS_ONE = Node("num", value=Fraction(-1))


def negative(node: Node) -> Node:
    """The node with its sign turned; numbers stay numbers."""
    if node.kind == "num" and isinstance(node.value, Fraction):
        return Node("num", node.args, -node.value)
    return Node("mul", (MINUS_ONE, node))


def number(text: str) -> Node:
    """A number literal, exact; a decimal keeps its count of significant digits as a child."""
    if len(text) > MAX_DIGITS:
        raise LimitError("too many digits")
    mantissa, _, exponent = text.lower().partition("e")
    whole, point, fraction = mantissa.partition(".")
    value = Fraction(int(whole + fraction or "0"), 10 ** len(fraction)) * Fraction(10) ** int(exponent or 0)
    if not (point and fraction):
        return Node("num", value=value)
    digits = Node("digits", value=(len((whole + fraction).lstrip("0")), len(fraction) - int(exponent or 0)))
    return Node("num", (digits,), value)
