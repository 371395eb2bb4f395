"""Files that all machines must see, asked as ranks are: each machine looks at the same paths by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnrl.errors import ConfigError
from attnrl.ranks.machines import seeing
from attnrl.ranks.verbs import look


def asking(blind_to: str):
    """Two machines, of which the second has nothing under one path."""

    def ask(paths: tuple[str, ...]) -> list[tuple[str, list[str]]]:
        _, missing = look(None, paths)
        return [("one", missing), ("two", missing + [p for p in paths if p.startswith(blind_to)])]

    return ask


def test_a_machine_that_does_not_see_a_path_is_named_with_it(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    assert seeing(asking("/elsewhere"), [model], run) == {"one", "two"}
    assert seeing(asking(str(run)), [model], None) == {"one", "two"}
    with pytest.raises(ConfigError, match=rf"machine two does not see {run}/\.seen-\S+: .* that all machines share"):
        seeing(asking(str(run)), [model], run)
    with pytest.raises(ConfigError, match=f"machine two does not see {model}: "):
        seeing(asking(str(model)), [model], run)
    with pytest.raises(ConfigError, match=r"machine one does not see .*nowhere"):
        seeing(asking("/elsewhere"), [model, tmp_path / "nowhere"], None)
    assert list(run.iterdir()) == []
