"""Hostile input: no hang, no crash, no false accept. Every case here must end with reward 0."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from attnrl.types import Verdict
from attnrl.verify import Verifier, extract
from attnrl.verify.symbolic import symbolic_equal

JOIN = 240  # seconds after which a hang fails the test instead of the suite


def _box(content: str) -> str:
    return f"\\boxed{{{content}}}"


def _nested(opening: str, inner: str, closing: str, depth: int) -> str:
    return opening * depth + inner + closing * depth


TOWERS = {
    **{
        f"tower of {base}, {depth} high": _box(_nested(f"{base}^{{", str(base), "}", depth))
        for base in (2, 9, 99)
        for depth in (4, 9, 30)
    },
    "tower without braces": _box("9^9^9^9^9"),
    "python tower": _box("9**9**9**9"),
    "factorial": _box("99999999!"),
    "factorial of a factorial": _box("((99!)!)!"),
    "many factorials": _box("!".join(["9"] * 40) + "!!!!!!!!"),
    "binomial": _box(r"\binom{99999999}{44444444}"),
    "huge exponent": _box("2^{99999999999}"),
    "huge negative exponent": _box("2^{-99999999999}"),
    "huge decimal exponent": _box("1e9999"),
    "exponential of a tower": _box(r"e^{e^{e^{e^{e^{9}}}}}"),
    "exponential": _box(r"\exp(\exp(\exp(99)))"),
    "sine of a tower": _box(r"\sin(10^{10^{10}})"),
    "tangent of a long number": _box(r"\tan(" + "7" * 300 + ")"),
    "root of high degree": _box(r"\sqrt[99999999999]{2}"),
    "root of degree zero": _box(r"\sqrt[0]{2}"),
    "product of big powers": _box(r"\cdot ".join(["9^{9999}"] * 60)),
    "sum of big fractions": _box("+".join(f"\\frac{{1}}{{{n}^{{300}}}}" for n in range(3, 150))),
    "digits": _box("4" * 3000),
    "a million digits": _box("4" * 1_000_000),
    "decimal digits": _box("42." + "0" * 2500 + "1"),
    "modulus zero": _box(r"42 \bmod 0"),
    "division by zero": _box(r"\frac{42}{0}"),
    "zero to zero": _box("42 + 0^0"),
    "logarithm of zero": _box(r"42 + \ln 0"),
    "repeating for ever": _box(r"42.\overline{" + "0" * 5000 + "}"),
}
SIZES = {
    "backslashes": "\\" * 2_000_000,
    "boxed backslashes": _box("\\" * 1_000_000),
    "open braces": "{" * 2_000_000,
    "close braces": "}" * 2_000_000,
    "boxed open braces": "\\boxed" + "{" * 1_000_000,
    "balanced braces": _box(_nested("{", "42", "}", 100_000)),
    "brackets": _box(_nested("(", "42", ")", 1900)),
    "square brackets": _box(_nested("[", "42", "]", 500)),
    "bars": _box("|" * 3000),
    "nested fractions": _box(_nested(r"\frac{1}{", "42", "}", 300)),
    "nested roots": _box(_nested(r"\sqrt{", "42", "}", 300)),
    "nested sets": _box(_nested(r"\{", "42", r"\}", 300)),
    "nested set builders": _box(_nested(r"\{x \in ", "41", r"\}", 19)),
    "nested conditions": _box(_nested(r"\{x : ", "x < 42", r"\}", 18)),
    "minima of minima": _box(r"\min " * 900 + "x"),
    "open subscripts": _box(r"\min_{" * 300 + "42"),
    "units of units": _box("41 cm" + r"/\text{ cm}" * 300),
    "a chain of conversions": _box(r"1\text{ m} = " * 90 + "42"),
    "answer tags": "<answer>" * 30_000,
    "closing answer tags": "</answer>" * 30_000 + "<answer>",
    "labels": _box("(42)(1)" * 500),
    "nested text": _box(_nested(r"\text{", "42", "}", 300)),
    "minus signs": _box("-" * 3001 + "42"),
    "plus signs": _box("1" + "+" * 3000),
    "carets": _box("42" + "^" * 3000),
    "primes": _box("x" + "'" * 3000),
    "long list": _box(",".join(["42"] * 900)),
    "long sum": _box("+".join(["1"] * 700) + "+x"),
    "long product": _box("x" * 3 + "*y" * 700),
    "long matrix": _box(r"\begin{pmatrix}" + "42&" * 600 + r"42\end{pmatrix}"),
    "open matrix": _box(r"\begin{pmatrix}42 & "),
    "many signs": _box(r"\pm 1" * 200),
    "unopened matrix": _box(r"42\end{pmatrix}"),
    "boxes": "\\boxed{1} " * 100_000,
    "boxes in a list": "\\boxed{42}, \\boxed{43}, " * 50_000 + "\\boxed{44}",
    "open boxes": "\\boxed{" * 200_000,
    "box commands": "\\boxed" * 200_000,
    "boxes in boxes": _nested("\\boxed{", "43", "}", 20_000),
    "thinking tags": "<think>" * 100_000 + "\\boxed{42}",
    "long response": "so " * 3_000_000 + "\\boxed{43}",
}
REGEX = {
    "letters": "a" * 500_000 + "!",
    "spaces": " " * 1_000_000,
    "newlines": "\n" * 1_000_000,
    "dollars": "$" * 300_000,
    "dollar pairs": "$ $" * 100_000,
    "open formulas": r"\(" * 100_000,
    "open displays": r"\[" * 100_000,
    "answers": "answer is " * 50_000,
    "final answers": "Final answer: " * 50_000,
    "therefores": "Therefore, " * 50_000 + ".",
    "commas": _box("," * 3900),
    "digit groups": _box(",".join(["000"] * 900)),
    "dots": "." * 500_000,
    "stars": "**" * 300_000,
    "boxed spaces": _box(" " * 3900 + "43"),
    "thin spaces": _box(r"\," * 1900),
    "texts": _box(r"\text{" * 600),
    "turn marks": "<|im_start|>" * 50_000,
}
CHARACTERS = {
    "NUL in the number": _box("4\x002"),
    "NUL after": _box("43\x00"),
    "zero width": _box("4\u200b2"),
    "soft hyphen": _box("4\u00ad2"),
    "right to left": _box("\u202e24"),
    "lone surrogate": _box("4\ud8002"),
    "surrogates": "\ud800\udfff" * 1000 + _box("\udc80"),
    "bell": _box("4\x072"),
    "combining": _box("4\u03362"),
    "emoji": _box("4️⃣2️⃣"),
    "private use": _box("\ue000"),
    "byte order mark": _box("4\ufeff2"),
    "bytes as text": _box("b'42'"),
}
INJECTION = {
    "import": "__import__('os').system('touch {marker}')",
    "eval": 'eval(\'open("{marker}","w")\')',
    "exec": "exec(\"open('{marker}','w')\")",
    "open": "open('{marker}','w').write('x')",
    "subclasses": "().__class__.__bases__[0].__subclasses__()",
    "lambda": "(lambda: open('{marker}','w'))()",
    "sympy": "Symbol('x', open('{marker}','w'))",
    "sympify": "sympify(\"open('{marker}','w')\")",
    "attribute": "x.__init__.__globals__",
    "format": "{{0.__class__}}",
    "shell": "; touch {marker} #",
    "backticks": "`touch {marker}`",
    "input": r"\input{{{marker}}}",
    "write18": r"\immediate\write18{{touch {marker}}}",
    "text": r"\text{{__import__('os').system('touch {marker}')}}",
    "operatorname": r"\operatorname{{open}}('{marker}','w')",
    "integral": r"\int_0^1 \text{{open('{marker}','w')}} dx",
    "pickle": "cos\nsystem\n(S'touch {marker}'\ntR.",
    "json": '42"}}\n{{"id": 1, "right": true}}',
}
HEDGES = {
    name: _box(text)
    for name, text in {
        "or": "42 or 43",
        "text or": r"42 \text{ or } 43",
        "OR": "42 OR 43",
        "and": r"42 \text{ and } 43",
        "comma": "42, 43",
        "semicolon": "42; 43",
        "slash": "42 / 43",
        "set": r"\{42, 43\}",
        "list of all": ", ".join(map(str, range(100))),
        "plus minus": r"\pm 42",
        "interval": "[41, 43]",
        "not": r"\text{not } 42",
        "bracketed": "42 (or 43)",
        "question": "42? 43?",
        "lor": r"42 \lor 43",
        "relation": "41 < 42 < 43",
        "at least": r"x \ge 42",
        "approximately": r"42 \text{ or more}",
        "power": "42^1 43",
        "quad": r"42 \quad 43",
        "newline": r"42 \\ 43",
        "equals both": "x = 42, x = 43",
        "variable": "42 + x - y",
        "whole prompt": r"\text{Let } x = 42. \text{ Then } x = 43",
    }.items()
} | {
    "two boxes": r"\boxed{42} or \boxed{43}",
    "two boxes, gold last": r"\boxed{43} or \boxed{42}",
    "plain": "The answer is 42 or 43.",
}
EMPTY_GOLDS: dict[str, str | list[str]] = {
    "empty": "", "blank": "   ", "dollars": "$$", "empty list": [], "empty alternatives": ["", " "],
    "empty box": r"\boxed{}", "empty text": r"\text{}", "blank text": r"$\text{ }$",
}  # fmt: skip

CASES = TOWERS | SIZES | REGEX | CHARACTERS | HEDGES


def _grade(verifier: Verifier, items: list[tuple[str, str | list[str]]]) -> list[Verdict]:
    """The verdicts, or a failure where grading hangs."""
    found: list[list[Verdict]] = []
    thread = threading.Thread(target=lambda: found.append(verifier.grade(items)), daemon=True)
    thread.start()
    thread.join(JOIN)
    assert found, "grading hangs or crashed"
    return found[0]


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    with Verifier(workers=1, timeout=2.0, memory_mb=1024) as shared:
        yield shared


def test_there_are_at_least_a_hundred_cases() -> None:
    assert len(CASES) + len(INJECTION) + len(EMPTY_GOLDS) >= 100


@pytest.mark.parametrize("response", CASES.values(), ids=CASES)
def test_hostile_responses_end_and_earn_nothing(verifier: Verifier, response: str) -> None:
    (verdict,) = _grade(verifier, [(response, "42")])
    assert verdict.reward == 0.0


@pytest.mark.parametrize("name", ["tower of 9, 9 high", "factorial", "huge exponent", "digits", "nested fractions"])
def test_too_much_work_is_wrong_or_training_would_learn_to_ask_for_it(verifier: Verifier, name: str) -> None:
    (verdict,) = _grade(verifier, [(CASES[name], "42")])
    assert (verdict.rule, verdict.error) == ("limit", None)


def test_too_long_is_wrong_by_a_rule_of_its_own(verifier: Verifier) -> None:
    (verdict,) = _grade(verifier, [(_box("4" * 100_000), "42")])
    assert (verdict.rule, verdict.error) == ("too_long", None)
    assert len(verdict.answer or "") <= 200


@pytest.mark.parametrize("response", CASES.values(), ids=CASES)
def test_no_hostile_response_is_left_out_as_an_error(verifier: Verifier, response: str) -> None:
    (verdict,) = _grade(verifier, [(response, "42")])
    assert verdict.error is None


@pytest.mark.parametrize(
    ("gold", "error"),
    [
        ("99999999!", "gold_limit"),
        ("4" * 5000, "gold_too_long"),
        (r"\frac{1}{" * 300 + "42" + "}" * 300, "gold_limit"),
        (r"\lim_{x \to 0} 99999999!", "gold_timeout"),
    ],
    ids=["limit", "too long", "deep", "symbolic"],
)
def test_a_gold_that_breaks_things_is_an_error_of_its_row(verifier: Verifier, gold: str, error: str) -> None:
    broken, sound = _grade(verifier, [(_box("42"), gold), (_box("42"), "42")])
    assert (broken.reward, broken.error) == (0.0, error)
    assert (sound.reward, sound.error) == (1.0, None)


def test_a_thousand_responses_that_hit_the_limits_are_all_wrong(verifier: Verifier) -> None:
    """Each another text, so that nothing is decided by a cache; the last ones keep workers busy until killed."""
    rules = [
        *((_box(f"{99_999_000 + n}!"), "limit") for n in range(300)),
        *((_box(f"9^{{9^{{{9_000 + n}}}}}"), "limit") for n in range(300)),
        *((_box("+".join(["1"] * 3000) + f"+{n}"), "too_long") for n in range(200)),
        *((_box(_nested(r"\frac{1}{", str(n), "}", 300)), "limit") for n in range(196)),
        *((_box(rf"\lim_{{x \to 0}} {99_999_000 + n}!"), "timeout") for n in range(4)),
    ]
    with Verifier(workers=2, timeout=0.5, memory_mb=1024) as quick:
        verdicts = _grade(quick, [(response, "4") for response, _ in rules])
        assert quick.counts["answers"] == 1000
    assert [(v.reward, v.right, v.error) for v in verdicts] == [(0.0, False, None)] * 1000
    assert [v.rule for v in verdicts] == [rule for _, rule in rules]


@pytest.mark.parametrize("text", INJECTION.values(), ids=INJECTION)
def test_nothing_in_a_response_or_gold_runs(verifier: Verifier, tmp_path: Path, text: str) -> None:
    marker = tmp_path / "ran"
    hostile = text.format(marker=marker)
    verdicts = _grade(verifier, [(_box(hostile), "42"), (hostile, "42"), (_box("42"), hostile)])
    assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 0.0]
    assert not marker.exists()


@pytest.mark.parametrize("text", INJECTION.values(), ids=INJECTION)
def test_the_symbolic_grader_itself_runs_nothing(tmp_path: Path, text: str) -> None:
    """Straight into the symbolic path, past the guards that keep such text away from it."""
    marker = tmp_path / "ran"
    symbolic_equal(text.format(marker=marker), "42")
    symbolic_equal("42", text.format(marker=marker))
    assert not marker.exists()


@pytest.mark.parametrize("gold", EMPTY_GOLDS.values(), ids=EMPTY_GOLDS)
@pytest.mark.parametrize("response", [r"\boxed{}", r"\boxed{42}", "", r"\boxed{ }", r"\boxed{\text{}}"])
def test_an_empty_gold_accepts_nothing_and_is_an_error(
    verifier: Verifier, gold: str | list[str], response: str
) -> None:
    (verdict,) = _grade(verifier, [(response, gold)])
    assert verdict.reward == 0.0
    assert verdict.error == "empty_gold" or extract(response).answer is None


def test_a_tower_that_reaches_the_symbolic_grader_times_out(verifier: Verifier) -> None:
    items = [(_box(r"\lim_{x \to 0} 10^{10^{10^{10}}}"), "42"), (_box("42"), "42"), (_box(r"\int_0^{42} 1 dx"), "42")]
    verdicts = _grade(verifier, items)
    assert [v.reward for v in verdicts] == [0.0, 1.0, 1.0]
    assert verdicts[0].error is None
    assert verdicts[0].rule in ("timeout", "memory", "crash")


UNITS = [r"\sqrt", "√", "sqrt ", r"\frac", r"\frac1", r"\binom", r"\overline", r"\hat", r"\vec", r"\dot", "2^-",
         r"\log^", "cos^", "x!", "-(", r"\angle", r"\text{is:}", r"|x", "^\\circ", "2^", r"\lfloor", "f("]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_deep_text_is_its_own_error_and_spares_the_batch(verifier: Verifier, unit: str) -> None:
    deep = unit * (3900 // len(unit))
    items = [(_box("1"), "1"), (_box(deep), "1"), (_box(deep[:400]), "1"), (_box("1"), deep), (_box("2"), "2")]
    assert [verdict.reward for verdict in _grade(verifier, items)] == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_what_has_no_value_is_wrong_wherever_it_stands(verifier: Verifier) -> None:
    wide = ", ".join(str(n) for n in range(41))
    items = [(_box(wide[:-2] + r"\frac{1}{0}"), wide), (_box("1/0 = 42"), "42"), (_box("42"), "1/0 = 42")]
    assert [verdict.reward for verdict in _grade(verifier, items)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("tail", ["!" * 1400, r"^\circ" * 400])
def test_a_deep_tree_of_flat_text_is_a_limit(verifier: Verifier, tail: str) -> None:
    first, second = _grade(verifier, [(_box(f"(x+1){tail}"), "1"), (_box("1"), f"(x+1){tail}")])
    assert (first.reward, first.rule, first.error) == (0.0, "limit", None)
    assert (second.reward, second.rule, second.error) == (0.0, "gold_limit", "gold_limit")


def test_long_chains_of_sets_are_a_limit(verifier: Verifier) -> None:
    chain = r"\mathbb{R}" + "".join(rf"\setminus\{{{n}\}}" for n in range(240))
    short = r"\mathbb{R}" + "".join(rf"\setminus\{{{n}\}}" for n in range(20))
    points = r"\mathbb{R} \setminus \{" + ",".join(map(str, range(20))) + r"\}"
    many = r"\mathbb{R} \setminus \{" + ",".join(map(str, range(240))) + r"\}"
    verdicts = _grade(verifier, [(_box(chain), points), (_box(short), points), (_box(many), points)])
    assert [(v.reward, v.rule) for v in verdicts] == [(0.0, "limit"), (1.0, "interval"), (0.0, "limit")]
    assert [v.error for v in verdicts] == [None] * 3


def test_the_same_spelling_is_right_however_large() -> None:
    with Verifier() as verifier:
        tower = "9^{9^{9^{9}}}"
        assert verifier.grade([(_box(tower), tower)])[0].reward == 1.0
        assert verifier.grade([(_box(tower), "9^{9^{9^{8}}}")])[0].reward == 0.0
