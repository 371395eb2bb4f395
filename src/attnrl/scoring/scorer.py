"""One forward pass over finished responses: log-probs, entropy and FCI.

Shapes: T tokens of a pack, N response tokens of a pack, S steps of a pack, W model width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from attnrl.attention.decoder import lone_from, vocabulary_of
from attnrl.attention.head import check_head
from attnrl.attention.trie import bins_by_budget
from attnrl.backend import check_ids
from attnrl.errors import DataError
from attnrl.progress import tell
from attnrl.scoring.entropy import logprobs_and_entropy
from attnrl.scoring.fci import Body, Sums, make_sums, run_body, split_steps
from attnrl.scoring.plan import KeyReduce, make_plan
from attnrl.types import ScoreRequest, Scores, Scoring

TOKEN_BUDGET = 16384


@dataclass(slots=True)
class ScoreReport:
    """What scoring cost and how it ran; pass one to `score` to have it filled.

    >>> ScoreReport(seconds=1.10, fci_seconds=0.10).overhead.__round__(3)
    0.1
    """

    seconds: float = 0.0  # of all packs, FCI included
    fci_seconds: float = 0.0
    tokens: int = 0
    packs: int = 0
    attention_kinds: set[str] = field(default_factory=set)
    fci_kinds: set[str] = field(default_factory=set)

    def add(self, ranks: Sequence[ScoreReport]) -> None:
        """Take in what ranks did at the same time: the work of all, the time of the slowest."""
        for rank in ranks:
            self.tokens += rank.tokens
            self.packs += rank.packs
            self.attention_kinds |= rank.attention_kinds
            self.fci_kinds |= rank.fci_kinds
        slowest = max(ranks, key=lambda rank: rank.seconds)
        self.seconds += slowest.seconds
        self.fci_seconds += slowest.fci_seconds

    @property
    def overhead(self) -> float:
        """Time with FCI over time without, minus 1: metric `score/overhead`."""
        rest = self.seconds - self.fci_seconds
        return self.fci_seconds / rest if rest > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """The report as metrics `score/...`; the implementations that ran are keys with value 1."""
        ran = [f"score/attention_{kind}" for kind in sorted(self.attention_kinds)] + [
            f"score/fci_{kind}" for kind in sorted(self.fci_kinds)
        ]
        return {
            "score/seconds": self.seconds,
            "score/overhead": self.overhead,
            "score/tokens": float(self.tokens),
            "score/packs": float(self.packs),
        } | dict.fromkeys(ran, 1.0)


class _Clock:
    """Time of the parts of a pack: CUDA events on a GPU, so that nothing waits; wall time elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.spans: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def measure(self) -> Iterator[None]:
        start = self._now()
        yield
        self.spans.append((start, self._now()))

    def seconds(self) -> float:
        """The sum of the measured spans; on a GPU, call it after the results have been read."""
        if self.cuda:
            return float(sum(a.elapsed_time(b) for a, b in self.spans)) / 1000.0
        return float(sum(b - a for a, b in self.spans))


def score(
    model: torch.nn.Module,
    requests: Sequence[ScoreRequest],
    *,
    delta: int = 4,
    key_reduce: KeyReduce = "mean",
    temperature: float = 1.0,
    token_budget: int = TOKEN_BUDGET,
    chunk: int | None = None,
    fci: bool = True,
    report: ScoreReport | None = None,
    body: Body | None = None,
) -> list[Scores]:
    """Log-probs and entropy of the response tokens and FCI of their steps, in request order.

    One forward of the model's body per pack of about `token_budget` tokens; the head runs on `chunk` positions at a
    time. Each response is scored as if alone. With `fci=False` every step scores 0 and nothing is captured. `body` runs
    in the place of the model's own forward below its head.
    Paper: Eq. 4-6.
    """
    check_requests(requests, vocabulary_of(model), temperature)
    if requests:
        check_head(model)
    lengths = [len(r.prompt) + len(r.response) for r in requests]
    report = report if report is not None else ScoreReport()
    asked = Scoring(fci, delta, key_reduce, temperature)
    results: list[Scores | None] = [None] * len(requests)
    done = 0
    with torch.no_grad():
        for members in bins_by_budget(lengths, token_budget, lone_from(model)):
            pack = [requests[i] for i in members]
            scored = _score_pack(model, pack, asked, chunk, report, body)
            for index, scores in zip(members, scored, strict=True):
                results[index] = scores
            done += len(members)
            tell("score: responses", done, len(requests))
    return [scores for scores in results if scores is not None]


