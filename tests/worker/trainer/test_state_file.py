from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from rljob_worker.trainer.checked_file import CheckedFile, damage
from rljob_worker.trainer.state_file import StateReader, path_of, write_state


def test_round_trip_of_views_dtypes_and_metadata(tmp_path: Path) -> None:
    flat = torch.arange(12, dtype=torch.float32)
    tensors = {
        "a": flat[:6].view(2, 3),
        "overlapping": flat[3:9],
        "strided": flat.view(3, 4)[:, 1],
        "bf16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0),
        "rng": torch.get_rng_state(),
    }
    path = path_of(tmp_path, 3)
    assert path.name == "rank-00003.safetensors"
    written = write_state(path, tensors, {"updates": 5, "nested": {"x": [1]}})
    assert written == CheckedFile(path.name, path.stat().st_size, xxhash.xxh3_64(path.read_bytes()).hexdigest())
    assert damage(tmp_path, written) == ""
    reader = StateReader(path)
    assert reader.metadata == {"updates": 5, "nested": {"x": [1]}}
    assert reader.names == set(tensors)
    elsewhere = load_file(path)
    for name, tensor in tensors.items():
        assert elsewhere[name].shape == tensor.shape
        expected = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(reader.read(name).reshape(-1).view(torch.uint8), expected)
    target = torch.zeros(2, 3)
    reader.read_into("a", target)
    assert torch.equal(target, tensors["a"])


def test_faults_name_file_and_tensor(tmp_path: Path) -> None:
    path = path_of(tmp_path, 0)
    with pytest.raises(ValueError, match=r"rank-00000.safetensors: no such file"):
        StateReader(path)
    write_state(path, {"a": torch.zeros(3)}, {})
    reader = StateReader(path)
    with pytest.raises(ValueError, match="has no tensor b"):
        reader.read("b")
    with pytest.raises(ValueError, match=r"a is torch.float32 \(3,\), this job has torch.float32 \(4,\)"):
        reader.read_into("a", torch.zeros(4))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="not a readable state file"):
        StateReader(path)


def test_every_damage_is_found(tmp_path: Path) -> None:
    path = path_of(tmp_path, 0)
    written = write_state(path, {"a": torch.arange(1000.0)}, {})
    whole = path.read_bytes()
    for position in (0, 9, len(whole) // 2, len(whole) - 1):
        content = bytearray(whole)
        content[position] ^= 1
        path.write_bytes(content)
        assert "its content is not what was written" in damage(tmp_path, written)
    path.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1} bytes, {len(whole)} were written" in damage(tmp_path, written)
    path.unlink()
    assert damage(tmp_path, written) == f"{path}: No such file or directory"


def test_a_state_is_written_into_a_folder_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_state(path_of(tmp_path / "gone", 0), {"a": torch.zeros(3)}, {})
    assert not (tmp_path / "gone").exists(), "a folder that a later attempt removed must not come back"
