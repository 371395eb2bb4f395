r"""What is wrong with a training set: repeated problems, conflicting or leaked answers, benchmark problems in it.

Two problems are the same when their keys are: the text without white space, math delimiters, LaTeX spacing and sizing,
redundant braces, sentence punctuation and case. Digits, operators and brackets stay: other numbers, other problem.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attnrl.data.records import Record, last_boxed
from attnrl.types import content_hash

BLOCK = 2048  # training rows whose keys are looked up together
SHINGLE = 24  # characters of a key that two texts must share to be compared at all
# What counts as the same wording, set on DeepScaleR and MATH against six benchmarks (docs/data.md lists the outcome).
REPEAT_SHARE = 0.4  # of the longer key's shingles, where numbers and answer agree
REPEAT_SHARE_ALONE = 0.9  # where the numbers agree and the answer does not, or is written in another way
NEAR_SHARE = 0.5  # where the numbers agree and only the question differs
NEAR_SHARE_OTHER_NUMBERS = 0.65
NEAR_RATIO = 0.8  # difflib ratio over words
NEAR_RUN = 13  # words in a row

_SPELLINGS = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\([lg]e)(?:q|qslant)(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"\\not\s*=|\\neq(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\[cl]?dots[a-z]?(?![a-zA-Z])|\.\.\."), " dots "),
    (re.compile(r"\\(?:mapsto|to|longrightarrow)(?![a-zA-Z])"), r"\\rightarrow"),
)
_CHARACTERS = str.maketrans("−–—", "---", "‘’´`'\"“”$~&")
_MARKUP = re.compile(
    r"""\\\\(?:\[[^\]]*\])?                      # line break of an array
    | \\tag\*?\{[^}]*\} | \\(?:begin|end)\{[^}]*\}
    | \\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|quad|qquad|limits|nolimits|text(?:bf|it|rm)?
         |math(?:rm|bf|it)|operatorname|mbox|rm|bf|it)(?![a-zA-Z])
    | \\[()\[\],;:!>\s]                          # math delimiters and thin spaces
    | \[/?(?:[a-z*]{1,6})\]                      # forum markup such as [i] and [list]
    | \\""",
    re.VERBOSE,
)
_BRACED = re.compile(r"\{([a-z]*|\d)\}")  # not {12}{3}: without braces it would read as {1}{23}
_PUNCTUATION = re.compile(r"[\s,;:?!]|\.(?!\d)")
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[+\-=<>*/^|%()]")
_DRAWING = re.compile(r"\[asy\].*?(?:\[/asy\]|\Z)", re.DOTALL)
_NUMBER = re.compile(
    r"\d+(?:\.\d+)?|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|hundred|thousand)\b"
)
_BRACKETS = re.compile(r"[{}()\[\]_]")
_OPTION = re.compile(r"[{(]*[a-z][)}]*")


Same = Callable[[str, str], bool]  # do two answers mean the same? The verifier's equality fits


def _plain(text: str) -> str:
    text = text.translate(_CHARACTERS)
    for pattern, spelling in _SPELLINGS if "\\" in text or "..." in text else ():
        text = pattern.sub(spelling, text)
    return _MARKUP.sub(" ", text).lower()


def problem_key(text: str) -> str:
    r"""The text by which problems, and answers, are compared.

    >>> problem_key(r"Find $x^{2}$, where \( x = \dfrac{1}{2} \).") == problem_key(r"find $x^2$ where $x=\frac12$.")
    True
    >>> problem_key(r"\frac{12}{3}") == problem_key(r"\frac{1}{23}") or problem_key("2.5") == problem_key("25")
    False
    """
    return _BRACED.sub(r"\1", _PUNCTUATION.sub("", _plain(text)))


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Records that state the same problem, in the order they were given."""

    records: tuple[Record, ...]

    @property
    def answers(self) -> tuple[str, ...]:
        """The different answers, as written."""
        return tuple(dict.fromkeys(" | ".join(record.answers) for record in self.records))

    @property
    def conflicting(self) -> bool:
        """The answers differ as written. Some only in spelling: `disagree` asks the keys."""
        return len(self.answers) > 1

    def disagree(self, same: Same | None = None) -> bool:
        """Some record shares no answer with the first one: neither by key nor, where it is given, by `same`."""
        first = self.records[0].answers
        keys = {problem_key(answer) for answer in first}
        for record in self.records[1:]:
            if not keys.isdisjoint(problem_key(answer) for answer in record.answers):
                continue
            if same is None or not any(same(a, b) for a in record.answers for b in first):
                return len(first) > 0 or len(record.answers) > 0
        return False


