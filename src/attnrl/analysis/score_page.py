"""The score view: responses with their steps shaded by FCI, beside the position null, the entropy, and the step-to-step
attention of the head that decides. One HTML file. Paper: Fig. 2 and the case of the appendix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnrl.analysis.curves import clean
from attnrl.analysis.page import render, shell
from attnrl.analysis.pages import VISIBLE
from attnrl.types import counted

SCRIPTS = ("charts.js", "table.js", "trees.js", "score.js")
CELLS = 160  # of the attention map, each way: a longer response is shown by runs of steps


@dataclass(frozen=True, slots=True, eq=False)
class HeadMap:
    """The step-to-step attention of one head."""

    layer: int
    head: int
    alpha_SS: NDArray[np.float32]


def build_score_page(model: str, pages: Sequence[dict[str, Any]], delta: int) -> str:
    """The page of these responses (`response_page` each), model text as text."""
    payload = shell([], forests=[], pages=[], responses=list(pages), model=model, delta=delta)
    return render("score", f"{model}: {counted(len(pages), 'response')}", payload, SCRIPTS)


def response_page(name: str, prompt: str, steps: Sequence[dict[str, Any]], head: HeadMap | None) -> dict[str, Any]:
    """One response, its `steps` as `attnrl.score` gives them, as plain values: a step is [start, stop, text, FCI,
    entropy, position null, why, branch point].
    """
    rows = [
        [
            *(step["start"], step["stop"], step["text"].translate(VISIBLE)),
            *(clean(step["fci"]), clean(step["entropy"]), clean(step["position_null"])),
            *(step.get("why") or "", bool(step["branch_point"])),
        ]
        for step in steps
    ]
    page: dict[str, Any] = {"name": name, "prompt": prompt.translate(VISIBLE), "steps": rows}
    return page if head is None else {**page, "map": map_page(head)}


def map_page(found: HeadMap) -> dict[str, Any]:
    """The attention map, coarse enough to draw: the largest entry of each cell stands for it."""
    size = len(found.alpha_SS)
    run = max(1, -(-size // CELLS))
    cells = -(-size // run)
    padded = np.zeros((cells * run, cells * run), dtype=np.float32)
    padded[:size, :size] = np.tril(found.alpha_SS, -1)  # a step's attention to itself would hide all else
    coarse = padded.reshape(cells, run, cells, run).max(axis=(1, 3))
    rows = [[clean(float(v)) for v in row[: i + 1]] for i, row in enumerate(coarse)]
    return {"layer": found.layer, "head": found.head, "run": run, "rows": rows}
