"""Values of expression trees: exact rationals, else many digits at fixed sample points. All work is bounded."""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import mpmath

from attnrl.verify.commands import TRIG
from attnrl.verify.tokens import LimitError
from attnrl.verify.tree import Node

MAX_BITS = 1 << 16  # of an exact number: 2016! has 19,300
MAX_LOG2 = 1e5  # of a rounded number
MAX_FACTORIAL = 4000
SYMMETRIC = frozenset(("gcd", "lcm", "min", "max"))  # functions whose arguments have no order
DIGITS = (50, 160)  # decimal digits of the first and of the deciding evaluation
MAX_EXTRA_DIGITS = 2500  # that the size of a value may add to the second

_context = mpmath.mp.clone()
_lock = threading.Lock()  # mpmath caches its constants without one


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


class UndefinedError(ArithmeticError):
    """The expression has no value here: division by zero, an infinity, text."""


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise LimitError("number too large")
    return value


def exact(node: Node) -> Fraction | None:
    """The rational value of a tree; None where it has variables or irrational parts.

    >>> from attnrl.verify.parse import parse
    >>> exact(parse(r"1\\frac{1}{2} + 2^{-1}"))
    Fraction(2, 1)
    """
    kind = node.kind
    if kind == "num":
        return node.value  # type: ignore[return-value]
    if kind in ("deg", "unit"):
        return exact(node.args[0])
    if kind not in ("add", "mul", "div", "pow", "fn") and not (kind == "ufn" and node.value in SYMMETRIC):
        return None
    parts = [exact(arg) for arg in node.args]
    if any(part is None for part in parts):
        return None
    values: list[Fraction] = parts  # type: ignore[assignment]
    if kind == "add":
        total = Fraction(0)
        for value in values:
            total = _bounded(total + value)
        return total
    if kind == "mul":
        total = Fraction(1)
        for value in values:
            if _bits(total) + _bits(value) > MAX_BITS + 64:
                raise LimitError("number too large")
            total *= value
        return total
    if kind == "div":
        if values[1] == 0:
            raise UndefinedError("division by zero")
        return _bounded(values[0] / values[1])
    if kind == "pow":
        return _exact_power(*values)
    return _exact_function(str(node.value), values)


def _exact_power(base: Fraction, power: Fraction) -> Fraction | None:
    if power.denominator != 1:
        return None
    if base == 0 and power <= 0:
        raise UndefinedError("zero to no positive power")
    if base in (0, 1, -1):
        return base if power % 2 or base != -1 else Fraction(1)
    if abs(power.numerator) * _bits(base) > 2 * MAX_BITS:
        raise LimitError("power too large")
    return _bounded(base**power.numerator)


def _exact_function(name: str, values: list[Fraction]) -> Fraction | None:
    first = values[0]
    if name == "abs":
        return abs(first)
    if name == "floor":
        return Fraction(math.floor(first))
    if name == "ceil":
        return Fraction(math.ceil(first))
    if name == "mod":
        if values[1] == 0:
            raise UndefinedError("modulus zero")
        return first % values[1]
    whole = all(value.denominator == 1 for value in values)
    if name in ("min", "max"):
        return (min if name == "min" else max)(values)
    if name in ("gcd", "lcm") and whole:
        combined = (math.gcd if name == "gcd" else math.lcm)(*(value.numerator for value in values))
        return _bounded(Fraction(combined))
    if name == "factorial" and whole:
        if first < 0:
            raise UndefinedError("factorial of a negative number")
        if first > MAX_FACTORIAL:
            raise LimitError("factorial too large")
        return Fraction(math.factorial(first.numerator))
    if name == "binomial" and whole and min(values) >= 0:
        if first > MAX_FACTORIAL:
            raise LimitError("binomial too large")
        return Fraction(math.comb(first.numerator, values[1].numerator))
    return None


def symbols(node: Node) -> set[str]:
    """The variables of a tree."""
    if node.kind == "sym":
        return {str(node.value)}
    found: set[str] = set()
    for arg in node.args:
        found |= symbols(arg)
    return found


def sample_points(names: set[str]) -> list[dict[str, Fraction]]:
    """Where expressions are compared: two positive points, one negative, one mixed; the same every time."""
    points = []
    for number, signs in enumerate(((1, 1), (1, 1), (-1, -1), (1, -1))):
        point = {}
        for at, name in enumerate(sorted(names)):
            seed = zlib.crc32(f"{number} {name}".encode("utf-8", "surrogatepass"))
            point[name] = signs[at % 2] * Fraction(3 + seed % 9973, 4001 + seed % 13)
        points.append(point)
    return points if names else points[:1]


def whole_points(names: set[str]) -> list[dict[str, Fraction]]:
    """Even and odd whole numbers for what floor, ceiling, modulus and factorial tell apart."""
    return [
        {name: Fraction(10 + 2 * (zlib.crc32(name.encode("utf-8", "surrogatepass")) % 5) + odd) for name in names}
        for odd in (0, 1)
    ]


def _log2(value: Any) -> float:
    size = abs(value)
    return float(_context.log(size, 2)) if size else -math.inf


