"""What a run directory says, read and checked: config, environment, metrics, and the names of its forest files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnrl.algo.adaptive import most_points
from attnrl.algo.reasons import declared_by
from attnrl.algo.rules import RULES
from attnrl.errors import DataError, MissingFileError


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """The record of one run, as far as it has come."""

    name: str  # of the directory, longer where two runs share it
    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, float]]  # one dict an iteration, in order
    forest_files: tuple[Path, ...]  # oldest iteration first

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a dotted config key."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    @property
    def branches(self) -> bool:
        """Whether the run's method makes branches at all: what its rule declares, as recorded, or as a rule of ours
        declares it where nothing is on record.
        """
        declared = [row["trees/most_points"] for row in self.metrics if "trees/most_points" in row]
        rule = RULES.get(str(self.setting("algo.rule")))
        return (declared[-1] if declared else rule and most_points(rule)) != 0

    @property
    def rule(self) -> dict[str, Any]:
        """What the run's rule declares of itself, as recorded, or as a rule of ours does where nothing is on record."""
        ours = RULES.get(str(self.setting("algo.rule")))
        found: dict[str, Any] = self.environment.get("rule") or (
            declared_by(ours) if ours is not None else {"reads": [], "by_quantile": False}
        )
        return found

    @property
    def preset(self) -> str | None:
        """The preset named on the command line of `attnrl train`; None where the run was started otherwise."""
        command = [str(word) for word in self.environment.get("command", [])]
        if "train" not in command:
            return None
        after = command[command.index("train") + 1 :]
        return after[0] if after and not after[0].startswith("-") else None


def read_run(path: Path, name: str | None = None, *, begun: bool = True) -> RunRecord:
    """The record of a run directory; the first thing that is missing or broken is an error that names it.

    Without `begun` a run whose first iteration has not finished yet is a record without metrics.
    """
    if path.is_file():
        raise MissingFileError(f"{path} is a file, no run directory; give the folder that it lies in")
    if not path.is_dir():
        raise MissingFileError(f"run directory {path} does not exist; `attnrl train ... --run-dir {path}` makes it")
    metrics = path / "metrics.jsonl"
    if begun and not metrics.is_file():
        raise MissingFileError(
            f"{path} holds no metrics.jsonl: it is no run directory, or its first iteration has not finished yet"
        )
    return RunRecord(
        name=name or path.resolve().name,
        path=path,
        config=_read_object(path / "config.json"),
        environment=_read_object(path / "environment.json") if (path / "environment.json").exists() else {},
        metrics=read_metrics(metrics, begun=begun) if metrics.is_file() else [],
        forest_files=tuple(sorted(p for p in (path / "forests").glob("*.parquet") if p.stem.isdigit())),
    )


def read_metrics(file: Path, *, begun: bool = True) -> list[dict[str, float]]:
    """One dict an iteration; a last line without its line break was torn by a kill and is left out."""
    lines = file.read_text("utf-8", errors="replace").split("\n")[:-1]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}:{number}: not a JSON object ({error.msg}); delete or repair the line") from None
        if not isinstance(row, dict) or not isinstance(row.get("iteration"), int | float):
            raise DataError(f"{file}:{number}: not an object with a number `iteration`; delete or repair the line")
        rows.append(row)
    if begun and not rows:
        raise DataError(f"{file} has no finished iteration yet; report the run once its first one is done")
    return rows


def distinct_names(paths: list[Path]) -> list[str]:
    """The shortest tails of the paths that tell them apart.

    >>> distinct_names([Path("/runs/a/demo"), Path("/runs/b/demo")])
    ['a/demo', 'b/demo']
    """
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        twice = next(p for i, p in enumerate(paths) if parts[i] in parts[:i])
        raise DataError(f"run directory {twice} is named twice")
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths have different tails")


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise MissingFileError(f"{file.parent} holds no {file.name}: it is no run directory, or an incomplete copy")
    try:
        value = json.loads(file.read_text("utf-8", errors="replace"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{error.lineno}: not valid JSON ({error.msg})") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: not a JSON object")
    return value
