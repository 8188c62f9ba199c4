"""TRL's side of `peer_trl.py`, run by the interpreter of TRL's own environment; also holds the reward of both sides.

    python peer_trl_worker.py REQUEST.json RESULT.json

The request's `task` is `train` (steps of GRPOTrainer, timed) or `fixed_batch` (loss and gradient of given samples).
Nothing outside the standard library may be imported at the top: RLJob imports the reward from here.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def reward(response: str, label: str) -> float:
    """Share of the response's words that are the label."""
    words = [word for word in response.split() if not word.startswith("<")]
    return words.count(label) / len(words) if words else 0.0


def trl_reward(completions: list[str], label: list[str], **_: Any) -> list[float]:
    return [reward(completion, word) for completion, word in zip(completions, label)]


def make_replay(end_token: int, longest: int) -> Any:
    """A logits processor that ends each row where the other side's response ended, so that both do the same work.

    Its cost is one masked write a token to scores of [64, vocabulary].
    """
    import torch
    from transformers import LogitsProcessor

    class ReplayLengths(LogitsProcessor):
        def begin(self, lengths: list[int]) -> None:
            self._lengths = torch.tensor(lengths)
            self._prompt: int | None = None

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self._prompt is None:
                self._prompt = input_ids.shape[1]
            position = input_ids.shape[1] - self._prompt + 1
            if position == longest:
                return scores
            ending = self._lengths == position
            end_scores = torch.where(ending, 0.0, -torch.inf)
            scores = scores.masked_fill(ending[:, None], -torch.inf)
            scores[:, end_token] = end_scores
            return scores

    return ReplayLengths()


def make_trainer(request: dict[str, Any], replay: Any | None, samples: int, micro_batch: int) -> Any:
    """GRPOTrainer on the shared model folder: fp32, no KL, no gradient checkpointing, one update for each rollout."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList
    from trl import GRPOConfig, GRPOTrainer

    class TimedTrainer(GRPOTrainer):
        """Keeps the tokens and generation seconds of each step."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.rollouts: list[dict[str, float]] = []

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            if replay is not None:
                replay.begin(request["lengths"][len(self.rollouts)])
            started = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            seconds = time.perf_counter() - started
            self.rollouts.append({"generation": seconds, "tokens": int(batch["completion_mask"].sum())})
            return batch

    torch.set_num_threads(request["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    if replay is not None:
        model.generate = functools.partial(model.generate, logits_processor=LogitsProcessorList([replay]))
    config = GRPOConfig(
        output_dir=request["output"],
        seed=request["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        num_generations=request["samples_per_prompt"],
        max_completion_length=request["max_tokens"],
        max_steps=request["steps"],
        shuffle_dataset=False,
        beta=0.0,
        loss_type="dapo",
        epsilon=request["clip_low"],
        epsilon_high=request["clip_high"],
        learning_rate=request["lr"],
        lr_scheduler_type="constant",
        adam_beta2=request["beta2"],
        adam_epsilon=request["eps"],
        weight_decay=0.0,
        max_grad_norm=request["clip_grad"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in Path(request["data"]).read_text().splitlines()]
    return TimedTrainer(
        model=model,
        reward_funcs=trl_reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(request["model"], padding_side="left"),
    )


def train(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds, generation seconds and response tokens of each step; the optimizer step is inside the seconds."""
    import torch
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self._started)

    clock = StepClock()
    samples = request["prompts_per_step"] * request["samples_per_prompt"]
    replay = make_replay(request["end_token"], request["max_tokens"])
    trainer = make_trainer(request, replay, samples, request["micro_batch"])
    trainer.add_callback(clock)
    trainer.train()
    return {
        "seconds": clock.seconds,
        "generation": [rollout["generation"] for rollout in trainer.rollouts],
        "tokens": [rollout["tokens"] for rollout in trainer.rollouts],
        "threads": torch.get_num_threads(),
    }


def fixed_batch(request: dict[str, Any]) -> dict[str, Any]:
    """Means over the updates of a step: loss, gradient norm before clipping, entropy, share of clipped tokens.

    Each update takes the next `update_samples` samples; the ratio's denominator is the policy before the first one.
    """
    import torch

    size = request["update_samples"]
    trainer = make_trainer(request | {"steps": 1}, None, size, size)
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    trainer.model.train()
    samples = request["batch"]
    updates = [_collate(samples[start : start + size]) for start in range(0, len(samples), size)]
    with torch.no_grad():
        for inputs in updates:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            width = inputs["completion_ids"].shape[1]
            inputs["old_per_token_logps"] = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[
                0
            ]
    losses, norms = [], []
    for inputs in updates:
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), request["clip_grad"]).item())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    metrics = trainer._metrics["train"]
    columns = {"loss": losses, "grad_norm": norms, "entropy": metrics["entropy"]}
    columns["clip_fraction"] = metrics["clip_ratio/region_mean"]
    return {name: sum(values) / len(values) for name, values in columns.items()}


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Responses as TRL's trainer collates them: prompts padded on the left, responses on the right."""
    import torch

    prompts = [torch.tensor(sample["prompt"]) for sample in samples]
    responses = [torch.tensor(sample["response"]) for sample in samples]

    def padded(rows: list[torch.Tensor], side: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)

    ones = torch.ones_like
    return {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([ones(row) for row in prompts], "left"),
        "completion_ids": padded(responses, "right"),
        "completion_mask": padded([ones(row) for row in responses], "right"),
        "advantages": torch.tensor([sample["advantage"] for sample in samples]),
        "num_items_in_batch": torch.tensor(sum(len(row) for row in responses)),
    }


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"train": train, "fixed_batch": fixed_batch}


def main(request_file: Path, result_file: Path) -> None:
    from importlib.metadata import version

    request = json.loads(request_file.read_text())
    result = TASKS[request["task"]](request) | {"trl": version("trl"), "torch": version("torch")}
    temporary = result_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(result))
    os.replace(temporary, result_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
