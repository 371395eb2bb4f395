"""Named parts: from a name in a config to a function with its options bound.

A name without a colon is one of ours; `package.module:function` is the user's own. Knobs are offered to every part and
taken by those whose signature has them; options were written for this part and must all be taken.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le

from attnrl.errors import listed, near

Part = TypeVar("Part", bound=Callable[..., Any])

Count = Annotated[int, Ge(1)]  # ranges of options, read by `config.check_options`
Share = Annotated[float, Gt(0), Le(1)]

READABLE = frozenset({"logprobs", "entropy", "fci"})  # what a scoring forward gives


def reads(*what: str) -> Callable[[Part], Part]:
    """Declares what of a scoring forward a part reads: "logprobs", "entropy", "fci", or nothing.

    >>> @reads("fci")
    ... def rule(prompt, trunk, rng): ...
    >>> sorted(read_by(rule))
    ['fci']
    """
    if unknown := set(what) - READABLE:
        raise ValueError(f"a part can read {', '.join(sorted(READABLE))}, not {sorted(unknown)[0]!r}")

    def declare(part: Part) -> Part:
        part.reads = frozenset(what)  # type: ignore[attr-defined]
        return part

    return declare


def read_by(part: Callable[..., Any]) -> frozenset[str]:
    """What a part reads of a scoring forward; everything, where it does not say."""
    declared: frozenset[str] = getattr(getattr(part, "func", part), "reads", READABLE)
    return declared


def bind(
    table: Mapping[str, Callable[..., Any]], name: str, options: Mapping[str, Any], knobs: Mapping[str, Any]
) -> partial[Any]:
    """The part called `name` with knobs and options bound. Raises ValueError with the choices at hand.

    >>> bind({"add": lambda x, *, y, z=0: x + y + z}, "add", {"z": 1}, {"y": 2, "unused": 3})(10)
    13
    """
    part = find(table, name)
    taken = inspect.signature(part).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    known = [n for n, p in taken.items() if p.kind is p.KEYWORD_ONLY]
    if not takes_any and (unknown := [o for o in options if o not in known]):
        raise ValueError(f"{name!r} has no option {unknown[0]!r}{near(unknown[0], known)}; it has: {listed(known)}")
    if missing := [n for n in known if taken[n].default is inspect.Parameter.empty and n not in {*options, *knobs}]:
        raise ValueError(f"{name!r} needs the option {missing[0]!r}")
    offered = {k: v for k, v in knobs.items() if k in known}
    return partial(part, **{**offered, **options})


def find(table: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    """The function called `name`: ours, or the user's own by `package.module:function`."""
    if ":" not in name:
        if name not in table:
            module, _, attribute = name.rpartition(".")
            own = f"; for your own write {module}:{attribute}" if module else ""
            known = f"known: {listed(table)}, or your own as package.module:function"
            raise ValueError(f"unknown name {name!r}{near(name, table)}{own}; {known}")
        return table[name]
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        dotted = module.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
        raise ValueError(f"{name!r} names a file; write its module, {dotted}:{attribute}")
    try:
        imported = importlib.import_module(module)
        if not hasattr(imported, attribute):
            raise AttributeError(f"{module} has no {attribute!r}{near(attribute, vars(imported))}")
        found = getattr(imported, attribute)
    except (Exception, SystemExit) as error:  # a module of the user's own may fail, or end, in any way
        plain = isinstance(error, ImportError | AttributeError | ValueError | TypeError)
        said = f"cannot import {name!r}: {error if plain else f'{type(error).__name__}: {error}'}"
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            said += "; it is looked for where the command is run and among installed packages"
        raise ValueError(said) from error
    if not callable(found):
        raise ValueError(f"{name!r} is not a function but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def check_call(part: Callable[..., Any], *names: str) -> None:
    """Raise ValueError where a part, its options bound, cannot be called with these positional values, or would not
    return what it computes.

    >>> check_call(lambda forest: [], "forest", "rng")
    Traceback (most recent call last):
    ValueError: must be callable as (forest, rng), options being keyword-only: too many positional arguments
    """
    function = getattr(part, "func", part)
    if inspect.isclass(function):
        raise ValueError(f"must be a function, and {function.__name__} is a class")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError("must return its values; it yields them, one at a time")
    try:
        inspect.signature(part).bind(*names)
    except TypeError as error:
        shape = ", ".join(names)
        raise ValueError(f"must be callable as ({shape}), options being keyword-only: {error}") from None
