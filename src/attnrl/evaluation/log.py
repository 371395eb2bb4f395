"""The durable log of an evaluation: graded responses appended as they come, so that a kill loses one chunk at most."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from attnrl.checkpoint import write_json
from attnrl.errors import ConfigError, DataError
from attnrl.evaluation.results import RESPONSES, SETTINGS, Response


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """A file of lines, open for more."""

    file: IO[bytes]
    lines: list[bytes]  # that were there at the start

    def append(self, lines: Iterable[str]) -> None:
        """Add lines; on return they are on disk."""
        self.file.write(b"".join(line.encode() + b"\n" for line in lines))
        self.file.flush()
        os.fsync(self.file.fileno())


@contextmanager
def open_lines(path: Path, settings: Mapping[str, Any], what: str) -> Iterator[Log]:
    """The lines of a file, and room for more; refuses one that another process writes, or that was begun with other
    settings. `what` names the work that writes it.

    A last line without its line break was cut off by a kill and is dropped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the process, however it ends
        except BlockingIOError as error:
            raise ConfigError(f"{path.parent}: another {what} is writing there; wait for it or name another") from error
        _check_settings(path.parent, settings, what)
        file.seek(0)
        whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        file.truncate(len(whole))
        yield Log(file, whole.split(b"\n")[:-1])


@contextmanager
def open_log(directory: Path | None, settings: Mapping[str, Any]) -> Iterator[tuple[list[Response], Log | None]]:
    """The responses of a results directory, and the log to add to; without a directory none, and none. Refuses one that
    was begun with other settings or is in use.
    """
    if directory is None:
        yield [], None
        return
    path = directory / RESPONSES
    with open_lines(path, settings, "evaluation") as log:
        yield _parse(path, log.lines), log


def _parse(path: Path, lines: Sequence[bytes]) -> list[Response]:
    responses = []
    for number, line in enumerate(lines, start=1):
        try:
            responses.append(Response.from_json(line.decode()))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number}: not a line this command wrote ({error}); remove it or start anew"
            ) from error
    return responses


def _check_settings(directory: Path, settings: Mapping[str, Any], what: str) -> None:
    """Remember the settings of new work; what goes on must have the same."""
    file = directory / SETTINGS
    asked = json.loads(json.dumps(settings))
    if not file.exists():
        write_json(file, asked)
        return
    begun = json.loads(file.read_text(encoding="utf-8"))
    pairs = {key: (begun.get(key), asked.get(key)) for key in sorted(begun.keys() | asked.keys())}
    if changed := [_change(key, was, now) for key, (was, now) in pairs.items() if was != now]:
        said = "; ".join(changed)
        raise ConfigError(f"{directory} holds an {what} with other settings ({said}); name another --output")


def _change(key: str, was: Any, now: Any) -> str:
    """A setting that is another one now, in words; of prompts only fingerprints are kept."""
    if key == "prompts" and isinstance(was, dict) and isinstance(now, dict):
        names = [name for name in now if name in was and was[name] != now[name]]
        if names:
            return f"other problems, or another number of them, or another template: {', '.join(names)}"
        was, now = sorted(was), sorted(now)
    return f"{key} was {was!r}, is now {now!r}"
