"""Which part of a response is its answer: linear-time scans, no backtracking over model text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Source = Literal["boxed", "tag", "text", "none"]

TAIL = 1 << 18  # characters of the final part that are looked at; an answer further up is not a final answer
JOIN_GAP = 80  # characters between two boxes of one list, at most

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_BRACES = re.compile(r"\\[\\{}]|[{}]")
_JOIN_NOISE = re.compile(
    r"\\(?:quad|qquad|[,;:!() \[\]]|text(?:rm|bf|normal)?|mathrm|mbox|left|right|\\)|\b(?:and|or)\b|[\s{}$,;&~*]"
)
_JOIN_WORD = re.compile(r"[,;&]|\b(?:and|or)\b")
_TURN = re.compile(r"<\|(?:im_start|im_end|endoftext|eot_id|end_of_text|end_of_sentence)\|>|<｜end▁of▁sentence｜>")
_ANCHOR = re.compile(r"(?i)\banswers?\b[ \t*_]{0,4}(?:\bis\b|\bare\b|=|:)?[ \t]{0,4}:?[ \t*_]{0,4}")
_CONCLUSION = re.compile(r"(?i)\b(?:therefore|thus|hence|so|consequently|in conclusion|finally|solution|result)\b")
_MATH = re.compile(
    r"\$\$([^$]{1,400})\$\$|\$([^$\n]{1,400})\$|\\\(((?:[^\\]|\\[^)]){1,400}?)\\\)|\\\[((?:[^\\]|\\[^\]]){1,400}?)\\\]"
)
_NUMBER = re.compile(
    r"(?<![\w.^_\\{])[-+]?[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)|(?=\.\d))(?:\.\d+)?(?:\s?/\s?\d+)?(?![\w{}^])|-?\\[dt]?frac\{-?\d+\}\{\d+\}"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_COPULA = re.compile(r"(?i).*(?:\bis\b|\bare\b|\bequals\b|=|:)\s*", re.DOTALL)
_QUALIFIED = re.compile(r"(?i)\b(?:not|than|at least|at most|between|never|cannot|no)\b")
_HASHES = re.compile(r"(?:^|\n)#### *([^\n]{1,200})\s*$")
_BOLD = re.compile(r"\*\*([^*\n]{1,100})\*\*")
_LAST_FORMULA = re.compile(r"\\[\[(]((?:(?!\\[\[(\])]).){1,600})\\[\])]\s*\.?\s*$", re.DOTALL)
_HOPE = re.compile(r"(?i)^\s*I hope (?:it|this) is correct")


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer of a response and where it stood.

    >>> extract(r"<think>\\boxed{1}</think> So \\boxed{2}.")
    Extraction(answer='2', source='boxed')
    """

    answer: str | None
    source: Source


@dataclass(frozen=True, slots=True)
class Box:
    """One `\\boxed{...}`; content is None where its brace never closes."""

    start: int
    stop: int
    content: str | None


def final_part(response: str) -> str:
    """The text after the last `</think>`; nothing where thinking was opened and never closed.

    >>> final_part("<think>a</think>b"), final_part("<think>a"), final_part("a")
    ('b', '', 'a')
    """
    _, mark, tail = response.rpartition("</think>")
    if mark:
        return tail
    return "" if "<think>" in response else response


def boxes(text: str) -> list[Box]:
    """The outermost boxes of a text in order, found in one pass over its braces.

    >>> [box.content for box in boxes(r"\\boxed{\\frac{1}{2}} \\fbox 3 \\boxed{4")]
    ['\\\\frac{1}{2}', '3', None]
    """
    starts = list(_BOX.finditer(text))
    if not starts:
        return []
    closes = _matching_braces(text, starts[0].start())
    found: list[Box] = []
    for match in starts:
        if found and match.start() < found[-1].stop:
            continue  # inside an earlier box
        at = match.end()
        while at < len(text) and text[at] in " \t\n\r":
            at += 1
        if at < len(text) and text[at] == "{":
            close = closes.get(at)
            content = None if close is None else text[at + 1 : close]
            found.append(Box(match.start(), at + 1 if close is None else close + 1, content))
        else:
            stop = at
            while stop < len(text) and text[stop] not in " \t\n\r$" and stop - at < 200:
                stop += 1
            found.append(Box(match.start(), stop, text[at:stop].rstrip(".,;") or None))
    return found


def _matching_braces(text: str, begin: int) -> dict[int, int]:
    """Position of every opening brace from `begin` on, to the position of its closing one."""
    open_at: list[int] = []
    closes: dict[int, int] = {}
    for match in _BRACES.finditer(text, begin):
        token = match.group()
        if token == "{":
            open_at.append(match.start())
        elif token == "}" and open_at:
            closes[open_at.pop()] = match.start()
    return closes


def _joined(gap: str) -> bool:
    """Whether the text between two boxes makes them one list: commas, "and", "or" and layout, nothing else."""
    if len(gap) > JOIN_GAP or not _JOIN_WORD.search(gap):
        return False
    return not _JOIN_NOISE.sub("", gap)


