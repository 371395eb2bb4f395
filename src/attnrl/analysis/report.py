"""The HTML report of run directories: one file that needs no network, no server and no other file.

Model output is hostile. It reaches the page as JSON in a script element that is never executed, with every `<`
escaped; the page's own script puts it on screen as text, never as markup; and a content security policy lets nothing
run but that script, known by its hash.
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
from pathlib import Path
from typing import Any

from attnrl.analysis.curves import POINTS, curves, headline
from attnrl.analysis.figures import DRAWN, SECTIONS
from attnrl.analysis.pages import fci_by_position, forest_pages
from attnrl.analysis.records import RunRecord, distinct_names, read_run
from attnrl.errors import ConfigError, MissingFileError
from attnrl.version import __version__

SCRIPTS = ("charts.js", "trees.js", "report.js")


def build_report(run_dirs: Sequence[Path]) -> str:
    """The report of one run, or of several to compare, as a self-contained HTML page."""
    if not run_dirs:
        raise MissingFileError("name at least one run directory")
    paths = [Path(path) for path in run_dirs]
    for path in paths:
        if not path.is_dir():
            raise MissingFileError(f"run directory {path} does not exist")
    names = distinct_names(paths)
    return render([read_run(path, name) for path, name in zip(paths, names, strict=True)])


def write_report(run_dirs: Sequence[Path], output: Path) -> Path:
    """The file the report was written to, whole or not at all."""
    if output.is_dir():
        raise ConfigError(f"--output {output} is a directory; name a file, for example {output / 'report.html'}")
    page = build_report(run_dirs)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.tmp")
    unfinished.write_text(page, "utf-8")
    unfinished.replace(output)
    return output


def render(records: Sequence[RunRecord]) -> str:
    """The page of these records."""
    style, script = _asset("report.css"), "\n".join(_asset(name) for name in SCRIPTS)
    parts = {
        "style": style,
        "style_hash": source_hash(style),
        "script": script,
        "script_hash": source_hash(script),
        "title": html.escape(" · ".join(record.name for record in records)),
        "data": embedded(payload(records)),
    }
    # one pass, so that nothing inserted is ever searched for marks again
    return re.sub(r"@(\w+)@", lambda mark: parts[mark.group(1)], _asset("report.html"))


def payload(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Everything the page shows, as plain values."""
    limit = min(400, POINTS // len(records))
    runs = [
        {
            "name": record.name,
            "headline": headline(record),
            **curves(record, limit),
            "fci": fci_by_position(record.forest_files),
            "forest_files": len(record.forest_files),
            "config": record.config,
            "environment": record.environment,
        }
        for record in records
    ]
    sections = [asdict(section) for section in SECTIONS]
    return {
        "version": __version__,
        "runs": runs,
        "sections": sections,
        "drawn": sorted(DRAWN),
        "forests": forest_pages(records),
    }


def embedded(value: Any) -> str:
    """The value as JSON that no HTML parser can mistake for markup.

    >>> embedded("</script><!--")
    '"\\\\u003c/script\\\\u003e\\\\u003c!--"'
    """
    text = json.dumps(finite(value), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: Any) -> Any:
    """The value with None for every number JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0.0 else value


def source_hash(source: str) -> str:
    """The source's hash as a content security policy writes it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _asset(name: str) -> str:
    return (resources.files("attnrl.analysis") / name).read_text("utf-8")
