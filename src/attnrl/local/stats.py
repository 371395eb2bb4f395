"""What a call of the sampler did, and the sizes that keep its shapes few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from attnrl.attention.trie import Trie


@dataclass(slots=True)
class SamplerStats:
    """What the last call of `generate` did."""

    requests: int = 0
    rows: int = 0  # most rows that could run at once
    drawn_tokens: int = 0
    prefilled_tokens: int = 0  # context tokens the model ran over
    saved_tokens: int = 0  # context tokens it did not, since another request shares them
    prefills: int = 0  # forward passes over contexts
    steps: int = 0  # decode steps
    row_steps: int = 0  # rows of all decode steps: drawn tokens and idle or finished rows
    put_back: int = 0  # rows that made room for others and were prefilled again
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    cache_bytes: int = 0  # of this process: an earlier call may have needed more
    cache_peak_bytes: int = 0  # of the pages or slots that rows held when they held most
    cache_live_bytes: int = 0  # what the different tokens of those rows needed then
    fused: bool = False  # the model's forward ran with fused kernels
    cuda_graph: bool = False  # decode steps were replayed CUDA graphs
    cuda_graphs_captured: int = 0  # of this call

    def add_prefill(self, trie: Trie) -> None:
        """Counts the forward over the trie's contexts; none was run where another request had all their tokens."""
        self.prefills += bool(len(trie.ids_T))
        self.prefilled_tokens += len(trie.ids_T)
        self.saved_tokens += sum(map(len, trie.paths)) - len(trie.ids_T)

    @property
    def tokens_per_second(self) -> float:
        return self.drawn_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, float]:
        """All counts by name, with tokens_per_second."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def metrics_of(calls: Sequence[SamplerStats]) -> dict[str, float]:
    """What these calls did, as metrics of docs/metrics.md; nothing of none."""
    if not calls:
        return {}

    def total(name: str) -> float:
        return float(sum(getattr(call, name) for call in calls))

    beside_steps = total("requests") + total("put_back")  # tokens that prefills drew
    return {
        "generate/sampler_own": 1.0,
        "generate/fused": float(all(call.fused for call in calls)),
        "generate/captured": float(all(call.cuda_graph for call in calls)),
        "generate/prefilled_tokens": total("prefilled_tokens"),
        "generate/shared_context": total("saved_tokens") / max(1.0, total("saved_tokens") + total("prefilled_tokens")),
        "generate/idle_share": 1 - (total("drawn_tokens") - beside_steps) / max(1.0, total("row_steps")),
        "generate/put_back": total("put_back"),
        "generate/cache_gb": max(call.cache_peak_bytes for call in calls) / 1e9,
    }


def length_bucket(tokens: int) -> int:
    """`tokens` rounded up to a multiple of a quarter of its power of two, at least 128: few shapes, at most 25 % spare.

    >>> [length_bucket(n) for n in (1, 129, 513, 1025)]
    [128, 256, 640, 1280]
    """
    grain = max(128, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // grain) * grain


def step_rows(rows: int) -> int:
    """Rows of a step that has so many running: a power of two up to 256, then a multiple of 128.

    Few sizes, so that few graphs serve; and sizes for which matrix products are fast: 320 rows take longer than 384.

    >>> [step_rows(n) for n in (1, 9, 129, 257, 700)]
    [8, 16, 256, 384, 768]
    """
    if rows <= 256:
        return max(8, 1 << (rows - 1).bit_length())
    return -(-rows // 128) * 128
