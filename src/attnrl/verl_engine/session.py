"""Nothing of a run stays behind on the driver's machine, however the driver ends.

A second process watches the driver. It notes what Ray started there (workers, vLLM) and the shared-memory segments
those processes map; when the run is over or the driver is gone, it gives them a moment to leave, ends those that did
not, and removes the segments. Other machines are Ray's business: it ends workers whose driver is gone. Standard library
only: `python -m attnrl.verl_engine.session DRIVER_PID` must start fast.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

Process = tuple[int, int]  # pid and start time: a pid alone may come again
SHM = Path("/dev/shm")
MAPPED = re.compile(r" (\d+) +/dev/shm/")  # inodes: the name of a semaphore in a map is not its own
LOOK_S, GRACE_S = 2.0, 8.0


def table() -> dict[int, tuple[int, int]]:
    """(parent, start time) of every living process."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found[int(folder.name)] = int(fields[1]), int(fields[19])
    return found


def children(pid: int) -> set[Process]:
    """What a process has started."""
    return {(child, start) for child, (parent, start) in table().items() if parent == pid}


def family(known: set[Process]) -> set[Process]:
    """The known processes that still live, and all that they started."""
    living = table()
    inside = {pid for pid, start in known if pid in living and living[pid][1] == start}
    while more := {pid for pid, (parent, _) in living.items() if parent in inside} - inside:
        inside |= more
    return {(pid, living[pid][1]) for pid in inside}


def segments(processes: set[Process]) -> set[int]:
    """Inodes of the files in /dev/shm that the processes map."""
    found: set[int] = set()
    for pid, _ in processes:
        try:
            found |= {int(inode) for inode in MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())}
        except OSError:
            continue
    return found


def watch(driver: int) -> None:
    """Look while the driver lives and has not closed the pipe, then clear away. Each line read names processes."""
    born = table().get(driver, (0, 0))[1]
    known: set[Process] = set()
    mapped: set[int] = set()
    while table().get(driver, (0, -1))[1] == born:
        if select.select([sys.stdin], [], [], LOOK_S)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            known |= {(int(pid), int(start)) for pid, start in (entry.split(":") for entry in line.split())}
        known |= family(known)
        mapped |= segments(known)
    until = time.monotonic() + GRACE_S
    while (left := family(known)) and time.monotonic() < until:
        mapped |= segments(left)
        time.sleep(0.2)
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    for file in SHM.iterdir():
        if file.stat().st_ino in mapped:
            file.unlink(missing_ok=True)


class Session:
    """The watching process, from the driver's side."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "attnrl.verl_engine.session", str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True)
        self.before = children(os.getpid())

    def note_children(self) -> None:
        """What this process started since the session began belongs to the run."""
        assert self.process.stdin is not None
        new = children(os.getpid()) - self.before - {p for p in children(os.getpid()) if p[0] == self.process.pid}
        self.process.stdin.write(" ".join(f"{pid}:{start}" for pid, start in new) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Say that the run is over and wait until all is cleared away."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    watch(int(sys.argv[1]))
