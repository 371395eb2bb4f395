"""The documentation keeps its word: names exist, code blocks run, numbers of equations are all there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from attnrl.config import load_config
from attnrl.errors import ConfigError
from attnrl.launch.parts import check_parts
from attnrl.types import Forest, Group, Prompt, Rollout, Sample, Scores, Step, Tree, Trunk, Verdict, as_floats, as_ids

ROOT = Path(__file__).parent.parent
METHOD = (ROOT / "docs/method.md").read_text(encoding="utf-8")
EXTENDING = (ROOT / "docs/extending.md").read_text(encoding="utf-8")

FUNCTIONS = sorted(set(re.findall(r"`(attnrl(?:\.\w+)+)`", METHOD)))
NODES = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)*)`", METHOD)))


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", EXTENDING, flags=re.DOTALL)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_named_in_the_method_exist(name):
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except AttributeError:
        found = importlib.import_module(name)
    assert found.__doc__


@pytest.mark.parametrize("node", NODES)
def test_tests_named_in_the_method_exist(node):
    file, *names = node.split("::")
    scope: ast.AST = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for name in names:
        inside = {child.name: child for child in ast.iter_child_nodes(scope) if hasattr(child, "name")}
        assert name in inside, f"{file} has no {name}"
        scope = inside[name]


def test_every_equation_has_a_function_and_a_test():
    rows = dict(re.findall(r"^\| (\d+) \|(.*)$", METHOD, flags=re.MULTILINE))
    assert list(rows) == [str(n) for n in range(1, 11)]
    for number, row in rows.items():
        assert re.search(r"`attnrl\.", row), f"equation {number} names no function"
        assert re.search(r"`tests/.*::test_", row), f"equation {number} names no test"


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    """The page's code blocks as files, importable, and its preset."""
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, "a block of extending.md begins with its file name"
        (tmp_path / name[1]).write_text(block, encoding="utf-8")
    (preset,) = blocks("toml")
    (tmp_path / "mine.toml").write_text(preset, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def example_trunk(reward: float) -> Trunk:
    rollout = Rollout(as_ids(range(10)), as_floats(-np.ones(10)), "stop", 0)
    steps = (Step(0, 1), Step(1, 2), Step(2, 6), Step(6, 9), Step(9, 10, thinking=False))
    return Trunk(
        rollout, Verdict(reward, "number"), steps, Scores(rollout.logprobs, rollout.logprobs, as_floats([0] * 5))
    )


def test_own_parts_run_under_their_preset(own_files):
    parts = check_parts(load_config(str(own_files / "mine.toml")))
    prompt, rng = Prompt("q", as_ids([1]), ("1",)), np.random.default_rng(0)
    trunk = example_trunk(1.0)
    assert parts["rule"](prompt, trunk, rng) == (1, 2, 6)  # points = 3 came from [algo]
    assert parts["rule"](prompt, trunk, rng, points=1) == (2,)
    assert parts["segmenter"](["So", " x", "Wait", " y", " Hmm", "z"]) == (Step(0, 2), Step(2, 4), Step(4, 6))
    assert [parts["budget"](a, 6) for a in (0.0, 0.5, 1.0)] == [1, 6, 1]
    forest = Forest(prompt, (Tree(trunk), Tree(example_trunk(0.0))))
    assert [s.advantages[0] for s in parts["estimator"](forest, rng)] == [1.0, -1.0]  # 2 * (R - 1/2)


def test_own_parts_are_about_ten_lines(own_files):
    for block in blocks("python"):
        assert len([line for line in block.splitlines() if line.strip()]) <= 10


def test_a_wrong_option_of_an_own_part_is_refused_by_name(own_files):
    with pytest.raises(ConfigError, match=r"algo.budget: .*no option 'most'; it has: least"):
        check_parts(load_config(str(own_files / "mine.toml"), {"algo.budget_options": {"most": 3}}))


def test_own_credit_and_loss_run_by_their_names(own_files):
    import torch

    from attnrl.algo.credit import CREDITS
    from attnrl.algo.parts import bind, read_by
    from attnrl.config import UpdateConfig
    from attnrl.policy.objective import objective

    credit = bind(CREDITS, "my_credit:by_entropy", {"floor": 0.2}, {})
    zeros = as_floats([0, 0])
    sample = Sample(as_ids([1]), as_ids([1, 2]), zeros, zeros, "q")
    assert credit([sample], [Scores(zeros, as_floats([0.1, 0.7]), zeros)])[0] == pytest.approx([0.2, 0.7])
    assert read_by(credit) == {"entropy"}
    loss = objective(UpdateConfig(loss="my_losses:soft", loss_options={"strength": 3.0}, clip_high=0.5)).loss
    found = loss(torch.log(torch.tensor([2.0, 1.2])), torch.zeros(2), torch.tensor([1.0, -1.0]), torch.tensor([2]))
    assert found.loss_N.tolist() == pytest.approx([-2.0 + 3.0, 1.2 + 3 * 0.04])
    assert found.marks["clip_high"].tolist() == [True, False]


def test_own_filter_remembers_what_it_kept(own_files):
    parts = check_parts(load_config(str(own_files / "mine.toml")))
    groups = [Group(Prompt(uid, as_ids([1]), ("1",)), (example_trunk(1.0),)) for uid in ("a", "b")]
    first = parts["filter"](groups, {"b": 1})  # most = 1 came from the preset
    assert first.mask == (True, False)
    assert first.reasons == ("", "seen 1 times")
    assert first.memory == {"a": 1, "b": 1}
    assert parts["filter"](groups, first.memory).mask == (False, False)


def test_nothing_of_the_preset_reads_fci_so_it_is_not_asked_for(own_files):
    from attnrl.launch.parts import scoring_of

    config = load_config(str(own_files / "mine.toml"))
    parts = check_parts(config)
    assert scoring_of(config, [parts["rule"], parts["filter"]]) is None


def test_the_page_has_every_part(own_files):
    kinds = re.findall(r"^\| (\w+): ", EXTENDING, flags=re.MULTILINE)
    assert kinds == [
        "segmenter", "rule", "filter", "budget", "estimator", "credit", "loss", "reward", "schedule", "engine",
    ]  # fmt: skip
