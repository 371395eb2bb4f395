"""The local page over run directories: a read-only server on the loopback interface, standard library only."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from attnrl.analysis.page import SCRIPTS, render, shell
from attnrl.analysis.report import named_runs
from attnrl.analysis.watch import Watch
from attnrl.checkpoint import finite
from attnrl.errors import AttnRLError, ConfigError, MissingFileError

LOOPBACK = "127.0.0.1"
NUMBER = re.compile("[0-9]{1,9}")
LIVE_SCRIPTS = ("live.js", *SCRIPTS)
Query = dict[str, str]


class Server(ThreadingHTTPServer):
    """Python's own, silent about a connection that the browser dropped."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@dataclass(slots=True)
class View:
    """The server and its watches; `close` ends both."""

    watches: list[Watch]
    server: Server
    stopping: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server.server_address[1]}/"

    def start(self) -> None:
        """Serve and index, in threads of their own."""
        for work in (self._index, lambda: self.server.serve_forever(0.2)):
            self.threads.append(threading.Thread(target=work, daemon=True))
            self.threads[-1].start()

    def close(self) -> None:
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()
        for thread in self.threads:
            thread.join()

    def _index(self) -> None:
        while not self.stopping.is_set():
            left = [watch.index_some() for watch in self.watches]  # every one gets its turn
            if not any(left):
                self.stopping.wait(1.0)


def open_view(run_dirs: Sequence[Path], port: int = 0, *, or_any: bool = False) -> View:
    """A view of these runs, not yet started; port 0 is any free one, which is also taken with `or_any` where the port
    is in use.
    """
    watches = [Watch(path, name) for path, name in named_runs(run_dirs)]
    for watch in watches:
        watch.record()  # a directory that is no run is refused here
    try:
        server = Server((LOOPBACK, port), handler(watches))
    except OSError as error:
        if or_any and port:
            return open_view(run_dirs)
        raise ConfigError(
            f"--port {port} cannot be used ({error.strerror}); choose another, 0 for any free one"
        ) from None
    return View(watches, server)


def index_page(watches: Sequence[Watch]) -> str:
    """The page itself, with what the runs are at this moment."""
    runs = [watch.page(len(watches)) for watch in watches]
    title = " · ".join(watch.name for watch in watches)
    return render("view", title, shell(runs, forests=[], pages=[]), LIVE_SCRIPTS, "'self'")


def answers(watches: Sequence[Watch]) -> dict[str, Callable[[Query], Any]]:
    """What the page may ask, by path."""

    def watch_of(query: Query) -> Watch:
        number = _number(query, "run")
        if not 0 <= number < len(watches):
            raise MissingFileError(f"no run {number}")
        return watches[number]

    def changes(query: Query) -> Any:
        have, stamps = query.get("have", "").split(","), query.get("stamps", "").split(",")
        found = []
        for i, watch in enumerate(watches):
            known = int(have[i]) if i < len(have) and NUMBER.fullmatch(have[i]) else 0
            same = i < len(stamps) and stamps[i] == watch.stamp()
            found.append({**watch.changes(known), "page": None if same else watch.page(len(watches))})
        return {"runs": found}

    return {
        "/api/changes": changes,
        "/api/forest": lambda q: watch_of(q).forest(_number(q, "iteration"), _number(q, "number")),
        "/api/search": lambda q: watch_of(q).search(q.get("q", ""), _number(q, "before") if "before" in q else None),
    }


def _number(query: Query, name: str) -> int:
    if not NUMBER.fullmatch(query.get(name, "")):
        raise ConfigError(f"{name} must be a number")
    return int(query[name])


def handler(watches: Sequence[Watch]) -> type[BaseHTTPRequestHandler]:
    """The request handler of a view: GET and HEAD alone, and only where the request names this machine as its host."""
    routes = answers(watches)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version = "attnrl"
        sys_version = ""

        def do_GET(self) -> None:
            asked = urlsplit("/" + self.path.lstrip("/"))  # a path of this server, whatever host it names
            name = self.headers.get("Host", "").rpartition(":")[0]
            if name not in (LOOPBACK, "localhost"):  # another site's name that points here must not read the runs
                self.answer(403, "text/plain", "this server answers to localhost only\n")
            elif asked.path == "/":
                self.give(lambda: ("text/html", index_page(watches)))
            elif asked.path in routes:
                query = {key: values[-1] for key, values in parse_qs(asked.query).items()}
                self.give(lambda: ("application/json", json.dumps(finite(routes[asked.path](query)))))
            else:
                self.answer(404, "text/plain", "nothing here\n")

        do_HEAD = do_GET  # the same answer without its body

        def give(self, make: Callable[[], tuple[str, str]]) -> None:
            try:
                self.answer(200, *make())
            except AttnRLError as error:
                self.answer(404, "application/json", json.dumps({"error": str(error)}))

        def answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode("utf-8", "replace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body if self.command != "HEAD" else b"")

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet: the page asks every second."""

    return Handler
