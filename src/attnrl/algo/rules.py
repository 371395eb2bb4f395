"""Branching rules by name: the paper's and the rivals', and those that separate attention from position."""

from __future__ import annotations

from collections.abc import Callable

from attnrl.algo import branching, position

RULES: dict[str, Callable[..., tuple[int, ...]]] = {**branching.RULES, **position.RULES}