def duplicates(records: Iterable[Record]) -> list[Duplicate]:
    """The groups of two or more records with the same problem, by the hash of its key."""
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[content_hash(problem_key(record.problem))].append(record)
    return [Duplicate(tuple(group)) for group in groups.values() if len(group) > 1]


def leaks(records: Iterable[Record]) -> list[Record]:
    r"""The records whose problem shows its own answer in a \boxed{}: they teach copying."""
    return [
        record
        for record in records
        if "boxed" in record.problem
        and (boxed := last_boxed(record.problem))
        and _loose_key(boxed) in {_loose_key(answer) for answer in record.answers}
    ]


@dataclass(frozen=True, slots=True)
class Overlap:
    """A training row that repeats a benchmark problem.

    A repeat is the same problem. A near one has the same wording with another number or another question at its end:
    a policy that saw it has seen most of the benchmark problem.
    """

    record: Record
    benchmark: Record
    kind: Literal["repeat", "near"]
    share: float  # of the longer text's shingles that both have
    same_answer: bool


def contamination(train: Iterable[Record], evals: Iterable[Record]) -> list[Overlap]:
    """The training rows that repeat a benchmark problem, each with the one it repeats most, in training order.

    Texts are compared through the shingles of their keys (runs of 24 characters): equal keys are found whatever their
    length, and what shares shingles is then compared word by word, with its numbers and its answer.
    """
    rows, benchmarks = list(train), list(evals)
    index = _Index(benchmarks)
    overlaps = []
    for block in (rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)):
        similar = index.similar([_loose_key(record.problem) for record in block])
        for record, candidates in zip(block, similar, strict=True):
            judged = [_judge(record, benchmarks[i], share) for i, share in candidates]
            found = [overlap for overlap in judged if overlap is not None]
            if found:
                overlaps.append(max(found, key=lambda overlap: (overlap.kind == "repeat", overlap.share)))
    return overlaps


def _loose_key(problem: str) -> str:
    """The key without brackets and indices, which repeats of a problem set differently: for finding, not judging."""
    return _BRACKETS.sub("", problem_key(problem))


def _judge(record: Record, benchmark: Record, share: float) -> Overlap | None:
    answers = {problem_key(answer) for answer in record.answers}
    common = answers.intersection(problem_key(answer) for answer in benchmark.answers)
    same_answer = bool(common)
    same_numbers = _numbers(record.problem) == _numbers(benchmark.problem)
    # a bare option letter agrees by chance, and a drawing can outweigh the question that goes with it
    telling = any(not _OPTION.fullmatch(answer) for answer in common)
    drawn = _DRAWING.search(record.problem) is not None
    repeat = (share >= REPEAT_SHARE and telling) or (share >= REPEAT_SHARE_ALONE and not drawn)
    if same_numbers and repeat:
        return Overlap(record, benchmark, "repeat", share, same_answer)
    if share < (NEAR_SHARE if same_numbers else NEAR_SHARE_OTHER_NUMBERS):
        return None
    words = difflib.SequenceMatcher(
        None, _WORD.findall(_plain(record.problem)), _WORD.findall(_plain(benchmark.problem)), autojunk=False
    )
    if words.ratio() < NEAR_RATIO or words.find_longest_match().size < NEAR_RUN:
        return None
    return Overlap(record, benchmark, "near", share, same_answer)


def _numbers(problem: str) -> Counter[str]:
    """The numbers of a problem without those of its drawing, which say nothing of the question."""
    return Counter(_NUMBER.findall(_plain(_DRAWING.sub(" ", problem))))


