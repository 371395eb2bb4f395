from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from attnrl.cli import run
from attnrl.run import open_run
from processes import LIMIT, wait_until


@contextmanager
def viewed(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command over a small run, and its port."""
    open_run(directory, {"about": "tiny"}, resume=False).log({"iteration": 0.0, "eval/tasks/pass@1": 0.5})
    command = [sys.executable, "-m", "attnrl", "view", str(directory), "--port", "0"]
    root = str(Path(run.__code__.co_filename).parents[2])  # the code under test, wherever the process starts
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    try:
        assert process.stdout is not None
        found = re.match(r"http://127\.0\.0\.1:(\d+)/   \(Ctrl-C ends it\)", process.stdout.readline())
        assert found
        yield process, int(found[1])
    finally:
        process.kill()
        process.communicate()


def sockets(pid: int) -> int:
    """How many a process has open."""
    names = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(file))
    return sum(name.startswith("socket:") for name in names)


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    with viewed(tmp_path / "demo") as (process, port):
        with urlopen(f"http://localhost:{port}/", timeout=LIMIT) as answer:
            assert b"<title>demo \xc2\xb7 attnrl view</title>" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 130


@pytest.mark.parametrize("asked", [b"GET /nothing HTTP/1.1\r\nHost: localhost:1\r\n\r\n", b"GET /noth"])
def test_a_browser_that_drops_its_connection_is_no_news(tmp_path: Path, asked: bytes) -> None:
    """Between two requests of a connection, and in the middle of one; told from a quiet end by a reset."""
    with viewed(tmp_path / "demo") as (process, port):
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as browser:
            browser.sendall(asked)
            assert wait_until(lambda: sockets(process.pid) == 2)  # the one that waits for browsers, and this one's
            if asked.endswith(b"\r\n\r\n"):
                assert browser.recv(12) == b"HTTP/1.1 404"
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert wait_until(lambda: sockets(process.pid) == 1)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=LIMIT) == ("", "stopped\n")


def test_mistakes_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "nowhere"
    assert run(["view", str(missing)]) == 2
    assert capsys.readouterr().err == (
        f"attnrl view: run directory {missing} does not exist; `attnrl train ... --run-dir {missing}` makes it\n"
    )
    assert run(["view"]) == 2
    assert "give run directories" in capsys.readouterr().err
