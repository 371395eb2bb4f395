"""The rules: pairs of one family stand together, right ones beside their near misses."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl.verify.equal import decide, decide_any
from attnrl.verify.number import exact
from attnrl.verify.parse import parse

# gold, answers that equal it, answers that do not
FAMILIES: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "integers": [
        ("42", ["42", "42.0", "+42", r"\text{42}", "042", "42.", "$42$", "**42**"], ["-42", "24", "420", "4 2", "4,2"]),
        ("12345678902", ["12345678902", "12,345,678,902"], ["12345678901"]),
        ("4", [r"\text{four}", r"\frac{8}{2}", "2+2", r"\sqrt{16}"], ["5", r"\text{five}"]),
    ],
    "digit groups": [
        ("1234", ["1,234", "1{,}234", r"1,\!234", r"1\,234", "1 234"], ["1, 234", "1234,0", "(1,234)"]),
        (r"11,\! 111,\! 111,\! 100", ["11111111100", "11,111,111,100"], ["11, 111"]),
        ("100, 200", ["100,200", "200, 100"], ["100200", "100"]),
        ("100,000,000", ["10^8"], [r"100,000,000 \pi", "100"]),
        ("(98, 503)", ["(98,503)"], ["98503", "(98503)"]),
        ("3.14", ["3{,}14"], ["3,14"]),
    ],
    "fractions": [
        (
            r"\frac{3}{4}",
            ["3/4", "0.75", r"\dfrac34", r"\tfrac{3}{4}", r"\frac 3 4", ".75", "¾", r"\frac{6}{8}"],
            ["4/3", "3", "-3/4"],
        ),
        (r"-\frac{1}{2}", [r"\frac{-1}{2}", r"\frac{1}{-2}", "-0.5", "-.5"], ["0.5"]),
        (r"1\frac{4}{5}", ["9/5", "1.8", "1 4/5", r"1\frac45"], ["14/5", "4/5"]),
        (r"\frac{270}7\text{ degrees}", ["270/7", r"\frac{270}{7}^\circ"], ["38.57"]),
    ],
    "decimals": [
        (".2", ["0.2", "0.20", r"\frac15"], ["0.1", "0.02"]),
        (r"\frac{1}{12}", ["0.0833333333333333", r"0.08\overline{3}"], ["0.08333", "0.0833333333"]),
        ("1", ["1.0", r"0.\overline{9}"], ["1.0000000000000001", "0.9999999999999999"]),
        (r"\pi", ["3.14159265358979", "pi", "π"], ["3.14159", "22/7"]),
        ("133.\\overline{3}", [r"\frac{400}{3}"], ["133.3"]),
    ],
    "scientific": [
        ("1500", [r"1.5 \times 10^3", "1.5e3", "1.5x10^3", r"1.5\cdot 10^{3}"], [r"1.5 \times 10^4"]),
        (r"6.6 \times 10^{-34}", ["6.6e-34"], [r"6.7 \times 10^{-34}", "0"]),
        (r"\pi \times 10^{-34}", [r"\frac{\pi}{10^{34}}"], [r"2\pi \times 10^{-34}"]),
    ],
    "radicals": [
        (r"2\sqrt{3}", [r"\sqrt{12}", "2*sqrt(3)", "2√3", r"\frac{6}{\sqrt 3}"], [r"3\sqrt{2}", r"\sqrt{6}", "3.46"]),
        ("2", [r"\sqrt[3]{8}", r"\sqrt{\sqrt{16}}", r"8^{1/3}"], [r"\sqrt{2}", r"\sqrt[3]{2}"]),
        ("1", [r"\sqrt{1}"], [r"\sqrt{1.00000000000000000000001}"]),
    ],
    "powers": [
        ("12^{10}", [r"2^{20} \cdot 3^{10}"], [r"2^{20} \cdot 3^{11}"]),
        ("3^{2025}", ["3^{2024} \\cdot 3", "3^2025"], ["2^{2025}", "3^{2024}"]),
        (r"\frac{1}{2004!}", [r"\frac{2005}{2005!}"], [r"\frac{1}{2006!}"]),
        ("101! - 1", ["-1 + 101!"], ["101!"]),
    ],
    "large and small values": [
        ("e^{100}", [r"e \cdot e^{99}"], ["e^{100}+1"]),
        (r"\pi^{90}", [r"\pi^{80}\pi^{10}"], [r"\pi^{90}+1"]),
        ("10^{20}", [r"\sqrt{10^{40}}"], [r"\sqrt{10^{40}+1}"]),
        ("10^{300}", [r"\sqrt{10^{600}}"], [r"\sqrt{10^{600}+1}"]),
        (r"2^{2005}\pi", [r"2 \cdot 2^{2004}\pi"], [r"(2^{2005}+1)\pi"]),
        (r"\sqrt{2}", [r"\frac{2}{\sqrt 2}"], [r"\sqrt{2}+10^{-40}"]),
        (r"\pi \times 10^{-150}", [r"\frac{\pi}{10^{150}}"], [r"2\pi \times 10^{-150}"]),
    ],
    "values of functions": [
        (r"I(0) e^{-\frac{t}{R C}}", ["I(0) e^{-t/RC}"], ["0", "e^{-t/RC}", "I e^{-t/RC}"]),
        ("V(0)", ["V(0)", "V( 0 )"], ["0", "W(0)", "V(1)", "V"]),
        ("N(2)", ["N(2)"], ["2N", "N"]),
        ("x^2+x", ["x(x+1)"], ["x(x)+1"]),
        ("6", ["2(3)", "(2)(3)"], ["23"]),
        (r"2\pi", [r"\pi(2)"], [r"\pi"]),
    ],
    "equations of numbers": [
        ("42", [r"6 \cdot 7 = 42", r"x = 6 \cdot 7 = 42"], ["43=42", "1=2=42", "x=43=42", "1/0=42"]),
        ("50", [r"0.5 = 50\%"], ["5 = 50"]),
        ("0.33", [r"\frac13 = 0.33"], [r"\frac12 = 0.33"]),
    ],
    "numbers in words": [
        ("5", [r"5\text{ cm squared}", "5 square units", "5 quarters"],
         ["5 million", r"5\text{ thousand}", "5 dozen", "5 squared", r"5\text{ factorial}", "5 halves"]),
        ("5000000", ["5 million", r"5\text{ million dollars}", "\\$5 million"], ["5", "5 thousand"]),
        ("60", ["5 dozen", "5 dozen eggs"], ["5", "12"]),
        ("2500", ["2.5 thousand"], ["2.5"]),
    ],
    "sets of sets": [
        (r"\{1,2\},\{3\}", [r"\{3\},\{2,1\}"], [r"\{1,2,3\}", r"\{1\},\{2,3\}"]),
    ],
    "a number or a list": [
        ("1,200", ["1200", "1{,}200"], ["1, 200"]),
        ("1, 200", ["200, 1"], ["1200"]),
        ("(1,200)", ["(1, 200)"], ["1200"]),
        ("1,2,300", ["1, 2, 300"], ["1, 2"]),
    ],
    "functions of whole numbers": [
        (r"\lfloor n/2\rfloor", [r"\lfloor \frac{n}{2}\rfloor"], [r"\lceil n/2\rceil-1", "n/2"]),
        ("n!", ["n(n-1)!"], ["(n-1)!"]),
        (r"\binom{n}{2}", [r"\frac{n(n-1)}{2}"], [r"\binom{n}{3}"]),
    ],
    "spellings": [
        (r"\frac12", [r"\nicefrac{1}{2}", r"\sfrac12"], [r"\nicefrac{2}{1}"]),
        ("30^{\\circ}", [r"30\degree", r"30^{\degree}", r"30^\degree"], [r"31\degree"]),
        (r"\frac13", [r"0.\bar{3}", r"0.\bar 3"], [r"0.\bar{4}"]),
        ("2", [r"\gcd(4,6)"], [r"\gcd(4,8)", r"\lcm(4,6)"]),
    ],
    "complex": [
        ("3+4i", ["4i+3", r"3+4\mathrm{i}"], ["3-4i", "4+3i", "7i"]),
        ("-1", [r"e^{i\pi} = -1", "i^2"], ["e^{i}"]),
    ],
    "expressions": [
        ("x^2 + 2x + 1", ["(x+1)^2", "1 + x(x+2)"], ["(x-1)^2", "x^2+2x-1", "y^2+2y+1"]),
        (r"\frac{x+2}{7}", [r"\frac{x}{7}+\frac{2}{7}"], [r"\frac{x+7}{2}"]),
        (r"\sin^2 x", [r"1-\cos^2 x", r"(\sin x)^2"], [r"\sin x^2", r"\cos^2 x"]),
        (r"\cos(x)", [r"\sin(90^{\circ}-x)"], [r"\sin(90^{\circ}+2x)"]),
        ("|x|", [r"\sqrt{x^2}"], ["x", "-x"]),
        (r"\frac{1}{\sqrt{n}}", [r"\sqrt{1/n}", "n^{-1/2}"], [r"\sqrt{n}"]),
        ("ln(a)*a^x", [r"a^x \ln a"], [r"a^x \log_{10} a"]),
        (r"e^{-\frac{t}{RC}}", ["e^{-t/RC}", "e^{-t/(RC)}"], ["e^{-tC/R}"]),
        ("2k", ["k+k"], ["2", "k", "3k"]),
        (r"\log_2 x", [r"\frac{\ln x}{\ln 2}"], [r"\log_3 x"]),
        (r"\binom{5}{2}", ["10"], ["20"]),
        (r"\lfloor 2.5 \rfloor", ["2"], ["3"]),
    ],
    "lists": [
        (
            "3, 5, 7",
            ["7, 3, 5", "3,5,7", r"\{3,5,7\}", "3 and 5 and 7", "3; 5; 7"],
            ["3, 5", "3, 5, 8", "3, 5, 7, 9", "(3,5,7)"],
        ),
        ("3", ["3"], ["3, 3", "3, 4", r"3 \text{ or } 4"]),
        (r"\pm 3", ["3, -3", r"x = \pm 3"], ["3", "-3, 4"]),
        (r"1\pm\sqrt{2}", [r"1-\sqrt{2}, 1+\sqrt{2}"], [r"1+\sqrt{2}"]),
        ("(11,7)or(7,11)", [r"(7,11),\ (11,7)"], ["(7,11)"]),
        ("x=1, x=2", ["1, 2", r"x = 2 \text{ or } x = 1"], ["1"]),
        (r"\text{C,E}", ["E, C", "C, E", r"\text{C and E}"], ["C", "C, D"]),
        (r"1, 2, \ldots, n", [r"1,2,\ldots,n"], [r"1, 3, \ldots, n"]),
    ],
    "tuples": [
        (
            "(1, 2)",
            [r"\left( 1, 2 \right)", r"(1.0, \frac{4}{2})", "x = 1, y = 2", r"\langle 1, 2\rangle"],
            ["(2,1)", "[1,2]", "1, 2", r"\{1, 2\}"],
        ),
        ("(p,q,r)=(3,2,7)", ["(3,2,7)"], ["(3,7,2)"]),
    ],
    "intervals": [
        ("[1/2, \\infty)", [r"x \in [0.5, \infty)", r"x \ge 0.5", "[0.5, +∞)"], ["(0.5, \\infty)", "x > 0.5"]),
        (
            r"(-\infty,5)\cup(5,\infty)",
            [r"(5,\infty)\cup(-\infty,5)", r"x \neq 5", r"\mathbb{R}\setminus\{5\}"],
            [r"(-\infty,5)\cap(5,\infty)", r"\mathbb{R}"],
        ),
        ("[0,2]", [r"[0,1]\cup[1,2]", r"0 \le x \le 2"], ["(0,2]", "[0,2)"]),
        (r"x<2 \text{ or } x>3", [r"(-\infty,2)\cup(3,\infty)"], [r"(-\infty,2]\cup[3,\infty)"]),
    ],
    "inequalities": [
        (r"x \geq 5", [r"5 \leq x", "x >= 5", "x≥5"], [r"x \leq 5", "x > 5", r"y \ge 5"]),
        (r"1 < x \le 2", [r"2 \ge x > 1", "(1, 2]"], ["1 < x < 2"]),
        ("x < 1", [], ["-x > -1"]),
        (r"x^2+y^2 \le 4", [r"4 \ge x^2 + y^2", r"x^2+y^2-4 \le 0"], [r"x^2+y^2 \ge 4"]),
    ],
    "equations": [
        (
            "5",
            ["x = 5", "5 = x", "a = 2+3 = 5", r"\text{Area} = 5", "m + n = 5", r"17 \bmod 6 = 5"],
            ["x - 5 = 0", "5x = 25", "2x - 5 = 5"],
        ),
        ("0", ["x = 0"], ["x^2 - 4 = 0"]),
        ("x = 5", ["5", "x=5"], ["y = 5", "x - 5 = 0", "x = 6"]),
        ("f(x) = 2x + 3", ["y = 2x+3", "2x + 3", "3 + 2x"], ["y = 3x + 2"]),
        ("y = 2x + 3", ["2x - y + 3 = 0", "y - 3 = 2x"], ["2x + y + 3 = 0", "x = 2y + 3"]),
        ("x^2 + y^2 = 4", ["x^2 + y^2 - 4 = 0", "2x^2 + 2y^2 = 8"], ["4", "x^2 + y^2 = 5"]),
        (r"\frac{NO}{BO}=\frac{1}{\sqrt{6}}", [r"\frac{1}{\sqrt{6}}"], [r"\sqrt{6}"]),
        ("3", [], ["n = 3k"]),
        (r"4 \cdot 2007 - 3 = 8025", ["8025", r"4 \times 2007 - 3 = 8025"], ["8026", "3"]),
    ],
    "matrices": [
        (
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            [
                r"\begin{bmatrix}1&2\\3&4\\\end{bmatrix}", r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]",
                "[[1,2],[3,4]]",
            ],
            [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"],
        ),
        (
            r"\begin{pmatrix} 1/2 \\ -1 \end{pmatrix}",
            [r"\begin{pmatrix} \frac12 \\ -1 \end{pmatrix}", "(0.5, -1)"],
            ["(-1, 0.5)", "0.5"],
        ),
    ],
    "scaled matrices": [
        (
            r"\begin{pmatrix} 1/2 & 1 \\ 0 & 2 \end{pmatrix}",
            [r"\frac{1}{2}\begin{pmatrix} 1 & 2 \\ 0 & 4 \end{pmatrix}"],
            [r"2\begin{pmatrix} 1 & 2 \\ 0 & 4 \end{pmatrix}", r"-\begin{pmatrix} 1/2 & 1 \\ 0 & 2 \end{pmatrix}"],
        ),
    ],
    "units": [
        (
            "10",
            ["10 cm", "10cm", r"10\text{ cm}^2", "10 square units", r"10\,\mathrm{m/s}", "10 m/s", "10th"],
            ["10x", "10m", "10 or 11"],
        ),
        (r"6.4 \times 10^{16} \text{ cm}^{-3}", [r"6.4 \times 10^{16}"], [r"6.4 \times 10^{-3}"]),
        ("90", [r"90^\circ", r"90^{\circ}", "90°", "90 degrees"], [r"9^\circ"]),
        (r"\$32,\!348", ["32348", "$32,348", "32348 dollars"], ["32.348"]),
        (r"28\%", ["28", "28%", "28 percent"], ["0.28", "2800"]),
        ("15'", ["15"], ["16"]),
        ("3x", [r"3x \text{ square units}"], [r"3x \text{ odd}"]),
    ],
    "words": [
        (r"\text{even}", ["even", "Even", r"\textbf{even}", r"\mathrm{even}."], ["odd", "evene", "0", "e"]),
        (
            r"\text{(C)}",
            ["C", "(C)", r"\text{C}", r"\textbf{(C) } 12", "C) 12", r"\text{Option C}"],
            ["D", r"\text{C or D}", "CC", r"\text{(C) or (D)}"],
        ),
        (r"\text{4:30 p.m.}", [r"4:30 \text{ PM}"], ["4:30", "3:40 p.m."]),
        (r"n \text{ even}", [r"n\text{ Even}"], [r"n \text{ odd}", "n"]),
        ("ABC", ["ABC"], ["ACB"]),
        ("no", ["No"], ["no idea", "on"]),
        ("12:00", ["12:00"], ["11:00"]),
    ],
    "bases": [("52_8", ["52_{8}", "(52)_8"], ["52", "52_9", "42"]), ("1112112_3", [], ["1112122_3"])],
    "ratios": [("3:4", ["6:8", r"3 : 4"], ["4:3", "3:5"])],
    "other": [
        (r"\infty", [r"+\infty", "infinity", "∞"], [r"-\infty", "0"]),
        (r"\emptyset", ["∅", r"\varnothing", r"\{\}"], ["0"]),
        (r"\text{no solution}", [r"\emptyset", "No solutions"], ["0", r"\text{none}"]),
        (r"\mathbb{R}", [r"(-\infty,\infty)", "ℝ", r"\text{all real numbers}"], [r"\mathbb{Z}"]),
        (r"\boxed{12}", ["12"], ["13"]),
    ],
}  # fmt: skip

RIGHT = [(gold, answer) for rows in FAMILIES.values() for gold, right, _ in rows for answer in right]
WRONG = [(gold, answer) for rows in FAMILIES.values() for gold, _, wrong in rows for answer in wrong]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_equal_answers(gold: str, answer: str) -> None:
    assert decide(answer, gold).right is True


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_near_misses(gold: str, answer: str) -> None:
    assert decide(answer, gold).right is False


def test_any_of_several_golds() -> None:
    assert decide_any("1/2", ["0.6", "0.5"])[0].right
    assert not decide_any("0.7", ["0.6", "0.5"])[0].right


def test_empty_golds_never_accept() -> None:
    assert decide("", "").error == "empty_gold"
    assert decide("42", " $ $ ").error == "empty_gold"


def test_what_the_rules_cannot_tell_is_left_to_the_symbolic_grader() -> None:
    assert decide(r"\int_0^1 x dx", "0.5").right is None
    assert decide(r"\operatorname{whatever}(x) \int", "0.5").right is False  # words are never shown to it


rationals = st.fractions(min_value=-1000, max_value=1000, max_denominator=60)


def _latex(value: Fraction) -> st.SearchStrategy[str]:
    top, bottom = value.numerator, value.denominator
    forms = [
        f"\\frac{{{top}}}{{{bottom}}}",
        f"{top}/{bottom}",
        f"\\dfrac{{{3 * top}}}{{{3 * bottom}}}",
        f"x = {top}/{bottom}",
    ]
    if bottom in (1, 2, 4, 5, 8, 10, 20, 25, 40, 50):
        forms.append(f"{float(value)}")
    return st.sampled_from(forms)


@given(
    rationals.flatmap(lambda v: st.tuples(st.just(v), _latex(v))),
    rationals.flatmap(lambda v: st.tuples(st.just(v), _latex(v))),
)
@settings(max_examples=200, deadline=None)
def test_rationals_in_any_spelling_compare_as_rationals(one: tuple[Fraction, str], other: tuple[Fraction, str]) -> None:
    gold = one[1].removeprefix("x = ")
    assert decide(other[1], gold).right is (one[0] == other[0])


trees = st.recursive(
    st.integers(0, 9).map(str),
    lambda inner: st.one_of(
        st.builds("({}+{})".format, inner, inner),
        st.builds("({}-{})".format, inner, inner),
        st.builds(r"{}\cdot {}".format, inner, inner),
    ),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=200, deadline=None)
def test_exact_arithmetic_agrees_with_python(text: str) -> None:
    expected = Fraction(_brute(text.replace(r"\cdot ", "*")))
    assert exact(parse(text)) == expected


def _brute(text: str) -> int:
    """Sums, differences and products by Python's own grammar, through ast: the oracle."""
    import ast
    import operator

    signs = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return signs[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant)
        return int(node.value)  # type: ignore[arg-type]

    return value(ast.parse(text, mode="eval").body)
