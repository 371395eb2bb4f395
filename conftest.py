"""What needs verl is collected only where it is installed: `make test-verl`. Shims are modules of other processes."""

import importlib.util

collect_ignore_glob = ["tests/verl_engine/shims/*"]
if importlib.util.find_spec("verl") is None:
    collect_ignore_glob += ["src/attnrl/verl_engine/backend.py", "src/attnrl/verl_engine/worker.py"]
