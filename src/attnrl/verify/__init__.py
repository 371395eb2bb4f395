"""Is the answer right? A verifier that cannot hang and never runs what a response says."""

from attnrl.verify.extract import Extraction, extract
from attnrl.verify.frameworks import trl_reward, verl_reward
from attnrl.verify.verifier import Verifier, is_correct

__all__ = ["Extraction", "Verifier", "extract", "is_correct", "trl_reward", "verl_reward"]
