r"""Problems with their reference answers, from the layouts people have.

A record is a problem in its own words, with no template and no instruction, and its answers. Rows without a problem or
without an answer are left out with their row numbers kept, or refused with `strict=True`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnrl.data.files import Row, iterate_rows
from attnrl.errors import DataError

PROBLEM_COLUMNS = ("problem", "question", "query", "prompt", "input", "instruction")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "ground_truth", "target", "gold", "solution")
INFO_COLUMNS = ("level", "type", "subject", "difficulty", "data_source", "offline_pass_rate", "id", "unique_id", "idx")

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

    >>> Record("1+1?", ("2",), source="sums.jsonl", where="sums.jsonl:0").answers
    ('2',)
    """

    problem: str  # own words, instruction removed
    answers: tuple[str, ...]  # alternatives, each right; as written, outer white space removed
    source: str  # file or data set
    where: str  # file:row, rows counted from 0
    info: dict[str, Any] = field(default_factory=dict)  # level, subject, pass rate: whatever the row says

    @property
    def row(self) -> int:
        """The row number in its file, counted from 0."""
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
    limit: int | None = None,
    allow_empty_answers: bool = False,
    strict: bool = False,
) -> Records:
    """The records of a file, a directory or a hub data set.

    A row without problem or answer is left out and kept in `skipped`; with `strict` it raises. `allow_empty_answers`
    keeps rows without an answer, for sampling without grading. `limit` reads only the first rows.
    """
    records: list[Record] = []
    skipped: list[Skipped] = []
    layouts: dict[tuple[str, ...], tuple[str, ...]] = {}  # by column names: rows of one file seldom differ
    for row in iterate_rows(source, split):
        if limit is not None and len(records) + len(skipped) >= limit:
            break
        names = tuple(row.columns)
        if names not in layouts:
            try:
                layouts[names] = find_layout(row, allow_empty_answers)
            except DataError:
                if strict or not records:  # rows before it had a layout, so this row is at fault, not the file
                    raise
                skipped.append(Skipped(row.where, "no column with a problem or an answer"))
                continue
        record = _record(row, str(source), layouts[names], allow_empty_answers)
        if isinstance(record, Record):
            records.append(record)
        elif strict:
            raise DataError(
                f"{record.where}: {record.reason}; fix or remove the row, or leave such rows out "
                "(data.drop_bad_rows = true; strict=False in Python)"
            )
        else:
            skipped.append(record)
    if not records:
        why = f"all {len(skipped)} were left out, {skipped[0].where}: {skipped[0].reason}" if skipped else "it is empty"
        raise DataError(f"{source}: no usable row: {why}")
    layout = "/".join(next(iter(layouts.values())))
    return Records(tuple(records), str(source), layout, tuple(skipped))


def find_layout(row: Row, allow_empty_answers: bool = False) -> tuple[str, ...]:
    """The columns that hold problem and answer: a verl pair, body and question, or the first known names.

    >>> find_layout(Row("f:0", {"Question": "1+1?", "answer": "2 #### 2"}))
    ('question', 'answer')
    """
    names = {name.lower() for name in row.columns}
    if {"prompt", "reward_model"} <= names:
        return ("prompt", "reward_model")
    answer = next((name for name in ANSWER_COLUMNS if name in names), None)
    if {"body", "question"} <= names and answer:
        return ("body", "question", answer)
    problem = next((name for name in PROBLEM_COLUMNS if name in names), None)
    if problem and (answer or allow_empty_answers):
        return (problem, answer) if answer else (problem,)
    raise DataError(
        f"{row.where}: unknown layout, columns found: {', '.join(row.columns) or 'none'}; known layouts: "
        f"prompt + reward_model (verl), body + question + answer, or a problem column ({', '.join(PROBLEM_COLUMNS)}) "
        f"with an answer column ({', '.join(ANSWER_COLUMNS)}); rename the columns"
    )


def _record(row: Row, source: str, layout: tuple[str, ...], allow_empty_answers: bool) -> Record | Skipped:
    columns = {name.lower(): value for name, value in row.columns.items()}
    if layout[0] == "body":
        body, question = (str(columns[name] or "").strip() for name in layout[:2])
        problem = f"{body} {question}" if body[-1:] in ".?!" else f"{body}, {question}"
        answers = tuple(_UNIT.sub(r"\1", a) for a in parse_answers(columns[layout[2]]))
    else:
        text = _text(columns[layout[0]])
        if text is None:
            return Skipped(row.where, f"{layout[0]} is no text and no chat that ends in one user message")
        problem = strip_instruction(text)
        answers = parse_answers(columns[layout[1]], layout[1]) if len(layout) > 1 else ()
    if not problem.strip():
        return Skipped(row.where, "empty problem")
    if not answers and not allow_empty_answers:
        return Skipped(row.where, "empty answer")
    info = {name: columns[name] for name in INFO_COLUMNS if columns.get(name) is not None}
    return Record(problem.strip(), answers, source, row.where, info)


def _text(value: object) -> str | None:
    """The problem's text: a string, or the user message of a chat (a system message is the template's business)."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        return None
    turns = [turn for turn in value if turn.get("role") != "system"]
    if len(turns) != 1 or turns[0].get("role") != "user":
        return None
    content = turns[0].get("content")
    return content if isinstance(content, str) else None


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
    if value is None:
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
