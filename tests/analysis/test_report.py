from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from attnrl.algo.forest import unscored
from attnrl.analysis import build_report, write_report
from attnrl.analysis.figures import SECTIONS
from attnrl.analysis.forests import grouped, rebuild
from attnrl.analysis.page import embedded, source_hash
from attnrl.errors import ConfigError, DataError, MissingFileError
from attnrl.run import Run
from attnrl.types import Forest, Prompt, Tree, Trunk, Verdict, as_ids

HOSTILE = "</script><img src=x onerror=alert(1)>\"'`<!-- &amp; \x00\u2028 ${1} @data@ \\u003c"


KNOWN = {"html", "head", "meta", "title", "style", "script", "noscript", "body"}
KNOWN |= {"a", "header", "div", "p", "span", "button", "nav", "main"}


class Page(HTMLParser):
    """What a browser's parser makes of the page: elements, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self.inside.append(tag)
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data

    def handle_entityref(self, name: str) -> None:
        self.handle_data(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.handle_data(f"&#{name};")

    @property
    def data(self) -> dict[str, Any]:
        where = [a.get("id") for t, a in self.tags if t in ("script", "style", "title")].index("data")
        loaded: dict[str, Any] = json.loads(self.texts[where])
        return loaded


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        make_run(folder / "demo", iterations=6),
        make_run(folder / "demo_grpo", iterations=6, seed=1, estimator="grpo", rule="none"),
    ]


def test_one_file_that_asks_for_nothing_else(runs: list[Path]) -> None:
    text = build_report(runs)
    page = Page(text)
    assert {t for t, _ in page.tags} <= KNOWN
    assert not [a for _, attrs in page.tags for a in attrs if a in ("src", "style") or a.startswith("on")]
    assert [a["href"] for _, a in page.tags if "href" in a] == ["#main"]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|innerHTML|https?://(?!www\.w3\.org/2000/svg)", text)
    assert len(text.encode()) < 400_000


def test_only_the_pages_own_script_may_run(runs: list[Path]) -> None:
    page = Page(build_report(runs[:1]))
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    title, style, data, script = page.texts
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert f"style-src '{source_hash(style)}'" in policy
    assert f"script-src '{source_hash(script)}'" in policy
    assert "unsafe" not in policy
    assert title == "demo · attnrl report"
    assert json.loads(data)["runs"]


def test_what_the_page_is_given(runs: list[Path]) -> None:
    data = Page(build_report(runs)).data
    assert [run["name"] for run in data["runs"]] == ["demo", "demo_grpo"]
    demo = data["runs"][0]
    held = demo["held_out"][0]
    assert (held["accuracy"][0], held["accuracy"][-1]) == (0.25, 0.55)
    assert (held["low"][-1], held["high"][-1]) == (0.51, 0.6)
    assert demo["x"]["iteration"] == [0, 1, 2, 3, 4, 5, 6]
    assert demo["x"]["tokens"][-1] == 54_000
    rows = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    drawn = [row.get("trunks/valid") for row in rows]
    assert demo["metrics"]["trunks/valid"] == [v if v is None else pytest.approx(v, abs=1e-4) for v in drawn]
    assert [row[0] for row in data["forests"]] == [0] * 6 + [1] * 6  # by run
    assert {row[1] for row in data["forests"]} == {page["iteration"] for page in data["pages"]} == {1, 6}
    assert [row[3] for row in data["forests"]] == [page["uid"] for page in data["pages"]]
    assert [page["estimator"] for page in data["pages"]] == ["tree"] * 6 + ["grpo"] * 6
    for forest in data["pages"][:2]:
        assert {leaf["reward"] for t in forest["trees"] for leaf in (t, *t["branches"])} == {0, 1}


def test_figures_draw_metrics_that_training_logs(runs: list[Path]) -> None:
    logged = set(Page(build_report(runs[:1])).data["runs"][0]["metrics"])
    assert {f.key for s in SECTIONS for f in s.figures} <= logged


def hostile_run(path: Path, make_run: Callable[..., Path]) -> Path:
    """A run whose every text is hostile."""
    run = make_run(path, iterations=1)
    config = json.loads((run / "config.json").read_text())
    config["about"] = config["model"]["path"] = HOSTILE
    (run / "config.json").write_text(json.dumps(config))
    (run / "environment.json").write_text(json.dumps({"command": ["attnrl", "train", HOSTILE], "commit": HOSTILE}))

    first = rebuild(grouped(pq.read_table(run / "forests" / "000001.parquet").to_pylist())[0])
    verdict = Verdict(1.0, HOSTILE, HOSTILE)
    trees = tuple(Tree(Trunk(t.trunk.rollout, verdict, t.trunk.steps, t.trunk.scores), t.branches) for t in first.trees)
    forest = Forest(Prompt("<b>", as_ids([1]), (HOSTILE,), HOSTILE), trees)
    Run(run).save_forests(1, [forest], lambda ids: HOSTILE)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 2, "<script>alert(2)</script>": 1.0, "policy/kl": float("inf")}) + "\n")
        file.write(json.dumps({"iteration": 3, f"eval/{HOSTILE}/pass@1": 0.5}) + "\n")
    return run


def test_hostile_texts_stay_texts(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run = hostile_run(tmp_path / "<img src=x>@data@", make_run)
    text = build_report([run])
    page = Page(text)
    assert [t for t, _ in page.tags].count("script") == 2
    assert "img" not in [t for t, _ in page.tags]
    assert page.texts[0] == "&lt;img src=x&gt;@data@ · attnrl report"
    block = text.partition('id="data">')[2].partition("</script>")[0]
    assert not set("<>&\x00\u2028") & set(block)
    assert block.isascii()
    visible = HOSTILE.replace("\x00", "\u2400")
    data = page.data
    assert data["pages"][0]["problem"] == visible
    assert data["pages"][0]["trees"][0]["steps"][0][2] == visible
    assert data["runs"][0]["headline"]["about"] == HOSTILE
    assert HOSTILE in [h["benchmark"] for h in data["runs"][0]["held_out"]]


def test_numbers_json_does_not_know() -> None:
    assert embedded({"a": [float("nan"), float("inf"), 1.5]}) == '{"a":[null,null,1.5]}'


def test_a_run_without_forests(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run = make_run(tmp_path / "run", iterations=2)
    shutil.rmtree(run / "forests")
    data = Page(build_report([run])).data
    assert data["forests"] == []
    assert (data["runs"][0]["recorded"], data["runs"][0]["fci"]) == ([], None)


def test_forest_files_without_a_forest(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run = make_run(tmp_path / "run", iterations=2)
    for file in (run / "forests").glob("*.parquet"):
        Run(run).save_forests(int(file.stem), [], lambda ids: "")
    assert Page(build_report([run])).data["forests"] == []


def test_unscored_steps(tmp_path: Path, make_run: Callable[..., Path]) -> None:

    run = make_run(tmp_path / "run", iterations=1)
    rows = grouped(pq.read_table(run / "forests" / "000001.parquet").to_pylist())[0]
    first = rebuild(rows)
    trees = tuple(
        Tree(Trunk(t.trunk.rollout, t.trunk.verdict, t.trunk.steps, unscored(t.trunk.rollout, t.trunk.steps)))
        for t in first.trees
    )
    Run(run).save_forests(1, [Forest(first.prompt, trees)], lambda ids: "x")
    data = Page(build_report([run])).data
    assert {fci for t in data["pages"][0]["trees"] for _, fci, *_ in t["steps"]} == {None}
    assert data["runs"][0]["fci"] is None


def test_long_runs_stay_small(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run = make_run(tmp_path / "run", iterations=1)
    rng = np.random.default_rng(0)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    with (run / "metrics.jsonl").open("a") as file:
        for i in range(2, 3001):
            noisy = {k: v * (1 + rng.normal() / 9) for k, v in row.items() if not k.startswith("eval/")}
            file.write(json.dumps({**noisy, "iteration": i}) + "\n")
    text = build_report([run])
    shown = Page(text).data["runs"][0]
    assert (shown["rows"], shown["x"]["iteration"][-1]) == (3001, 3000)
    assert shown["drawn"] <= 402
    assert len(text) < 600_000


def test_write_report(tmp_path: Path, runs: list[Path]) -> None:
    output = tmp_path / "new" / "report.html"
    assert write_report(runs[:1], output) == output
    assert output.read_text("utf-8") == build_report(runs[:1])
    assert [p.name for p in output.parent.iterdir()] == ["report.html"]
    with pytest.raises(ConfigError, match="is a directory"):
        write_report(runs[:1], tmp_path)


def test_refused_before_anything_is_written(tmp_path: Path, runs: list[Path]) -> None:
    missing, twice = [runs[0], tmp_path / "no"], runs[:1] * 2
    for dirs, error in [([], MissingFileError), (missing, MissingFileError), (twice, DataError)]:
        with pytest.raises(error):
            write_report(dirs, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_chosen_part_of_the_trees(runs: list[Path]) -> None:
    data = Page(build_report(runs[:1], iterations=[3], forests=4)).data
    assert [row[1] for row in data["forests"]] == [3] * 4
    with pytest.raises(
        ConfigError, match=r"--iterations 5: demo has no forests of that iteration \(3 on record, 1 to 6\)"
    ):
        build_report(runs[:1], iterations=[5])


def test_a_run_that_learns_nothing_says_so_on_top(make_run: Callable[..., Path], tmp_path: Path) -> None:
    learns = make_run(tmp_path / "learns", iterations=4)
    idle = make_run(tmp_path / "idle", iterations=4)
    rows = [json.loads(line) for line in (idle / "metrics.jsonl").read_text().splitlines()]
    nothing = {"train/valid_samples": 0, "trunks/solve_none": 1, "trunks/solve_all": 0, "trunks/truncated_share": 1}
    rows = [row if row["iteration"] == 0 else {**row, **nothing} for row in rows]
    (idle / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(build_report([learns, idle]))
    data = next(json.loads(text) for text in page.texts if text.startswith('{"version"'))
    said = [run["headline"]["complaint"] for run in data["runs"]]
    assert said[0] == ""
    assert said[1].startswith("nothing trained in 4 of 4 iterations: all responses wrong, 100 % cut off at ")
    assert any("h.complaint" in text for text in page.texts), "the page's script shows it"
