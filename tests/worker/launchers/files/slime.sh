set -ex
NVLINK_COUNT=$(nvidia-smi topo -m | grep -o 'NV[0-9][0-9]*' | wc -l)
HAS_NVLINK=$([ "$NVLINK_COUNT" -gt 0 ] && echo 1 || echo 0)
ROLLOUT_ARGS=(
   --prompt-data /root/gsm8k/train.parquet
   --input-key messages --label-key label --apply-chat-template --rollout-shuffle
   --custom-rm-path my_rewards.score
   --num-rollout 100 --rollout-batch-size 32 --n-samples-per-prompt 8
   --over-sampling-batch-size 64
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --rollout-max-response-len 1024 --rollout-temperature 0.8
)
RUNTIME_ENV_JSON="{\"env_vars\": {\"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\"}}"
ray job submit --address=http://127.0.0.1:8265 --runtime-env-json="${RUNTIME_ENV_JSON}" -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --hf-checkpoint /root/Qwen2.5-0.5B \
   --advantage-estimator gspo --calculate-per-token-loss --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 \
   --adam-beta1 0.9 --adam-beta2 0.98 --use-wandb --wandb-project tests --wandb-key ${WANDB_KEY} "${ROLLOUT_ARGS[@]}"
