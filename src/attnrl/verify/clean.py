"""Answers as people type them -> one spelling: unicode, layout commands, money, percent, digit groups."""

from __future__ import annotations

import re
import unicodedata

_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_VULGAR = "½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ", "π": r"\pi ", "°": r"^\circ ", "∈": r"\in ", "∪": r"\cup ",
    "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℂ": r"\mathbb{C}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "±": r"\pm ", "∓": r"\mp ", "…": r"\ldots ", "∖": r"\setminus ",
    "∠": r"\angle ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
    "⌉": r"\rceil ", "′": "'", "’": "'", "“": r'"', "”": r'"', "，": ",", "；": ";", "（": "(", "）": ")", "％": "%",
    "＝": "=", "€": r"\$", "£": r"\$", "¥": r"\$", "₹": r"\$", "￥": r"\$", '\t': ' ', '\n': ' ', '\r': ' ',
    "√": r"\sqrt ", "∛": r"\sqrt[3]", '\xa0': ' ', '\u2009': ' ', '\u202f': ' ', '\u2003': ' ', '\u2002': ' ',
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu",
    "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ϕ": "phi", "ω": "omega", "Δ": "Delta", "Ω": "Omega",
}  # fmt: skip
_TABLE = str.maketrans(_SIGNS | {letter: f"\\{name} " for letter, name in _GREEK.items()})
_SUPER_RUN = re.compile(f"[{''.join(_SUPER)}]+")
_SUB_RUN = re.compile(f"[{''.join(_SUB)}]+")
_VULGAR_RUN = re.compile(f"[{_VULGAR}]")

_NO_DELIMITER = re.compile(r"\\(?:left|right)\s*\.")
_LAYOUT = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|bigg?[lrm]?|Bigg?[lrm]?|left|right|mleft|mright|middle|boldsymbol"
    r"|hfill|newline|noindent|allowbreak|nonumber|protect|mathstrut)(?![a-zA-Z])"
)
_SPACES = re.compile(r"\\(?:[,;:> ]|quad|qquad|enspace|thinspace|space)(?![a-zA-Z])|\\[,;:> ]|~")
_ARG_SPACE = re.compile(r"\\(?:hspace|vspace|phantom|hphantom|label|tag)\*?\s*\{[^{}]{0,40}\}|\\phantom(?![a-zA-Z])")
_TEXT_LIKE = re.compile(
    r"\\(?:textbf|textit|textrm|textsf|texttt|textsc|textnormal|textup|mathrm|mathbf|mathit|mathsf|mathtt|mathnormal|mbox"
    r"|hbox|operatorname\*?|emph|underline|bf|rm|it)(?=\s*\{)"
)
_FRAC = re.compile(r"\\(?:[dtcs]|nice|x)frac(?![a-zA-Z])")
_DEGREE = re.compile(r"\^?\s*(?:\{\s*)?\\(?:degree|textdegree)(?![a-zA-Z])(?:\s*\})?")
_BOX_CMD = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{ ?, ?\}|,\\!|\\!,|\\,|,\s*\\!\s*)\s*(?=\d{3}(?!\d))")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{ ?, ?\}(?=\d)")
_PERCENT = re.compile(r"\\?%|\\text\s*\{\s*(?:percent|percentage|pct)\s*\}|\b(?:percent|percentage|pct)\b")
_MONEY = re.compile(r"\\\$|\\(?:euro|pounds|yen|texteuro|textdollar)(?![a-zA-Z])")
_LETTER_TIMES = re.compile(r"(?<=\d) ?x ?(?=10 ?\^)")  # 3x10^8
_SPEED = re.compile(r"(?<=\d) ?(?:[kcm]?m|ft|mi)/(?:s|h|hr|min|sec)(?:\^\{?2\}?)?$")
_CONGRUENT = re.compile(r"\(\s{0,3}(?:\\(?:text|mathrm) ?\{ ?mod ?\}|\\b?mod|mod)[ \\]{0,3}(\w{1,12})\s{0,3}\)")
_COUNT = re.compile(r"\\#(?= ?[A-Za-z])")  # how many of S
_SQUARE_INTERVAL = re.compile(r"\s*([\[\]])([^\[\]]*)([\[\]])\s*")
_DOMAIN = r"(?:(?:real|positive|natural|integers?|numbers?|nonnegative|non-negative|values? of) ?){0,4}"
_FOR_ALL = re.compile(
    rf"\s{{0,4}},?\s{{0,4}}(?:(?:\\text ?\{{)?[ ,]{{0,4}}\bfor (?:all|every|any|each) ?{_DOMAIN}\}}?|\\forall)"
    r" {0,4}[a-zA-Z](?: {0,4}\\in {0,4}\\mathbb ?\{?[A-Z]\}?(?:[_^]\{?[\w+*>]{1,3}\}?)?)?$"
)
_TRAILING = " .,;:\n\t"


def _vulgar(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match.group()).partition("⁄")
    return f"\\frac{{{top}}}{{{bottom}}}"


def ascii_signs(text: str) -> str:
    """The text with unicode mathematics spelled in LaTeX.

    >>> ascii_signs("x² ≤ ½")
    'x^{2} \\\\le  \\\\frac{1}{2}'
    """
    if text.isascii():
        return text.replace("\t", " ").replace("\n", " ").replace("\r", " ")
    text = _SUPER_RUN.sub(lambda m: "^{" + "".join(_SUPER[c] for c in m.group()) + "}", text)
    text = _SUB_RUN.sub(lambda m: "_{" + "".join(_SUB[c] for c in m.group()) + "}", text)
    text = _VULGAR_RUN.sub(_vulgar, text)
    return unicodedata.normalize("NFKC", text.translate(_TABLE))


