"""Tasks with a decisive step: an independent reader solves them, the teacher errs as often as it says."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from attnrl.config import TaskConfig
from attnrl.data.forks import MISLED_BY, doubt
from attnrl.data.task_tokenizer import task_tokenizer, vocabulary
from attnrl.data.tasks import as_records, make_task, make_tasks

SPEC = TaskConfig(
    forks=("hub", "method", "turn"), wording="equations", modulus=11, operations=(5, 8), routine=(1, 6), style=4
)


def changed(**settings) -> TaskConfig:
    return TaskConfig(**{**SPEC.model_dump(), **settings})


def solve(problem: str, wrong: bool = False) -> int:
    """The asked count, read from the problem's lines alone; `wrong` takes the misled option."""
    opening, *lines, question = problem.split("\n")
    m = int(re.fullmatch(r"All counts are modulo (\d+)\.", opening)[1])
    counts: dict[str, int] = {}
    by = ""
    for line in lines:
        if match := re.fullmatch(r"- (\w+) = (\d+)", line):
            counts[match[1]] = int(match[2])
        elif match := re.fullmatch(r"- (\w+) = half (\w+)", line):
            half = next(h for h in range(m) if 2 * h % m == counts[match[2]])
            counts[match[1]] = (half + MISLED_BY * wrong) % m
        elif match := re.fullmatch(r"- by is ([+-]) where (\w+) is low else ([+-])", line):
            by = match[1] if (2 * counts[match[2]] < m) != wrong else match[3]
        elif match := re.fullmatch(r"- (\w+) = (\w+) where (\w+) is low else (\w+)", line):
            counts[match[1]] = counts[match[2] if (2 * counts[match[3]] < m) != wrong else match[4]]
        else:
            match = re.fullmatch(r"- (\w+) = (\w+) (\+|-|\*|by) (\w+)", line)
            second = int(match[4]) if match[4].isdigit() else counts[match[4]]
            first, sign = counts[match[2]], by if match[3] == "by" else match[3]
            counts[match[1]] = {"+": first + second, "-": first - second, "*": first * second}[sign] % m
    return counts[re.fullmatch(r"How many (\w+) are there\?", question)[1]]


def test_a_reader_of_the_problem_gets_the_answer_and_the_decision_decides_it():
    kinds = set()
    for task in make_tasks(SPEC, "train", 300):
        assert solve(task.problem) == int(task.answer)
        assert solve(task.problem, wrong=True) != int(task.answer)
        assert task.solution.endswith(f"\\boxed{{{task.answer}}}.")
        steps = task.solution.split("\n\n")
        (number,) = task.decisive
        assert [" choose " in step for step in steps].index(True) == number
        assert sum(" choose " in step for step in steps) == 1
        assert len(steps) == task.operations + 3  # the given count, the decision and the answer
        kinds.add(re.sub(r"\w+ = \w+$", "count", steps[number].split(" ", 1)[1]))
        assert all(sum_is_right(step) for step in steps)
    assert kinds == {"choose count", "choose by is +", "choose by is -"}


def test_a_pair_is_two_decisions_each_of_which_decides_and_later_steps_use_both():
    for task in make_tasks(changed(forks=("pair",)), "train", 200):
        assert solve(task.problem) == int(task.answer)
        assert task.solution.endswith(f"\\boxed{{{task.answer}}}.")
        steps = task.solution.split("\n\n")
        first, second = task.decisive
        assert [k for k, step in enumerate(steps) if " choose " in step] == [first, second]
        assert 1 <= second - first <= 3
        hub = next(re.search(r"choose (\w+) = ", steps[k])[1] for k in task.decisive if "by is" not in steps[k])
        assert f" by {hub} = " in steps[second + 1]
        assert sum(f" by {hub} = " in step for step in steps) >= 1


def sum_is_right(step: str) -> bool:
    match = re.search(r"= (\d+) ([+*-]) (\d+) = (\d+)$", step)
    if not match:
        return True
    a, sign, b, value = int(match[1]), match[2], int(match[3]), int(match[4])
    return {"+": a + b, "-": a - b, "*": a * b}[sign] % 11 == value


def test_the_decisive_step_is_at_places_that_vary():
    places = {task.decisive[0] for task in make_tasks(SPEC, "train", 200)}
    assert places == {2, 3, 4, 5, 6, 7}


def test_the_teacher_is_misled_as_often_as_it_says_and_errors_touch_no_problem():
    plain, doubtful = SPEC, changed(doubts=0.4)
    wrong: dict[int, list[bool]] = {0: [], 1: [], 2: []}
    for index in range(1500):
        task, taught = make_task(plain, "train", index), make_task(doubtful, "train", index)
        assert task.problem == taught.problem
        step = task.solution.split("\n\n")[task.decisive[0] - 1]
        basis = int(re.findall(r"\d+", step)[-1])
        wrong[basis % 3].append(not taught.solution.endswith(f"\\boxed{{{task.answer}}}."))
        if wrong[basis % 3][-1]:
            assert taught.solution.endswith(f"\\boxed{{{solve(task.problem, wrong=True)}}}.")
    for count, outcomes in wrong.items():
        assert sum(outcomes) / len(outcomes) == pytest.approx(doubt(0.4, count), abs=0.07)


def test_style_words_open_the_steps_and_mean_nothing():
    tasks = make_tasks(SPEC, "train", 50)
    opened = {step.split(" ")[0] for task in tasks for step in task.solution.split("\n\n")[:-1]}
    assert opened == {"Then", "Next", "Now", "And"}
    plain = make_tasks(changed(style=1), "train", 50)
    assert [t.problem for t in plain] == [t.problem for t in tasks]
    assert {step.split(" ")[0] for task in plain for step in task.solution.split("\n\n")[:-1]} == {"Then"}


def test_the_tokenizer_loses_nothing():
    tokenizer = task_tokenizer(SPEC)
    for task in make_tasks(SPEC, "test", 50):
        ids = tokenizer(task.problem + "\n" + task.solution, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == task.problem + "\n" + task.solution


def test_records_carry_the_decisive_step_and_tasks_without_forks_are_what_they_were():
    assert [r.info["decisive"] for r in as_records(SPEC, "train", 3)] == [
        list(t.decisive) for t in make_tasks(SPEC, "train", 3)
    ]
    assert "decisive" not in as_records(TaskConfig(), "train", 1)[0].info
    assert " choose" not in vocabulary(TaskConfig())
    assert make_task(TaskConfig(), "train", 0).key == make_task(TaskConfig(style=2, routine=(1, 1)), "train", 0).key


def test_train_and_test_share_no_problem():
    train, test = ({t.problem for t in make_tasks(SPEC, split, 200)} for split in ("train", "test"))
    assert len(train) == len(test) == 200
    assert not train & test


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"modulus": 10}, "modulus"),
        ({"wording": "list"}, "wording"),
        ({"doubts": 0.7}, "doubts"),
        ({"style": 5}, "style"),
        ({"routine": (5, 2)}, "routine"),
        ({"forks": ("fork",)}, "forks"),
        ({"routine": (20, 20), "operations": (17, 17)}, "names"),
    ],
)
def test_settings_that_cannot_be_are_said(settings, key):
    with pytest.raises(ValidationError, match=key):
        changed(**settings)
