"""The rules that decide whether an answer is the gold, in order; what they cannot tell goes to the symbolic grader.

1. string   the same spelling after cleaning
2. text     words, without case; a choice letter before its option text
3. value    numbers, expressions, lists, tuples, intervals, relations, matrices by what they denote
4. symbolic (worker processes) what the parser above does not know: integrals, sums, limits
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from attnrl.verify.clean import clean, string_key, text_key
from attnrl.verify.compare import same
from attnrl.verify.number import UndefinedError
from attnrl.verify.parse import parse
from attnrl.verify.spelled import spelled
from attnrl.verify.tokens import INFINITE, NUMBER_WORDS, WORDS_AS_NAMES, LimitError, ParseError
from attnrl.verify.tree import Node
from attnrl.verify.units import DOLLAR
from attnrl.verify.units import bare as without_unit

RULES = {
    "num": "number", "list": "list", "set": "list", "group": "tuple", "rel": "relation", "matrix": "matrix",
    "setop": "interval", "text": "text", "base": "base", "ratio": "ratio",
}  # fmt: skip
SAYINGS = {
    **dict.fromkeys(("allrealnumbers", "allreals"), Node("field", value="R")),
    **dict.fromkeys(("nosolution", "nosolutions", "norealsolution", "norealsolutions"), Node("empty")),
}
_GROUPED = re.compile(r"\d,\d{3}(?!\d)|\d \d{3}(?!\d)")
_DOLLARS = re.compile(r"\s*(?:\\boxed\s*\{)?\s*(?:\$?\\\$|\$(?=[^$]*$))")
_CHOICE = re.compile(r"\(?\s?([A-Ja-j])(?:\s?\)|[.:](?=\s)|\)\s*[.:])\s*\S")
_LABEL = re.compile(r"\(\d{1,2}\)$")
_LABELS = re.compile(r"(?:\(\d{1,2}\)[ ,]{0,3}){2,80}")  # (1)(3): which statements hold, and no product
_LETTERED = re.compile(r"\(([A-J])\)\s*\S")  # a choice with its option: (A) 5
_BARE_WORD = re.compile(r"[A-Z]{2,}|[A-Za-z]{4,}|[A-Z][a-z]+|no|yes|odd|all|any")  # not a product of variables
_WORD = re.compile(r"\\text\s*\{[^{}]*[A-Za-z]|(?<![\\A-Za-z])[A-Za-z]{2,}")
_SAFE = re.compile(r"[A-Za-z0-9\s\\{}\[\]()^_+\-*/=<>|,.;:!'&]{1,400}")
_SYMBOLIC_TEXT = re.compile(r"\\(?:text|mathrm|mbox|operatorname)|__|(?<![\\A-Za-z])[A-Za-z]{4,}")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a text says: cleaned spelling, keys, trees (two where 1,234 may be a list), and why there are none."""

    cleaned: str
    key: str
    words: str
    trees: tuple[Node, ...]
    problem: str | None  # None, "prose", "syntax", "limit"


@dataclass(frozen=True, slots=True)
class Decision:
    """right is None where the rules cannot tell. What the answer itself breaks is wrong; the error is the gold's."""

    right: bool | None
    rule: str
    error: str | None = None


GOLD_LIMIT = Decision(False, "gold_limit", "gold_limit")  # the gold itself asks for more work than an answer may


@lru_cache(maxsize=8192)
def read(text: str) -> Reading:
    """The reading of a gold or an answer; cached, since golds come many times.

    >>> read(r"1{,}000").trees[0].value
    Fraction(1000, 1)
    """
    cleaned = clean(text)
    words = text_key(cleaned)
    trees: list[Node] = []
    problem: str | None = None
    spoken = NUMBER_WORDS.index(words) if words in NUMBER_WORDS else spelled(words_only(cleaned))
    if spoken is not None:
        cleaned = str(spoken)
    bare = words_only(cleaned)
    letters = bare not in WORDS_AS_NAMES | INFINITE and _BARE_WORD.fullmatch(bare)
    try:
        if words in SAYINGS:
            trees.append(SAYINGS[words])
        elif letters:
            trees.append(Node("text", value=words))
        else:
            trees.append(parse(cleaned))
            if _GROUPED.search(cleaned):
                trees.append(parse(cleaned, thousands=False))
        trees = list(dict.fromkeys(trees))
        if _DOLLARS.match(text) and trees[0].kind == "num":
            trees = [Node("unit", (tree,), DOLLAR) if tree.kind == "num" else tree for tree in trees]
    except (LimitError, RecursionError):  # a tree of x!!!... is deep though its text is not nested
        trees, problem = [], "limit"
    except ParseError as error:
        if not trees:
            problem = "prose" if error.prose else "syntax"
    return Reading(cleaned, string_key(cleaned), words, tuple(trees), problem)


def words_only(cleaned: str) -> str:
    """The bare letters of an answer that is one \\text{...} or one word."""
    inner = re.fullmatch(r"\\text\s*\{([^{}]*)\}", cleaned)
    return (inner.group(1) if inner else cleaned).strip()


