"""From a config to a run, an evaluation or scores: the Python API, and the only place that knows all the parts.

attnrl.check("demo")
attnrl.train("demo", "runs/a")
attnrl.evaluate("runs/a", output="results/a")
attnrl.score("demo", [(prompt, response)])
"""

from attnrl.launch.checking import Finding, check
from attnrl.launch.evaluating import evaluate
from attnrl.launch.scoring import score
from attnrl.launch.training import Trained, train

__all__ = ["Finding", "Trained", "check", "evaluate", "score", "train"]
