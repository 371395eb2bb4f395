"""What may follow a factor: powers, factorials, primes, subscripts, degree signs, units."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from attnrl.verify.tokens import NUMBER_WORDS, ORDINALS, ParseError
from attnrl.verify.tree import Node, negative
from attnrl.verify.units import unit_of

if TYPE_CHECKING:
    from attnrl.verify.parse import Parser


def unit_tail(parser: Parser) -> None:
    """Skips units such as square feet, cm^2, m/s: they are no part of the value. Known ones are noted."""
    start = parser.at
    while True:
        token = parser.peek()
        joins = parser.is_op("/", "*", "-") or parser.is_cmd("cdot", "times")
        if token.kind == "unit":
            parser.at += 1
        elif parser.is_op("^"):
            parser.at += 1
            exponent(parser)
        elif joins and parser.peek(1).kind in ("unit", "word", "sym"):
            parser.at += 2
        else:
            break
    if parser.starts_factor():
        raise ParseError("text between values", prose=True)
    parser.units.append((parser.at, unit_of(" ".join(token.value for token in parser.tokens[start : parser.at][:12]))))


def postfix(parser: Parser, node: Node) -> Node:
    """The factor with every power, factorial, prime, subscript and degree sign that follows it."""
    while True:
        if parser.is_op("^"):
            parser.at += 1
            if parser.is_cmd("circ") or (parser.is_op("{") and parser.peek(1).value == "circ"):
                parser.at += 1 if parser.is_cmd("circ") else 3
                node = Node("deg", (node,))
            elif parser.is_op("{") and parser.peek(1).value in ORDINALS and node.kind == "num":
                parser.at += 3  # 12^{th} is 12
            elif (
                parser.is_op("'")
                or parser.is_cmd("prime")
                or (parser.is_op("{") and parser.peek(1).value in ("prime", "'"))
            ):
                braces = parser.is_op("{")
                parser.at += braces
                while parser.is_op("'") or parser.is_cmd("prime"):
                    parser.at += 1
                parser.at += braces
                node = _primed(node)
            else:
                node = Node("pow", (node, exponent(parser)))
        elif parser.is_op("!"):
            parser.at += 1
            node = Node("fn", (node,), "factorial")
        elif parser.is_op("'"):
            parser.at += 1
            node = _primed(node)
        elif parser.is_op("_"):
            parser.at += 1
            node = _subscript(parser, node)
        elif parser.is_cmd("circ"):
            parser.at += 1
            node = Node("deg", (node,))
        else:
            return node


def _primed(node: Node) -> Node:
    """f' is a name of its own; 15' is fifteen minutes of arc, and units do not count."""
    if node.kind == "num":
        return node
    return Node("sym", value=f"{_raw_name(node)}'")


def _raw_name(node: Node) -> str:
    if node.kind in ("sym", "const"):
        return str(node.value)
    raise ParseError("a prime on no name")


def exponent(parser: Parser) -> Node:
    """What stands after ^: one part with its signs; towers of powers lean right."""
    parser.deeper()
    if parser.is_op("-", "+"):
        sign = parser.sign()
        inner = exponent(parser)
        node = negative(inner) if sign == "-" else inner
    else:
        node = parser.primary()
        if parser.is_op("^"):
            parser.at += 1
            node = Node("pow", (node, exponent(parser)))
    parser.depth -= 1
    return node


def skip_group(parser: Parser) -> None:
    """Goes past one token, or a group in braces."""
    if not parser.is_op("{"):
        parser.take()
        return
    parser.take()
    level = 1
    while level and parser.peek().kind != "end":
        token = parser.take()
        level += (token.value == "{") - (token.value == "}")


def _subscript(parser: Parser, node: Node) -> Node:
    """A named variable such as a_1, or a number in a base such as 102_3."""
    start = parser.at
    skip_group(parser)
    name = "".join(token.value for token in parser.tokens[start : parser.at]).strip("{}()")
    name = str(NUMBER_WORDS.index(name)) if name in NUMBER_WORDS else name  # in base two
    if node.kind in ("sym", "const"):
        return Node("sym", value=f"{node.value}_{name}")
    if node.kind == "num" and isinstance(node.value, Fraction) and name.isdigit() and not node.args:
        return Node("base", value=(str(node.value), int(name[:6])))
    if node.kind in ("group", "paren", "ufn"):
        raise ParseError("subscript on a bracket")
    raise ParseError("subscript on no name")
