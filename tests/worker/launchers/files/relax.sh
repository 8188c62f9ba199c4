#!/bin/bash
# Fully asynchronous on 8 NPUs: half of them train, half generate.
export HCCL_OP_EXPANSION_MODE=AIV
export HCCL_BUFFSIZE=400
export RAY_EXPERIMENTAL_NOSET_ASCEND_VISIBLE_DEVICES=1
NUM_ROLLOUT="${NUM_ROLLOUT:-3000}"
GPU_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2)
GPU_ARGS+=(--fully-async --max-staleness 2 --num-iters-per-train-update 32)
WANDB_ARGS=(
  --use-tensorboard
  --use-clearml
)
cat <<'HELP'
usage: run 'it' with "care
HELP
python3 train_async.py "${GPU_ARGS[@]}" "${WANDB_ARGS[@]}" \
  --hf-checkpoint "$MODEL_DIR/Qwen3.5-9B" --prompt-data "$DATA_DIR"/dapo-math-17k.jsonl --input-key prompt \
  --label-key label --apply-chat-template --rm-type dapo --num-rollout "$NUM_ROLLOUT" --rollout-batch-size 32 \
  --n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size 256 \
  --micro-batch-size 2 --tensor-model-parallel-size 4 --log-passrate --skip-eval-before-train \
  --optimizer-cpu-offload --recompute-granularity full --sglang-mem-fraction-static 0.7 2>&1 | tee run.log
