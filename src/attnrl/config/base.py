"""What every section of the config is: frozen, typed, documented key by key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

# A list of names, or one name by itself: `--data.train rows.parquet`.
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


def _as_layers(value: Any) -> Any:
    if isinstance(value, bool):  # a switch, as it was in configs before
        return "all" if value else "none"
    if value in ("auto", "none", "all") or (isinstance(value, int) and value >= 0):
        return value
    raise ValueError('must be "all", "none", "auto" or a number of layers')


# How many of the model's layers.
Layers = Annotated[Literal["auto", "none", "all"] | int, BeforeValidator(_as_layers)]

# A key that only says how to execute, or how far a run goes: a resumed run may have another value.
MAY_CHANGE: dict[str, Any] = {"may_change": True}


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