class _Index:
    """The shingles of the benchmark problems, for finding which of them a text shares."""

    def __init__(self, benchmarks: Sequence[Record]) -> None:
        self.keys = [_loose_key(record.problem) for record in benchmarks]
        self.exact: defaultdict[str, list[int]] = defaultdict(list)
        self.owners: defaultdict[int, list[int]] = defaultdict(list)
        for i, key in enumerate(self.keys):
            self.exact[key].append(i)
            for shingle in np.unique(_shingles(key.encode())).tolist():
                self.owners[shingle].append(i)
        self.known = np.array(sorted(self.owners), dtype=np.uint64)

    def similar(self, keys: Sequence[str]) -> Iterator[list[tuple[int, float]]]:
        """For each key, the benchmark problems that share enough with it, and what share of the longer one."""
        # one pass over all keys: a run that crosses the zeros between two of them is no shingle of any benchmark
        gap = bytes(SHINGLE)
        shingles = _shingles(gap.join(key.encode() for key in keys) + gap)
        at = np.minimum(np.searchsorted(self.known, shingles), max(len(self.known) - 1, 0))
        hits = np.flatnonzero(self.known[at] == shingles) if len(self.known) else np.zeros(0, dtype=np.int64)
        start = 0
        for key in keys:
            stop = start + len(key.encode())
            mine = hits[np.searchsorted(hits, start) : np.searchsorted(hits, stop)]
            shares = dict.fromkeys(self.exact.get(key, []), 1.0)
            counts = Counter(i for shingle in np.unique(shingles[mine]).tolist() for i in self.owners[shingle])
            for i, count in counts.items():
                shares.setdefault(i, count / (max(len(key), len(self.keys[i])) - SHINGLE + 1))
            yield [(i, share) for i, share in shares.items() if share >= REPEAT_SHARE]
            start = stop + SHINGLE


def _shingles(text: bytes) -> NDArray[np.uint64]:
    """A hash of every run of SHINGLE bytes: a polynomial modulo 2**64, all positions at once."""
    codes = np.frombuffer(text, dtype=np.uint8).astype(np.uint64)
    positions = len(codes) - SHINGLE + 1
    hashes = np.zeros(max(positions, 0), dtype=np.uint64)
    for offset in range(SHINGLE if positions > 0 else 0):
        hashes *= np.uint64(1099511628211)
        hashes += codes[offset : offset + positions]
    return hashes


@dataclass(frozen=True, slots=True)
class Decontaminated:
    """The records that no benchmark has, and what was dropped for repeating one."""

    records: tuple[Record, ...]
    overlaps: tuple[Overlap, ...]

    def report(self) -> str:
        """One line for the console."""
        repeats = sum(overlap.kind == "repeat" for overlap in self.overlaps)
        total = len(self.records) + len(self.overlaps)
        return (
            f"decontaminated: {len(self.records)} of {total} problems remain; "
            f"{repeats} are a benchmark's, {len(self.overlaps) - repeats} nearly so"
        )


def decontaminate(records: Iterable[Record], evals: Iterable[Record]) -> Decontaminated:
    """The records without benchmark problems, repeated or nearly so; order kept."""
    rows = list(records)
    overlaps = tuple(contamination(rows, evals))
    dirty = {id(overlap.record) for overlap in overlaps}
    return Decontaminated(tuple(record for record in rows if id(record) not in dirty), overlaps)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The records worth training on, and how many went for which reason (the first that applied, in this order)."""

    records: tuple[Record, ...]
    leaked: int
    conflicting: int  # every member of a group whose answers disagree: none of them can be trusted
    repeated: int  # further copies of a problem that is kept
    conflicts: int  # how many groups that are
    spelled: int  # groups whose answers differ as written but agree: one copy of each is kept

    def report(self) -> str:
        """One line for the console."""
        total = len(self.records) + self.leaked + self.conflicting + self.repeated
        return (
            f"cleaned: {len(self.records)} of {total} problems remain; {self.leaked} state their answer, "
            f"{self.conflicting} have conflicting answers, {self.repeated} repeat another"
        )


def clean(records: Iterable[Record], same: Same | None = None) -> Cleaned:
    """The records without leaked answers, conflicting groups and further copies; order kept.

    Answers conflict when they differ beyond spacing and markup; `same` decides finer, so that 1/2 and 0.5 agree.
    """
    rows = list(records)
    leaked = {id(record) for record in leaks(rows)}
    rest = [record for record in rows if id(record) not in leaked]
    groups = duplicates(rest)
    conflicts = [group for group in groups if group.disagree(same)]
    conflicting = {id(record) for group in conflicts for record in group.records}
    further = {id(record) for group in groups for record in group.records[1:]} - conflicting
    kept = tuple(record for record in rest if id(record) not in conflicting | further)
    spelled = sum(group.conflicting for group in groups) - len(conflicts)
    return Cleaned(kept, len(leaked), len(conflicting), len(further), len(conflicts), spelled)
