#!/usr/bin/env bash
# A queue of runs on one GPU within a limit of seconds: base model, sweep, comparison; rows and base model go to a folder.
#   bash benchmarks/evidence_gpu.sh benchmarks/evidence_late.toml 14 470 results [STAGE ...]
# No cell starts after the limit; those that run then may take a minute more. The same command goes on where it stopped.
set -u
QUEUE=$1 WORKERS=$2 SECONDS_LEFT=$3 OUTPUT=$4
shift 4
[ $# -gt 0 ] || set -- sweep main
BEGIN=$(date +%s)
export PYTHONPATH=${PYTHONPATH:-$PWD/src} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
mkdir -p "$OUTPUT"

# Processes on one GPU take turns; under the MPS daemon they run side by side, where it can be started.
if command -v nvidia-cuda-mps-control >/dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps
  mkdir -p /tmp/mps
  nvidia-cuda-mps-control -d
  if ! timeout 40 python3 -c 'import torch; torch.ones(3, device="cuda").sum().item()'; then
    echo quit | timeout 5 nvidia-cuda-mps-control
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    echo "without MPS"
  fi
fi

timeout $((SECONDS_LEFT + 75)) python3 benchmarks/evidence.py run "$QUEUE" --stage "$@" \
  --workers "$WORKERS" --seconds $((SECONDS_LEFT - ($(date +%s) - BEGIN)))
echo "exit status $?, $(($(date +%s) - BEGIN)) s"

NAME=$(python3 -c 'import sys, tomllib; print(tomllib.load(open(sys.argv[1], "rb"))["name"])' "$QUEUE")
python3 - "$NAME" <<'P'
import sys
from pathlib import Path

sys.path.insert(0, "benchmarks")
from evidence import collect, read_rows

name = sys.argv[1]
print(collect(name, Path("runs/evidence") / name), "rows")
for row in read_rows(name):
    cell = row["cell"]
    where = {k: row["branching"].get(k) for k in ("first_steps", "at", "after", "split")}
    print(*cell.values(), f"{row['before']:.3f} {row['after']:.3f}", row["iterations"], row["seconds"], where)
P
cp "docs/results/$NAME.jsonl" "$OUTPUT/"
if [ "$(du -sm "runs/$NAME" | cut -f1)" -lt 60 ]; then  # a larger base model stays where it is
  tar czf - -C runs --exclude='*.lock' "$NAME" | split -b 15M - "$OUTPUT/base_$NAME.tgz."
fi
tail -n 2 "runs/evidence/$NAME"/worker-*.log | tail -n 40
