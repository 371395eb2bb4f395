"""Made-up tasks: solvable by an independent reader, split by content, and lossless in their tokenizer."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl import cli
from attnrl.config import TaskConfig, load_config
from attnrl.data.prompts import render_prompts
from attnrl.data.task_tokenizer import task_tokenizer, vocabulary
from attnrl.data.tasks import Task, as_records, make_task, make_tasks
from attnrl.errors import ConfigError
from attnrl.verify import Verifier

SPECS = {
    "default": TaskConfig(),
    "list": TaskConfig(wording="list", modulus=11, operations=(2, 6), distractors=(0, 2)),
    "equations": TaskConfig(wording="equations", modulus=11, operations=(2, 8), checks=(1, 3)),
    "plain counts": TaskConfig(modulus=None, sides=(0, 2), slips=0.1),
    "long": TaskConfig(operations=(15, 20), sides=(0, 3), checks=(0, 6), slips=0.05, givens=4, distractors=(2, 6)),
    "short": TaskConfig(operations=(1, 3), modulus=10, names=12, kinds=("more", "fewer"), sides=(0, 0)),
}
FORMS = (  # read independently of the generator: pattern, then names of its groups
    (r"There are (\d+) (\w+)\.", "value name"),
    (r"There are (\d+) more (\w+) than (\w+)\.", "value name first +"),
    (r"There are (\d+) fewer (\w+) than (\w+)\.", "value name first -"),
    (r"There are (\d+) times as many (\w+) as (\w+)\.", "value name first *"),
    (r"There are as many (\w+) as (\w+) plus (\w+)\.", "name first second +"),
    (r"There are as many (\w+) as (\w+) minus (\w+)\.", "name first second -"),
    (r"- (\w+): (\d+)\n", "name value"),
    (r"- (\w+): (\d+) more than (\w+)\n", "name value first +"),
    (r"- (\w+): (\d+) fewer than (\w+)\n", "name value first -"),
    (r"- (\w+): (\d+) times (\w+)\n", "name value first *"),
    (r"- (\w+): (\w+) plus (\w+)\n", "name first second +"),
    (r"- (\w+): (\w+) minus (\w+)\n", "name first second -"),
    (r"- (\w+) = (\d+)\n", "name value"),
    (r"- (\w+) = (\w+) \+ (\d+)\n", "name first value +"),
    (r"- (\w+) = (\w+) - (\d+)\n", "name first value -"),
    (r"- (\w+) = (\w+) \* (\d+)\n", "name first value *"),
    (r"- (\w+) = ([a-z]+) \+ ([a-z]+)\n", "name first second +"),
    (r"- (\w+) = ([a-z]+) - ([a-z]+)\n", "name first second -"),
)


def read_definitions(problem: str) -> dict[str, dict[str, str]]:
    definitions = {}
    for pattern, fields in FORMS:
        names = fields.split()
        for match in re.finditer(pattern, problem):
            found = dict(zip(names, match.groups(), strict=False))
            assert found["name"] not in definitions
            definitions[found["name"]] = found | ({"sign": names[-1]} if names[-1] in "+-*" else {})
    return definitions


def compute(sign: str, first: int, second: int, modulus: int | None) -> int:
    value = first + second if sign == "+" else first - second if sign == "-" else first * second
    return value if modulus is None else value % modulus


def solve(problem: str) -> tuple[int, set[str]]:
    """The answer and the quantities it needs, by recursion over the text."""
    definitions = read_definitions(problem)
    modulus = re.search(r"modulo (\d+)\.", problem)
    needed: set[str] = set()

    def value(name: str) -> int:
        needed.add(name)
        d = definitions[name]
        if "sign" not in d:
            return int(d["value"])
        second = value(d["second"]) if "second" in d else int(d["value"])
        return compute(d["sign"], value(d["first"]), second, modulus and int(modulus[1]))

    return value(re.search(r"How many (\w+) are there\?$", problem)[1]), needed


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_answer_is_what_an_independent_reader_computes(spec: TaskConfig, split: str) -> None:
    for index in range(60):
        task = make_task(spec, split, index, seed=5)
        answer, needed = solve(task.problem)
        definitions = read_definitions(task.problem)
        assert str(answer) == task.answer
        assert task.operations == sum("sign" in definitions[name] for name in needed)
        assert spec.operations[0] <= task.operations <= spec.operations[1]
        assert spec.distractors[0] <= len(definitions) - len(needed) <= spec.distractors[1]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_step_of_a_solution_follows_from_the_problem_and_the_steps_before(spec: TaskConfig) -> None:
    for index in range(60):
        task = make_task(spec, "train", index, seed=6)
        check_solution(task, spec)


def check_solution(task: Task, spec: TaskConfig) -> None:
    definitions = read_definitions(task.problem)
    known = {name: int(d["value"]) for name, d in definitions.items() if "sign" not in d}
    steps = task.solution.split("\n\n")
    planned: list[str] = []
    computed: list[str] = []
    slipped: str | None = None
    for step in steps[:-1]:
        if step.startswith("Plan: "):
            assert not computed
            entries = step.removeprefix("Plan: ").removesuffix(".").split(", ")
            assert 1 <= len(entries) <= spec.plan_entries
            for entry in entries:
                name, _, sources = entry.partition(" from ") if " from " in entry else (*entry.split(" known"), "")
                d = definitions[name]
                assert sources == " and ".join(d[key] for key in ("first", "second") if key in d)
                planned.append(name)
        elif match := re.fullmatch(r"Take (\w+) = (\d+)", step):
            assert known[match[1]] == int(match[2])
            computed.append(match[1])
        elif match := re.fullmatch(r"Then (\w+) = (\w+) ([-+*]) (\w+) = (\d+) [-+*] (\d+) = (\d+)", step):
            name, first, sign, second, a, b, shown = match.groups()
            d = definitions[name]
            assert (first, sign, second) == (
                d["first"],
                d["sign"],
                d.get("second", d.get("value")),
            )
            assert known[first] == int(a)
            assert (known[second] if "second" in d else int(second)) == int(b)
            assert slipped is None
            known[name] = compute(sign, int(a), int(b), spec.modulus)
            slipped = None if known[name] == int(shown) else name
            computed.append(name)
        else:
            match = re.fullmatch(r"Check: (\w+) = (\d+) ([-+*]) (\d+) = (\d+), (right|not \d+)", step)
            assert match, step
            name, a, sign, b, value, end = match.groups()
            assert known[name] == int(value) == compute(sign, int(a), int(b), spec.modulus)
            assert name in computed
            assert (end == "right") == (slipped != name)
            slipped = None
    assert computed == planned[::-1]
    assert computed[-1] in steps[-1]
    assert steps[-1] == f"So {computed[-1]} = \\boxed{{{task.answer}}}."
    assert slipped is None


def test_ten_thousand_solutions_grade_as_right() -> None:
    tasks = [
        task for number, spec in enumerate(SPECS.values()) for task in make_tasks(spec, "train", 2000, seed=number)
    ]
    with Verifier(workers=1) as verifier:
        verdicts = verifier.grade([(task.solution, [task.answer]) for task in tasks])
        wrong = verifier.grade([(task.solution, [str(int(task.answer) + 1)]) for task in tasks[:200]])
    assert len(verdicts) == len(tasks) >= 10_000
    assert all(verdict.reward == 1.0 for verdict in verdicts)
    assert not any(verdict.reward for verdict in wrong)


def test_train_and_test_share_no_problem_whatever_the_seeds() -> None:
    # A space of a few thousand problems, so that seeds do meet: train 0 and train 1 share many.
    fields = {"operations": (1, 1), "modulus": 5, "names": 8, "givens": 0, "distractors": (0, 0), "sides": (0, 0)}
    spec, other = TaskConfig(**fields), TaskConfig(**fields, wording="list", checks=(0, 0))

    def problems(spec: TaskConfig, split: str, seed: int) -> set[str]:
        found = set()
        for index in range(500):
            problem = make_task(spec, split, index, seed).problem
            definitions = sorted(map(str, (sorted(d.items()) for d in read_definitions(problem).values())))
            found.add("|".join([*definitions, problem.rpartition("How many")[2]]))
        return found

    train = [problems(spec, "train", 0), problems(spec, "train", 1), problems(other, "train", 0)]
    test = [problems(spec, "test", 0), problems(spec, "test", 2), problems(other, "test", 1)]
    assert len(train[0] & train[1]) > 40
    assert len(train[0] & train[2]) > 40
    assert len(test[0] & test[1]) > 50
    assert not set.union(*train) & set.union(*test)


def test_ordinary_tasks_of_two_seeds_are_disjoint_too() -> None:
    keys = {
        (split, seed): {t.key for t in make_tasks(TaskConfig(), split, 200, seed)}
        for split in ("train", "test")
        for seed in (0, 1)
    }
    assert all(len(found) == 200 for found in keys.values())
    assert len(set.union(*keys.values())) == 800


def test_a_task_depends_on_spec_split_seed_and_index_alone() -> None:
    spec = TaskConfig()
    first = make_task(spec, "train", 7, seed=3)
    others = [
        make_task(spec, "train", 8, seed=3),
        make_task(spec, "train", 7, seed=4),
        make_task(spec, "test", 7, seed=3),
    ]
    assert all(other.problem != first.problem for other in others)


def test_a_teacher_that_errs_goes_on_from_its_error_and_leaves_problem_and_answer_alone() -> None:
    spec = TaskConfig(operations=(4, 4), sides=(0, 0), checks=(0, 0))
    erring = spec.model_copy(update={"errors": 0.2})
    right = 0
    for index in range(300):
        task, other = make_task(spec, "train", index), make_task(erring, "train", index)
        assert (task.problem, task.answer) == (other.problem, other.answer)
        wrong_lines = 0
        for a, sign, b, value in re.findall(r"= (\d+) ([+*-]) (\d+) = (\d+)", other.solution):
            wrong_lines += compute(sign, int(a), int(b), spec.modulus) != int(value)
        boxed = other.solution.rpartition("{")[2].partition("}")[0]
        assert wrong_lines or boxed == task.answer
        right += not wrong_lines
    assert 300 * 0.8**4 - 40 < right < 300 * 0.8**4 + 40


def test_response_lengths_span_what_experiments_need() -> None:
    tokenizer = task_tokenizer()
    short = make_tasks(TaskConfig(operations=(4, 4), checks=(0, 0)), "train", 20)
    long = make_tasks(TaskConfig(operations=(20, 20), checks=(20, 20), sides=(0, 1)), "train", 20)
    steps = [task.solution.count("\n\n") + 1 for task in short]
    assert all(8 <= n <= 10 for n in steps)
    assert [task.difficulty for task in (short[0], long[0])] == [1, 5]
    assert all(70 <= len(tokenizer(task.solution)["input_ids"]) <= 130 for task in short)
    assert all(550 <= len(tokenizer(task.solution)["input_ids"]) <= 800 for task in long)


@settings(max_examples=40, deadline=None)
@given(index=st.integers(0, 10**9), name=st.sampled_from(sorted(SPECS)), split=st.sampled_from(["train", "test"]))
def test_tokens_lose_nothing_and_meet_at_the_prompt_boundary(index: int, name: str, split: str) -> None:
    tokenizer = TOKENIZERS[name]
    task = make_task(SPECS[name], split, index)
    prompt, solution = tokenizer(task.problem + "\n")["input_ids"], tokenizer(task.solution)["input_ids"]
    whole = tokenizer(task.problem + "\n" + task.solution)["input_ids"]
    assert prompt + solution == whole
    assert tokenizer.decode(whole) == task.problem + "\n" + task.solution
    assert tokenizer.unk_token_id not in whole
    texts = [tokenizer.decode([i]) for i in solution]
    assert "".join(texts) == task.solution
    assert texts.count("\n\n") == task.solution.count("\n\n")


TOKENIZERS = {name: task_tokenizer(spec) for name, spec in SPECS.items()}


def test_numbers_and_words_are_single_tokens() -> None:
    tokenizer = TOKENIZERS["default"]
    text = "Then lamps = coins + 3 = 19 + 3 = 22\n\n"
    assert [tokenizer.decode([i]) for i in tokenizer(text)["input_ids"]] == [
        "Then", " lamps", " =", " coins", " +", " 3", " =", " 19", " +", " 3", " =", " 22", "\n\n",
    ]  # fmt: skip
    assert len(set(vocabulary(TaskConfig()))) == len(vocabulary(TaskConfig())) == len(tokenizer)
    digits = TOKENIZERS["plain counts"]
    assert [digits.decode([i]) for i in digits(" = 97")["input_ids"]] == [" =", " 9", "7"]


@pytest.mark.parametrize("family", [None, "qwen3", "llama"])
def test_the_saved_tokenizer_loads_without_loss(tmp_path, family) -> None:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = TOKENIZERS["default"]
    tokenizer.save_pretrained(tmp_path)
    if family:
        AutoConfig.for_model(family, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    check_loaded(loaded)


def test_a_qwen2_directory_needs_the_plain_class(tmp_path) -> None:
    from transformers import AutoConfig, PreTrainedTokenizerFast

    TOKENIZERS["default"].save_pretrained(tmp_path)
    AutoConfig.for_model("qwen2", vocab_size=200).save_pretrained(tmp_path)
    check_loaded(PreTrainedTokenizerFast.from_pretrained(tmp_path))


def check_loaded(loaded) -> None:
    for index in range(20):
        task = make_task(TaskConfig(), "test", index)
        ids = TOKENIZERS["default"](task.problem + "\n" + task.solution)["input_ids"]
        assert loaded(task.problem + "\n" + task.solution)["input_ids"] == ids
        assert loaded.decode(ids) == task.problem + "\n" + task.solution
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) == (0, 1, 2)
    assert loaded.decode([1, 0], skip_special_tokens=True) == ""


def test_tasks_take_the_prompt_path_of_any_data_set() -> None:
    records = as_records(TaskConfig(), "test", 5, seed=1)
    tasks = make_tasks(TaskConfig(), "test", 5, seed=1)
    tokenizer = TOKENIZERS["default"]
    prompts, dropped = render_prompts(records, tokenizer, template="{problem}", max_prompt_tokens=400)
    assert not dropped
    for prompt, task in zip(prompts, tasks, strict=True):
        assert tokenizer.decode(prompt.ids) == task.problem + "\n"
        assert prompt.answers == (task.answer,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operations": (5, 2)}, "operations"),
        ({"operations": (2, 21)}, "operations"),
        ({"modulus": 4}, "modulus"),
        ({"modulus": None, "largest": 5}, "largest"),
        ({"slips": 1.0}, "slips"),
        ({"errors": 0.5, "modulus": None}, "errors"),
        ({"names": 41}, "names"),
        ({"operations": (20, 20), "distractors": (0, 20)}, "lower one of the ranges"),
        ({"kinds": ("plus",)}, "kinds"),
        ({"kinds": ("more", "fewer"), "sides": (1, 1)}, "sides above 0 need"),
        ({"wording": "rhyme"}, "wording"),
    ],
)
def test_wrong_settings_are_refused_by_name(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("attnrl_1p5b", {f"data.tasks.{key}": value for key, value in fields.items()})


@pytest.mark.parametrize(
    ("fields", "digest"),
    [
        ({}, "7329778c2f81bf49"),
        (
            {"operations": (2, 6), "modulus": 11, "distractors": (0, 2), "checks": (0, 1), "wording": "equations"},
            "61252630d11dbcad",
        ),
        ({"modulus": None, "sides": (0, 2), "slips": 0.1}, "f8a32397c229612c"),
        (
            {"operations": (2, 6), "modulus": 11, "errors": 0.08, "wording": "list", "names": 30}
            | {"kinds": ("more", "fewer", "plus")},
            "bcc52adedc85bf9f",
        ),
    ],
)
def test_the_tasks_of_a_setting_are_what_they_always_were(fields, digest) -> None:
    """Digests computed at d9ecc0b, with the generator's own settings class of that time."""
    tasks = [make_task(TaskConfig(**fields), s, i, 3) for s in ("train", "test") for i in range(20)]
    text = "".join(repr((t.problem, t.solution, t.answer, t.key)) for t in tasks)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest
    assert make_task(TaskConfig(**fields, seed=3), "train", 1) == tasks[1]


def test_asking_for_more_problems_than_there_are_is_refused() -> None:
    spec = TaskConfig(operations=(1, 1), modulus=5, names=2, givens=0, distractors=(0, 0), sides=(0, 0))
    with pytest.raises(ConfigError, match="fewer than 40 different test problems"):
        make_tasks(spec, "test", 40)
    with pytest.raises(ConfigError, match="split"):
        make_task(spec, "dev", 0)  # type: ignore[arg-type]


def test_the_command_writes_the_tasks(tmp_path, capsys) -> None:
    file = tmp_path / "tasks.jsonl"
    code = cli.run(
        ["tasks", "--output", str(file), "--split", "test", "--count", "7", "--seed", "3", "--operations", "2,4"]
    )
    assert code == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    tasks = make_tasks(TaskConfig(operations=(2, 4)), "test", 7, seed=3)
    assert [(r["problem"], r["answer"], r["solution"], r["operations"]) for r in rows] == [
        (t.problem, t.answer, t.solution, t.operations) for t in tasks
    ]
    assert cli.run(["tasks", "--output", str(tmp_path / "no" / "x.jsonl")]) == 2
    assert "does not exist" in capsys.readouterr().err