def check_requests(requests: Sequence[ScoreRequest], vocabulary: int, temperature: float) -> None:
    """Raise on requests that a model of this vocabulary cannot score, naming the first."""
    if not temperature > 0:
        raise DataError(f"temperature must be above 0 to score log-probs; got {temperature}")
    for index, request in enumerate(requests):
        if not len(request.prompt) or not len(request.response):
            raise DataError(f"request {index}: prompt and response need at least one token each")
        ends = [0, *(step.stop for step in request.steps)]
        for before, step in zip(ends, request.steps, strict=False):
            if not before <= step.start < step.stop <= len(request.response):
                raise DataError(
                    f"request {index}: step ({step.start}, {step.stop}) must be non-empty, after the step before it "
                    f"(ends at {before}) and within the {len(request.response)} response tokens"
                )
    check_ids([r.prompt for r in requests], vocabulary, "prompt of request")
    check_ids([r.response for r in requests], vocabulary, "response of request")


def _score_pack(
    model: torch.nn.Module,
    pack: Sequence[ScoreRequest],
    asked: Scoring,
    chunk: int | None,
    report: ScoreReport,
    body: Body | None,
) -> list[Scores]:
    device = next(model.parameters()).device
    lengths = [len(r.prompt) + len(r.response) for r in pack]
    spans = [[(len(r.prompt) + s.start, len(r.prompt) + s.stop) for s in r.steps] for r in pack]
    plan = make_plan(lengths, spans, delta=asked.delta, key_reduce=asked.key_reduce)
    ids_T = np.concatenate([x for r in pack for x in (r.prompt, r.response)]).astype(np.int64)
    starts = np.cumsum([0, *lengths])[:-1]
    at_N = np.concatenate(
        [start + np.arange(len(r.prompt), n) for start, n, r in zip(starts, lengths, pack, strict=True)]
    )
    whole, part = _Clock(device), _Clock(device)
    with whole.measure():
        sums = make_sums(plan, device) if asked.fci else None
        hidden_TW, state = run_body(model, ids_T, lengths, _timed(sums, part), body)
        at = torch.from_numpy(at_N).to(hidden_TW.device)
        targets_N = torch.from_numpy(ids_T[at_N]).to(hidden_TW.device)
        logprobs, entropy = logprobs_and_entropy(
            model, hidden_TW[at - 1], targets_N, temperature=asked.temperature, chunk=chunk
        )
        best_S = sums.best_S if sums is not None else hidden_TW.new_zeros(len(plan.step_S))
        found = torch.cat([logprobs, entropy, best_S.to(logprobs)])
    logprobs_N, entropy_N, fci_S = np.split(found.cpu().numpy(), [len(at_N), 2 * len(at_N)])
    report.seconds += whole.seconds()
    report.fci_seconds += part.seconds()
    report.tokens += len(ids_T)
    report.packs += 1
    report.attention_kinds |= state.kinds
    report.fci_kinds |= sums.kinds if sums is not None else {"off"}
    counts = [len(r.response) for r in pack]
    parts = ((logprobs_N, counts), (entropy_N, counts), (fci_S, plan.counts))
    rows = zip(*(split_steps(*part) for part in parts), strict=True)
    return [Scores(*map(np.ascontiguousarray, row)) for row in rows]


def _timed(sums: Sums | None, clock: _Clock) -> Callable[..., None] | None:
    """The collector with its time taken."""
    if sums is None:
        return None
    collect = sums

    def collector(q_THD: torch.Tensor, k_TKD: torch.Tensor, lse_HT: torch.Tensor | None, **shape: Any) -> None:
        with clock.measure():
            collect(q_THD, k_TKD, lse_HT, **shape)

    return collector
