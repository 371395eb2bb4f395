"""A run directory watched while it grows: its record read anew when it changed, its forests indexed aside."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from attnrl.analysis.curves import POINTS
from attnrl.analysis.forests import read_table
from attnrl.analysis.index import Entry, index_file, read_entry
from attnrl.analysis.page import run_page
from attnrl.analysis.pages import VISIBLE, forest_page, map_texts
from attnrl.analysis.positions import fci_by_position
from attnrl.analysis.records import RunRecord, read_run
from attnrl.errors import DataError, MissingFileError

CHUNKS = 60  # iterations of the index in one answer
SEARCH_SECONDS = 0.6  # of one answer to a search; the page asks on
Stamp = tuple[int, int]


@dataclass(slots=True)
class Watch:
    """One run. The indexing thread writes, the server's threads read; `lock` is held only to swap references."""

    path: Path
    name: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    entries: dict[int, list[Entry]] = field(default_factory=dict)  # by iteration
    chunks: list[dict[str, Any]] = field(default_factory=list)  # what was indexed, in that order
    seen: dict[Path, Stamp] = field(default_factory=dict)
    fci: dict[str, Any] | None = None
    fci_files: int = 0

    def record(self) -> RunRecord:
        return read_run(self.path, self.name, begun=False)

    def stamp(self) -> str:
        """Changes whenever what `page` answers would."""
        metrics = self.path / "metrics.jsonl"
        size, changed = _stamp(metrics) if metrics.exists() else (0, 0)
        return f"{size}.{changed}.{len(self.seen)}.{self.fci_files}"

    def page(self, runs: int) -> dict[str, Any]:
        """The run as the page shows it."""
        return {**run_page(self.record(), min(400, POINTS // runs), self.fci), "stamp": self.stamp()}

    def changes(self, have: int) -> dict[str, Any]:
        """What was indexed since the page had `have` chunks."""
        with self.lock:
            new = self.chunks[have : have + CHUNKS]
            return {"chunks": new, "have": have + len(new), "of": len(self.chunks), "indexed": len(self.seen)}

    def index_some(self, seconds: float = 0.5) -> bool:
        """Index new and changed forest files, newest iteration first, for about that long; whether any was left."""
        files = {p: _stamp(p) for p in (self.path / "forests").glob("*.parquet") if p.stem.isdigit()}
        for gone in [p for p in self.seen if p not in files]:
            self._put(gone, None, [])
        waiting = sorted((p for p in files if self.seen.get(p) != files[p]), reverse=True)
        start = time.monotonic()
        for file in waiting:
            try:
                self._put(file, files[file], index_file(file))
            except DataError as error:
                self._put(file, files[file], [], str(error))
            if time.monotonic() - start > seconds:
                return True
        if len(files) != self.fci_files and not waiting:
            try:
                self.fci, self.fci_files = fci_by_position(sorted(files)), len(files)
            except DataError:
                self.fci_files = len(files)  # the index names the broken file
        return bool(waiting)

    def _put(self, file: Path, stamp: Stamp | None, entries: list[Entry], error: str | None = None) -> None:
        iteration = int(file.stem)
        chunk = {"iteration": iteration, "rows": [entry.row() for entry in entries], "error": error}
        with self.lock:
            self.chunks.append(chunk)
            if stamp is None:
                self.seen.pop(file)
                self.entries.pop(iteration, None)
            else:
                self.seen[file] = stamp
                self.entries[iteration] = entries

    def forest(self, iteration: int, number: int) -> dict[str, Any]:
        """One forest, nothing cut, control characters made visible."""
        entries = self.entries.get(iteration)
        if not entries:  # not indexed yet, broken, or not on record
            file = self.path / "forests" / f"{iteration:06d}.parquet"
            if not file.is_file():
                raise MissingFileError(f"{self.name} has no forests of iteration {iteration}")
            entries = index_file(file)
        if not 0 <= number < len(entries):
            raise MissingFileError(
                f"{self.name}, iteration {iteration}: {len(entries)} forests, none numbered {number + 1}"
            )
        page = forest_page(read_entry(entries[number]), self.record())
        return map_texts(page, lambda text: text.translate(VISIBLE))

    def search(self, words: str, before: int | None) -> dict[str, Any]:
        """Forests whose prompt or some response holds the words, in iterations under `before`, newest first.

        Answers after a short time, with the iteration to go on from, None at the end.
        """
        iterations = sorted((i for i in self.entries if before is None or i < before), reverse=True)
        hits: list[tuple[int, int]] = []
        start = time.monotonic()
        for iteration in iterations:
            hits += [(iteration, number) for number in find_in(self.entries[iteration], words)]
            if time.monotonic() - start > SEARCH_SECONDS and iteration != iterations[-1]:
                return {"hits": hits, "next": iteration}
        return {"hits": hits, "next": None}


def find_in(entries: list[Entry], words: str) -> list[int]:
    """Numbers of the forests of one file in which the words stand, whatever their case."""
    if not entries:
        return []
    table = read_table(entries[0].file, ("problem", "text"))
    starts = [entry.start for entry in entries]
    found: set[int] = set()
    for name in ("problem", "text"):
        column = table[name]
        match = pc.match_substring(column, words, ignore_case=True)
        rows = pc.indices_nonzero(pc.fill_null(match, pa.scalar(False))).to_pylist()
        found |= {bisect_right(starts, row) - 1 for row in rows}
    return sorted(found)


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
