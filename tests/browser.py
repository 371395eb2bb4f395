"""A real Chromium for the tests, driven over the DevTools protocol through a pair of pipes; standard library alone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
MISSING = "no Chromium here (Debian: apt-get install chromium); the page is not driven in a browser"
SECONDS = 30.0  # the longest wait for anything: a machine may be busy


class Browser:
    """One headless Chromium with one tab. Whatever the page's console called an error is kept in `errors`."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        assert BINARY is not None, MISSING
        self.profile = tempfile.mkdtemp(prefix="attnrl-chromium-")
        pipes = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for pair in (os.pipe(), os.pipe()) for end in pair]
        to_read, self.to, self.back, to_write = pipes  # well above 3 and 4, where Chromium looks for them
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        flags += ["--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={self.profile}"]
        place = f"import os, sys; os.dup2({to_read}, 3); os.dup2({to_write}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", place, BINARY, *flags, "about:blank"]
        self.process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self.number, self.buffer, self.session = 0, b"", ""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command of the protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._next(until - time.monotonic(), method)
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._event(answer)

    def _next(self, seconds: float, method: str) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(seconds, 0.0))
            assert ready, f"Chromium did not answer {method} in {SECONDS} s"
            chunk = os.read(self.back, 1 << 20)
            assert chunk, "Chromium has gone"
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _event(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif (method == "Runtime.consoleAPICalled" and params["type"] == "error") or (
            method == "Log.entryAdded" and params["entry"]["level"] == "error"
        ):
            self.errors.append(json.dumps(params)[:2000])

    def size(self, width: int, height: int = 900, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def dark(self, on: bool = True) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.querySelector('main h1') !== null")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = SECONDS) -> Any:
        """The value of an expression as soon as it is true."""
        until = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < until, f"never true: {script}; console: {self.errors}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        """The text of the first element that fits."""
        return str(self.wait(f"document.querySelector({json.dumps(selector)})?.innerText"))

    def click(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """A real click on the first element that fits, at that share of its width and height."""
        where = self.wait(
            f"(() => {{ const n = document.querySelector({json.dumps(selector)}); if (!n) return null;"
            "n.scrollIntoView({block: 'center', behavior: 'instant'}); const b = n.getBoundingClientRect();"
            f"return [b.left + b.width * {across}, b.top + b.height * {down}]; }})()"
        )
        at = {"x": where[0], "y": where[1], "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **at)

    def press(self, *keys: str) -> None:
        """Keys by their DevTools name, one after the other."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            code = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowRight": 39, "ArrowLeft": 37}
            virtual = {"windowsVirtualKeyCode": code[key]} if key in code else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **virtual)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **virtual)

    def type(self, words: str) -> None:
        self.call("Input.insertText", text=words)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)
        os.close(self.to)
        os.close(self.back)
        shutil.rmtree(self.profile, ignore_errors=True)
