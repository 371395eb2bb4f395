"""How fast the pages open and scroll in a real Chromium, as JSON: `attnrl view` over a large made-up run, or one file.

    python benchmarks/pages.py view RUN_DIR [--iterations 500] [--prompts 64] [--tokens 8192]
    python benchmarks/pages.py file PAGE.html

`view` makes the run where RUN_DIR does not exist: 30 leaves a prompt, 60 steps a trunk, short texts but for the last
iteration, whose rollouts have `tokens` tokens each. `file` opens a page of `attnrl score --html` or `attnrl report`.
Frames are the times between frames while the page scrolls, which on a busy machine is mostly waiting; work is the
processor time of one such move, script and layout, measured apart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attnrl.analysis.view import open_view
from attnrl.config import load_config
from attnrl.run import ROWS_PER_GROUP, forest_table, open_run
from attnrl.types import (
    Branch,
    Forest,
    Prompt,
    Rollout,
    Scores,
    Step,
    Tree,
    Trunk,
    Verdict,
    as_floats,
    as_ids,
)
from browser import Browser

STEPS, TREES, POINTS, WIDTH = 60, 6, 2, 2
WORDS = (
    "so",
    "the",
    "sum",
    "of",
    "both",
    "sides",
    "is",
    "what",
    "we",
    "had",
    "and",
    "the",
    "next",
    "term",
    "is",
    "even",
)
MOVES = 150


def rollout(rng: np.random.Generator, tokens: int) -> Rollout:
    return Rollout(as_ids(rng.integers(1, 20_000, tokens)), as_floats(-rng.exponential(0.4, tokens)), "stop", 0)


def forest(rng: np.random.Generator, number: int, tokens: int) -> Forest:
    """Six trunks, two points each, two branches a point: 30 leaves."""
    trees = []
    for _ in range(TREES):
        drawn = rollout(rng, tokens)
        starts = np.linspace(0, tokens, STEPS, endpoint=False).astype(int).tolist()
        steps = tuple(Step(a, b) for a, b in zip(starts, [*starts[1:], tokens], strict=True))
        fci = rng.gamma(1.5, 0.02, STEPS) * np.linspace(1.4, 0.6, STEPS)
        trunk = Trunk(drawn, verdict(rng), steps, Scores(drawn.logprobs, as_floats(rng.random(tokens)), as_floats(fci)))
        points = [starts[k] for k in sorted(rng.choice(np.arange(1, STEPS - 4), POINTS, replace=False).tolist())]
        grown = [Branch(p, rollout(rng, tokens - p), verdict(rng)) for p in points for _ in range(WIDTH)]
        trees.append(Tree(trunk, tuple(grown)))
    problem = f"Problem {number}: how many even terms has the sequence {rng.integers(1, 99, 6).tolist()}?"
    return Forest(Prompt(f"uid{number:05d}", as_ids([1]), ("9",), problem), tuple(trees))


def verdict(rng: np.random.Generator) -> Verdict:
    right = bool(rng.random() < 0.5)
    return Verdict(float(right), "number", "9" if right else "7")


def make_run(path: Path, iterations: int, prompts: int, tokens: int) -> None:
    """A run of that size: eight different iterations of short texts over and over, and a last one of full length."""
    rng = np.random.default_rng(0)
    config = load_config("attnrl_1p5b").model_dump(mode="json")
    run = open_run(path, config, resume=False)

    def decode(ids: np.ndarray) -> str:
        return "".join("\n\n" if i % 137 == 0 else f" {WORDS[i % len(WORDS)]}" for i in ids.tolist())

    short = [forest_table(0, [forest(rng, n, 90) for n in range(prompts)], decode) for _ in range(8)]
    for i in range(1, iterations + 1):
        if i < iterations:
            table = short[i % len(short)]
        else:
            table = forest_table(i, [forest(rng, n, tokens) for n in range(prompts)], decode)
        table = table.set_column(0, table.schema.field(0), pa.array([i] * table.num_rows, pa.int32()))
        file = path / "forests" / f"{i:06d}.parquet"
        pq.write_table(table, file, compression="zstd", row_group_size=ROWS_PER_GROUP)
        row = {
            "iteration": float(i),
            "policy/kl": 0.001 * i,
            "generate/total_tokens": 1e7 * i,
            "seconds/generate": 90.0,
        }
        row |= {"seconds/iteration": 100.0, "policy/entropy": 0.6 - 0.0005 * i, "batch/prompts": float(prompts)}
        run.log(row | ({"eval/tasks/pass@1": 0.3 + 0.0008 * i} if i % 25 == 0 else {}))
    run.close()


def spread(values: list[float]) -> list[float]:
    """Median and 95th percentile, in milliseconds."""
    return [round(median(values), 1), round(quantiles(values, n=20)[-1], 1)]


def scrolled(browser: Browser, what: str, pixels: int) -> dict[str, Any]:
    """Milliseconds between frames while `what` scrolls so many pixels a frame, and of work for each move."""
    move = f"const box = {what}; const far = () => box.scrollTop + box.clientHeight + {pixels} > box.scrollHeight;"
    move += f"const go = () => {{ if (far()) box.scrollTop = 0; else box.scrollTop += {pixels}; }};"
    frames = browser.run(
        f"new Promise(done => {{ {move} const times = []; const step = at => {{ times.push(at); go();"
        f"times.length > {MOVES} ? done(times) : requestAnimationFrame(step); }}; requestAnimationFrame(step); }})"
    )
    work = browser.run(
        f"(() => {{ {move} const times = []; for (let i = 0; i < {MOVES}; i++) {{"
        "const start = performance.now(); go();"
        "box.dispatchEvent(new Event('scroll')); box.getBoundingClientRect(); times.push(performance.now() - start); }"
        "return times; })()"
    )
    return {
        "frame_ms": spread([b - a for a, b in pairwise(frames)]),
        "work_ms": spread(work),
    }


def measure_view(path: Path, pictures: Path | None) -> dict[str, Any]:
    browser, found = Browser(), {}
    start = time.perf_counter()
    view = open_view([path])
    view.start()
    try:
        browser.call("Page.navigate", url=view.url + "#trees")
        browser.wait("document.querySelector('tbody tr[data-key]') !== null")
        found["first_rows_s"] = time.perf_counter() - start
        browser.wait("/of [0-9,]+ forests of /.test(document.querySelector('#count').innerText)", 300)
        found["all_rows_s"] = time.perf_counter() - start
        found["rows"] = browser.text("#count")
        start = time.perf_counter()
        browser.call("Page.navigate", url="about:blank")
        browser.call("Page.navigate", url=view.url + "#trees")
        browser.wait("document.querySelector('tbody tr[data-key]') !== null")
        found["again_first_rows_s"] = time.perf_counter() - start
        browser.wait("/of [0-9,]+ forests of /.test(document.querySelector('#count').innerText)", 300)
        start = time.perf_counter()
        browser.click('th[data-column="value"] button')
        browser.wait("document.querySelector('th[data-column=value]').ariaSort !== 'none'")
        found["sort_s"] = time.perf_counter() - start
        found["scroll_100_rows_a_frame"] = scrolled(browser, "document.querySelector('.scroller')", 3400)
        found["scroll_3_rows_a_frame"] = scrolled(browser, "document.querySelector('.scroller')", 100)
        start = time.perf_counter()
        last = max(int(file.stem) for file in (path / "forests").glob("*.parquet"))
        browser.run(f"location.hash = '#tree/0/{last}/0'")
        browser.wait("document.querySelectorAll('[data-step]').length > 0")
        found["open_forest_s"] = time.perf_counter() - start
        found["scroll_forest"] = scrolled(browser, "document.scrollingElement", 900)
        browser.press("b")
        found["scroll_forest_all_branches_open"] = scrolled(browser, "document.scrollingElement", 900)
        if pictures:
            look(
                browser, pictures, {name: view.url + "#" + name for name in ("", "curves", "trees", f"tree/0/{last}/0")}
            )
        found["console_errors"] = browser.errors
    finally:
        view.close()
        browser.close()
    return found


def measure_file(page: Path, pictures: Path | None) -> dict[str, Any]:
    browser = Browser()
    try:
        start = time.perf_counter()
        browser.open(page.absolute().as_uri())
        browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found: dict[str, Any] = {"open_s": time.perf_counter() - start, "megabytes": page.stat().st_size / 1e6}
        found["steps"] = browser.run("document.querySelectorAll('.step').length")
        found["elements"] = browser.run("document.querySelectorAll('*').length")
        found["scroll_a_screen_a_frame"] = scrolled(browser, "document.scrollingElement", 900)
        found["scroll_100_pixels_a_frame"] = scrolled(browser, "document.scrollingElement", 100)
        if pictures:
            look(browser, pictures, {"": page.absolute().as_uri()})
        return found | {"console_errors": browser.errors}
    finally:
        browser.close()


def look(browser: Browser, folder: Path, urls: dict[str, str]) -> None:
    """Pictures of the pages to look at: light, dark, and on a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, url in urls.items():
        for kind, width, height in (("light", 1280, 900), ("dark", 1280, 900), ("phone", 390, 844)):
            browser.size(width, height, phone=kind == "phone")
            browser.dark(kind == "dark")
            browser.call("Page.navigate", url="about:blank")
            browser.open(url)
            time.sleep(1.5)
            browser.screenshot(folder / f"{name.replace('/', '_') or 'first'}_{kind}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("view", "file"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of the pages")
    options = parser.parse_args()
    if options.what == "view" and not options.path.exists():
        make_run(options.path, options.iterations, options.prompts, options.tokens)
    before = os.getloadavg()[0]
    measure = measure_view if options.what == "view" else measure_file
    found = measure(options.path, options.pictures)
    print(
        json.dumps(
            {"load_before": before, "load_after": os.getloadavg()[0], "cores": os.cpu_count(), **found}, indent=1
        )
    )


if __name__ == "__main__":
    main()
