"""Cleaned answers -> tokens. Words are told from products of variables here."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_TOKENS = 1500


def words(text: str) -> frozenset[str]:
    """The words of a text as a set."""
    return frozenset(text.split())


FUNCTIONS = words(
    "sqrt sin cos tan cot sec csc log ln lg exp arcsin arccos arctan arccot sinh cosh tanh abs asin acos atan cbrt"
)
NAMES = words(
    "pi alpha beta gamma delta epsilon varepsilon theta vartheta lambda mu nu rho sigma tau phi varphi "
    "omega psi chi eta zeta kappa xi Gamma Delta Theta Lambda Sigma Phi Psi Omega hbar ell"
)
WORDS_AS_NAMES = words("pi alpha beta gamma delta theta lambda sigma omega phi")
INFINITE = frozenset(("infty", "infinity", "inf", "oo"))
UNITS = words(
    "cm mm km kg mg ml mL ft yd mi oz lb lbs hr hrs min mins sec secs mph kph rpm mol Hz kHz MHz Pa kPa "
    "eV keV MeV GeV nm yr yrs cc sq rad deg usd USD gal ohm kJ kW mA mV kV pts dm dl kmh ms day days cup "
    "cups men way ways egg eggs box pie car cars st nd rd th hour year mile foot feet inch unit coin cent "
    "yuan"
)
UNIT_WORDS = UNITS | words(
    "units square cubic meters metres meter metre inches degrees dollars cents hours minutes seconds miles years weeks "
    "months grams liters pounds yards per centimeters kilometers people points"
)  # in \\text{...} these are units even after a variable
MAGNITUDES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
CHANGES = words("squared cubed factorial half halves thirds fourths fifths tenths hundredths thousandths")  # of a value
ORDINALS = words("st nd rd th")
SEPARATORS = frozenset(("and", "or", ",", ";"))
_COUNTING = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
NUMBER_WORDS = _COUNTING.split()

_LETTER_LIST = re.compile(r"[A-Za-z0-9](?:(?:\s*[,;]\s*(?:(?:and|or)\s)?|\s+(?:and|or)\s+)[A-Za-z0-9]){1,12}")
_NUMERAL = re.compile(r"-?\d{1,20}(?:,\d{3}){0,6}(?:\.\d{1,20})?")
_TOKEN = re.compile(
    r"\s*(?:"
    r"(?P<num>\d+(?:\.(?!\.)\d*)?(?:[eE][+-]?\d{1,4}(?![\d.a-zA-Z]))?|\.\d+(?:[eE][+-]?\d{1,4}(?![\d.a-zA-Z]))?)"
    r"|\\text\s*\{(?P<text>[^{}]*)\}"
    r"|\\(?P<cmd>[a-zA-Z]+)\s*"
    r"|(?P<esc>\\[\\{}|&#_])"
    r"|(?P<word>[a-zA-Z]+)"
    r"|(?P<op><=|>=|!=|==|=<|=>|:=|\.\.\.|[-+*/^_=<>!(){}\[\]|,;:&'])"
    r")",
    re.ASCII,
)


class ParseError(ValueError):
    """The text is not mathematics this reader knows; `prose` says that words were in the way."""

    def __init__(self, message: str, *, prose: bool = False) -> None:
        super().__init__(message)
        self.prose = prose


class LimitError(ValueError):
    """The text asks for more work than an answer may."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token: kind is num, sym, fn, cmd, word, unit, sep or op; `space` says that blank stood before it."""

    kind: str
    value: str
    space: bool


def _split_word(word: str, space: bool, after_value: bool) -> list[Token]:
    """A run of letters: a function, a name, a separator, a unit, prose, or a product of variables."""
    if word in FUNCTIONS:
        return [Token("fn", word, space)]
    if word in WORDS_AS_NAMES or word in INFINITE:
        return [Token("cmd", word, space)]
    lower = word.casefold()
    if lower in ("and", "or"):
        return [Token("sep", lower, space)]
    if len(word) == 1:
        return [Token("sym", word, space)]
    if after_value and (word in UNITS or lower in UNITS):
        return [Token("unit", word, space)]
    for name in ("pi", "sqrt"):  # "2pir", "xsqrt(2)"
        if lower.startswith(name) and len(word) == len(name) + 1:
            kind = "cmd" if name == "pi" else "fn"
            return [Token(kind, name, space), Token("sym", word[-1], False)]
    if word.endswith("sqrt") and len(word) <= 6:
        letters = [Token("sym", letter, space and not at) for at, letter in enumerate(word[:-4])]
        return [*letters, Token("fn", "sqrt", False)]
    if len(word) <= 3 and not (word.istitle() and len(word) == 3):
        return [Token("sym", letter, space and not at) for at, letter in enumerate(word)]
    return [Token("unit" if after_value else "word", word, space)]


