from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2-0.5B-Instruct"
dataset = load_dataset("trl-lib/DeepMath-103K", split="train")


def reward(completions, **kwargs):
    return [0.0 for c in completions]


args = GRPOConfig(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=8,
    max_completion_length=512,
    use_vllm=True,
    vllm_mode="colocate",
    learning_rate=1e-6,
    beta=0.04,
    bf16=True,
    max_steps=100,
    report_to="wandb",
)
trainer = GRPOTrainer(model=MODEL, reward_funcs=[reward], train_dataset=dataset, args=args)
trainer.train()
