"""Shards on disk, as the driver looks at them before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from attnrl.errors import MissingFileError
from attnrl.ranks.weights import check_shards


def test_shards_that_are_not_all_there_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    with pytest.raises(MissingFileError, match=r"holds no shards of weights: actor/\.metadata is missing"):
        check_shards(folder)
    dcp.save({"model": {"a": torch.ones(1000), "b": torch.zeros(10)}}, checkpoint_id=folder, no_dist=True)
    check_shards(folder)
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(MissingFileError, match=rf"distcp is missing or cut short; remove {tmp_path} to go on from"):
        check_shards(folder)
    file.write_bytes(whole)
    check_shards(folder)
    file.unlink()
    with pytest.raises(MissingFileError, match="distcp is missing or cut short"):
        check_shards(folder)
    file.write_bytes(whole)
    index = folder / ".metadata"
    whole = index.read_bytes()
    for part in (b"", whole[:1], whole[: len(whole) // 2], whole[:-1], bytes(len(whole))):
        index.write_bytes(part)
        with pytest.raises(MissingFileError, match=rf"\.metadata is missing or cut short; remove {tmp_path} to go on"):
            check_shards(folder)
