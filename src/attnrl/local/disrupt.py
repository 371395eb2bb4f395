"""Continuations that cannot see a part of their context: the engine side of the disruption experiment.

Shapes: B rows of a batch, P positions of the longest context, L positions so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from attnrl.data.texts import stop_token_ids
from attnrl.local.draw import check_sampling, draw, stream_of, uniforms
from attnrl.local.models import plain
from attnrl.types import Request, Rollout, Sampling, as_floats, as_ids

Span = tuple[int, int]
FEWEST_RUNNING = 0.75  # of a batch: with fewer, ended rows are taken out of it


def continue_without(
    model: Any,
    tokenizer: Any,
    requests: Sequence[Request],
    hidden: Sequence[Span | None],
    sampling: Sampling,
    rows: int = 256,
) -> list[Rollout]:
    """One rollout per request, in order, drawn while no new token attends to the `hidden` positions of its context.

    The context itself is run over as it was: what changes is what later text sees of it. Attention to hidden keys is
    exactly zero in every layer and head, and the rest is renormalised. With None nothing is hidden, and the draw is the
    sampler's own. A plain loop over a cache, for any decoder-only model transformers runs.

    Paper: Sec. 3.1.2. Deviation: the paper sets attention values to zero; here the keys are masked before the softmax,
    so that the attention to the other positions still sums to 1.
    """
    check_sampling(sampling)
    stops = stop_token_ids(model.generation_config, tokenizer)
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].context))  # rows of a batch are alike in length
    found: dict[int, Rollout] = {}
    with torch.no_grad():
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            drawn = _batch(plain(model), [requests[i] for i in batch], [hidden[i] for i in batch], sampling, stops)
            found |= dict(zip(batch, drawn, strict=True))
    return [found[i] for i in range(len(requests))]


def _batch(
    model: Any, requests: Sequence[Request], hidden: Sequence[Span | None], sampling: Sampling, stops: Sequence[int]
) -> list[Rollout]:
    device = next(model.parameters()).device
    ids_BP, seen_BP, later_BP = (torch.from_numpy(a).to(device) for a in padded(requests, hidden))
    position_BP = (seen_BP.cumsum(dim=1) - 1).clamp(min=0)
    out = model(input_ids=ids_BP, attention_mask=seen_BP, position_ids=position_BP, use_cache=True, logits_to_keep=1)
    streams_B = torch.tensor([stream_of(r.seed) for r in requests], device=device)
    limits = np.array([r.max_tokens for r in requests])
    drawn: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    running = np.ones(len(requests), dtype=bool)
    rows = np.arange(len(requests))  # the requests that are still in the batch
    visible_BL, position_B = later_BP, position_BP[:, -1]
    for step in range(int(limits.max())):
        counts_B = torch.full_like(streams_B, step)
        ids_B, logprobs_B = draw(out.logits[:, -1], uniforms(streams_B, counts_B), sampling)
        for place in np.flatnonzero(running[rows]):
            drawn[rows[place]].append(int(ids_B[place]))
            logprobs[rows[place]].append(float(logprobs_B[place]))
        running[rows] &= ~np.isin(ids_B.cpu().numpy(), stops) & (limits[rows] > step + 1)
        if not running.any():
            break
        if running[rows].mean() < FEWEST_RUNNING:
            left = torch.from_numpy(np.flatnonzero(running[rows])).to(device)
            out.past_key_values.batch_select_indices(left)
            ids_B, streams_B, position_B, visible_BL = ids_B[left], streams_B[left], position_B[left], visible_BL[left]
            rows = np.flatnonzero(running)
        visible_BL = torch.cat([visible_BL, torch.ones_like(visible_BL[:, :1])], dim=1)
        position_B = position_B + 1
        out = model(
            input_ids=ids_B[:, None],
            attention_mask=visible_BL,
            position_ids=position_B[:, None],
            past_key_values=out.past_key_values,
            use_cache=True,
        )
    return [
        Rollout(as_ids(ids), as_floats(values), "stop" if ids[-1] in stops else "length", 0)
        for ids, values in zip(drawn, logprobs, strict=True)
    ]


def padded(
    requests: Sequence[Request], hidden: Sequence[Span | None]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Contexts as one block, padded on the left; what they see of themselves; what later text sees of them. [B, P]"""
    longest = max(len(r.context) for r in requests)
    ids = np.zeros((len(requests), longest), dtype=np.int64)
    seen, later = np.zeros_like(ids), np.zeros_like(ids)
    for row, (request, span) in enumerate(zip(requests, hidden, strict=True)):
        lead = longest - len(request.context)
        ids[row, lead:] = request.context
        seen[row, lead:] = later[row, lead:] = 1
        if span is not None:
            later[row, lead + span[0] : lead + span[1]] = 0
    return ids, seen, later
