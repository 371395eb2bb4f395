#!/usr/bin/env bash
#SBATCH --job-name=attnrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --requeue
# One Ray node a machine, then `attnrl train` on the first. RUN_DIR and the model must lie on a file system all nodes see.
#   sbatch deploy/slurm.sh attnrl_1p5b RUN_DIR [--section.key VALUE ...]
# A job that was killed goes on from its newest checkpoint when it is submitted again.
set -euo pipefail
preset=$1 run_dir=$2
shift 2
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')
port=6379
export RAY_ADDRESS="$address:$port"
srun --nodes=1 --ntasks=1 -w "$head" \
  ray start --head --node-ip-address="$address" --port="$port" --num-gpus="$SLURM_GPUS_ON_NODE" --block &
sleep 20
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
    ray start --address="$RAY_ADDRESS" --num-gpus="$SLURM_GPUS_ON_NODE" --block &
  sleep 20
fi
resume=()
if [ -e "$run_dir/metrics.jsonl" ]; then resume=(--resume); fi
srun --overlap --nodes=1 --ntasks=1 -w "$head" attnrl train "$preset" --run-dir "$run_dir" "${resume[@]}" \
  --engine.name verl --engine.verl.nodes "$SLURM_JOB_NUM_NODES" --engine.verl.gpus_per_node "$SLURM_GPUS_ON_NODE" "$@"