def _texty(reading: Reading) -> bool:
    bare = words_only(reading.cleaned.strip("{}"))
    return bool(_WORD.search(reading.cleaned)) or re.fullmatch(r"[A-J]|\([A-Z]\)", bare) is not None


def _untexted(reading: Reading) -> str:
    return re.sub(r"\\text\s*\{([^{}]*)\}", r"\1 ", reading.cleaned).strip()


def _by_text(gold: Reading, answer: Reading) -> bool:
    """Words, or a choice letter that stands before its option."""
    if not gold.words or not _texty(gold):
        return False
    if gold.words == answer.words:
        return True
    if re.fullmatch(r"[a-j]", answer.words) and _texty(answer):
        named = _LETTERED.match(_untexted(gold))
        return named is not None and named.group(1).casefold() == answer.words
    if re.fullmatch(r"[a-j]", gold.words):
        option = _untexted(answer)
        option = re.sub(r"(?i)^(?:option|choice|answer)\s+(\(?[a-j]\)?)$", r"(\1) x", option).replace("((", "(")
        choice = _CHOICE.match(option)
        return (
            choice is not None and choice.group(1).casefold() == gold.words and not re.search(r"\bor\b|\band\b", option)
        )
    return False


def _labels(reading: Reading) -> Reading:
    labelled = _LABEL.match(reading.cleaned) or _LABELS.fullmatch(reading.cleaned)
    return read(", ".join(re.findall(r"\d+", reading.cleaned))) if labelled else reading


def decide(answer: str, gold: str) -> Decision:
    """The decision for one gold by rules 1 to 3.

    >>> decide("0.5", r"\\frac{1}{2}")
    Decision(right=True, rule='value', error=None)
    """
    left, right = read(gold), read(answer)
    if left.cleaned[:1] == "(" and (
        _LABELS.fullmatch(left.cleaned) or (_LABEL.match(left.cleaned) and _LABELS.fullmatch(right.cleaned))
    ):
        left, right = _labels(left), _labels(right)
    if not left.cleaned:
        return Decision(False, "empty_gold", "empty_gold")
    if left.key == right.key:
        return Decision(True, "string")
    if _by_text(left, right):
        return Decision(True, "text")
    if left.problem == "limit":
        return GOLD_LIMIT
    if right.problem == "limit":
        return Decision(False, "limit")
    if not left.trees or not right.trees:
        if "prose" in (left.problem, right.problem) or not (may_be_symbolic(left) and may_be_symbolic(right)):
            return Decision(False, "text")
        return Decision(None, "symbolic")
    return _by_value(left, right)


def _by_value(gold: Reading, answer: Reading) -> Decision:
    rule = RULES.get(without_unit(gold.trees[0]).kind, "value")
    verdicts: list[bool | None] = []
    pairs = [(left, right) for left in gold.trees for right in answer.trees]
    if without_unit(gold.trees[0]).kind == "num" and answer.trees[0].kind == "list":
        pairs = pairs[:1]  # the gold 1,200 is a number, and 1, 200 is not
    if len(pairs) == 4:  # both may be grouped digits or lists: the same reading for both
        pairs = pairs[:1]
    try:
        for left, right in pairs:
            verdicts.append(same(left, right))
            if verdicts[-1]:
                return Decision(True, rule)
    except (LimitError, RecursionError):
        return GOLD_LIMIT if _breaks(gold) else Decision(False, "limit")
    except UndefinedError:  # somewhere in a list or equation: what has no value is no answer
        return Decision(False, rule)
    if None in verdicts and may_be_symbolic(gold) and may_be_symbolic(answer):
        return Decision(None, "symbolic")
    return Decision(False, rule)


def _breaks(gold: Reading) -> bool:
    """Whether a gold asks for too much work even beside itself or the answer 1."""
    try:
        for tree in gold.trees:
            same(tree, tree)
            same(tree, Node("num", value=Fraction(1)))
    except (LimitError, RecursionError):
        return True
    except UndefinedError:
        return False
    return False


def may_be_symbolic(reading: Reading) -> bool:
    """Whether a text may be shown to the symbolic grader: plain LaTeX mathematics of moderate size, no words."""
    text = reading.cleaned
    return _balanced(text) and _SAFE.fullmatch(text) is not None and not _SYMBOLIC_TEXT.search(text)


def _balanced(text: str) -> bool:
    """Whether every brace that opens closes: nothing may leave the box it is shown in."""
    depth = 0
    for mark in re.findall(r"\\[{}]|[{}]", text):
        depth += (mark == "{") - (mark == "}")
        if depth < 0:
            return False
    return depth == 0


def decide_any(answer: str, golds: Sequence[str]) -> tuple[Decision, list[str]]:
    """The best decision over alternative golds, and the golds that the symbolic grader must still look at.

    Empty golds never accept; where all are empty that is an error of its own.
    """
    best = Decision(False, "empty_gold", "empty_gold")
    waiting: list[str] = []
    for gold in golds:
        decision = decide(answer, gold)
        if decision.right:
            return decision, []
        if decision.right is None:
            waiting.append(gold)
        if best.error == "empty_gold" or (best.error and not decision.error):
            best = decision
    return best, waiting
