"""docs/rewards.md keeps its word: its files are written, its preset is loaded, its numbers come out."""

from __future__ import annotations

import json
import re
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from attnrl.config import load_config
from attnrl.launch.models import open_rewards
from attnrl.reward import REWARDS, build_rewards
from attnrl.types import Attempt

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:python|toml)\n# (\w+\.\w+)\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in BLOCKS:
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_block_is_a_file_and_every_built_in_has_a_row() -> None:
    assert len(BLOCKS) == PAGE.count("```python") + PAGE.count("```toml")
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE)) == set(REWARDS)


def test_the_preset_grades_as_it_says(files: Path) -> None:
    config = load_config(str(files / "mine.toml"))
    limit = config.sampling.max_response_tokens
    attempts = [
        Attempt("How many?", ("12",), r"\boxed{12} pears", tokens=5, row={"unit": "pears"}),
        Attempt("How many?", ("12",), r"\boxed{13}", tokens=limit - 12, row={"unit": "pears"}),
        Attempt("How many?", ("12",), r"\boxed{12} apples", "length", tokens=limit),
    ]
    with open_rewards(config) as rewards:
        verdicts = rewards.grade(attempts)
    assert [v.parts for v in verdicts] == [
        {"math": 1.0, "overlong": 0.0, "names_its_unit": 2.0},
        {"math": 0.0, "overlong": -0.5, "names_its_unit": 0.0},
        {"math": 0.0, "overlong": -1.0, "names_its_unit": 0.0},
    ]
    assert [v.reward for v in verdicts] == pytest.approx([1.2, -0.25, -0.5])
    assert [v.right for v in verdicts] == [True, False, False]


def test_the_trial_prints_what_it_says(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(files / "try_it.py"))
    (said,) = re.findall(r"print\(.*\)  # (.*)", PAGE)
    assert capsys.readouterr().out.strip() == said


def test_a_verdict_says_what_is_right() -> None:
    with build_rewards([("my_tests:passes", 1.0, {})], workers=1) as rewards:
        rows = [Attempt("", (), text, row={"words": ["a", "b", "c", "d"]}) for text in ("a b c", "a b c d")]
        assert [(v.reward, v.right, v.rule) for v in rewards.grade(rows)] == [
            (0.75, False, "words"),
            (1.0, True, "words"),
        ]


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["response"] == "break":
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"grade": len(asked["response"]) / 10}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_judge_asks_a_real_service() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {"url": f"http://127.0.0.1:{server.server_port}"}
        with build_rewards([("my_judge:judge", 1.0, options)], concurrency=4) as rewards:
            verdicts = rewards.grade([Attempt("p", (), text) for text in ("a" * 7, "break", "", "a")])
        server.shutdown()
    assert [v.reward for v in verdicts] == [0.7, 0.0, 0.0, 0.1]
    assert [v.error for v in verdicts] == [None, "HTTPError: HTTP Error 503: Service Unavailable", None, None]


def test_what_a_function_declares_holds() -> None:
    entries = [("my_declared:short", 1.0, {}), ("my_declared:rare", 1.0, {})]
    attempts = [Attempt("", (), text, tokens=len(text)) for text in ["same"] * 9 + ["other"]]
    attempts.append(Attempt("", (), "x" * 10, "length", tokens=10))
    with build_rewards(entries, workers=1, knobs={"max_response_tokens": 10}) as rewards:
        verdicts = rewards.grade(attempts)
    assert [v.parts["short"] for v in verdicts] == [-0.4] * 9 + [-0.5, -1.0]
    assert [v.parts["rare"] for v in verdicts] == pytest.approx([1 / 9] * 9 + [1.0, 0.0])