def _boxed_answer(text: str) -> Extraction | None:
    found = boxes(text)
    if not found:
        return None
    last = [found[-1]]
    for box in reversed(found[:-1]):
        if len(last) >= 64 or not _joined(text[box.stop : last[0].start]):
            break
        last.insert(0, box)
    contents = [box.content for box in last]
    if any(content is None or not content.strip() for content in contents):
        return Extraction(None, "boxed")
    parts = [content.strip() for content in contents if content is not None]
    if len(set(parts)) == 1:
        return Extraction(parts[0], "boxed")
    return Extraction(", ".join(parts), "boxed")


def _from_sentence(sentence: str) -> str | None:
    """The one value a closing sentence states: its only formula or number, or the one after its last "is"."""
    sentence = sentence.strip().rstrip(".!*_ \t")
    copula = _COPULA.match(sentence)
    after = sentence[copula.end() if copula else 0 :].strip(" *_")
    if _QUALIFIED.search(after):
        return None
    if 0 < len(after) <= 80 and "$" not in after and not re.search(r"\\[(\[]|(?<![\\A-Za-z])[A-Za-z]{4,}", after):
        return after  # nothing but mathematics
    for part in (after, sentence):
        maths = [next(group for group in m.groups() if group) for m in _MATH.finditer(part)]
        plain = _MATH.sub(" ", part)
        numbers = [m.group() for m in _NUMBER.finditer(plain) if m.group().strip("+-$ ")]
        if len(maths) + len(numbers) == 1:
            return (maths or numbers)[0].strip()
        if len(maths) + len(numbers) > 1:
            # several values: a list or a hedge when nothing but list words stands between them
            return after if len(after) <= 200 and not re.search(r"[A-Za-z]{4,}", plain) else None
    return after if 0 < len(after) <= 40 and re.fullmatch(r"[\w\\${}^()+*/.,\- ]+", after) else None


def _closing(sentences: list[str]) -> bool:
    """Whether nothing of substance follows: no number, no formula, no change of mind."""
    rest = " ".join(sentences)
    return len(rest) <= 200 and not re.search(r"\d|\$|\\|\b(?:but|wait|however|actually|no|not)\b", rest, re.IGNORECASE)


def _plain_answer(text: str) -> str | None:
    """The answer of a response without a box: after its last "answer", or in a closing sentence or formula."""
    turn = _TURN.search(text)
    if turn and text[: turn.start()].strip():
        text = text[: turn.start()]
    text = text[-4000:].strip()
    hashes = _HASHES.search(text)
    if hashes:
        return hashes.group(1).strip()
    anchors = list(_ANCHOR.finditer(text))
    if anchors:
        rest = text[anchors[-1].end() :].lstrip()
        math = _MATH.match(rest)
        if math and _closing([rest[math.end() :]]) and not re.match(r"[\s.]*(?:or|and)\b", rest[math.end() :]):
            return next(group for group in math.groups() if group).strip()
        sentences = _SENTENCE_END.split(rest)
        if sentences[0] and _closing(sentences[1:]):
            return _from_sentence(sentences[0])
    sentences = [s for s in _SENTENCE_END.split(text) if s.strip() and not _HOPE.match(s)]
    if sentences and _CONCLUSION.search(sentences[-1]) and sentences[-1].rstrip()[-1:] in ".!$":
        bold = _BOLD.findall(sentences[-1])
        return bold[0].strip() if len(bold) == 1 else _from_sentence(sentences[-1])
    formula = _LAST_FORMULA.search(text)
    if formula and "=" in formula.group(1):
        return formula.group(1).rpartition("=")[2].strip() or None
    return None


def _tagged_answer(text: str) -> str | None:
    """What the last <answer>...</answer> holds, or what its closing statement says; a tag must close."""
    close = text.rfind("</answer>")
    if close < text.rfind("<answer>"):
        return None
    content = text[text.rfind("<answer>", 0, close) + len("<answer>") : close].strip()
    if _ANCHOR.search(content) or _CONCLUSION.search(content):
        return _plain_answer(content)
    return content


def extract(response: str) -> Extraction:
    """The answer: the last box after the last `</think>`, with the boxes joined to it; else the last
    <answer>...</answer>; else a plain closing statement.

    An empty or unterminated last box is no answer, even where an earlier box is whole.

    >>> extract(r"\\boxed{1} and \\boxed{3}").answer, extract("Final answer: 42").answer
    ('1, 3', '42')
    """
    text = final_part(response)[-TAIL:]
    boxed = _boxed_answer(text)
    if boxed is not None:
        return boxed
    if "<answer>" in text:
        answer = _tagged_answer(text)
        return Extraction(answer or None, "tag" if answer else "none")
    answer = _plain_answer(text)
    return Extraction(answer or None, "text" if answer else "none")
