"""Files of commands: rows that are read, and where files are written."""

from __future__ import annotations

from pathlib import Path

from attnrl.data.files import Row, iterate_rows
from attnrl.errors import DataError, MissingFileError


def check_folder(flag: str, file: Path | None) -> None:
    """Refuse a file that is to be written into a folder that is not there: mistyped more often than wanted."""
    if file is not None and not file.parent.is_dir():
        raise MissingFileError(f"--{flag} {file}: the folder {file.parent} does not exist; make it, or name another")


def check_file(path: Path) -> None:
    """Refuse a file of rows that is not there."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; give a .jsonl, .json, .gz or .parquet file")


def read_file(path: Path) -> list[Row]:
    """The rows of one file, at least one; DataError names file:row where one is no object."""
    check_file(path)
    rows = list(iterate_rows(path, ""))
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows
