"""The HTML page over run directories, shared by `attnrl report` (one file) and `attnrl view` (a local server).

Model output is hostile. It reaches the page as JSON that is never executed, with every `<` escaped; the page's own
script puts it on screen as text, never as markup; and a content security policy lets nothing run but that script, known
by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from attnrl.algo.reasons import PROMPT_REASONS, STEP_REASONS, TREE_REASONS
from attnrl.analysis.curves import curves, headline
from attnrl.analysis.figures import DRAWN, SECTIONS
from attnrl.analysis.records import RunRecord
from attnrl.checkpoint import finite
from attnrl.version import __version__

SCRIPTS = ("charts.js", "table.js", "trees.js", "report.js")


def render(
    kind: str, title: str, payload: dict[str, Any], scripts: Sequence[str] = SCRIPTS, connect: str = "'none'"
) -> str:
    """The page of a payload; `connect` is where its script may send requests to."""
    style, script = asset("report.css"), "\n".join(asset(name) for name in scripts)
    parts = {
        "kind": kind,
        "style": style,
        "style_hash": source_hash(style),
        "script": script,
        "script_hash": source_hash(script),
        "connect": connect,
        "title": html.escape(title),
        "data": embedded(payload),
    }
    # one pass, so that nothing inserted is ever searched for marks again
    return re.sub(r"@(\w+)@", lambda mark: parts[mark.group(1)], asset("report.html"))


def shell(runs: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What every page is given: its runs, the figures to draw, and the reasons in words."""
    return {
        "version": __version__,
        "runs": list(runs),
        "sections": [asdict(section) for section in SECTIONS],
        "drawn": sorted(DRAWN),
        "reasons": {"prompt": PROMPT_REASONS, "tree": TREE_REASONS, "step": STEP_REASONS},
        **more,
    }


def run_page(record: RunRecord, points: int, fci: dict[str, Any] | None) -> dict[str, Any]:
    """One run: its headline, curves of at most `points` points, and which iterations have forests."""
    return {
        "name": record.name,
        "branches": record.branches,
        "headline": headline(record),
        **curves(record, points),
        "fci": fci,
        "recorded": [int(file.stem) for file in record.forest_files],
        "config": record.config,
        "environment": record.environment,
    }


def embedded(value: Any) -> str:
    """The value as JSON that no HTML parser can mistake for markup.

    >>> embedded("</script><!--")
    '"\\\\u003c/script\\\\u003e\\\\u003c!--"'
    """
    text = json.dumps(finite(value), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def source_hash(source: str) -> str:
    """The source's hash as a content security policy writes it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def asset(name: str) -> str:
    """A file of this package."""
    return (resources.files("attnrl.analysis") / name).read_text("utf-8")
