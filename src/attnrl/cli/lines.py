"""Files of commands: JSON lines that are read, one object a line, plain or gzipped; and where files are written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from attnrl.errors import DataError, MissingFileError


def check_folder(flag: str, file: Path | None) -> None:
    """Refuse a file that is to be written into a folder that is not there: mistyped more often than wanted."""
    if file is not None and not file.parent.is_dir():
        raise MissingFileError(f"--{flag} {file}: the folder {file.parent} does not exist; make it, or name another")


def read_lines(path: Path, fields: str) -> list[tuple[str, int, dict[str, Any]]]:
    """(file:line, line counted from 0, object) of every line that is not blank.

    DataError names file:line where one is no object, and says which `fields` are wanted.
    """
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; give a .jsonl or .jsonl.gz file")
    rows = []
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for index, line in enumerate(file):
                if line.strip():
                    where = f"{path}:{index + 1}"
                    rows.append((where, index, _object(where, line, fields)))
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        kind = "gzip" if path.suffix == ".gz" else "UTF-8"
        raise DataError(f"{path}: not a readable {kind} file ({error}); give JSON lines, plain or .gz") from error
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def _object(where: str, line: str, fields: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not a JSON object ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object but {type(row).__name__}; {fields}")
    return row
