"""Units of one kind and different size: 90 minutes are 1.5 hours, and not 90 hours."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from attnrl.verify.tree import Node

Unit = tuple[str, Fraction]  # what it measures, and its size in the first unit of its row below

_INCH = Fraction("0.0254")
_YEAR = Fraction("365.25") * 86400
_KINDS: dict[str, dict[str, Fraction]] = {
    "length": {
        "m meter metre": Fraction(1), "cm centimeter centimetre": Fraction(1, 100), "dm": Fraction(1, 10),
        "mm millimeter millimetre": Fraction(1, 1000), "km kilometer kilometre": Fraction(1000),
        "nm nanometer": Fraction(1, 10**9), "in inch inche": _INCH, "ft foot feet": 12 * _INCH, "yd yard": 36 * _INCH,
        "mi mile": 63360 * _INCH,
    },
    "mass": {
        "g gram": Fraction(1), "kg kilogram": Fraction(1000), "mg milligram": Fraction(1, 1000),
        "lb pound": Fraction("453.59237"), "oz ounce": Fraction("453.59237") / 16,
    },
    "time": {
        "s sec second": Fraction(1), "ms millisecond": Fraction(1, 1000), "min minute": Fraction(60),
        "h hr hour": Fraction(3600), "day": Fraction(86400), "week": Fraction(7 * 86400), "month": _YEAR / 12,
        "yr year": _YEAR,
    },
    "volume": {"l L liter litre": Fraction(1), "ml mL milliliter millilitre": Fraction(1, 1000)},
    "money": {"dollar USD usd buck": Fraction(1), "cent": Fraction(1, 100)},
    "angle": {"degree deg": Fraction(1), "radian rad": Fraction("57.29577951308232")},
}  # fmt: skip
_TABLE: dict[str, Unit] = {
    name: (kind, size) for kind, row in _KINDS.items() for names, size in row.items() for name in names.split()
}
_SIMPLE = re.compile(
    r"(?:(?P<before>square|sq|cubic)\.? )?(?P<name>[A-Za-z]+)\.?(?: (?P<after>squared|cubed))?(?:\^(?P<power>[23]))?"
)
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3, "2": 2, "3": 3}
DOLLAR = _TABLE["dollar"]
DEGREE = _TABLE["degree"]


@lru_cache(maxsize=1024)
def unit_of(text: str) -> Unit | None:
    """The unit that a text names, also squared, cubed, or as a rate; None for all others.

    >>> unit_of("square feet") == unit_of("ft^2"), unit_of("km/h"), unit_of("apples")
    (True, ('length/time', Fraction(5, 18)), None)
    """
    parts = re.split(r" ?/ ?| per ", " ".join(text.replace("{", "").replace("}", "").split()).replace(" ^", "^"))
    units = [_simple(part.replace("^ ", "^")) for part in parts[:3]]
    if len(units) > 2 or None in units:
        return None
    known: list[Unit] = units  # type: ignore[assignment]
    if len(known) == 1:
        return known[0]
    return f"{known[0][0]}/{known[1][0]}", known[0][1] / known[1][1]


def _simple(text: str) -> Unit | None:
    match = _SIMPLE.fullmatch(text)
    if match is None:
        return None
    name = match["name"]
    lower = name.casefold()
    unit = _TABLE.get(name) or (_TABLE.get(lower) or _TABLE.get(lower.removesuffix("s")) if len(name) > 2 else None)
    powers = [_POWERS[word] for word in (match["before"], match["after"], match["power"]) if word]
    if unit is None or len(powers) > 1:
        return None
    return (f"{unit[0]}^{powers[0]}", unit[1] ** powers[0]) if powers else unit


def unit(node: Node) -> Unit | None:
    """The known unit of a quantity; a degree sign is one."""
    if node.kind == "unit":
        return node.value  # type: ignore[return-value]
    return DEGREE if node.kind == "deg" else None


def bare(node: Node) -> Node:
    """The node without its unit."""
    return node.args[0] if node.kind == "unit" else node


def differ(one: Node, other: Node) -> bool:
    """Whether both nodes carry units of one kind and different size."""
    left, right = unit(one), unit(other)
    return left is not None and right is not None and left[0] == right[0] and left[1] != right[1]


def scaled(node: Node) -> Node:
    """The quantity as a plain value in the first unit of its kind."""
    size = unit(node)
    inner = node.args[0] if node.kind in ("unit", "deg") else node
    if size is None or size[1] == 1:
        return inner
    if inner.kind == "num" and isinstance(inner.value, Fraction):
        return Node("num", value=inner.value * size[1])
    return Node("mul", (Node("num", value=size[1]), inner))
