"""Tiles that a GPU has shared memory for: ours were chosen on one with 227 KiB a multiprocessor, others have 99."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from triton.runtime.errors import OutOfResources

Tile = TypeVar("Tile")
_fits: dict[Hashable, int] = {}  # the number of the first tile that fits, where it is not the first one


def launch(key: Hashable, tiles: Sequence[Tile], run: Callable[[Tile], object]) -> None:
    """Launches a kernel with the first of `tiles` that fits, the largest first; `key`: what its size depends on."""
    while True:
        at = _fits.get(key, 0)
        try:
            run(tiles[at])
            return
        except OutOfResources:
            if at + 1 == len(tiles):
                raise
            _fits[key] = at + 1
