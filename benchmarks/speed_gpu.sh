#!/usr/bin/env bash
# The numbers of docs/performance.md on one GPU, a part at a time, JSON and logs in a folder.
#   bash benchmarks/speed_gpu.sh OUT TOKENIZER [steps|vllm|small|mixed|learner|plain|paper|big|growth|agree|remembering|kernels ...]
# OUT: where to; TOKENIZER: a folder with that of DeepSeek-R1-Distill-Qwen. Without names all parts run, in this order:
#   steps    decode steps, with logits in float32 and rounded; the same draws
#   vllm     every call of the table at 1.5B beside vLLM 0.26.0 (it must be installed), in one call of the benchmark
#   small    the call at 135M beside vLLM
#   mixed    1,024 requests of mixed length
#   learner  1.5B, tied, all layers recomputed
#   plain    a whole iteration against the plain way (vLLM again), and its update with the least memory
#   paper    `attnrl train attnrl_1p5b`, 8 prompts, responses of 8,192 tokens, two iterations
#   big      the learner of 7B on one GPU
#   growth   limits from 1,024 to 16,384 tokens, prompts from 4 to 64
#   agree    log-probs of sampler (ours and vLLM) and learner, and what brings them nearer
#   remembering  a model of Qwen3.5's layers by pages and captured steps, and without
#   kernels  kernels alone, by tile, beside aten's and the library's
# TINY=1 rehearses them on a CPU, but for vLLM: no number means anything then. COMMIT: where the tree is no checkout.
# Runs are written below TMPDIR, 25 GB at a time: give it a fast disk, or memory. EACH: seconds that a part may take;
# what it has written by then stays.
# `python benchmarks/goals.py OUT` says afterwards which goals are met.
set -u
OUT=$1 TOKENIZER=$2
shift 2
[ $# -gt 0 ] || set -- steps vllm small mixed learner plain paper big growth agree remembering kernels
export PYTHONPATH=${PYTHONPATH:-$PWD/src:$PWD/benchmarks} PYTHONUNBUFFERED=1 VLLM_USE_FLASHINFER_SAMPLER=0
mkdir -p "$OUT"
COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
PYTHON="timeout -k 10 ${EACH:-3600} ${PYTHON:-python3}"
SHAPE=1.5B SMALL=mini LIMIT=8192 SHORT=2048 TINY_FLAG='' DEVICE='' PLAIN=--plain AGREE='--samplers own,vllm' LIMITS=1024,2048,4096,8192,16384
if [ -n "${TINY:-}" ]; then
  SHAPE=tiny SMALL=tiny LIMIT=64 SHORT=64 TINY_FLAG=--tiny DEVICE='--device cpu' PLAIN='' AGREE='--prompts 2 --group 1 --tokens 8' LIMITS=64,128
fi

case " $* " in
  *" vllm "* | *" small "* | *" plain "* | *" agree "*)
    if [ -z "${TINY:-}" ] && ! $PYTHON -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("vllm"))'; then
      echo "parts vllm, small, plain and agree stand beside vLLM, which is not installed here" >&2
      exit 2
    fi
    ;;
esac

measure() { # name, script, options
  local name=$1 script=$2 begin
  shift 2
  begin=$(date +%s)
  # shellcheck disable=SC2086
  $PYTHON "benchmarks/$script.py" "$@" --commit "$COMMIT" --out "$OUT/$name.json" >"$OUT/$name.log" 2>&1
  echo "$name: exit status $?, $(($(date +%s) - begin)) s"
}

for part in "$@"; do
  # shellcheck disable=SC2086
  case $part in
    steps)
      measure steps generation --sections steps,exact $TINY_FLAG $DEVICE
      measure rounded generation --sections steps --no-float32-logits $TINY_FLAG $DEVICE
      ;;
    vllm) measure vllm generation --sections vllm,work --work 0,1,2,3,4,5,6 $TINY_FLAG $DEVICE ;;
    small) measure small generation --sections vllm,work --work 7 $TINY_FLAG $DEVICE ;;
    mixed) measure mixed generation --sections mixed $TINY_FLAG $DEVICE ;;
    remembering) measure remembering generation --sections remembering $TINY_FLAG $DEVICE ;;
    kernels) measure kernels generation --sections kernels $TINY_FLAG $DEVICE ;;
    learner) measure learner learner_memory --tied --sections all $TINY_FLAG ;;
    plain) measure plain iteration --shape $SHAPE --prompts 16 --limit $SHORT --iterations 2 --lengths --rows 512 --layers auto --tokenizer "$TOKENIZER" --spare $PLAIN ;;
    paper) measure paper paper_length --shape $SHAPE --limit "$LIMIT" --tokenizer "$TOKENIZER" ;;
    big) measure big learner_memory --sections 7b --updates 1 $TINY_FLAG ;;
    agree) measure agree agreement --shape $SHAPE --peak 6 --tokenizer "$TOKENIZER" $AGREE $DEVICE ;;
    growth) measure growth growth --shape $SMALL --once 8192 --tokenizer "$TOKENIZER" --limits $LIMITS --prompts 4,16,64 ;;
    *)
      echo "no part '$part': see the head of this file" >&2
      exit 2
      ;;
  esac
done
