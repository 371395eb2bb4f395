"""Rows of data files: parquet, json and jsonl (also gzipped), from a path, a directory or the Hugging Face hub."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnrl.errors import DataError, MissingFileError

SUFFIXES = (".parquet", ".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
READ = "what is read is .parquet, .jsonl (one object a line) and .json, the last two also as .gz"
_HUB = re.compile(r"(?:hf:)?(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in its file; `where` is file:row, rows counted from 1."""

    where: str
    columns: dict[str, Any]


def iterate_rows(source: str | Path, split: str) -> Iterator[Row]:
    """The rows of a file, of every data file of a directory, or of a split of a hub data set, in order.

    Rows count from 1 in each file, as the lines of a .jsonl file do; blank lines are no rows.
    """
    for label, path in find_files(source, split):
        yield from _read(label, path)


def find_files(source: str | Path, split: str) -> list[tuple[str, Path]]:
    """The data files a source stands for, each with the name that messages use.

    An existing path always wins over a hub name; `hf:` in front asks for the hub alone.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        names = [p.relative_to(path).as_posix() for p in sorted(path.rglob("*")) if p.name.endswith(SUFFIXES)]
        chosen = pick_split(names, split, config=None)
        if not chosen:
            raise MissingFileError(
                f"{path}: of several files in a directory those of the split are read, and none has {split!r} as a "
                f"word of its name, such as {split}-1.jsonl; it has: {_some(names)}; name the files one by one"
                if names
                else f"{path}: no data file in this directory; {READ}"
            )
        return [(name, path / name) for name in chosen]
    name = _HUB.fullmatch(str(source))
    if name is None or str(source).endswith(SUFFIXES):
        raise MissingFileError(
            f"{source}: no such file, and not the name of a hub data set (org/name or hf:org/name:split); "
            f"check the path"
        )
    return _download(str(source), name["repo"], name["config"], name["split"] or split)


def pick_split(names: list[str], split: str, config: str | None) -> list[str]:
    """The files of one split, by the naming the hub uses: split-00000-of-00001.parquet, data/split*.jsonl, split.json.

    A repository with a single data file needs no split in its name. Files of several configurations are refused.

    >>> pick_split(["main/test-0.parquet", "main/train-0.parquet"], "test", None)
    ['main/test-0.parquet']
    >>> pick_split(["deepscaler.json"], "train", None)
    ['deepscaler.json']
    """
    names = sorted(n for n in names if n.endswith(SUFFIXES))
    if config is not None:
        names = [n for n in names if config in n.split("/")[:-1] or n.split("/")[-1].startswith(config)]
    wanted = re.compile(rf"(?:^|[/_.-]){re.escape(split)}(?:$|[/_.-])")
    chosen = [n for n in names if wanted.search(n)]
    if not chosen and len(names) == 1:
        chosen = names
    folders = {n.rpartition("/")[0] for n in chosen}
    if len(folders) > 1:
        raise DataError(
            f"split {split!r} exists in several configurations ({_some(sorted(folders))}); "
            f"name one: hf:org/name/CONFIG:{split}"
        )
    return chosen


def _download(source: str, repo: str, config: str | None, split: str) -> list[tuple[str, Path]]:
    # imported here: huggingface_hub takes half a second and local files do not need it
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # the base of a hub error is the error class of the HTTP library, which differs between versions of the client
    http: tuple[type[BaseException], ...] = HfHubHTTPError.__bases__
    failures: tuple[type[BaseException], ...] = (OSError, HFValidationError, *http)
    if not constants.HF_HUB_OFFLINE and (reason := unreachable(constants.ENDPOINT)):
        raise MissingFileError(
            f"{source}: no such file here, and the hub ({constants.ENDPOINT}) cannot be reached: {reason}; "
            "check the path or the network; HF_HUB_OFFLINE=1 takes what earlier runs downloaded"
        )
    try:
        if constants.HF_HUB_OFFLINE:  # what earlier runs downloaded
            folder = Path(snapshot_download(repo, repo_type="dataset", local_files_only=True))
            listed = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        else:
            listed = HfApi().list_repo_files(repo, repo_type="dataset")
        chosen = pick_split(listed, split, config)
        if chosen:
            return [(f"{repo}/{n}", Path(hf_hub_download(repo, n, repo_type="dataset"))) for n in chosen]
    except failures as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MissingFileError(
            f"{source}: no such file here, and as the hub data set {repo!r} it could not be fetched ({reason}); "
            f"check the path or the name, or download the data set and name its file"
        ) from error
    data = [name for name in listed if name.endswith(SUFFIXES)]
    raise MissingFileError(f"{source}: the hub data set {repo} has no file for split {split!r}; it has: {_some(data)}")


def unreachable(address: str, seconds: float = 4.0) -> str | None:
    """Why nothing answers at an address, found within `seconds`; None where something does.

    The hub's client tries again and again for minutes; this asks once. An answer of any kind will do, also an error or
    a certificate that only the client knows. In a thread: looking up a name knows no time limit.
    """
    found: list[str | None] = [f"no answer within {seconds:.0f} seconds"]

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=seconds).close()
            found[0] = None
        except urllib.error.HTTPError:
            found[0] = None
        except OSError as error:
            cause = getattr(error, "reason", error)
            found[0] = None if isinstance(cause, ssl.SSLError) else str(cause)
        except ValueError as error:  # no address at all
            found[0] = str(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return found[0]


def _read(label: str, path: Path) -> Iterator[Row]:
    if path.name.endswith(".parquet"):
        yield from _read_parquet(label, path)
        return
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError) as error:
            raise DataError(f"{label}: broken gzip file ({error}); copy or download it again") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fix = _kinds(label) or "convert it with `iconv -t utf-8`"
        raise DataError(f"{label}: not UTF-8 text (byte {error.start}); {fix}") from error
    whole = path.name.removesuffix(".gz").endswith(".json")
    yield from _read_json(label, text) if whole else _read_lines(label, text)


def _read_parquet(label: str, path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=4096))
        for row, columns in enumerate(itertools.chain.from_iterable(batches), start=1):
            yield Row(f"{label}:{row}", columns)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise DataError(f"{label}: not a readable parquet file ({error}); copy or download it again") from error


def _read_lines(label: str, text: str) -> Iterator[Row]:
    # not splitlines(): U+2028 and its kin are legal inside JSON strings
    lines = enumerate(io.StringIO(text, newline="\n"), start=1)
    for row, (number, line) in enumerate(((n, line) for n, line in lines if line.strip()), start=1):
        try:
            columns = json.loads(line)
        except json.JSONDecodeError as error:
            fix = _kinds(label) or "one object a line"
            raise DataError(f"{label}:{row} (line {number}): not JSON ({error.msg}); {fix}") from error
        yield _row(label, row, columns)


def _kinds(label: str) -> str:
    """What to say of a file that is none of those that are read, by its name; empty for one of them."""
    kind = Path(label.removesuffix(".gz")).suffix.upper().removeprefix(".")
    return "" if label.endswith(SUFFIXES) else f"{kind or 'a file without a suffix'} is not read: {READ}"


def _read_json(label: str, text: str) -> Iterator[Row]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{label}: not JSON ({error}); a file of one object a line is named .jsonl") from error
    if isinstance(value, dict):  # {"data": [...]}, or columns as lists
        lists = {k: v for k, v in value.items() if isinstance(v, list)}
        if len(lists) == 1:
            (value,) = lists.values()
        elif lists and len({len(v) for v in lists.values()}) == 1:
            value = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    if not isinstance(value, list):
        raise DataError(
            f"{label}: holds a {type(value).__name__}, not a list of rows; write a list of objects or .jsonl"
        )
    for row, columns in enumerate(value, start=1):
        yield _row(label, row, columns)


def _row(label: str, row: int, columns: object) -> Row:
    if not isinstance(columns, dict):
        raise DataError(f"{label}:{row}: a row must be an object with named columns, not {type(columns).__name__}")
    return Row(f"{label}:{row}", columns)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8]) or "none"
    return f"{shown}, and {len(names) - 8} more" if len(names) > 8 else shown


def data_directory(data_dir: str | os.PathLike[str] | None) -> Path | None:
    """The local data directory: the argument, else the environment variable ATTNRL_DATA, else none."""
    chosen = data_dir if data_dir is not None else os.environ.get("ATTNRL_DATA") or None
    return None if chosen is None else Path(chosen).expanduser()