def _number_words(word: str, space: bool) -> list[Token]:
    """What a word right after a number does to it: 5 million is a product, 5 squared is refused; else nothing."""
    lower = word.casefold()
    if lower in CHANGES:
        raise ParseError(f"{lower} in words", prose=True)
    factor = MAGNITUDES.get(lower.removesuffix("s"))
    return [Token("op", "*", space), Token("num", str(factor), space)] if factor else []


def _text_tokens(content: str, space: bool, after_value: bool, after_variable: bool) -> list[Token]:
    """The inside of \\text{...}: a separator, a number or letter, a unit after a value, else prose."""
    inner = content.strip()
    lower = inner.casefold().strip(" ,")
    if not inner:
        return []
    if lower in SEPARATORS or inner in (",", ";"):
        return [Token("sep", lower or ",", space)]
    if len(inner) == 1 and inner.isalpha():
        constant = inner in "ei" or not after_value
        return [Token("sym" if constant else "unit", inner, space)]
    if _LETTER_LIST.fullmatch(inner) or _NUMERAL.fullmatch(inner) or inner in (":", "+", "-", "=", "/"):
        return tokenize(inner)
    if lower == "to" and after_value:
        return [Token("op", ":", space)]
    if "=" in inner and not re.search(r"[A-Za-z]{2}|\\", inner):  # an equation that is all of the text
        return tokenize(inner)
    if re.search(r"\b(?:or|and|not|but)\b|\d", inner.casefold()):
        return [Token("word", inner, space)]
    if inner in FUNCTIONS:
        return [Token("fn", inner, space)]
    unit = after_value or (after_variable and set(lower.replace(".", "").split()) <= UNIT_WORDS)
    return [Token("unit" if unit else "word", inner, space)]


def _after_value(tokens: list[Token]) -> bool:
    """Whether a unit may follow. Not after a bare variable: "n odd" says more than n."""
    if not tokens:
        return False
    last = tokens[-1]
    return (
        last.kind in ("num", "unit")
        or (last.kind == "op" and last.value in ")}]!|")
        or (last.kind == "cmd" and (last.value in NAMES or last.value in INFINITE or last.value in ("circ", "rbrace")))
    )


def tokenize(text: str) -> list[Token]:
    """The tokens of a cleaned answer.

    >>> [token.value for token in tokenize("2pi + 10 weeks")]
    ['2', 'pi', '+', '10', 'weeks']
    """
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.end() == at:
            if not text[at:].strip():
                break
            raise ParseError(f"character {text[at : at + 8].strip()[:1]!r}", prose=True)
        kind = match.lastgroup or ""
        value = match.group(kind)
        space = text[at : match.start(kind)][:1].isspace()
        at = match.end()
        after_number = bool(tokens) and _after_value(tokens) and tokens[-1].kind != "unit"
        first, _, rest = value.strip().partition(" ") if kind in ("word", "text") and after_number else ("", "", "")
        if first and (product := _number_words(first, space)):
            tokens += product
            tokens += _text_tokens(rest, True, True, False) if rest else []
        elif kind == "word":
            tokens += _split_word(value, space, _after_value(tokens))
        elif kind == "text":
            after_variable = bool(tokens) and tokens[-1].kind == "sym"
            tokens += _text_tokens(value, space, _after_value(tokens), after_variable)
        elif kind == "cmd" and value in ("land", "lor", "wedge", "vee"):
            tokens.append(Token("sep", "and" if value in ("land", "wedge") else "or", space))
        elif kind == "cmd" and value in FUNCTIONS:
            tokens.append(Token("fn", value, space))
        elif kind == "esc":
            tokens.append(Token("op", value, space))
        else:
            tokens.append(Token(kind, value, space))
        if len(tokens) > MAX_TOKENS:
            raise LimitError("too many tokens")
    return tokens
