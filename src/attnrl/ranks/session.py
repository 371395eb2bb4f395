"""Nothing of a run stays behind on the driver's machine, however the driver ends.

A second process watches the driver. It notes what the run started there and the shared-memory segments those
processes map; when the run is over or the driver is gone, it gives them a moment to leave, ends those that did not, and
removes the segments. Other machines are the business of what starts processes there. It is
`python -m attnrl.ranks.session DRIVER_PID` and must start fast: psutil and the standard library only.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from psutil import STATUS_ZOMBIE, NoSuchProcess, Process, process_iter  # a process that is gone equals no later one

SHM = Path("/dev/shm")
MAPPED = re.compile(r" (\d+) +/dev/shm/")  # inodes: the name of a semaphore in a map is not its own
LOOK_S, GRACE_S = 2.0, 8.0


def family(known: Iterable[Process]) -> set[Process]:
    """The known processes that still live, and all that they started."""
    table = [p for p in process_iter(["ppid", "status"]) if p.info["status"] != STATUS_ZOMBIE]
    inside = set(known) & set(table)
    while more := {p for p in table if p.info["ppid"] in {q.pid for q in inside}} - inside:
        inside |= more
    return inside


def segments(processes: Iterable[Process]) -> set[int]:
    """Inodes of the files in /dev/shm that the processes map."""
    found: set[int] = set()
    for process in processes:
        with suppress(OSError):
            found |= {int(inode) for inode in MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text())}
    return found


def watch(driver: Process) -> None:
    """Look while the driver lives and has not closed the pipe, then clear away. Each line read names processes."""
    known: set[Process] = set()
    mapped: set[int] = set()
    while driver in family([driver]):
        if select.select([sys.stdin], [], [], LOOK_S)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            known |= {p for p in process_iter() if str(p.pid) in line.split()}
        known |= family(known)
        mapped |= segments(known)
    until = time.monotonic() + GRACE_S
    while (left := family(known)) and time.monotonic() < until:
        mapped |= segments(left)
        time.sleep(0.2)
    for process in left:
        with suppress(NoSuchProcess):
            process.kill()
    for file in SHM.iterdir():
        if file.stat().st_ino in mapped:
            file.unlink(missing_ok=True)


class Session:
    """The watching process, from the driver's side."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "attnrl.ranks.session", str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True)
        self.before = set(Process().children())

    def note_children(self) -> None:
        """What this process started since the session began belongs to the run."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(str(p.pid) for p in set(Process().children()) - self.before) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Say that the run is over and wait until all is cleared away."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    with suppress(NoSuchProcess):  # the driver is gone already, and has started nothing
        watch(Process(int(sys.argv[1])))
