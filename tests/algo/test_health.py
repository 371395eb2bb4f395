"""Whether a run learns, said from its metrics."""

from __future__ import annotations

import io

from rich.console import Console

from attnrl.algo.health import complaint
from attnrl.config import load_config
from attnrl.console import console_line, live_line
from attnrl.progress import tell, unwatched

IDLE = {"train/samples": 0.0, "train/valid_samples": 0.0, "trunks/solve_none": 1.0, "trunks/truncated_share": 1.0}
IDLE |= {"trunks/steps": 2.0, "trees/count": 0.0}
LEARNS = {"train/samples": 9.0, "train/valid_samples": 9.0, "trunks/steps": 9.0}


def rows(*of: dict[str, float]) -> list[dict[str, float]]:
    return [{"iteration": float(i), **row} for i, row in enumerate(of, start=1)]


def said(*of: dict[str, float], delta: int = 4) -> str:
    return complaint(rows(*of), max_response_tokens=512, delta=delta)


def test_what_is_wrong_is_said_with_its_numbers() -> None:
    assert said(IDLE, IDLE, IDLE) == (
        "nothing trained in 3 of 3 iterations: all responses wrong, 100 % cut off at 512 tokens, no trunk branched "
        "(2.0 steps a response; FCI needs more than delta = 4)"
    )
    assert "FCI needs" not in said({**IDLE, "trunks/steps": 20.0})
    right = {
        **IDLE,
        "trunks/solve_none": 0.0,
        "trunks/solve_all": 0.75,
        "trunks/truncated_share": 0.0,
        "trees/count": 3.0,
    }
    assert said(right) == "nothing trained in 1 of 1 iterations: all responses right of 75% of prompts"
    dropped = {"train/valid_samples": 0.0, "trees/count": 1.0, "batch/filtered_share": 0.8, "verify/errors": 4.0}
    assert said(dropped) == (
        "nothing trained in 1 of 1 iterations: 4 verdicts were errors, 80% of prompts dropped by the filter"
    )


def test_samples_without_an_update_are_no_training() -> None:
    skips = {**LEARNS, "policy/updates": 0.0, "policy/skipped_updates": 2.0, "trees/count": 3.0}
    assert said(skips, skips) == (
        "nothing trained in 2 of 2 iterations: 4 updates skipped because loss or gradient was no number"
    )
    assert said({**skips, "policy/updates": 1.0}) == "", "one of two minibatches trained"


def test_updates_at_a_rate_of_zero_are_no_training() -> None:
    last = {**LEARNS, "policy/updates": 2.0, "policy/lr": 0.0, "trees/count": 3.0}
    assert said(last) == "", "the rate is that of the next update"
    assert said(last, last, last) == (
        "nothing trained in 2 of 3 iterations: the learning rate has come down to 0 (update.lr_decay_updates)"
    )


def test_a_run_that_stopped_learning_says_so_of_its_last_iterations() -> None:
    assert said(*[LEARNS] * 100, *[IDLE] * 10) == ""
    assert said(*[LEARNS] * 100, *[IDLE] * 11).startswith(
        "nothing trained in 11 of the last 20 iterations: all responses"
    )


def test_a_method_that_does_not_branch_is_not_blamed_for_it() -> None:
    row = {"iteration": 1, "train/valid_samples": 0, "trunks/solve_none": 1, "trees/count": 0}
    assert "no trunk branched" in complaint([row], max_response_tokens=8, delta=4)
    said = complaint([row], max_response_tokens=8, delta=4, branching=False)
    assert said == "nothing trained in 1 of 1 iterations: all responses wrong"


def test_a_run_that_learns_in_half_of_its_iterations_is_left_alone() -> None:
    assert said() == said(LEARNS) == said(IDLE, LEARNS) == ""
    assert said(IDLE, LEARNS, IDLE).startswith("nothing trained in 2 of 3 iterations")
    assert said({"eval/x/pass@1": 0.5}) == ""  # an evaluation alone is no iteration


def test_the_console_names_responses_that_could_not_be_graded() -> None:
    """Where they first are, then as often as it looks; of held-out ones beside the accuracy that they lower."""
    out = io.StringIO()
    show = console_line(load_config("demo", {"run.iterations": 50}), Console(file=out, width=400))
    errors, said = {"verify/errors": 5.0, "verify/error": 5.0}, []
    for row in rows(LEARNS, *[LEARNS | errors] * 11):
        show(row)
        said.append(out.getvalue().count("5 responses could not be graded and were left out (error 5)"))
    assert said == [0, 1, 2, *[2] * 6, 3, 3, 3]
    show({"iteration": 12.0, "eval/tasks/pass@1": 0.5, "eval/tasks/errors": 164.0})
    assert "held-out tasks after 12: 50.0%; 164 responses could not be graded and count as wrong" in out.getvalue()


def test_the_console_says_so_after_three_iterations_and_at_the_end() -> None:
    def shown(*of: dict[str, float], planned: int) -> list[int]:
        """After which iterations the complaint was printed."""
        out = io.StringIO()
        show = console_line(load_config("demo", {"run.iterations": planned}), Console(file=out, width=400))
        found, before = [], 0
        for row in rows(*of):
            show(row)
            if out.getvalue().count("nothing trained") > before:
                before += 1
                found.append(int(row["iteration"]))
        return found

    assert shown(*[IDLE] * 12, planned=50) == [3, 10]
    assert shown(*[IDLE] * 5, planned=5) == [3, 5]
    assert shown(IDLE, LEARNS, LEARNS, LEARNS, planned=4) == []


def test_a_terminal_is_shown_what_goes_on_and_a_file_is_not():
    shown = {}
    for terminal in (True, False):
        out = io.StringIO()
        with live_line(Console(file=out, width=80, force_terminal=terminal)):
            tell("generate")
            tell("generate: responses", 1, 1024)
            tell("generate: responses", 2, 1024)  # too soon after the last to be shown
            with unwatched():
                tell("evaluated elsewhere")
        shown[terminal] = out.getvalue()
    assert "generate: responses 1 of 1,024" in shown[True]
    assert "elsewhere" not in shown[True]
    assert shown[False] == ""
