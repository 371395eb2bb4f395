"""The ladder of presets (Tables 1-3 of the paper): neighbours differ in what their row says and in nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from attnrl.config import load_config, presets

NOTHING = object()
SEVEN = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
ITERATIONS = {"run.iterations": (800, 500)}  # Table 3: 800 for the rivals, 500 for AttnRL; the paper's own numbers
ADAPTIVE = {  # Sec. 3.2, what Table 2 calls ADS
    "algo.filter": ("all", "attention"),
    "algo.budget": ("all", "difficulty"),
    "algo.adaptive_batch": (False, True),
}
PIPELINE = {"algo.schedule": ("on_policy", "one_step_off_policy")}  # Sec. 3.3

S_RULES = {
    "s_atb": "fci",
    "s_entropy": "step_entropy",
    "s_first": "first_steps",
    "s_mean": "fci_mean",
    "s_oracle": "oracle",
    "s_random": "random_steps",
    "s_ratio": "fci_ratio",
    "s_residual": "fci_residual",
}

# one preset, its neighbour, and every key in which they differ with both values
LADDER: list[tuple[str, str, dict[str, tuple[Any, Any]]]] = [
    # Table 1: GRPO, TreeRL, AttnRL; the same at 7B
    (
        "grpo_1p5b",
        "treerl_1p5b",
        {"algo.group": (30, 6), "algo.rule": ("none", "surprisal"), "algo.estimator": ("grpo", "tree")},
    ),
    ("treerl_1p5b", "attnrl_1p5b", {"algo.rule": ("surprisal", "fci"), **ADAPTIVE, **PIPELINE, **ITERATIONS}),
    ("grpo_1p5b", "grpo_7b", {"model.path": (NOTHING, SEVEN)}),
    ("treerl_1p5b", "treerl_7b", {"model.path": (NOTHING, SEVEN)}),
    ("attnrl_1p5b", "attnrl_7b", {"model.path": (NOTHING, SEVEN)}),
    ("attnrl_7b", "attnrl_7b_one_gpu", {"update.optimizer": ("adamw", "adamw_offloaded")}),
    # Table 2: + ATB, + ADS without its filter or its expansion, AttnRL
    ("treerl_1p5b", "ablation_atb_1p5b", {"algo.rule": ("surprisal", "fci")}),
    ("ablation_atb_1p5b", "attnrl_1p5b", {**ADAPTIVE, **PIPELINE, **ITERATIONS}),
    ("ablation_no_filter_1p5b", "attnrl_1p5b", {"algo.filter": ("all", "attention")}),
    ("ablation_no_expansion_1p5b", "attnrl_1p5b", {"algo.budget": ("all", "difficulty")}),
    ("ablation_not_all_right_1p5b", "attnrl_1p5b", {"algo.filter": ("not_all_right", "attention")}),  # Sec. 4.3
    # beyond the paper: another rule
    ("attnrl_residual_1p5b", "attnrl_1p5b", {"algo.rule": ("fci_residual", "fci")}),
    ("attnrl_ratio_1p5b", "attnrl_1p5b", {"algo.rule": ("fci_ratio", "fci")}),
    ("attnrl_random_1p5b", "attnrl_1p5b", {"algo.rule": ("random_steps", "fci")}),
    ("attnrl_entropy_1p5b", "attnrl_1p5b", {"algo.rule": ("step_entropy", "fci")}),
    # Table 3: TreeRL, TreeRL one step off-policy
    ("treerl_1p5b", "treerl_1p5b_off_policy", PIPELINE),
    # TreeRL's own form
    ("treerl_1p5b", "treerl_original_1p5b", {"algo.estimator": ("tree", "treerl")}),
    # the same rungs on small models
    *(
        rung
        for treerl, grpo, attnrl in (
            ("demo_treerl", "demo_grpo", "demo"),
            ("mini_treerl", "mini_grpo", "mini_attnrl"),
            ("s_treerl", "s_grpo", "s_attnrl"),
        )
        for rung in (
            (
                grpo,
                treerl,
                {"algo.group": (30, 6), "algo.rule": ("none", "surprisal"), "algo.estimator": ("grpo", "tree")},
            ),
            (treerl, attnrl, {"algo.rule": ("surprisal", "fci"), **ADAPTIVE, **PIPELINE}),
        )
    ),
    # testbed P: its short responses need a small delta where something reads FCI
    (
        "p_grpo",
        "p_treerl",
        {"algo.group": (30, 6), "algo.rule": ("none", "surprisal"), "algo.estimator": ("grpo", "tree")},
    ),
    (
        "p_treerl",
        "p_attnrl",
        {"algo.rule": ("surprisal", "fci"), "algo.delta": (4, 1), **ADAPTIVE, **PIPELINE},
    ),
    ("p_treerl", "p_atb", {"algo.rule": ("surprisal", "fci"), "algo.delta": (4, 1)}),
    ("p_treerl", "p_ratio", {"algo.rule": ("surprisal", "fci_ratio"), "algo.delta": (4, 1)}),
    ("p_treerl", "p_random", {"algo.rule": ("surprisal", "random_steps")}),
    ("p_treerl", "p_entropy", {"algo.rule": ("surprisal", "step_entropy")}),
    # testbeds S and P: the ablations, and AttnRL with its rule alone replaced
    *(
        rung
        for bed in ("s", "p")
        for rung in (
            (f"{bed}_treerl", f"{bed}_treerl_off_policy", PIPELINE),
            (f"{bed}_attnrl_entropy", f"{bed}_attnrl", {"algo.rule": ("step_entropy", "fci")}),
            (f"{bed}_no_filter", f"{bed}_attnrl", {"algo.filter": ("all", "attention")}),
            (f"{bed}_no_expansion", f"{bed}_attnrl", {"algo.budget": ("all", "difficulty")}),
            (f"{bed}_no_batch", f"{bed}_attnrl", {"algo.adaptive_batch": (False, True)}),
        )
    ),
    ("s_attnrl_ratio", "s_attnrl", {"algo.rule": ("fci_ratio", "fci")}),
    # testbed S: the rule alone replaced on the tree of TreeRL
    ("s_atb", "s_atb_top10", {"algo.top_fraction": (0.2, 0.1)}),
    ("s_treerl", "s_position", {"algo.rule": ("surprisal", "position"), "algo.rule_options": ({}, NOTHING)}),
    *(("s_treerl", name, {"algo.rule": ("surprisal", rule)}) for name, rule in S_RULES.items()),
]
RIVALS = {  # from GRPO: trunks, where they branch, and the advantage (method.md, "Rivals")
    "spo_chain_1p5b",
    "spo_tree_1p5b",
    "tree_grpo_1p5b",
    "treepo_1p5b",
    "vineppo_1p5b",
    "fr3e_1p5b",
}
PARTS_OF_A_RIVAL = {
    "algo.group", "algo.rule", "algo.rule_options", "algo.points", "algo.width", "algo.estimator",
    "algo.estimator_options",
}  # fmt: skip


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values; option tables are values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        deep = isinstance(value, dict) and not key.endswith(("options", "columns"))
        found |= flat(value, f"{prefix}{key}.") if deep else {f"{prefix}{key}": value}
    return found


def difference(a: str, b: str) -> dict[str, tuple[Any, Any]]:
    """The keys in which two resolved presets differ, with both values; what a preset says about itself left out."""
    one, other = (flat(load_config(name).model_dump()) for name in (a, b))
    assert one.keys() == other.keys()
    return {key: (one[key], other[key]) for key in one if key != "about" and one[key] != other[key]}


@pytest.mark.parametrize(("a", "b", "allowed"), LADDER, ids=[f"{a}-{b}" for a, b, _ in LADDER])
def test_neighbours_differ_in_what_their_row_says(a: str, b: str, allowed: dict[str, tuple[Any, Any]]) -> None:
    found = difference(a, b)
    print(f"{a} -> {b}")
    for key, (before, after) in found.items():
        print(f"  {key}: {before!r} -> {after!r}")
    assert found.keys() == allowed.keys()
    for key, (before, after) in allowed.items():
        assert after is NOTHING or found[key][1] == after
        assert before is NOTHING or found[key][0] == before


@pytest.mark.parametrize("rival", sorted(RIVALS))
def test_a_rival_differs_from_grpo_in_its_parts_alone(rival: str) -> None:
    found = difference("grpo_1p5b", rival)
    print(f"grpo_1p5b -> {rival}: " + ", ".join(f"{key} {b!r}" for key, (_, b) in found.items()))
    assert {"algo.rule", "algo.estimator"} <= found.keys() <= PARTS_OF_A_RIVAL


def test_every_preset_of_a_table_stands_on_the_ladder() -> None:
    named = {name for a, b, _ in LADDER for name in (a, b)} | RIVALS
    assert set(presets()) - named == {"attnrl_1p5b_released"}  # it says itself in what it differs


def test_every_preset_drops_and_updates_alike() -> None:
    """What is left out of the update, and the loss itself, are no part of any row."""
    for name in set(presets()) - {"attnrl_1p5b_released"}:
        config = load_config(name)
        assert config.algo.drop == "samples", name
        paper = "1p5b" in name or "7b" in name
        update = config.update.model_copy(update={"optimizer": "adamw"})  # where its state lies: attnrl_7b_one_gpu
        assert update == load_config("attnrl_1p5b").update or not paper, name