def _unwrap_dollars(text: str) -> str:
    """Without math delimiters; a lone dollar sign is money and goes too."""
    text = _MONEY.sub(" ", text)
    for mark in ("$", r"\(", r"\)", r"\[", r"\]"):
        if mark in text:
            text = text.replace(mark, " ")
    return text


def _balanced(text: str) -> str:
    """With the closing braces that a clipped gold lacks, up to three."""
    missing = text.count("{") - text.count("\\{") - text.count("}") + text.count("\\}")
    return text + "}" * missing if 0 < missing <= 3 else text


def clean(text: str) -> str:
    """The answer in one spelling, ready for the tokenizer; money and percent signs are gone.

    >>> clean(r"$\\dfrac{1}{2}\\%$."), clean(r"\\$32,\\!348"), clean(r"18{,}234")
    ('\\\\frac{1}{2}', '32348', '18234')
    """
    text = _balanced(ascii_signs(text))
    if "   " in text:  # several patterns below start with blanks: long runs of them would cost their square
        text = re.sub(r" {3,}", "  ", text)
    if "\\\\" in text:  # a row break in matrices, else a doubled backslash before a command
        if "\\begin" not in text:
            text = re.sub(r"\\\\(?=[a-zA-Z%$])", r"\\", text)
        text = text.replace("\\\\", "\x1f")
    text = _BOX_CMD.sub("", text)
    text = _LETTER_TIMES.sub(r"\\times ", text)
    text = _THOUSANDS.sub("", text)
    text = _DECIMAL_COMMA.sub(".", text)
    text = _unwrap_dollars(text)
    text = text.replace(r"\!", "")
    text = _CONGRUENT.sub(r"\\pmod{\1}", text) if "mod" in text else text
    text = _COUNT.sub("", text) if "\\#" in text else text
    text = _NO_DELIMITER.sub(" ", text) if "\\right" in text else text
    text = _LAYOUT.sub(" ", text)
    text = _TEXT_LIKE.sub(r"\\text", text)
    text = _ARG_SPACE.sub(" ", text)
    text = _SPACES.sub(" ", text)
    text = _FRAC.sub(r"\\frac", text)
    text = _DEGREE.sub(r"^\\circ ", text)
    text = _PERCENT.sub(" ", text)
    text = text.replace("\x1f", "\\\\")
    text = text.replace("**", "^") if re.search(r"\w\s*\*\*\s*[\w(]", text) else text.replace("**", "")
    text = _SPEED.sub("", text.strip().rstrip("."))
    text = _quantifier_cut(_outward_brackets(text))
    if not re.sub(r"\\text\s*(?=\{\s*\})", "", text).strip("{} "):
        return ""
    return text.rstrip(_TRAILING) if text[:1] == "." else text.strip(_TRAILING)


def _outward_brackets(text: str) -> str:
    """Intervals such as ]0, 1] and [0, 1[ with the round bracket they mean; all other text as it is."""
    if text[:1] != "]" and text[-1:] != "[" and "]\\cup" not in text.replace(" ", "") and "[\\cup" not in text:
        return text
    parts = re.split(r"(\\cup|\\cap)(?![a-zA-Z])", text)
    for at in range(0, len(parts), 2):
        interval = _SQUARE_INTERVAL.fullmatch(parts[at])
        if interval and re.search("[,;]", parts[at]):
            low, inner, high = interval.groups()
            parts[at] = f"{'[' if low == '[' else '('}{inner}{']' if high == ']' else ')'}"
    return "".join(parts)


def _quantifier_cut(text: str) -> str:
    """An equation without "for all x" after it: the problem says for which x."""
    return _FOR_ALL.sub("", text) if "=" in text and ("for " in text or "\\forall" in text) else text


_WORDY = re.compile(r"\\text\s*\{([^{}]*)\}")
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b")
_BASED = re.compile(r"\(?((?:[0-9A-F]|\\text\{?[A-F]\}?){1,200})\)?_\{?\(?(\d{1,3})\)?\}?")  # 2A_{16}


def string_key(cleaned: str) -> str:
    """Spelling without spaces (save between digits, and in 1, 200, which is not 1,200): equal keys are equal answers.

    >>> string_key("( 1, 2 )") == string_key("(1,2)"), string_key("1 2") == string_key("12")
    (True, False)
    """
    key = re.sub(r"(?<=\d) +(?=\d)|(?<=\d,) +(?=\d{3}(?!\d))", "\x00", cleaned)
    key = key.replace(" ", "").replace("\x00", " ")
    key = re.sub(r"\{(\w)\}", r"\1", key)
    base = _BASED.fullmatch(key) if "_" in key else None
    return re.sub(r"\\text|[{}]", "", base[1]) + "_" + base[2] if base else key


def text_key(cleaned: str) -> str:
    """Words without case, spaces, quotes, full stops or outer brackets.

    >>> text_key(r"\\text{4:30 p.m.}") == text_key(r"4:30 \\text{ PM}")
    True
    """
    key = _ORDINAL.sub("", _WORDY.sub(r"\1", cleaned).casefold())
    key = re.sub(r"(?<!\d)\.|\.(?!\d)|[\s\"'`\\{}_*]+", "", key).strip(".,;:!")
    while len(key) > 2 and key[0] in "([" and key[-1] in ")]" and not set("()[],") & set(key[1:-1]):
        key = key[1:-1]
    return key