class Evaluator:
    """Evaluates trees at one point with the context's digits; only inside `evaluate`, which holds the lock."""

    def __init__(self, point: Mapping[str, Fraction]) -> None:
        self.point = point

    def value(self, node: Node, *, in_trig: bool = False) -> Any:
        kind = node.kind
        if kind == "num":
            return self.rational(node.value)  # type: ignore[arg-type]
        if kind == "sym":
            return self.rational(self.point[str(node.value)])
        if kind == "const":
            return {"pi": _context.pi, "e": _context.e, "i": _context.j}[str(node.value)] * 1
        if kind == "deg":
            inner = self.value(node.args[0])
            return inner * _context.pi / 180 if in_trig else inner
        if kind == "unit":
            return self.value(node.args[0], in_trig=in_trig)
        if kind == "ufn":
            return self.unknown_function(node)
        if kind not in ("add", "mul", "div", "pow", "root", "fn"):
            raise UndefinedError(f"{kind} has no value")
        trig = in_trig or (kind == "fn" and node.value in TRIG)
        values = [self.value(arg, in_trig=trig) for arg in node.args]
        return self.check(self.combine(node, values))

    def rational(self, value: Fraction) -> Any:
        if _bits(value) > 4 * MAX_BITS:
            raise LimitError("number too large")
        return _context.mpf(value.numerator) / value.denominator

    def check(self, value: Any) -> Any:
        if not _context.isfinite(value):
            raise UndefinedError("not finite")
        if value and abs(_context.mag(value)) > MAX_LOG2:  # mag: log2 within two, without a logarithm
            raise LimitError("number too large")
        return value

    def unknown_function(self, node: Node) -> Any:
        """Some fixed smooth function per name: equal arguments, equal values."""
        seed = zlib.crc32(str(node.value).encode("utf-8", "surrogatepass"))
        total = _context.mpf(1 + seed % 97)
        for at, arg in enumerate(node.args):
            total += _context.sin(self.small(self.value(arg)) * (1 if node.value in SYMMETRIC else at + 1) + seed % 89)
        return total

    def small(self, value: Any) -> Any:
        if _log2(value) > 40:
            raise LimitError("argument too large")
        return value

    def combine(self, node: Node, values: list[Any]) -> Any:
        first = values[0]
        if node.kind == "add":
            return _context.fsum(values) if len(values) > 1 else first
        if node.kind == "mul":
            total = first
            for value in values[1:]:
                total = self.check(total * value)
            return total
        if node.kind == "div":
            if abs(values[1]) < _context.mpf(10) ** (-_context.dps * 2 // 3):
                raise UndefinedError("division by zero")
            return first / values[1]
        if node.kind == "pow":
            return self.power(first, values[1])
        if node.kind == "root":
            degree = values[1]
            if degree == 0:
                raise UndefinedError("root of degree zero")
            if (
                first
                and _context.im(first) == 0
                and _context.re(first) < 0
                and _context.isint(degree)
                and int(_context.re(degree)) % 2
            ):
                return -self.power(-first, 1 / degree)
            return self.power(first, 1 / degree)
        return self.function(str(node.value), values)

    def power(self, base: Any, power: Any) -> Any:
        if base == 0:
            if _context.re(power) <= 0:
                raise UndefinedError("zero to no positive power")
            return _context.mpf(0)
        if abs(power) * max(1.0, abs(_log2(base))) > MAX_LOG2 or _log2(power) > 40:
            raise LimitError("power too large")
        return _context.power(base, power)

    def function(self, name: str, values: list[Any]) -> Any:
        first = values[0]
        if name == "abs":
            return abs(first)
        if name in ("floor", "ceil"):
            return (_context.floor if name == "floor" else _context.ceil)(first)
        if name == "mod":
            if values[1] == 0 or _context.im(first) or _context.im(values[1]):
                raise UndefinedError("modulus")
            return _context.fmod(first, values[1])
        if name in ("factorial", "binomial"):
            if max(abs(value) for value in values) > MAX_FACTORIAL:
                raise LimitError("factorial too large")
            return _context.factorial(first) if name == "factorial" else _context.binomial(*values)
        if name in ("ln", "log10"):
            if first == 0:
                raise UndefinedError("logarithm of zero")
            return _context.ln(first) / (_context.ln(10) if name == "log10" else 1)
        if name in ("exp", "sinh", "cosh", "tanh") and abs(first) > MAX_LOG2 / 2:
            raise LimitError("exponent too large")
        return getattr(_context, name)(self.small(first))


def evaluate(node: Node, point: Mapping[str, Fraction], digits: int = DIGITS[0]) -> Any:
    """The value of a tree at a point; UndefinedError or LimitError where it has none that may be had."""
    with _lock:
        _context.dps = digits
        try:
            return Evaluator(point).value(node)
        except (ZeroDivisionError, OverflowError, ValueError, TypeError, NotImplementedError) as error:
            if isinstance(error, LimitError):
                raise
            raise UndefinedError(str(error)) from error
        except mpmath.libmp.NoConvergence as error:
            raise UndefinedError(str(error)) from error


def close(a: Any, b: Any, digits: int) -> bool:
    return bool(abs(a - b) <= max(abs(a), abs(b)) * _context.mpf(10) ** (-digits * 2 // 3))


def equal_at(a: Node, b: Node, point: Mapping[str, Fraction]) -> tuple[bool, bool]:
    """Whether two trees agree at a point, and whether both values are real.

    A difference that shrinks with the number of digits is rounding: only then is a second, longer look needed.
    """
    first, second = DIGITS
    x, y = evaluate(a, point, first), evaluate(b, point, first)
    real = not (mpmath.im(x) or mpmath.im(y))
    size = max(abs(x), abs(y))
    if abs(x - y) > _context.mpf(10) ** (-first // 2) * max(1, size):
        return False, real
    # 10^20 and sqrt(10^40 + 1) agree in 40 digits, twice what the value has before its point; `close` reads two thirds
    second += min(3 * int(abs(_log2(size)) * math.log10(2)), MAX_EXTRA_DIGITS) if size else 0
    x, y = evaluate(a, point, second), evaluate(b, point, second)
    return close(x, y, second) or bool(abs(x - y) < _context.mpf(10) ** (-second + 20)), real
