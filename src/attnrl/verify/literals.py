"""Number literals of several tokens: digit groups, mixed numbers, repeating decimals."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from attnrl.verify.tokens import ParseError, Token
from attnrl.verify.tree import Node, number

if TYPE_CHECKING:
    from attnrl.verify.parse import Parser


def literal(parser: Parser, token: Token) -> Node:
    """A number with its digit groups, or a mixed number such as 3 1/2."""
    text = token.value
    while _grouped(parser, text, token):
        text += parser.tokens[parser.at + (parser.tokens[parser.at].value == ",")].value
        parser.at += 1 + (parser.tokens[parser.at].value == ",")
    if "." in text and parser.is_cmd("overline", "bar"):
        return _repeating(parser, text)
    node = number(text)
    if not text.isdigit():
        return node
    fraction = _mixed_part(parser)
    if fraction is None:
        return node
    return Node("num", value=fraction + Fraction(int(text)))


def _repeating(parser: Parser, text: str) -> Node:
    r"""A decimal whose digits under \\overline go on for ever: 0.\\overline{3} is 1/3."""
    parser.at += 1
    inner = [parser.take().value for _ in range(3)] if parser.is_op("{") else ["", parser.take().value, ""]
    digits = inner[1]
    if not (digits.isdigit() and len(digits) < 100 and inner[2] in ("}", "")):
        raise ParseError("overline")
    period = Fraction(int(digits), (10 ** len(digits) - 1) * 10 ** len(text.partition(".")[2]))
    return Node("num", value=number(text).value + period)  # type: ignore[operator]


def _grouped(parser: Parser, text: str, token: Token) -> bool:
    """Whether three more digits of the same number follow: 1,234 outside brackets, or 1 234."""
    following, third = parser.peek(), parser.peek(1)
    if not parser.thousands or "e" in text.lower() or "." in text or len(text.lstrip("0")) != len(text):
        return False
    if len(token.value) > 3:
        return False
    if following.kind == "op" and following.value == ",":
        whole = third.value.partition(".")[0]
        return not parser.brackets and third.kind == "num" and not (following.space or third.space) and len(whole) == 3
    return following.kind == "num" and following.space and len(following.value.partition(".")[0]) == 3


def _mixed_part(parser: Parser) -> Fraction | None:
    """The proper fraction right after an integer, consumed; None where none follows."""
    if parser.is_cmd("frac"):
        parts: list[int] = []
        at = parser.at + 1
        while len(parts) < 2:
            values = [parser.peek(at - parser.at + ahead).value for ahead in range(3)]
            if values[0] == "{" and values[2] == "}" and values[1].isdigit():
                parts.append(int(values[1][:40]))
                at += 3
            elif values[0].isdigit() and len(values[0]) <= 2 - len(parts):
                parts += map(int, values[0])
                at += 1
            else:
                return None
        if len(parts) == 2 and 0 < parts[0] < parts[1]:
            parser.at = at
            return Fraction(*parts)
        return None
    values = [parser.peek(ahead).value for ahead in range(3)]
    if (
        parser.peek().kind == "num"
        and parser.peek().space
        and values[1] == "/"
        and values[0].isdigit()
        and values[2].isdigit()
    ):
        top, bottom = int(values[0][:40]), int(values[2][:40])
        if 0 < top < bottom:
            parser.at += 3
            return Fraction(top, bottom)
    return None
