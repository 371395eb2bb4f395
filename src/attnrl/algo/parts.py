"""Named parts: from a name in a config to a function with its options bound.

A name without a colon is one of ours; `package.module:function` is the user's own. Knobs are offered to every part and
taken by those whose signature has them; options were written for this part and must all be taken.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def bind(
    table: Mapping[str, Callable[..., Any]], name: str, options: Mapping[str, Any], knobs: Mapping[str, Any]
) -> Callable[..., Any]:
    """The part called `name` with knobs and options bound. Raises ValueError with the choices at hand.

    >>> bind({"add": lambda x, *, y, z=0: x + y + z}, "add", {"z": 1}, {"y": 2, "unused": 3})(10)
    13
    """
    part = find(table, name)
    taken = inspect.signature(part).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    known = [n for n, p in taken.items() if p.kind is p.KEYWORD_ONLY]
    if not takes_any and (unknown := [o for o in options if o not in known]):
        raise ValueError(f"{name!r} has no option {unknown[0]!r}; it has: {', '.join(known) or 'none'}")
    offered = {k: v for k, v in knobs.items() if k in known}
    return partial(part, **{**offered, **options})


def find(table: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    """The function called `name`: ours, or the user's own by `package.module:function`."""
    if ":" not in name:
        if name not in table:
            raise ValueError(
                f"unknown name {name!r}; known: {', '.join(table)}, or your own as package.module:function"
            )
        return table[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # the last two: no module, a relative one
        raise ValueError(f"cannot import {name!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} is not a function but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function
