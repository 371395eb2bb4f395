"""The index of a run's forests: one small entry a prompt and iteration, read from the narrow columns of each file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from attnrl.analysis.curves import clean
from attnrl.analysis.forests import Row, interest, read_rows, read_table
from attnrl.errors import DataError

EXCERPT = 220  # characters of a problem in the index
NARROW = ("uid", "problem", "tree", "kind", "reward", "finish", "fci", "prompt_reason", "right", "tokens")
WIDE = (  # all but the log-probs
    *("iteration", "uid", "problem", "answers", "tree", "kind", "point", "text", "ids", "finish", "version"),
    *("reward", "right", "rule", "answer", "reason", "prompt_reason", "step_starts", "step_texts", "fci", "entropy"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the forest table says of one forest, and where its rows lie."""

    file: Path
    iteration: int
    number: int  # of the forest in its file
    start: int  # its rows, half-open
    stop: int
    uid: str
    problem: str  # its beginning
    reason: str  # why the prompt taught or not
    value: float  # V(root): mean reward of all leaves
    leaves: int
    right: int
    trees: int
    branched: int
    tokens: float  # mean of a rollout
    cut_off: int
    fci: float  # mean over the trunks' steps but the first; not a number where nothing was scored
    interest: float

    def row(self) -> list[Any]:
        """By position, as the page reads it."""
        counts = [self.leaves, self.right, self.trees, self.branched]
        means = [clean(self.tokens), self.cut_off, clean(self.fci), clean(self.interest)]
        return [self.iteration, self.number, self.uid, self.problem, self.reason, clean(self.value), *counts, *means]


def index_file(file: Path) -> list[Entry]:
    """The entries of one forest file. Long columns (texts, token ids, log-probs) are not read."""
    table = read_table(file, NARROW)
    if not table.num_rows:
        return []
    uids, trees, kinds = (table[name].to_pylist() for name in ("uid", "tree", "kind"))
    starts = [i for i in range(len(uids)) if i == 0 or uids[i] != uids[i - 1] or trees[i] < trees[i - 1]]
    rewards, right, finish, tokens = (table[name].to_pylist() for name in ("reward", "right", "finish", "tokens"))
    fci = _mean_fci(table["fci"]).tolist()
    problems = [text or "" for text in table["problem"].take(starts).to_pylist()]
    recorded = table["prompt_reason"].take(starts).to_pylist()
    found = []
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(uids)], strict=True)):
        by_tree: list[list[float]] = []
        for i in range(start, stop):
            if kinds[i] == "trunk":
                by_tree.append([])
            by_tree[-1].append(rewards[i])
        leaves, cut_off = stop - start, finish[start:stop].count("length")
        scores = [fci[i] for i in range(start, stop) if kinds[i] == "trunk" and fci[i] == fci[i]]
        entry = Entry(
            file=file,
            iteration=int(file.stem),
            number=number,
            start=start,
            stop=stop,
            uid=uids[start],
            problem=problems[number][:EXCERPT],
            reason=recorded[number] or derived_reason(rewards[start:stop], cut_off),
            value=sum(rewards[start:stop]) / leaves,
            leaves=leaves,
            right=sum(right[start:stop]),
            trees=len(by_tree),
            branched=sum(len(tree) > 1 for tree in by_tree),
            tokens=sum(tokens[start:stop]) / leaves,
            cut_off=cut_off,
            fci=sum(scores) / len(scores) if scores else float("nan"),
            interest=interest(by_tree),
        )
        found.append(entry)
    return found


def derived_reason(rewards: Sequence[float], cut_off: int) -> str:
    """Why a prompt taught, from its rewards alone: for files without recorded reasons.

    >>> derived_reason([1.0, 0.0], 0), derived_reason([0.0, 0.0], 2), derived_reason([1.0], 0)
    ('taught', 'all_cut_off', 'all_right')
    """
    if cut_off == len(rewards):
        return "all_cut_off"
    if len(set(rewards)) > 1:
        return "taught"
    return "all_right" if rewards[0] > 0.5 else "all_wrong"


def _mean_fci(column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[rows] mean FCI of the steps but the first; not a number for branches and for trunks that were not scored."""
    lists = column.combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    offsets = lists.offsets.to_numpy().astype(np.int64)
    values = lists.values.to_numpy(zero_copy_only=False).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values))])
    broken = np.concatenate([[0], np.cumsum(~np.isfinite(values))])
    first, stop = np.minimum(offsets[:-1] + 1, offsets[1:]), offsets[1:]
    count = np.where(broken[stop] > broken[first], 0, stop - first)
    return np.where(count > 0, (sums[stop] - sums[first]) / np.maximum(count, 1), np.nan)


def read_entry(entry: Entry) -> list[Row]:
    """The rows of an entry's forest, without log-probs."""
    rows = read_rows(entry.file, WIDE, (entry.start, entry.stop))
    if not rows or rows[0]["uid"] != entry.uid:
        raise DataError(f"{entry.file} was written anew since it was indexed")
    return rows


def pick_entries(entries: Iterable[Entry], count: int) -> list[Entry]:
    """Up to `count` of the most telling entries, of each iteration about as many, one a prompt and iteration; in the
    order of iterations, the most telling first.
    """
    by_iteration: dict[int, dict[str, Entry]] = {}
    for entry in entries:
        by_iteration.setdefault(entry.iteration, {}).setdefault(entry.uid, entry)
    picks: list[Entry] = []
    for n, iteration in enumerate(sorted(by_iteration)):
        best = sorted(by_iteration[iteration].values(), key=lambda entry: (-entry.interest, entry.uid))
        picks += best[: (count - len(picks)) // (len(by_iteration) - n)]
    return picks
