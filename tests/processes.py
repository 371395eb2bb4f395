"""Processes as tests see them: a signal is sent at once, but a process ends in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 90.0  # seconds that a busy machine may take for what a free one does at once


def wait_until(reached: Callable[[], Any], seconds: float = LIMIT) -> bool:
    """Whether a condition came true within the limit."""
    end = time.monotonic() + seconds
    while not (found := bool(reached())) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def stat(pid: int) -> list[str]:
    """What the system says of a process from its state on; nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody asked for does not."""
    return (stat(pid) or ["X"])[0] not in "ZX"


def session(leader: int) -> list[int]:
    """The processes of a session that are alive."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if alive(pid) and stat(pid)[3:4] == [str(leader)]]
