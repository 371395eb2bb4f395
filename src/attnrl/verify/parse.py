"""Tokens -> an expression tree, by recursive descent with bounded depth. Nothing of the text is ever executed."""

from __future__ import annotations

from attnrl.verify.commands import BARS, CLOSING, OPENING, command, function
from attnrl.verify.literals import literal
from attnrl.verify.suffixes import postfix, unit_tail
from attnrl.verify.tokens import LimitError, ParseError, Token, tokenize, words
from attnrl.verify.tree import SCALARS, Node, negative
from attnrl.verify.units import Unit, bare

MAX_DEPTH = 60
MAX_SET_OPERATIONS = 64

RELATIONS = {
    "=": "=", "==": "=", ":=": "=", "<": "<", ">": ">", "<=": "<=", "=<": "<=", ">=": ">=", "!=": "!=", "lt": "<",
    "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "ne": "!=", "neq": "!=",
    "gt": ">", "approx": "~", "simeq": "~", "equiv": "=", "in": "in",
}  # fmt: skip
SET_OPERATIONS = {"cup": "cup", "cap": "cap", "setminus": "minus", "backslash": "minus"}
NO_FACTORS = {*CLOSING, *RELATIONS, *SET_OPERATIONS} | words(
    "rbrace rvert rfloor rceil mid vert circ prime end pm mp div over notin"
)
END = Token("end", "", False)
UNKNOWN_FUNCTIONS = frozenset("fghFGPQu")


