"""How far long work is, told to whoever watches: nobody, or a terminal (`console.live_line`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Watcher = Callable[[str, int, int], None]  # what is done, how much of it, of how much (0: not known); "": not now
_watchers: list[Watcher] = []


def tell(what: str, done: int = 0, of: int = 0) -> None:
    """Says how far the work is. Costs nothing where nobody watches.

    >>> said = []
    >>> with watched(lambda *told: said.append(told)):
    ...     tell("drawing", 3, 8)
    ...     with unwatched():
    ...         tell("drawing for something else", 1, 2)
    >>> tell("drawing", 4, 8)
    >>> said
    [('drawing', 3, 8), ('', 0, 0)]
    """
    for watcher in _watchers:
        watcher(what, done, of)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """While open, the watcher is told."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def unwatched() -> Iterator[None]:
    """While open, nobody is told: what goes on shows its own progress."""
    tell("")
    aside, _watchers[:] = _watchers[:], []
    try:
        yield
    finally:
        _watchers[:] = aside
