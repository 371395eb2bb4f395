"""Options of named parts against the types that their functions declare."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError


def check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError where an option is not of the type, or not within the range, that the function declares for it;
    what a function does not declare, or declares in types of its own, is its own affair.

    >>> def part(forest, *, ddof: int = 1): ...
    >>> check_options(part, {"ddof": "one"})
    Traceback (most recent call last):
    ValueError: option ddof = 'one': input should be a valid integer
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError):  # names for a type checker only, or no function at all
        hints = {}
    for name, value in options.items():
        try:
            text = json.dumps(value)
        except TypeError:
            raise ValueError(f"option {name} = {value!r}: must be a value that JSON can hold") from None
        if name not in hints:
            continue
        try:
            TypeAdapter(hints[name]).validate_json(text, strict=True)
        except ValidationError as error:
            said = error.errors()[0]["msg"].replace("valid array", "list")
            raise ValueError(f"option {name} = {value!r}: {said[:1].lower()}{said[1:]}") from None
        except PydanticUserError:  # a type of the user's own
            continue