class Parser:
    """Recursive descent over the tokens of one answer; `thousands` reads 1,234 as one number outside brackets."""

    def __init__(self, tokens: list[Token], thousands: bool) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.brackets = 0
        self.in_bars = 0
        self.set_operations = 0
        self.in_builder = 0  # a colon ends the variable of a set
        self.modulus: Node | None = None  # of the congruence that is read
        self.units: list[tuple[int, Unit | None]] = []  # where units ended, and which
        self.thousands = thousands

    # reading tokens

    def peek(self, ahead: int = 0) -> Token:
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else END

    def take(self) -> Token:
        token = self.peek()
        self.at += 1
        return token

    def is_op(self, *values: str) -> bool:
        token = self.peek()
        return token.kind == "op" and token.value in values

    def is_cmd(self, *values: str) -> bool:
        token = self.peek()
        return token.kind == "cmd" and token.value in values

    def expect(self, value: str) -> None:
        if self.take().value != value:
            raise ParseError(f"{value} missing")

    # lists and relations

    def answer(self) -> Node:
        node = self.items(closers=())
        if self.peek().kind != "end":
            raise ParseError(f"{self.peek().value!r} left over")
        return node

    def separator(self) -> str | None:
        token = self.peek()
        if token.kind == "sep" or (token.kind == "op" and token.value in (",", ";")):
            self.at += 1
            return token.value
        return None

    def items(self, closers: tuple[str, ...]) -> Node:
        """One item, or a list node of several."""
        found: list[Node] = []
        marks: set[str] = set()
        while True:
            while (mark := self.separator()) is not None:
                marks.add(mark)
            if self.peek().kind == "end" or self.peek().value in closers:
                break
            found.append(self.relation())
            if (mark := self.separator()) is None:
                break
            marks.add(mark)
        if not found:
            raise ParseError("nothing here")
        if len(found) == 1:
            return found[0]
        return Node("list", tuple(found), "or" if "or" in marks else "and" if marks == {"and"} else ",")

    def deeper(self) -> None:
        """One level down. Every part that may hold itself counts, so the stack of the interpreter never runs out."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise LimitError("nested too deep")

    def relation(self) -> Node:
        self.deeper()
        self.modulus = None
        while self.is_cmd("approx", "simeq") or self.is_op("="):  # "= 5" and "about 5" say 5
            self.at += 1
        sides = [self.quantity()]
        signs: list[str] = []
        while True:
            token = self.peek()
            if token.kind not in ("op", "cmd") or token.value not in RELATIONS:
                break
            self.at += 1
            signs.append(RELATIONS[token.value])
            sides.append(self.quantity())
            while self.is_cmd("pmod", "mod", "bmod"):
                self.at += 1
                self.modulus = self.factor()
        self.depth -= 1
        if signs == ["="] and self.modulus is not None:  # a congruence
            sides, signs, self.modulus = [*sides, self.modulus], ["=", "mod"], None
        return sides[0] if not signs else Node("rel", tuple(sides), tuple(signs))

    def quantity(self) -> Node:
        """A side of a relation, with its unit where it ends in one that is known and has no other."""
        before = len(self.units)
        node = self.ratio()
        if len(self.units) == before + 1 and node.kind in SCALARS and node.kind != "sym":
            end, unit = self.units[-1]
            if unit is not None and end == self.at:
                return Node("unit", (node,), unit)
        return node

    def ratio(self) -> Node:
        parts = [self.sets()]
        while self.is_op(":") and not self.in_builder:
            self.at += 1
            parts.append(self.sets())
        return parts[0] if len(parts) == 1 else Node("ratio", tuple(parts))

    def sets(self) -> Node:
        left = self.sum()
        while self.peek().kind == "cmd" and self.peek().value in SET_OPERATIONS:
            sign = SET_OPERATIONS[self.take().value]
            self.set_operations += 1
            if self.set_operations > MAX_SET_OPERATIONS:
                raise LimitError("too many set operations")
            left = Node("setop", (left, self.sum()), sign)
        return left

    # arithmetic

    def sum(self) -> Node:
        terms: list[Node] = []
        while True:
            sign = self.sign()
            term = self.term()
            if sign == "-":
                term = negative(term)
            elif sign in ("pm", "mp"):
                term = Node("pm", (term,), sign)
            terms.append(term)
            if not (self.is_op("+", "-") or self.is_cmd("pm", "mp")):
                break
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def sign(self) -> str:
        sign = "+"
        while self.is_op("+", "-") or self.is_cmd("pm", "mp"):
            token = self.take().value
            if token in ("pm", "mp"):
                sign = token
            elif token == "-":
                sign = {"+": "-", "-": "+", "pm": "mp", "mp": "pm"}[sign]
        return sign

    def term(self) -> Node:
        left = self.factor()
        factors = [left]
        while True:
            if self.is_op("*") or self.is_cmd("cdot", "times", "ast", "cdotp", "bullet"):
                self.at += 1
                factors.append(self.factor())
            elif self.is_op("/") or self.is_cmd("div", "over"):
                self.at += 1
                whole = Node("mul", tuple(factors)) if len(factors) > 1 else factors[0]
                factors = [Node("div", (whole, self.divisor()))]
            elif self.is_cmd("bmod", "mod") or (self.is_cmd("pmod") and self.peek(1).kind != "end"):
                modulus = self.take().value
                right = self.factor()
                if modulus == "pmod":
                    self.modulus = right
                else:
                    factors = [Node("fn", (Node("mul", tuple(factors)), right), "mod")]
            elif self.peek().kind == "unit":
                unit_tail(self)
                break
            elif self.starts_factor():
                factors.append(self.factor())
            else:
                break
        return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))

    def divisor(self) -> Node:
        """What a slash divides by: one factor, or letters that stand together, as in t/RC."""
        first = self.factor()
        parts = [first]
        while first.kind == "sym" and self.peek().kind == "sym" and not self.peek().space:
            parts.append(self.factor())
        return first if len(parts) == 1 else Node("mul", tuple(parts))

    def starts_factor(self) -> bool:
        token = self.peek()
        if token.kind in ("num", "sym", "fn", "word"):
            if token.kind == "num" and self.at and self.tokens[self.at - 1].kind == "num":
                raise ParseError("two numbers side by side", prose=True)
            return True
        if token.kind == "op":
            return token.value in ("(", "[", "{", "\\{") or (token.value == "|" and not self.in_bars)
        return token.kind == "cmd" and token.value not in NO_FACTORS

    def factor(self) -> Node:
        self.deeper()
        if self.is_op("+", "-"):
            sign = self.sign()
            node = self.factor()
            node = negative(node) if sign == "-" else node
        else:
            node = postfix(self, self.primary())
        self.depth -= 1
        return node

    # smallest parts

    def primary(self) -> Node:
        self.deeper()
        node = self.part(self.take())
        self.depth -= 1
        return node

    def part(self, token: Token) -> Node:
        if token.kind == "num":
            return literal(self, token)
        if token.kind == "sym":
            return self.symbol(token)
        if token.kind == "fn":
            return function(self, token.value)
        if token.kind == "word":
            return self.words(token)
        if token.kind == "op" and token.value in OPENING:
            return self.bracket(OPENING[token.value])
        if token.kind == "op" and token.value == "{":
            inner = self.items(closers=("}",))
            self.expect("}")
            return bare(inner)
        if token.kind == "op" and token.value in BARS:
            return self.bars(BARS[token.value])
        if token.kind in ("cmd", "op"):
            return command(self, token)
        raise ParseError("an operand is missing" if token.kind == "end" else f"{token.value!r} unexpected")

    def symbol(self, token: Token) -> Node:
        name = token.value
        if self.is_op("(") and not self.peek().space and (name in UNKNOWN_FUNCTIONS or self.at_number(name)):
            self.take()
            inner = self.bracket("(")
            return Node("ufn", inner.args if inner.kind == "group" else (inner,), name)
        if name in ("i", "e") and not self.is_op("_", "'"):
            return Node("const", value=name)
        return Node("sym", value=name)

    def at_number(self, name: str) -> bool:
        """Whether a letter stands before one bare number in brackets: I(0) is a value of I, not I times 0."""
        return name not in ("e", "i") and self.peek(1).kind == "num" and self.peek(2).value == ")"

    def words(self, token: Token) -> Node:
        """Prose: a label before a value is skipped, a name before a relation kept, anything else refused."""
        words = [token.value]
        while self.peek().kind in ("word", "unit"):
            words.append(self.take().value)
        text = " ".join(words).strip()
        ends = self.peek().kind in ("end", "sep") or self.peek().value in (",", ";") or self.peek().value in RELATIONS
        if not ends and text.casefold().endswith((":", "=", " is", " are")) and not any(c.isdigit() for c in text):
            return self.factor()
        if not ends:
            raise ParseError("prose", prose=True)
        return Node("text", value=" ".join(text.casefold().split()))

    def bracket(self, opening: str) -> Node:
        self.brackets += 1
        outside, self.in_builder = self.in_builder, 0
        inner = self.items(closers=tuple(CLOSING))
        self.in_builder = outside
        closing = CLOSING.get(self.take().value)
        self.brackets -= 1
        if closing is None:
            raise ParseError("an open bracket")
        if inner.kind == "list":
            return Node("group", inner.args, opening + closing)
        if opening + closing not in ("()", "[]"):
            raise ParseError("brackets do not match")
        return Node("group", (inner,), "[]") if opening == "[" and inner.kind == "group" else bare(inner)

    def bars(self, closing: str) -> Node:
        self.in_bars += 1
        inner = self.sum()
        self.in_bars -= 1
        self.expect(closing)
        return Node("fn", (inner,), "abs")


def parse(cleaned: str, *, thousands: bool = True) -> Node:
    """The tree of a cleaned answer; ParseError where it is not mathematics, LimitError where it is too much.

    >>> parse("1,234").value, parse("(1,234)").kind, parse("x = 2").kind
    (Fraction(1234, 1), 'group', 'rel')
    """
    return Parser(tokenize(cleaned), thousands).answer()
