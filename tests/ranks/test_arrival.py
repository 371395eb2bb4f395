"""Weights that do not change or do not arrive are an error; rounding is none. Numbers by hand."""

import numpy as np
import pytest

from attnrl.errors import TrainingError
from attnrl.ranks.arrival import Arrival
from attnrl.types import Rollout, Scores, as_floats, as_ids


def answer(logprobs, version=0, ids=(7, 8)):
    return Rollout(as_ids(ids), as_floats(logprobs), "length", version)


def scores(logprobs):
    return Scores(as_floats(logprobs), as_floats([0, 0]), as_floats([]))


def arrived(arrival, answers, learned):
    """The gap that is told after these answers of the servers and the learner's scores of them."""
    arrival.drawn = answers
    arrival.arrived(learned)
    assert arrival.drawn == []
    return arrival.metrics()["sync/logprob_gap"]


def test_an_update_that_changes_no_weight_is_an_error():
    arrival = Arrival("bfloat16", (1.0, 2.0))
    arrival.updated((1.5, 2.0), update=1, lr=1e-6)  # too little for bfloat16, but the optimizer's weights moved
    assert not arrival.moved
    arrival.updated((1.75, 2.5), update=2, lr=1e-6)
    assert arrival.moved
    with pytest.raises(TrainingError, match="update 3 changed no weight"):
        arrival.updated((1.75, 2.5), update=3, lr=1e-6)
    arrival.updated((1.75, 2.5), update=3, lr=1e-30)  # nothing was to change


def test_log_probs_beyond_rounding_name_the_server():
    arrival = Arrival("float32", (1.0, 1.0))
    good, bad = answer([-1.0, -2.0]), answer([-1.0, -2.004])
    assert arrived(arrival, [good, good], [scores([-1.0, -2.0005])] * 2) == pytest.approx(0.00025, rel=1e-3)
    with pytest.raises(TrainingError, match=r"server 1 and learner disagree by 0\.002 nats a token at version 0"):
        arrived(arrival, [good, bad], [scores([-1.0, -2.0])] * 2)
    for server in (0, 1):
        learned = [scores([-1.0, np.nan if server == i else -2.0]) for i in range(2)]
        with pytest.raises(TrainingError, match=f"server {server} and learner disagree by nan"):
            arrived(arrival, [good, good], learned)


def test_the_gap_that_is_told_is_the_largest_since_last_asked():
    arrival = Arrival("float32", (1.0, 1.0))
    for gap in (0.0002, 0.0004, 0.0001):
        arrival.drawn = [answer([-1.0, -2.0])]
        arrival.arrived([scores([-1.0, -2.0 - gap])])
    assert arrival.metrics() == {"sync/logprob_gap": pytest.approx(0.0002, rel=1e-3)}
    assert arrival.metrics() == {"sync/logprob_gap": 0.0}


def test_the_learner_is_asked_about_what_each_server_drew():
    arrival = Arrival("float32", (1.0, 1.0), probe=as_ids([3, 4]))
    arrival.drawn = [answer([-1.0, -2.0]), answer([-1.0, -3.0], ids=(7, 9))]
    found = [(r.prompt.tolist(), r.response.tolist(), r.steps) for r in arrival.asked()]
    assert found == [([3, 4], [7, 8], ()), ([3, 4], [7, 9], ())]


def test_a_server_that_answers_to_the_bit_as_before_an_update_has_the_old_weights():
    arrival = Arrival("bfloat16", (1.0, 1.0))
    old = [answer([-1.0, -2.0]), answer([-1.0, -2.0])]
    arrived(arrival, old, [scores([-1.0, -2.0])] * 2)
    arrived(arrival, old, [scores([-1.0, -2.0])] * 2)  # a second sync of the same weights
    arrival.updated((2.0, 2.0), update=1, lr=1e-6)
    new, stale = answer([-1.0, -2.001], version=1), answer([-1.0, -2.0], version=1)
    with pytest.raises(TrainingError, match="server 1 answers as it did at version 0: the weights of version 1"):
        arrived(arrival, [new, stale], [scores([-1.0, -2.001])] * 2)
    arrived(arrival, [new, new], [scores([-1.0, -2.001])] * 2)
    assert not arrival.moved


def test_other_weights_from_a_checkpoint_are_compared_with_nothing():
    arrival = Arrival("float32", (1.0, 1.0))
    same = [answer([-1.0, -2.0])]
    arrived(arrival, same, [scores([-1.0, -2.0])])
    arrival.updated((2.0, 2.0), update=1, lr=1e-6)
    arrival.loaded((1.0, 1.0))
    assert arrived(arrival, same, [scores([-1.0, -2.0])]) == 0
