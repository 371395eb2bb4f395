r"""Problems with their reference answers, from the layouts people have.

A record is a problem in its own words, with no template and no instruction, and its answers. Rows without a problem or
without an answer are left out with their row numbers kept, or refused with `strict=True`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attnrl.data.files import Row, iterate_rows
from attnrl.errors import DataError

MEND = (
    "fix or remove the row, or leave such rows out (data.drop_bad_rows = true; strict=False in Python); "
    "`attnrl data FILE` lists them all"
)
PROBLEM_COLUMNS = ("problem", "question", "query", "prompt", "input", "instruction")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "ground_truth", "target", "gold", "solution")
LARGEST = 65_536  # characters of JSON that one other column may have

# Instructions that data sets append or prepend to the problem; the template adds ours, so theirs would be a second one.
_CLOSING = re.compile(
    r"""(?:(?<=\s)|\A)(?:Let's\ think\ step\ by\ step|Please\ reason\ step\ by\ step|Think\ step\ by\ step
    |Reason\ step\ by\ step|Please\ (?:put|give|write)|Put\ your\ final\ answer|Present\ the\ answer
    |Output\ the\ final\ answer)
    [^.\n]{0,120}?(?:\\boxed\s*\{\s*\}|["'“]\#\#\#\#["'”])[^.\n]{0,40}\.?\s*\Z""",
    re.VERBOSE,
)
_INSTRUCTIONS = (
    ("\\boxed", _CLOSING),
    ("####", _CLOSING),
    ("Remember to put", re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*\Z")),
    (
        "The last line of your response",
        re.compile(
            r"\A\s*Solve the following math problem step by step\. The last line of your response .*?\n\n", re.S
        ),
    ),
)
_UNIT = re.compile(r"\A(-?[\d.,/]+)\s*\([^()]*\)\Z")


@dataclass(frozen=True, slots=True)
class Record:
    """One problem and its alternative answers.

    >>> Record("1+1?", ("2",), source="sums.jsonl", where="sums.jsonl:1").answers
    ('2',)
    """

    problem: str  # own words, instruction removed
    answers: tuple[str, ...]  # alternatives, each right; as written, outer white space removed
    source: str  # file or data set
    where: str  # file:row, rows counted from 1
    info: dict[str, Any] = field(default_factory=dict)  # the row's other columns, as JSON holds them
    system: str | None = None  # the row's own system message

    @property
    def row(self) -> int:
        """The row number in its file, counted from 1."""
        return int(self.where.rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that became no record, and why."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Records:
    """The records of one source, and the rows that were left out."""

    records: tuple[Record, ...]
    source: str
    layout: str  # of the first row
    skipped: tuple[Skipped, ...] = ()
    unseen: tuple[str, ...] = ()  # columns that rewards do not see in some row: too large, or not JSON

    @property
    def rows(self) -> int:
        """Rows read, the skipped ones included."""
        return len(self.records) + len(self.skipped)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __getitem__(self, index: int) -> Record:
        return self.records[index]

    def report(self) -> str:
        """One line for the console: rows, layout, and which rows were left out."""
        line = f"{self.source}: {self.rows} rows, layout {self.layout}"
        if not self.skipped:
            return line
        rows = ", ".join(s.where.rpartition(":")[2] for s in self.skipped[:20])
        more = f" and {len(self.skipped) - 20} more" if len(self.skipped) > 20 else ""
        reasons = "; ".join(sorted({s.reason for s in self.skipped}))
        return f"{line}; {len(self.skipped)} left out ({reasons}): rows {rows}{more}"


def load_records(
    source: str | Path,
    *,
    split: str = "train",
    strict: bool = False,
    columns: Mapping[Literal["problem", "answer"], str] | None = None,
) -> Records:
    """The records of a file, a directory or a hub data set.

    A row without problem or answer is left out and kept in `skipped`; with `strict` it raises. `columns` names the
    columns of problem and answer where they have names of their own.
    """
    records: list[Record] = []
    skipped: list[Skipped] = []
    layouts: dict[tuple[str, ...], tuple[str, ...]] = {}  # by column names: rows of one file seldom differ
    unknown: DataError | None = None
    unseen: dict[str, None] = {}
    for row in iterate_rows(source, split):
        names = tuple(row.columns)
        if names not in layouts:
            try:
                layouts[names] = find_layout(row, columns)
            except DataError as error:
                if strict and layouts:
                    found = f"columns found: {', '.join(names) or 'none'}"
                    raise DataError(f"{row.where}: unknown layout, unlike rows before it, {found}; {MEND}") from error
                if strict:
                    raise
                unknown = unknown or error
                skipped.append(Skipped(row.where, "no column with a problem or an answer"))
                continue
        record = _record(row, str(source), layouts[names])
        if isinstance(record, Record):
            records.append(record)
            unseen |= {n: None for n, v in row.columns.items() if _is_left_out(n, v, record, layouts[names])}
        elif strict:
            raise DataError(f"{record.where}: {record.reason}; {MEND}")
        else:
            skipped.append(record)
    if not records and unknown is not None:  # no row has a layout, or none that has one holds anything
        raise unknown
    if not records:
        why = f"all {len(skipped)} were left out, {skipped[0].where}: {skipped[0].reason}" if skipped else "it is empty"
        raise DataError(f"{source}: no usable row: {why}")
    layout = "/".join(next(iter(layouts.values())))
    return Records(tuple(records), str(source), layout, tuple(skipped), tuple(unseen))


def find_layout(row: Row, columns: Mapping[Literal["problem", "answer"], str] | None = None) -> tuple[str, ...]:
    """The columns that hold problem and answer: those named, a verl pair, body and question, or the first known names.

    >>> find_layout(Row("f:1", {"Question": "1+1?", "answer": "2 #### 2"}))
    ('question', 'answer')
    >>> find_layout(Row("f:1", {"task": "1+1?", "answer": "3", "key": 2}), columns={"problem": "task", "answer": "key"})
    ('task', 'key')
    """
    names = {name.lower() for name in row.columns}
    chosen: dict[str, str] = {part: name.lower() for part, name in (columns or {}).items()}
    if missing := [name for part, name in chosen.items() if name not in names]:
        raise DataError(
            f"{row.where}: no column {missing[0]!r}, which data.columns names; columns found: "
            f"{', '.join(row.columns) or 'none'}"
        )
    if not chosen and {"prompt", "reward_model"} <= names:
        return ("prompt", "reward_model")
    answer = chosen.get("answer") or next((name for name in ANSWER_COLUMNS if name in names), None)
    if not chosen and {"body", "question"} <= names and answer:
        return ("body", "question", answer)
    others = (name for name in PROBLEM_COLUMNS if name in names and name != answer)
    problem = chosen.get("problem") or next(others, None)
    if problem and answer:
        return (problem, answer)
    raise DataError(
        f"{row.where}: unknown layout, columns found: {', '.join(row.columns) or 'none'}; known layouts: "
        f"prompt + reward_model (verl), body + question + answer, or a problem column ({', '.join(PROBLEM_COLUMNS)}) "
        f"with an answer column ({', '.join(ANSWER_COLUMNS)}); name yours: "
        'data.columns = {problem = "...", answer = "..."}, in a shell --data.columns with the table in single quotes '
        "(`attnrl data`: --columns)"
    )


def _record(row: Row, source: str, layout: tuple[str, ...]) -> Record | Skipped:
    columns = {name.lower(): value for name, value in row.columns.items()}
    system = None
    if len(layout) == 3:
        body, question = (str(columns[name] or "").strip() for name in layout[:2])
        problem = f"{body} {question}" if body[-1:] in ".?!" else f"{body}, {question}"
        answers = tuple(_UNIT.sub(r"\1", a) for a in parse_answers(columns[layout[2]]))
    else:
        text, system = chat_text(columns[layout[0]])
        if text is None:
            return Skipped(row.where, f"{layout[0]} is no text and no chat that ends in one user message")
        problem = strip_instruction(text)
        answers = parse_answers(columns[layout[1]], layout[1])
    if not problem.strip():
        return Skipped(row.where, "empty problem")
    if not answers:
        return Skipped(row.where, "empty answer")
    # a struct may hold more than the answer: tests, a style, what a reward of one's own reads
    whole = layout[:-1] if isinstance(columns[layout[-1]], dict) else layout
    return Record(problem.strip(), answers, source, row.where, other_columns(row.columns, whole), system)


def other_columns(columns: Mapping[str, Any], used: Collection[str]) -> dict[str, Any]:
    """The columns that are not among `used` (lower case), as JSON holds them: what a reward sees of a row.

    Empty cells, and what JSON cannot hold or holds only in more than LARGEST characters, are left out.

    >>> other_columns({"Problem": "1+1?", "level": 2, "image": b"...", "note": None}, ("problem",))
    {'level': 2}
    """
    return {n: v for n, v in columns.items() if n.lower() not in used and v is not None and _fits_json(v)}


def _is_left_out(name: str, value: object, record: Record, layout: Collection[str]) -> bool:
    """Whether a column that is not empty is missing from what rewards see of its row."""
    return name not in record.info and name.lower() not in layout and value is not None and value == value


def _fits_json(value: object) -> bool:
    if isinstance(value, (bool, int)):
        return True
    if isinstance(value, str):
        return len(value) <= LARGEST
    try:
        return len(json.dumps(value, allow_nan=False)) <= LARGEST
    except (TypeError, ValueError):
        return False


def chat_text(value: object) -> tuple[str | None, str | None]:
    """The problem's text and its system message: a string, or the one user message of a chat."""
    if value is None or isinstance(value, str):
        return value or "", None
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        return None, None
    systems = [turn.get("content") for turn in value if turn.get("role") == "system"]
    turns = [turn for turn in value if turn.get("role") != "system"]
    if len(turns) != 1 or turns[0].get("role") != "user" or not all(isinstance(text, str) for text in systems):
        return None, None
    content = turns[0].get("content")
    return (content if isinstance(content, str) else None), "\n\n".join(systems) or None


def strip_instruction(text: str) -> str:
    r"""The problem without the instruction that a data set wrapped around it.

    >>> strip_instruction(r"1+1? Let's think step by step and output the final answer within \boxed{}.")
    '1+1?'
    """
    for mark, pattern in _INSTRUCTIONS:
        if mark in text:  # one scan for a rare word is cheap, the patterns are not
            text = pattern.sub("", text)
    return text.strip()


def parse_answers(value: object, column: str = "answer") -> tuple[str, ...]:
    r"""The alternative answers a cell holds: text, number, list of alternatives, or a struct with one of them inside.

    GSM8K's worked answer gives what follows the last `####`; a solution gives its last \boxed{}.

    >>> parse_answers("16 - 3 = 13\n#### 13"), parse_answers(["0.01\n", "0.02\n"]), parse_answers(14.0)
    (('13',), ('0.01', '0.02'), ('14',))
    >>> parse_answers(r"so $x=\boxed{\frac{1}{2}}$.", "solution")
    ('\\frac{1}{2}',)
    """
    if value is None or value != value:  # NaN is how tables of floats write an empty cell
        return ()
    if isinstance(value, dict):
        lower = {str(name).lower(): inner for name, inner in value.items()}
        name = next((n for n in ("ground_truth", "target", *ANSWER_COLUMNS) if lower.get(n) is not None), None)
        return () if name is None else parse_answers(lower[name], name)
    if isinstance(value, (list, tuple)):
        alternatives = [answer for item in value for answer in parse_answers(item, column)]
        return tuple(dict.fromkeys(alternatives))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    if "####" in text:
        text = text.rpartition("####")[2].strip()
    elif column == "solution":
        boxed = last_boxed(text)
        # a short one-line solution is the answer itself; a long one without a box has none we may guess
        text = boxed if boxed is not None else (text if "\n" not in text and len(text) <= 100 else "")
    return (text,) if text else ()


def last_boxed(text: str) -> str | None:
    r"""What stands in the last balanced \boxed{} or \fbox{}, or None.

    >>> last_boxed(r"\boxed{1}, then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    for match in reversed(list(re.finditer(r"\\f?box(?:ed)?\s*\{", text))):
        depth = 1
        for at in range(match.end(), len(text)):
            if text[at - 1] == "\\":  # \{ and \} are letters of the answer, not groups
                continue
            depth += (text[at] == "{") - (text[at] == "}")
            if depth == 0:
                return text[match.end() : at].strip()
    return None
