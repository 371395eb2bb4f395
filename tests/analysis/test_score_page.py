"""The score view, in a real Chromium."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attnrl.analysis.score_page import HeadMap, build_score_page, map_page, response_page
from attnrl.checkpoint import write_whole
from browser import BINARY, MISSING, Browser

ATTACK = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"


def steps(n: int) -> list[dict[str, object]]:
    rows = []
    for k in range(n):
        text = f"{ATTACK} step {k}\n\n"
        why = "first" if k == 0 else "low"
        rows.append({"step": k, "start": 10 * k, "stop": 10 * k + 10, "text": text, "fci": 0.5 / (k + 1), "why": why})
        rows[-1] |= {"entropy": 0.1 * k, "position_null": 0.25 / (k + 1), "branch_point": k == 2}
    return rows


def test_long_maps_are_coarse_and_keep_their_peaks() -> None:
    alpha = np.zeros((400, 400), dtype=np.float32)
    alpha[399, 7], alpha[5, 5] = 0.5, 0.9
    page = map_page(HeadMap(3, 1, alpha))
    assert (page["run"], len(page["rows"])) == (3, 134)
    assert page["rows"][133][2] == 0.5
    assert max(max(row) for row in page["rows"]) == 0.5  # the diagonal is left out


@pytest.mark.skipif(BINARY is None, reason=MISSING)
def test_in_the_browser(tmp_path: Path) -> None:
    alpha = np.tril(np.random.default_rng(0).random((12, 12)).astype(np.float32))
    shown = response_page("a", ATTACK, steps(12), HeadMap(1, 2, alpha)), response_page("b", "a prompt", steps(3), None)
    page = write_whole(tmp_path / "score.html", build_score_page("M", shown, 4))
    browser = Browser()
    try:
        browser.open(page.as_uri())
        assert ATTACK in browser.text(".problem")
        assert browser.run("document.querySelectorAll('.step').length") == 12
        gauge = browser.text('[data-step="1"] .gauge')
        assert "FCI 0.25" in gauge
        assert "2× uniform" in gauge
        assert "under the quantile" in gauge
        assert browser.run("document.querySelectorAll('.step.branchy').length") == 1
        assert "layer 2, head 3" in browser.text("figure:has(canvas)")
        peaks = browser.run("[...document.querySelectorAll('.peaks li')].map(li => li.innerText)")
        assert len(peaks) == 8
        assert all(" 2× uniform" in text and ATTACK[:20] in text for text in peaks)  # 0.5 / (k + 1) of 0.25 / (k + 1)
        browser.click(".peaks li:last-child button")
        number = int(peaks[-1].split()[1]) - 1
        place = f"document.querySelector('[data-step=\"{number}\"]').getBoundingClientRect()"
        browser.wait(f"{place}.top >= 0 && {place}.bottom <= innerHeight")
        assert browser.run("window.attacked") is None
        browser.press("n")
        browser.wait("document.querySelectorAll('.step').length === 3")
        assert browser.run("location.hash") == "#response/1"
        browser.size(390, 844, phone=True)
        assert browser.run("document.documentElement.scrollWidth") <= 390
        assert browser.errors == []
    finally:
        browser.close()
