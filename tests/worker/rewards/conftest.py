from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_cases import WORDS, Make, make_spec
from support.children import children as children
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rljob_api.spec import RLJobSpec
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.scorers import Scorers


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")


@pytest.fixture
def make_runner(workdir: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Make]:
    runners: list[RewardRunner] = []

    def make(function: str | None = None, **fields: Any) -> tuple[RewardRunner, RLJobSpec]:
        reward = ({"python": f"my_rewards_for_test:{function}"} if function else {}) | fields
        # Rewards of tests leave notes there.
        spec = make_spec({"writePaths": [str(workdir)]} | reward)
        runners.append(RewardRunner(Scorers(spec, tokenizer, workdir=workdir, processes=2)))
        return runners[-1], spec

    yield make
    for runner in runners:
        runner.close()
