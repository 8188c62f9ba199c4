"""`generation_config.json`: what `transformers` and vLLM sample with by default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_api.spec import RolloutSpec
from rljob_worker.host.files import write_whole
from rljob_worker.models.json_files import read_json_object

FILE = "generation_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_generation_config(folder: Path, rollout: RolloutSpec, hf_config: Mapping[str, Any]) -> None:
    """Write the sampling that a model was trained with into its exported folder.

    Args:
        folder: holds the file of the model that training began with, if that had one: its token ids stay.
        rollout: sampling of the job. Values that change nothing are written too: `transformers` has others by default.
        hf_config: the model's `config.json`, which says the token ids where no such file does.
    """
    path = folder / FILE
    before = read_json_object(path) if path.is_file() else {}
    tokens = {name: before.get(name, hf_config.get(name)) for name in _TOKENS}
    stops = list(dict.fromkeys([*_end_tokens(tokens), *rollout.stop_token_ids]))
    content = {
        **{name: token for name, token in tokens.items() if token is not None},
        **({"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {}),
        "do_sample": True,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "max_new_tokens": rollout.max_response_tokens,
    }
    write_whole(path, json.dumps(content, indent=2) + "\n")


def end_tokens(folder: Path) -> list[int]:
    """Tokens that end an answer by a model folder's file; empty where there is none, or it names none."""
    path = folder / FILE
    return _end_tokens(read_json_object(path)) if path.is_file() else []


def _end_tokens(content: Mapping[str, Any]) -> list[int]:
    ends = content.get("eos_token_id")
    return [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
