"""Which part of a response is its answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.verify.extract import boxes, extract, final_part

BOXED = {
    "last box": (r"\boxed{41} then \boxed{42}", "42"),
    "nested braces": (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    "escaped braces": (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    "lone escaped brace": (r"\boxed{\left\{ 1 \right.} and more }", r"\left\{ 1 \right."),
    "space before the brace": (r"\boxed {7}", "7"),
    "space form": (r"The answer is \boxed 4", "4"),
    "space form in dollars": (r"is $\boxed 42$ now", "42"),
    "fbox": (r"\fbox{7}", "7"),
    "box in a box": (r"\boxed{\boxed{5}}", r"\boxed{5}"),
    "after thinking": (r"<think>\boxed{1}</think>\boxed{2}", "2"),
    "two thoughts": (r"<think>a</think>\boxed{1}<think>b</think>\boxed{2}", "2"),
    "comma": (r"\boxed{1},\boxed{2}, \boxed{3}", "1, 2, 3"),
    "and": (r"\boxed{(98, 2)} \quad \text{and} \quad \boxed{(99, 503)}", "(98, 2), (99, 503)"),
    "or is a hedge": (r"$\boxed{42}$ or $\boxed{43}$", "42, 43"),
    "same box twice": (r"\boxed{4}, \boxed{4}", "4"),
    "sentence between": (r"\boxed{4}, but actually \boxed{5}", "5"),
    "only space between": ("\\boxed{4}\n\n\\boxed{5}", "5"),
    "boxedsomething is no box": (r"\boxedness{3} \boxed{4}", "4"),
}
NOTHING = {
    "empty box": r"\boxed{}",
    "blank box": r"\boxed{  }",
    "empty last box": r"\boxed{5} oops \boxed{}",
    "unterminated": r"\boxed{42",
    "unterminated last": r"\boxed{3} then \boxed{\frac{1}{2}",
    "box in unclosed thinking": r"<think> partial \boxed{42} and more",
    "nothing after thinking": r"<think>I get \boxed{42}</think>",
    "box command at the end": r"so the answer is \boxed",
    "shrug": "I don't know",
    "empty": "",
}
PLAIN = {
    "colon": ("Final answer: 42", "42"),
    "display": ("The answer is $$42$$", "42"),
    "parenthesis": (r"Answer \( 9 \)", "9"),
    "sentence": ("Final Answer: The largest $n$ is 34.", "34"),
    "therefore": ("P = 1/3. Therefore, the probability that Alice wins the game is 2/3.", "2/3"),
    "hope": ("Therefore, there are 12 sequences. I hope it is correct.", "12"),
    "next turn": ("So the answer is 5. <|im_start|>user", "5"),
    "bold": ("Thus, 196 has **9** positive divisors.", "9"),
    "decimal": ("The final answer is 7.78.", "7.78"),
    "formula": ("We simplify:\n\\[\n\\sqrt{117} = 3\\sqrt{13}\n\\]", r"3\sqrt{13}"),
    "hashes": ("She has 72.\n#### 72", "72"),
    "expression": ("Final answer: x^2+1", "x^2+1"),
    "denied": ("The answer is not 5.", None),
    "bounded": ("The answer is greater than 5.", None),
    "unfinished thought": ("So the answer is 15 liters. But wait, 37/3 - 2/3 = 35/3 and then", None),
    "unfinished sentence": ("So there are 12", None),
    "no value": ("The answer is !!!invalid!!!", None),
}


@pytest.mark.parametrize(("response", "answer"), BOXED.values(), ids=BOXED)
def test_boxed_answers(response: str, answer: str) -> None:
    found = extract(response)
    assert (found.answer, found.source) == (answer, "boxed")


@pytest.mark.parametrize("response", NOTHING.values(), ids=NOTHING)
def test_no_answer(response: str) -> None:
    assert extract(response).answer is None


@pytest.mark.parametrize(("response", "answer"), PLAIN.values(), ids=PLAIN)
def test_answers_without_a_box(response: str, answer: str | None) -> None:
    assert extract(response).answer == answer


def test_a_hedge_without_a_box_is_not_cut_to_one_value() -> None:
    assert extract("The answer is 4 or 5.").answer == "4 or 5"


braced = st.recursive(
    st.text("ab1 ,+", max_size=6), lambda inner: st.builds(lambda a, b: f"{a}{{{b}}}", inner, inner), max_leaves=8
)


@given(st.text("xyz {}\\$.", max_size=40), braced.filter(lambda text: text.strip()), st.text("xyz .$", max_size=20))
def test_the_last_box_is_found_whatever_stands_before_it(before: str, content: str, after: str) -> None:
    found = boxes(f"{before}\\relax\\boxed{{{content}}}{after}")
    assert found[-1].content == content


@given(st.text(max_size=60), st.text(max_size=60).filter(lambda t: "think>" not in t))
def test_the_final_part_follows_the_last_closing_tag(before: str, after: str) -> None:
    assert final_part(f"{before}</think>{after}") == after
