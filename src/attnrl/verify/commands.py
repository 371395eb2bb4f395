"""LaTeX commands and functions that the parser knows, apart from plain arithmetic."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

from attnrl.verify.suffixes import exponent, skip_group
from attnrl.verify.tokens import INFINITE, NAMES, ParseError, Token, words
from attnrl.verify.tree import Node, number

if TYPE_CHECKING:
    from attnrl.verify.parse import Parser

OPENING = {"(": "(", "[": "[", "langle": "(", "lbrack": "["}
CLOSING = {")": ")", "]": "]", "rangle": ")", "rbrack": "]"}
BARS = {"lvert": "rvert", "vert": "vert", "|": "|"}
DECORATIONS = words("hat vec bar tilde dot ddot widehat widetilde mathcal mathfrak mathscr overrightarrow")
INVERSE = {name: f"a{name}" for name in words("sin cos tan cot sinh cosh tanh")}
ALIASES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "lg": "log10", "log": "ln"}
TRIG = words("sin cos tan cot sec csc")
_SUCH_THAT = (":", "mid", "|", "vert")
_SET_ENDS = ("\\}", "rbrace")
_MATRIX = re.compile(r"matrix|[pbvBV]matrix|smallmatrix|array")


def function(parser: Parser, name: str) -> Node:
    """A named function with its power, base and argument: \\sin^2 x, \\log_2 8, sqrt(5)."""
    if name in ("sqrt", "cbrt"):
        return _root(parser, name)
    base = power = None
    while parser.is_op("_", "^"):
        sign = parser.take().value
        if sign == "_":
            base = parser.primary()
        else:
            power = exponent(parser)
    if power is not None and power.value == -1 and name in INVERSE:
        name, power = INVERSE[name], None
    node = Node("fn", (_argument(parser),), ALIASES.get(name, name))
    if base is not None:
        node = Node("div", (node, Node("fn", (base,), "ln")))
    return node if power is None else Node("pow", (node, power))


def _argument(parser: Parser) -> Node:
    """A bracket, or the factors that follow without a sign or another function between them."""
    if parser.is_op("(", "{"):
        return parser.primary()
    if parser.is_op("-", "+"):
        return parser.factor()
    parts = [parser.factor()]
    while (
        parser.peek().kind in ("num", "sym")
        or (parser.peek().kind == "cmd" and parser.peek().value in NAMES)
        or parser.is_cmd("frac")
    ):
        parts.append(parser.factor())
    if parser.is_op("/") and parser.peek(1).kind == "num" and parts[-1].kind in ("sym", "const"):
        parser.take()
        parts = [Node("div", (Node("mul", tuple(parts)), parser.factor()))]
    return parts[0] if len(parts) == 1 else Node("mul", tuple(parts))


def _root(parser: Parser, name: str) -> Node:
    degree = Node("num", value=Fraction(3 if name == "cbrt" else 2))
    if parser.is_op("[") and name == "sqrt":
        parser.take()
        degree = parser.sum()
        parser.expect("]")
    radicand = _digit_argument(parser)
    return Node("root", (radicand, degree))


def _digit_argument(parser: Parser, *, single: bool = False) -> Node:
    """The argument of \\frac or \\sqrt: a group, or one token; \\frac12 takes one digit at a time."""
    token = parser.peek()
    if single and token.kind == "num" and token.value[0].isdigit() and token.value[1:].isdigit():
        first, rest = token.value[0], token.value[1:]
        parser.tokens[parser.at] = Token("num", rest, False)
        return number(first)
    return parser.primary()


def _fraction(parser: Parser) -> Node:
    top = _digit_argument(parser, single=True)
    bottom = _digit_argument(parser, single=parser.tokens[parser.at - 1].value != "}")
    return Node("div", (top, bottom))


def _binomial(parser: Parser) -> Node:
    top = _digit_argument(parser, single=True)
    return Node("fn", (top, _digit_argument(parser, single=True)), "binomial")


def _environment(parser: Parser) -> Node:
    parser.expect("{")
    name = ""
    while not parser.is_op("}") and parser.peek().kind != "end":
        name += parser.take().value
    parser.expect("}")
    if not _MATRIX.fullmatch(name.rstrip("*")):
        raise ParseError(f"environment {name[:20]}")
    if name == "array" and parser.is_op("{"):
        while not parser.is_op("}") and parser.peek().kind != "end":
            parser.take()
        parser.expect("}")
    rows: list[Node] = []
    row: list[Node] = []
    while not parser.is_cmd("end"):
        if parser.is_op("\\\\"):
            parser.take()
            rows, row = ([*rows, Node("row", tuple(row))] if row else rows), []
        elif parser.is_op("&") or parser.is_cmd("hline"):
            parser.take()
        else:
            row.append(parser.ratio())
    while not parser.is_op("}"):
        if parser.take().kind == "end":
            raise ParseError("an open environment")
    parser.take()
    if row:
        rows.append(Node("row", tuple(row)))
    if not rows:
        raise ParseError("an empty matrix")
    return Node("matrix", tuple(rows), "det" if name == "vmatrix" else "")


def _set(parser: Parser) -> Node:
    """A set in braces; \\{x | x > 3\\} and \\{x : x > 3\\} are the set of their condition."""
    parser.brackets += 1
    if parser.peek().value in _SET_ENDS:
        parser.take()
        parser.brackets -= 1
        return Node("empty")
    if _opens_builder(parser):
        node = _builder(parser)
    else:
        parser.in_bars += 1  # a bar here ends the variable of a condition
        inner = parser.items(closers=_SET_ENDS)
        parser.in_bars -= 1
        node = Node("set", inner.args if inner.kind == "list" else (inner,))
    if parser.take().value not in _SET_ENDS:
        raise ParseError("an open set")
    parser.brackets -= 1
    return node


def _opens_builder(parser: Parser) -> bool:
    """Whether a variable and the sign before its domain or condition come next."""
    variable = parser.peek().kind == "sym" or (parser.peek().kind == "cmd" and parser.peek().value in NAMES)
    return variable and parser.peek(1).value in ("in", *_SUCH_THAT)


def _builder(parser: Parser) -> Node:
    """The region of {variable [in domain] such that condition}; the plain set where no condition follows."""
    name = parser.peek().value
    parser.in_bars += 1
    parser.in_builder += 1
    head = parser.relation()
    parser.in_builder -= 1
    parser.in_bars -= 1
    if parser.peek().value not in _SUCH_THAT:
        return Node("set", (head,))
    parser.take()
    condition = parser.items(closers=_SET_ENDS)
    parts = condition.args if condition.kind == "list" else (condition,)
    if any(part.kind != "rel" for part in parts):
        raise ParseError("a condition")
    if not all(any(side.kind == "sym" and side.value == name for side in part.args) for part in parts):
        return condition  # not solved for the variable: only comparable as it stands
    region = condition
    if condition.kind == "list" and condition.value != "or":
        region = parts[0]
        for part in parts[1:]:
            region = Node("setop", (region, part), "cap")
    domain = head.args[1] if head.kind == "rel" else Node("field", value="R")
    return Node("setop", (domain, region), "cap")


def _extreme(parser: Parser, name: str) -> Node:
    """\\min and \\max: of listed values, of a named function, or alone as a name; what stands below is left out."""
    if parser.is_op("_"):
        parser.take()
        skip_group(parser)
    if parser.is_op("(", "\\{"):
        inner = parser.primary()
        return Node("ufn", inner.args if inner.kind in ("group", "set") else (inner,), name)
    if parser.peek().kind in ("sym", "cmd") and parser.starts_factor():
        return Node("ufn", (parser.factor(),), name)
    return Node("sym", value=name)


def _field(parser: Parser) -> Node:
    parser.expect("{")
    name = parser.take().value
    parser.expect("}")
    return Node("field", value=name)


_COMMANDS: dict[str, Callable[[Parser], Node]] = {
    "frac": _fraction,
    "begin": _environment,
    "lbrace": _set,
    "mathbb": _field,
    "overline": lambda parser: parser.primary(),  # a line over letters names a segment: the letters are its name
    **dict.fromkeys(("binom", "dbinom", "tbinom"), _binomial),
    **dict.fromkeys(("angle", "measuredangle", "triangle"), lambda parser: parser.factor()),
    **dict.fromkeys(("emptyset", "varnothing"), lambda parser: Node("empty")),
}


def command(parser: Parser, token: Token) -> Node:
    """The node of a LaTeX command; ParseError where it is unknown (the symbolic grader may know it)."""
    name = token.value
    if token.kind == "op":
        if name == "\\{":
            return _set(parser)
        if name == "\\|":
            return parser.bars("\\|")
        if name == "...":
            return Node("dots")
        raise ParseError(f"{name!r} unexpected")
    if name in _COMMANDS:
        return _COMMANDS[name](parser)
    if name == "pi":
        return Node("const", value="pi")
    if name in INFINITE:
        return Node("inf", value=1)
    if name in NAMES:
        return Node("sym", value=name.removeprefix("var"))
    if name in OPENING:
        return parser.bracket(OPENING[name])
    if name in BARS:
        return parser.bars(BARS[name])
    if name in ("lfloor", "lceil"):
        inner = parser.sum()
        parser.expect("r" + name[1:])
        return Node("fn", (inner,), "floor" if name == "lfloor" else "ceil")
    if name in DECORATIONS:
        inner = parser.primary()
        return Node("sym", value=f"{name} {inner.value}") if inner.kind in ("sym", "const") else inner
    if name in ("ldots", "dots", "cdots", "dotsc"):
        return Node("dots")
    if name == "text":
        parser.expect("{")
        raise ParseError("text with braces", prose=True)
    if name == "Pr" and parser.is_op("("):
        inner = parser.primary()
        return Node("ufn", inner.args if inner.kind == "group" else (inner,), name)
    if name in ("max", "min"):
        return _extreme(parser, name)
    if name in ("gcd", "lcm") and parser.is_op("(", "\\{"):
        inner = parser.primary()
        return Node("ufn", inner.args or (inner,), name)
    raise ParseError(f"command {name[:20]}")
