"""`attnrl view` and the report, driven in a real Chromium; and the server by plain requests."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from attnrl.algo.reasons import Reasons
from attnrl.analysis import write_report
from attnrl.analysis.forests import grouped, rebuild
from attnrl.analysis.view import View, open_view
from attnrl.errors import ConfigError, MissingFileError
from attnrl.run import Run, open_run
from attnrl.types import Branch, Forest, Prompt, Rollout, Tree, Trunk, Verdict, as_floats, as_ids
from browser import BINARY, MISSING, Browser
from processes import wait_until

ATTACK = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"
needs_browser = pytest.mark.skipif(BINARY is None, reason=MISSING)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> Path:
    return make_run(tmp_path_factory.mktemp("view") / "demo", iterations=6)


@pytest.fixture
def served() -> Iterator[Callable[..., View]]:
    open_views: list[View] = []

    def serve(*paths: Path) -> View:
        view = open_view(paths)
        open_views.append(view)
        view.start()
        return view

    yield serve
    for view in open_views:
        view.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.size(1280)
    chromium.errors.clear()
    yield chromium
    assert chromium.errors == []


def forests_of(run: Path, iteration: int) -> list[list[dict[str, Any]]]:
    return grouped(pq.read_table(run / "forests" / f"{iteration:06d}.parquet").to_pylist())


def table_column(browser: Browser, name: str) -> list[str]:
    at = browser.wait(f"[...document.querySelectorAll('th')].findIndex(th => th.dataset.column === '{name}') + 1")
    cells = f"[...document.querySelectorAll('tr[data-key] td:nth-child({at})')].map(td => td.innerText)"
    found: list[str] = browser.wait(f"(c => c.length && c)({cells})")
    return found


@needs_browser
class TestInTheBrowser:
    def test_from_a_chart_to_a_tree_and_through_a_whole_branch(
        self, browser: Browser, served: Callable[..., View], run: Path
    ) -> None:
        browser.open(served(run).url)
        browser.wait("INDEX.all().length === 18 && runs[0].fci !== null && document.querySelector('.telling') !== null")
        browser.click('[data-place="training-accuracy"] > svg', across=0.95)  # the last iteration
        browser.wait("location.hash === '#trees?run=0&iteration=6'")
        browser.wait("document.querySelectorAll('tr[data-key]').length === 6")
        assert set(table_column(browser, "iteration")) == {"6"}
        browser.click("tr[data-key]")
        browser.wait("document.querySelector('.forest') !== null")
        _, run_number, iteration, number = browser.run("location.hash").split("/")[:4]
        rows = forests_of(run, int(iteration))[int(number)]
        assert (run_number, iteration) == ("0", "6")
        # the numbers are those of the file
        assert rows[0]["problem"] in browser.text(".problem")
        pills = browser.text(".pills")
        assert f"V(root) {np.mean([row['reward'] for row in rows]):.3f}" in pills
        assert f"4 trees, {len(rows)} leaves" in pills
        chosen = int(
            browser.run("[...document.querySelectorAll('[role=tab]')].findIndex(t => t.ariaSelected === 'true')")
        )
        trunk, *branches = [row for row in rows if row["tree"] == chosen]
        shown = browser.run("[...document.querySelectorAll('.step .text')].map(n => n.textContent)")
        assert shown == [text.strip() for text in trunk["step_texts"]]
        scores = re.findall(
            r"FCI ([\d.]+)", "\n".join(browser.run("[...document.querySelectorAll('.gauge')].map(n => n.innerText)"))
        )
        assert [float(s) for s in scores] == pytest.approx([float(f"{y:.3g}") for y in trunk["fci"]], rel=1e-3)
        # a whole branch can be read, word for word
        assert branches
        browser.press("b")
        browser.wait("[...document.querySelectorAll('details.branch')].every(d => d.open)")
        for n, branch in enumerate(branches):
            cells = f"[...document.querySelectorAll('[data-branch=\"{n}\"] [data-of=branch]')]"
            cells = browser.wait(f"{cells}.map(c => (c.lastChild?.textContent || ''))")
            assert "".join("".join(cells).split()) == "".join(branch["text"].split())
        box = "(n => n.scrollHeight <= n.clientHeight + 1)"
        assert browser.run(f"[...document.querySelectorAll('.problem, .text')].every({box})")  # nothing is clipped

    def test_sort_filter_and_search(self, browser: Browser, served: Callable[..., View], run: Path) -> None:
        browser.open(served(run).url + "#trees")
        browser.wait("document.querySelector('#count').innerText.startsWith('18 of 18')")
        forests = [rows for i in (1, 3, 6) for rows in forests_of(run, i)]
        values = sorted((float(np.mean([row["reward"] for row in rows])) for rows in forests), reverse=True)
        browser.click('th[data-column="value"] button')
        assert [float(v) for v in table_column(browser, "value")] == pytest.approx(values, abs=6e-4)
        browser.click('th[data-column="value"] button')
        assert [float(v) for v in table_column(browser, "value")] == pytest.approx(values[::-1], abs=6e-4)
        mixed = sum(0 < value < 1 for value in values)
        change = "s.value = 'mixed'; s.dispatchEvent(new Event('change'))"
        browser.run(f"(s => {{ {change} }})(document.querySelector('[name=outcome]'))")
        browser.wait(f"document.querySelector('#count').innerText.startsWith('{mixed} of 18')")
        # a word of one prompt alone
        browser.run("location.hash = '#trees'")
        browser.wait("document.querySelector('#count').innerText.startsWith('18 of 18')")
        browser.press("/")
        browser.type("problem 302:")
        browser.press("Enter")
        browser.wait("/^1 of 18 forests of/.test(document.querySelector('#count').innerText)")
        assert browser.run("document.querySelector('tr[data-key]').dataset.key") == "0/3/2"
        # the place has a link of its own
        assert "q=problem+302" in browser.run("location.hash")
        # entries that begin alike show where they differ
        assert table_column(browser, "problem") == ["… 302: how many coins does the box hold?"]

    def test_a_filter_that_cannot_be_read_is_said_and_filters_nothing(
        self, browser: Browser, served: Callable[..., View], run: Path
    ) -> None:
        browser.open(served(run).url + "#trees?iteration=abc&value_min=x&tokens_max=0.5e9")
        said = browser.wait("(t => t.startsWith('18 of 18') && t)(document.querySelector('#count').innerText)")
        assert "Iteration “abc” is not read: give 14 or 10-20" in said
        assert "V(root) “x” is not read: give a number" in said
        assert "tokens" not in said
        browser.run("location.hash = '#trees?iteration=1%20-%203'")
        browser.wait("/^12 of 18 forests of 3 iterations$/.test(document.querySelector('#count').innerText)")

    def test_the_keyboard_is_enough(self, browser: Browser, served: Callable[..., View], run: Path) -> None:
        browser.open(served(run).url)
        browser.wait("INDEX.all().length === 18")
        browser.press("3")
        browser.wait("document.querySelectorAll('tr[data-key]').length > 3")
        keys = browser.run("[...document.querySelectorAll('tr[data-key]')].map(tr => tr.dataset.key)")
        browser.wait("document.activeElement.classList.contains('scroller')")
        browser.press("ArrowDown", "ArrowDown", "Enter")
        browser.wait(f"location.hash.startsWith('#tree/{keys[2]}') && document.querySelector('.forest') !== null")
        browser.press("n")
        browser.wait(f"location.hash.startsWith('#tree/{keys[3]}')")
        browser.wait("document.querySelector('.picker').innerText.includes('4 of 18')")
        browser.press("]")
        browser.wait("/\\/\\d$/.test(location.hash)")
        browser.press("Escape")
        browser.wait("location.hash === '#trees'")
        assert browser.wait("document.querySelector('tr.cursor')?.dataset.key") == keys[2]  # where the table was left

    def test_live_while_a_run_writes(
        self, browser: Browser, served: Callable[..., View], tmp_path: Path, make_run: Callable[..., Path]
    ) -> None:
        """A run before its first iteration, then one iteration after the other: the open page follows."""
        source = make_run(tmp_path / "source", iterations=2)
        path = tmp_path / "growing"
        growing = open_run(path, json.loads((source / "config.json").read_text()), resume=False)
        browser.open(served(path).url)
        assert "No forests on record" in browser.text('[data-place="trees-to-look-at"]')
        logged = [json.loads(line) for line in (source / "metrics.jsonl").read_text().splitlines()]
        for metrics in logged:
            growing.log(metrics)
            if metrics["iteration"]:
                rows = forests_of(source, int(metrics["iteration"]))
                growing.save_forests(int(metrics["iteration"]), [rebuild(r) for r in rows], lambda ids: "so")
                n = 6 * int(metrics["iteration"])
                browser.wait(f"INDEX.all().length === {n}")
                browser.wait(f"runs[0].x.iteration.length === {int(metrics['iteration']) + 1}")
        browser.wait("document.querySelectorAll('.telling li').length > 0")
        browser.wait("document.querySelector('[data-place=\"training-accuracy\"] path') !== null")
        browser.run("location.hash = '#trees'")
        browser.wait("document.querySelector('#count').innerText.startsWith('12 of 12')")
        # a resumed run drops what came after its checkpoint: so does the page
        (path / "forests" / "000002.parquet").unlink()
        browser.wait("document.querySelector('#count').innerText.startsWith('6 of 6')")

    def test_reasons_are_said(
        self, browser: Browser, served: Callable[..., View], tmp_path: Path, make_run: Callable[..., Path]
    ) -> None:
        run = make_run(tmp_path / "run", iterations=1)
        first = rebuild(forests_of(run, 1)[0])
        bare = Forest(first.prompt, tuple(Tree(t.trunk) for t in first.trees))
        why = Reasons("filtered: mean FCI 0.012 under 0.015", ("filtered",) * len(bare.trees))
        Run(run).save_forests(1, [bare], lambda ids: "so", [why])
        browser.open(served(run).url + "#tree/0/1/0")
        assert "dropped by the filter (Eq. 8) (mean FCI 0.012 under 0.015)" in browser.text(".whypill")
        assert "This trunk was not branched: the prompt was dropped by the filter" in browser.text(".treewhy")
        assert "derived" not in browser.text(".treewhy")
        assert "first step" in browser.text('[data-step="0"]')
        assert "too near the end" in browser.run("[...document.querySelectorAll('[data-step]')].at(-1).innerText")

    def test_a_method_that_does_not_branch_says_so_instead_of_counting_branches(
        self, browser: Browser, served: Callable[..., View], tmp_path: Path, make_run: Callable[..., Path]
    ) -> None:
        for rule, estimator, said in (("none", "grpo", "does not branch"), ("fci", "tree", "3 of 4 trees branched")):
            run = make_run(tmp_path / estimator, iterations=1, rule=rule, estimator=estimator)
            view = served(run)
            browser.open(view.url)
            assert said in browser.text(".telling")
            browser.open(view.url + "#trees")
            browser.wait("document.querySelector('#count').innerText.startsWith('6 of 6')")
            at = browser.run("[...document.querySelectorAll('th')].findIndex(h => h.dataset.column === 'branched')")
            shown = f"[...document.querySelectorAll('tbody tr[data-key]')].map(r => r.cells[{at}].innerText)"
            cells = browser.run(shown)
            assert cells == ["3/4" if rule == "fci" else "–"] * 6
            browser.open(view.url + "#tree/0/1/0")
            shown = browser.text(".map")
            assert ("Response 1" in shown) == ("not branched" not in shown) == (rule == "none")
            assert ("4 responses" if rule == "none" else "4 trees, 14 leaves") in browser.text(".pills")
        browser.open(served(tmp_path / "grpo", run).url)
        assert "These runs drew" not in browser.text("main")  # both cost the same
        rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
        more = [{**row, "generate/total_tokens": 2 * row.get("generate/total_tokens", 0)} for row in rows]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
        browser.open(served(tmp_path / "grpo", run).url)
        assert "These runs drew 9k to 18k tokens: their last numbers are not at equal cost" in browser.text(".cost")
        grpo = served(tmp_path / "grpo")
        browser.open(grpo.url + "#tree/0/1/0")
        advantages = [tree["nodes"][0]["advantage"] for tree in grpo.watches[0].forest(1, 0)["trees"]]
        for advantage in advantages:
            assert f"A {advantage:+.3f}".replace("-", "−") in browser.text(".map")

    @pytest.mark.parametrize("kind", ["view", "report"])
    def test_model_text_is_always_text(
        self, kind: str, browser: Browser, served: Callable[..., View], tmp_path: Path, make_run: Callable[..., Path]
    ) -> None:
        run = make_run(tmp_path / "run", iterations=1)
        first = rebuild(forests_of(run, 1)[0])
        verdict = Verdict(1.0, ATTACK, ATTACK)
        trees = []
        for tree in first.trees:
            trunk = Trunk(tree.trunk.rollout, verdict, tree.trunk.steps, tree.trunk.scores)
            trees.append(Tree(trunk, tuple(Branch(b.point, b.rollout, verdict) for b in tree.branches)))
        forest = Forest(Prompt("<b>", as_ids([1]), (ATTACK,), ATTACK), tuple(trees))
        Run(run).save_forests(1, [forest], lambda ids: ATTACK, [Reasons(f"taught: {ATTACK}", (ATTACK,) * len(trees))])
        url = served(run).url if kind == "view" else write_report([run], tmp_path / "report.html").as_uri()
        there = {"#overview": ".telling", "#trees": "tr[data-key]", "#tree/0/1/0": ".forest", "#config": "pre"}
        for place, sign in there.items():
            browser.open(url)
            browser.run(f"location.hash = '{place}'")
            browser.wait(f"document.querySelector('{sign}') !== null")
            if sign == ".forest":
                browser.press("b")
                browser.wait("document.querySelector('.beside') !== null")
                assert ATTACK in browser.text(".problem")
                assert ATTACK in browser.text(".beside")
            assert browser.run("window.attacked") is None
            assert browser.run("document.querySelectorAll('main img, main script, main b > script').length") == 0

    def test_the_report_is_the_same_page(self, browser: Browser, tmp_path: Path, run: Path) -> None:
        browser.open(write_report([run], tmp_path / "report.html", iterations=[1, 6]).as_uri())
        browser.click('[data-place="training-accuracy"] > svg', across=0.95)
        browser.wait("location.hash === '#trees?run=0&iteration=6'")
        browser.click("tr[data-key]")
        browser.wait("document.querySelector('.forest .step') !== null")
        rows = forests_of(run, 6)[int(browser.run("location.hash").split("/")[3])]
        assert f"V(root) {np.mean([row['reward'] for row in rows]):.3f}" in browser.text(".pills")
        browser.run("location.hash = '#tree/0/3/0'")
        assert "not in this file" in browser.text(".empty")

    @pytest.mark.parametrize("width", [1280, 390])
    def test_nothing_hangs_over_the_edge(
        self, width: int, browser: Browser, served: Callable[..., View], run: Path
    ) -> None:
        browser.size(width, 844, phone=width < 500)
        url = served(run).url
        for place in ("#overview", "#curves", "#trees", "#tree/0/6/0", "#config"):
            browser.open(url)
            browser.run(f"location.hash = '{place}'")
            browser.wait("document.querySelector('main section, main .forest') !== null")
            assert browser.run("document.documentElement.scrollWidth") <= width, place

    def test_no_two_ticks_of_an_axis_read_the_same(
        self, browser: Browser, served: Callable[..., View], run: Path
    ) -> None:
        browser.open(served(run).url + "#curves")
        browser.wait("document.querySelectorAll('figure path').length > 20")
        figures = browser.run("[...document.querySelectorAll('figure')].map(f => f.outerHTML)")
        assert len(figures) >= 20
        for figure in figures:
            ticks = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end">([^<]+)</text>', figure)
            assert len(ticks) == len(set(ticks)), ticks


class TestTheServer:
    def ask(self, view: View, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", view.server.server_address[1], timeout=20)
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def test_it_answers_this_machine_alone_and_writes_nothing(self, served: Callable[..., View], run: Path) -> None:
        before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
        view = served(run)
        assert view.server.server_address[0] == "127.0.0.1"
        assert self.ask(view, "/")[0] == 200
        assert self.ask(view, "/", host="localhost:1")[0] == 200
        assert self.ask(view, "/", host="evil.example:80")[0] == 403  # a name of another site that points here
        assert self.ask(view, "/api/changes", host="evil.example")[0] == 403
        for path in ("/config.json", "/../config.json", "/forests/000001.parquet", "/api/else"):
            assert self.ask(view, path)[0] == 404
        assert self.ask(view, "/", method="HEAD") == (200, "")
        assert self.ask(view, "/nothing", method="HEAD") == (404, "")
        assert self.ask(view, "/", host="evil.example:80", method="HEAD") == (403, "")
        for method in ("POST", "PUT", "DELETE"):
            assert self.ask(view, "/", method=method)[0] == 501
        assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before

    def test_questions_it_cannot_answer(self, served: Callable[..., View], run: Path) -> None:
        view = served(run)
        for query, words in [
            ("forest?run=0&iteration=2&number=0", "demo has no forests of iteration 2"),
            ("forest?run=0&iteration=1&number=99", "6 forests, none numbered 100"),
            ("forest?run=7&iteration=1&number=0", "no run 7"),
            ("forest?run=0&iteration=x&number=0", "iteration must be a number"),
            ("forest?run=0&iteration=%C2%B2&number=0", "iteration must be a number"),
            ("forest?run=" + "9" * 5000 + "&iteration=1&number=0", "run must be a number"),
        ]:
            status, text = self.ask(view, f"/api/{query}")
            assert status == 404
            assert words in json.loads(text)["error"]

    def test_odd_addresses_are_answered(self, served: Callable[..., View], run: Path) -> None:
        view = served(run)
        assert self.ask(view, "/api/changes?have=%C2%B2")[0] == 200
        browser = HTTPConnection(*view.server.server_address[:2], timeout=60)
        browser.request("GET", "http://[", headers={"Host": "127.0.0.1:1"})
        assert browser.getresponse().status == 404
        browser.close()

    def test_a_forest_is_that_of_the_file(self, served: Callable[..., View], run: Path) -> None:
        page = json.loads(self.ask(served(run), "/api/forest?run=0&iteration=3&number=4")[1])
        rows = forests_of(run, 3)[4]
        assert page["uid"] == rows[0]["uid"]
        texts = ["".join(step[2] for step in tree["steps"]) for tree in page["trees"]]
        assert texts == [row["text"] for row in rows if row["kind"] == "trunk"]
        branches = ["".join(b["steps"]) for tree in page["trees"] for b in tree["branches"]]
        assert branches == [row["text"] for row in rows if row["kind"] == "branch"]

    def test_a_broken_file_is_named_and_the_rest_shown(
        self, served: Callable[..., View], tmp_path: Path, make_run: Callable[..., Path]
    ) -> None:
        run = make_run(tmp_path / "run", iterations=4)
        (run / "forests" / "000002.parquet").write_bytes(b"PAR1 torn")
        view = served(run)
        assert wait_until(lambda: len(view.watches[0].chunks) >= 3)
        chunks = json.loads(self.ask(view, "/api/changes?have=0&stamps=")[1])["runs"][0]["chunks"]
        found = {chunk["iteration"]: (len(chunk["rows"]), chunk["error"]) for chunk in chunks}
        assert (found[1], found[4]) == ((6, None), (6, None))
        assert "000002.parquet: not a readable forest file" in found[2][1]
        answer = self.ask(view, "/api/forest?run=0&iteration=2&number=0")[1]
        assert "000002.parquet: not a readable forest file" in json.loads(answer)["error"]

    def test_refused(self, tmp_path: Path, run: Path, served: Callable[..., View]) -> None:
        with pytest.raises(MissingFileError, match="does not exist"):
            open_view([tmp_path / "no"])
        (tmp_path / "other").mkdir()
        with pytest.raises(MissingFileError, match=r"holds no config\.json"):
            open_view([tmp_path / "other"])
        taken = served(run).server.server_address[1]
        with pytest.raises(ConfigError, match=f"--port {taken} cannot be used"):
            open_view([run], taken)
        another = open_view([run], taken, or_any=True)
        assert another.server.server_address[1] not in (0, taken)
        another.server.server_close()


def test_rollout_of_one_token_has_a_page(
    tmp_path: Path, make_run: Callable[..., Path], served: Callable[..., View]
) -> None:
    """The shortest response there is: one token, one step."""
    run = make_run(tmp_path / "run", iterations=1)
    first = rebuild(forests_of(run, 1)[0])
    trunk = first.trees[0].trunk
    short = Rollout(as_ids([5]), as_floats([-1.0]), "length", 0)
    scores = type(trunk.scores)(as_floats([-1.0]), as_floats([0.5]), as_floats([0.0]))
    tree = Tree(Trunk(short, Verdict(0.0, "truncated"), (type(trunk.steps[0])(0, 1),), scores))
    Run(run).save_forests(1, [Forest(first.prompt, (tree,))], lambda ids: "x")
    page = served(run).watches[0].forest(1, 0)
    assert page["reason"] == "all_cut_off: 1 response"
    assert page["trees"][0]["reason"] == "no_candidate: 1 step, and the trunk was cut off"
    assert page["trees"][0]["steps"] == [[0, 0, "x", 0.5, "first"]]
