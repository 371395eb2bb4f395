"""Maps of responses that `attnrl.score` scored: the step-to-step attention of the head that decides. Paper: Fig. 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrl.analysis.score_page import HeadMap
from attnrl.types import ScoreRequest, Scores, Scoring

if TYPE_CHECKING:
    from attnrl.backend import Backend


def head_maps(
    backend: Backend,
    load: Callable[[], Any],
    requests: Sequence[ScoreRequest],
    scores: Sequence[Scores],
    scoring: Scoring,
) -> list[HeadMap | None]:
    """The map of each response, from the weights the engine holds; an engine that holds none in this process, or in a
    way of its own, has them loaded.
    """
    from attnrl.local.backend import LocalBackend
    from attnrl.local.models import plain

    if not requests:
        return []
    weights = plain(backend.model) if isinstance(backend, LocalBackend) else load()
    return [head_map(weights, *row, scoring) for row in zip(requests, scores, strict=True)]


def head_map(weights: Any, request: ScoreRequest, scores: Scores, scoring: Scoring) -> HeadMap | None:
    """The step-to-step attention of the head that decides most steps; None where no step scores."""
    from attnrl.attention.decoder import attending_layers
    from attnrl.scoring import fci
    from attnrl.scoring.step_attention import deciding_head, step_attention

    if not np.any(scores.fci > 0):
        return None
    lead = len(request.prompt)
    spans = [(lead + step.start, lead + step.stop) for step in request.steps]
    ids = np.concatenate([request.prompt, request.response])
    heads = fci(weights, ids, spans, delta=scoring.delta, key_reduce=scoring.key_reduce, reduce="none")
    nth, head = deciding_head(heads)
    alpha_SS = step_attention(weights, ids, spans, layer=nth, head=head)
    return HeadMap(attending_layers(weights.config)[nth], head, alpha_SS)
