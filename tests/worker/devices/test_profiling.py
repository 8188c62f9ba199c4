"""Profiles of a process's work: one file for each order, and never a word about the work itself."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from rljob_worker.devices import profiling
from rljob_worker.devices.profiling import ProfileOrder, ProfileResult, WorkProfiler


def product(profiler: WorkProfiler) -> torch.Tensor:
    with profiler.work():
        return torch.mm(torch.eye(8), torch.ones(8, 8))


def test_the_next_work_alone_is_profiled_into_its_file(tmp_path: Path) -> None:
    profiler, file = WorkProfiler("cpu"), tmp_path / "profiles" / "rank-0.json.gz"
    product(profiler)
    assert profiler.results() == []
    profiler.ask(ProfileOrder(str(file), 1 << 20, stacks=False))
    assert product(profiler).sum() == 64
    product(profiler)
    assert profiler.results() == [ProfileResult(str(file), file.stat().st_size)]
    assert profiler.results() == []
    operators = {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert "aten::mm" in operators
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_an_order_can_be_taken_back(tmp_path: Path) -> None:
    profiler = WorkProfiler("cpu")
    profiler.ask(ProfileOrder(str(tmp_path / "a.json.gz"), 1 << 20, stacks=False))
    profiler.ask(None)
    product(profiler)
    assert profiler.results() == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_above_the_limit_is_not_kept_and_the_work_is_done(tmp_path: Path) -> None:
    profiler, file = WorkProfiler("cpu"), tmp_path / "a.json.gz"
    profiler.ask(ProfileOrder(str(file), 100, stacks=True))
    assert product(profiler).sum() == 64
    [result] = profiler.results()
    assert result.problem == "it has more than the 100 bytes that are left of the limit"
    assert list(tmp_path.iterdir()) == []


def test_a_profiler_that_does_not_start_or_end_costs_the_profile_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def start(self) -> None:
            pass

        def stop(self) -> None:
            raise RuntimeError("another profiler is active")

    profiler = WorkProfiler("cpu")
    order = ProfileOrder(str(tmp_path / "a.json.gz"), 1 << 20, stacks=False)
    monkeypatch.setattr(profiling, "_profiler", lambda *_: Broken())
    profiler.ask(order)
    assert product(profiler).sum() == 64
    monkeypatch.setattr(profiling, "_profiler", lambda *_: None)
    profiler.ask(order)
    assert product(profiler).sum() == 64
    problems = [result.problem for result in profiler.results()]
    assert problems[0] == "another profiler is active"
    assert problems[1].startswith("the profiler does not start: ")


def test_the_works_own_error_is_raised_and_its_profile_kept(tmp_path: Path) -> None:
    profiler, file = WorkProfiler("cpu"), tmp_path / "a.json.gz"
    profiler.ask(ProfileOrder(str(file), 1 << 20, stacks=False))
    with pytest.raises(ValueError, match="of the work"), profiler.work():
        raise ValueError("of the work")
    assert [result.problem for result in profiler.results()] == [""]


def test_npus_are_profiled_by_torch_npus_own_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against names and arguments as the contract register has them; the profiler itself is a stand-in."""
    seen: dict[str, object] = {}

    class Profile:
        def __init__(self, **arguments: object) -> None:
            seen.update(arguments)

        def start(self) -> None:
            pass

        def stop(self) -> None:
            handler = seen["on_trace_ready"]
            assert isinstance(handler, str)
            folder = Path(handler) / "host_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
            folder.mkdir(parents=True)
            (folder / "trace_view.json").write_text("[]")

    class Module:
        profile = Profile

        class ProfilerActivity:
            CPU, NPU = "cpu", "npu"

        class ProfilerLevel:
            Level1 = "level 1"

        class ExportType:
            Text = "text"

        @staticmethod
        def _ExperimentalConfig(**arguments: object) -> object:
            return arguments

        @staticmethod
        def tensorboard_trace_handler(folder: str, *, analyse_flag: bool) -> str:
            assert analyse_flag
            return folder

    monkeypatch.setattr(profiling.importlib, "import_module", lambda name: {"torch_npu.profiler": Module}[name])
    profiler, file = WorkProfiler("npu"), tmp_path / "rank-0.json.gz"
    profiler.ask(ProfileOrder(str(file), 1 << 20, stacks=True))
    assert product(profiler).sum() == 64
    assert profiler.results() == [ProfileResult(str(file), file.stat().st_size)]
    assert gzip.decompress(file.read_bytes()) == b"[]"
    assert (seen["activities"], seen["with_modules"]) == (["cpu", "npu"], True)
    assert seen["experimental_config"] == {"profiler_level": "level 1", "export_type": "text"}
