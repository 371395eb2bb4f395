"""What needs verl is collected only where it is installed: `make test-verl`. Shims are modules of other processes."""

import importlib.util
import re
from pathlib import Path

collect_ignore_glob = ["tests/verl_engine/shims/*"]
if importlib.util.find_spec("verl") is None:
    engine = Path(__file__).parent / "src/attnrl/verl_engine"
    needs = re.compile(r"^(from|import) (ray|verl)\b", re.MULTILINE)
    collect_ignore_glob += [str(file) for file in engine.glob("*.py") if needs.search(file.read_text())]
