"""A session clears away what a killed driver started, and nothing else. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from psutil import Process

from attnrl.ranks.session import family
from processes import wait_until

DRIVER = """
import fcntl, subprocess, sys, termios, time
from attnrl.ranks.session import Session
other = subprocess.Popen(["sleep", "600"])  # started before: not the run's
session = Session()
hold = "import time; from multiprocessing import shared_memory, resource_tracker; " \\
    "s = shared_memory.SharedMemory(create=True, size=4096); resource_tracker.unregister(s._name, 'shared_memory'); " \\
    "print(s.name, flush=True); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True, start_new_session=True)
name = worker.stdout.readline().strip()
session.note_children()
while any(fcntl.ioctl(session.process.stdin, termios.FIONREAD, bytes(4))):  # it has not read the names yet
    time.sleep(0.05)
print(other.pid, worker.pid, session.process.pid, name, flush=True)
if sys.argv[1] == "close":
    session.close()
    print("closed", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["kill", "close"])
def test_what_a_run_started_goes_and_nothing_else(how):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, how], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    other, worker, session, name = driver.stdout.readline().split()
    segment = Path("/dev/shm", name)
    started = {p for p in family(Process().children()) if p.pid in (int(other), int(worker), int(session))}
    try:
        assert len(started) == 3
        if how == "kill":
            assert segment.exists()
            driver.kill()
        else:
            assert driver.stdout.readline() == "closed\n"
        assert wait_until(lambda: {p.pid for p in family(started)} == {int(other)})
        assert not segment.exists()
    finally:
        driver.kill()
        driver.wait()
        os.kill(int(other), signal.SIGKILL)
