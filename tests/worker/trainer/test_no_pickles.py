"""Nothing that lies in a shared place is unpickled: by the code's own words, and tried."""

from __future__ import annotations

import ast
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_api.spec import RolloutSpec
from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.errors import JobError, UserError
from rljob_worker.models.hf_io import load_hf_weights, open_tensors
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.export import export_checkpoint
from rljob_worker.trainer.state_file import StateReader, path_of

ROOT = Path(__file__).parents[3]
ROLLOUT = RolloutSpec.model_validate({"promptsPerStep": 1, "samplesPerPrompt": 2, "maxResponseTokens": 4})
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "pickle5"}
ALLOWED = {
    "worker/rljob_worker/rewards/pool.py": {"pickle"},
    "worker/rljob_worker/environments/host_process.py": {"pickle"},
}
"""The driver pickles what it sends to confined processes; they answer in JSON."""


def unsafe(path: Path) -> set[str]:
    """Modules and calls of a file that can execute what they read."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & UNSAFE
        elif isinstance(node, ast.ImportFrom) and node.module in UNSAFE:
            found.add(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name.endswith(("torch.load", "torch.jit.load", "torch.hub.load")):
                found |= set() if words.get("weights_only") == "True" else {name}
            elif name.endswith(("np.load", "numpy.load", "read_pickle")):
                found |= {name} if words.get("allow_pickle", "False") != "False" or "pickle" in name else set()
            elif name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
                found.add(name)
            asks = name.endswith((".from_pretrained", "MsDataset.load"))
            if words.get("trust_remote_code", "None" if asks else "False") != "False":
                found.add(f"{name}(trust_remote_code)")
    return found


def test_the_code_unpickles_nothing() -> None:
    files = [path for package in ("crds", "operator", "worker") for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 300
    found = {str(path.relative_to(ROOT)): wrong for path in files if (wrong := unsafe(path))}
    reward = "worker/rljob_worker/rewards/worker.py"
    assert {name: wrong for name, wrong in found.items() if name != reward} == ALLOWED
    assert found.get(reward, set()) <= {"pickle"}, "the scoring process reads what the driver sent it"


def test_what_is_unsafe_is_found(tmp_path: Path) -> None:
    for text in ("import dill", "from pickle import loads", "torch.load(x)", "a.torch.load(x, weights_only=False)",
                 "np.load(x, allow_pickle=True)", "yaml.load(x)", "f(trust_remote_code=True)",
                 "f(trust_remote_code=None)", "AutoTokenizer.from_pretrained(x)"):  # fmt: skip
        (tmp_path / "file.py").write_text(text)
        assert unsafe(tmp_path / "file.py"), text
    (tmp_path / "file.py").write_text(
        "torch.load(x, weights_only=True); np.load(x); f.from_pretrained(trust_remote_code=False)"
    )
    assert not unsafe(tmp_path / "file.py")


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_malicious_pickle_in_a_checkpoint_or_model_folder_is_not_executed(tmp_path: Path, how: str) -> None:
    mark, bomb = tmp_path / "executed", tmp_path / "bomb"
    if how == "torch":
        torch.save({"weight": Bomb(mark)}, bomb)
    else:
        bomb.write_bytes(pickle.dumps(Bomb(mark)))
    content = bomb.read_bytes()
    folder = tmp_path / "checkpoints" / "step-3"
    folder.mkdir(parents=True)
    state = {"step": 3, "weight_version": 3, "data_cursor": {}, "attempt": 1, "world_size": 1, "record": None}
    for name in (path_of(folder, 0).name, "rank-0.pt", "pytorch_model.bin", "state.pkl"):
        (folder / name).write_bytes(content)
    (folder / "driver.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="not a readable state file"):
        StateReader(path_of(folder, 0))
    store = Checkpoints(tmp_path / "checkpoints", trust_unverified=True)
    assert store.find_whole() is not None
    (folder / "driver.json").write_bytes(content)
    with pytest.raises(JobError, match="not the state of a driver"):
        store.latest()

    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    (model / "tokenizer.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(content)
    pieces: list[Piece] = []
    with pytest.raises(UserError, match=r"no weights; expected model\.safetensors"):
        load_hf_weights(pieces, model)
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_hf_weights(pieces, model)
    with pytest.raises(UserError, match="not a readable safetensors file"):
        open_tensors(model / "model.safetensors")
    with pytest.raises(UserError, match="not a readable state file"):
        export_checkpoint(folder, model, tmp_path / "export", 1, ROLLOUT)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb is none"
