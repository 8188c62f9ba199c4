#!/bin/bash
# the launch script of the published set-up
set -ex
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:False
export TMS_HOOK_MODE=preload
export TMS_INIT_ENABLE=1
export TMS_INIT_ENABLE_CPU_BACKUP=1
export HCCL_DETERMINISTIC=true
export HCCL_CONNECT_TIMEOUT=7200
export VLLM_ASCEND_ENABLE_NZ=0
export VLLM_SERVER_DEV_MODE=1
export WANDB_API_KEY=abc123
export LD_PRELOAD=$(python3 -c "import torch_memory_saver, os; print(os.path.join(os.path.dirname(torch_memory_saver.__file__), 'x.so'))")
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/qwen3-4B.sh"
MODELS=${MODELS:-/storage/models}
if [ "$1" = "long" ]; then
  STEPS=6000
else
  STEPS=3000
fi
CKPT_ARGS=(
   --hf-checkpoint ${MODELS}/Qwen3-4B   # the model
   --ref-load "${MODELS}/Qwen3-4B_torch_dist"
   --save /storage/runs
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /storage/data/dapo-math-17k.jsonl
   --input-key prompt --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout $STEPS
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --global-batch-size 256
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime /storage/data/aime-2024.jsonl --n-samples-per-eval-prompt 16)
RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/root/Megatron-LM/\",
    \"ASCEND_COREDUMP_SIGNAL\": \"none\"
  }
}"
ray start --head --num-gpus 0 --resources '{"NPU": 8}' --disable-usage-stats
ray job submit --address="http://127.0.0.1:8265" \
  --runtime-env-json="${RUNTIME_ENV_JSON}" \
  -- python3 train.py \
    --train-backend megatron \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 8 \
    --rollout-num-gpus 8 \
    --colocate \
    --train-memory-margin-bytes 2147483648 \
    --tensor-model-parallel-size 2 \
    --rollout-num-gpus-per-engine 2 \
    --vllm-gpu-memory-utilization 0.35 \
    --vllm-enforce-eager \
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 \
    --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl \
    --use-dynamic-batch-size --max-tokens-per-gpu 9216 --lr 1e-6 --use-tis --foo-bar 3 \
    ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} "${ROLLOUT_ARGS[@]}" ${EVAL_ARGS[@]} $@
