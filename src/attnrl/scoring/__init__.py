"""Step scores from one forward pass: log-probs, entropy and Forward Context Influence.

`fci(model, input_ids, step_spans)` works alone on any Hugging Face decoder; `score` serves the trainer.
"""

from attnrl.attention.paths import attention_kind, packed_attention, packed_positions
from attnrl.scoring.fci import fci, position_null
from attnrl.scoring.scorer import ScoreReport, score

__all__ = [
    "ScoreReport",
    "attention_kind",
    "fci",
    "packed_attention",
    "packed_positions",
    "position_null",
    "score",
]
