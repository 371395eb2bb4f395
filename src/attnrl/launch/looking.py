"""The score view of responses that `attnrl.score` scored: the head that decides needs one more look at the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnrl.analysis.score_page import HeadMap, Response, build_score_page
from attnrl.config import Config
from attnrl.launch.models import check_model, load_tokenizer
from attnrl.launch.scoring import Scored


def score_page(model: str, scored: Sequence[Scored], names: Sequence[str], config: Config) -> str:
    """The HTML page of these responses, each with the attention map of its deciding head. Paper: Fig. 2."""
    from attnrl.local.models import load_weights

    path = check_model(model)
    weights = load_weights(path, device=config.engine.local.device, dtype=config.model.dtype)
    tokenizer = load_tokenizer(path)
    responses = []
    for name, one in zip(names, scored, strict=True):
        prompt = tokenizer.decode(one.prompt.tolist())
        responses.append(Response(name, prompt, one.steps, head_map(weights, one, config)))
    return build_score_page(model, responses, config.algo.delta)


def head_map(weights: Any, one: Scored, config: Config) -> HeadMap | None:
    """The step-to-step attention of the head that decides most steps; None where no step scores."""
    from attnrl.scoring import fci
    from attnrl.scoring.step_attention import deciding_head, step_attention

    lead = len(one.prompt)
    spans = [(lead + step["start"], lead + step["stop"]) for step in one.steps]
    if not np.any(one.scores.fci > 0):
        return None
    ids = np.concatenate([one.prompt, one.response])
    heads = fci(weights, ids, spans, delta=config.algo.delta, key_reduce=config.algo.key_reduce, reduce="none")
    layer, head = deciding_head(heads)
    return HeadMap(layer, head, step_attention(weights, ids, spans, layer=layer, head=head))
