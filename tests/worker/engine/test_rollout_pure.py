from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_models import spec_json

from rljob_api import RLJobSpec
from rljob_worker.engine import cpu_libraries
from rljob_worker.engine.arguments import engine_arguments, max_model_length, max_sequences
from rljob_worker.engine.environment import engine_environment
from rljob_worker.engine.sampling import check_requests
from rljob_worker.engine.seeds import request_seed
from rljob_worker.engine.states import EngineState, next_state
from rljob_worker.errors import UserError
from rljob_worker.host import processes, reaper, reaper_process
from rljob_worker.models.config import ModelConfig
from rljob_worker.types import GenerationRequest

whole = st.integers(0, 2**40)


@given(whole, whole, whole, st.integers(0, 4096))
def test_seed_depends_on_nothing_else_and_fits_vllm(job: int, step: int, prompt: int, sample: int) -> None:
    seed = request_seed(job, step, prompt, sample)
    assert seed == request_seed(job, step, prompt, sample)
    assert 0 <= seed < 2**63
    assert seed == request_seed(job, step, prompt, 0) + sample


def test_seeds_of_many_requests_differ_in_the_bits_that_torch_keeps() -> None:
    seeds = {
        request_seed(job, step, prompt, sample) & 0xFFFFFFFF
        for job in range(2)
        for step in range(8)
        for prompt in range(32)
        for sample in range(8)
    }
    assert len(seeds) == 2 * 8 * 32 * 8
    # Digits must not run together: step 1, prompt 12 is not step 11, prompt 2.
    assert request_seed(0, 1, 12, 0) != request_seed(0, 11, 2, 0)


def test_states_take_turns_in_one_order_only() -> None:
    state = EngineState.NEW
    for operation in ("start", "generate", "score", "sleep", "wake_weights", "receive_weights", "wake_kv", "generate"):
        state = next_state(operation, state)
    assert state is EngineState.ACTIVE


@pytest.mark.parametrize(
    ("operation", "state"),
    [
        ("generate", EngineState.ASLEEP),
        ("generate", EngineState.WEIGHTS),
        ("score", EngineState.NEW),
        ("sleep", EngineState.ASLEEP),
        ("sleep", EngineState.WEIGHTS),
        ("wake_weights", EngineState.ACTIVE),
        ("receive_weights", EngineState.NEW),
        ("receive_weights", EngineState.ASLEEP),
        ("wake_kv", EngineState.ASLEEP),
        ("start", EngineState.ACTIVE),
        ("generate", EngineState.CLOSED),
    ],
)
def test_a_transition_out_of_order_is_refused_with_the_state(operation: str, state: EngineState) -> None:
    with pytest.raises(RuntimeError, match=f"{operation} is not allowed while {state}"):
        next_state(operation, state)


def _spec(model: Path, **rollout: object) -> RLJobSpec:
    return RLJobSpec.model_validate(spec_json(model, **rollout))


def test_engine_arguments_follow_the_spec(model: Path) -> None:
    arguments = engine_arguments(_spec(model, engineArgs={"block_size": 64}, maxBatchedTokens=512), str(model))
    assert arguments["dtype"] == "float32"
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["max_num_seqs"] == 8 * 4
    assert arguments["max_model_len"] == 40 + 24
    assert arguments["kv_cache_memory_bytes"] == 2**26
    assert arguments["max_num_batched_tokens"] == 512
    assert arguments["block_size"] == 64
    assert arguments["enforce_eager"] is True


def test_engine_arguments_that_rljob_sets_are_refused_by_name(model: Path) -> None:
    with pytest.raises(UserError, match=r"engineArgs: dtype, seed: set by RLJob"):
        engine_arguments(_spec(model, engineArgs={"seed": 1, "dtype": "float16", "block_size": 64}), str(model))


def test_sizes_of_an_engine(model: Path) -> None:
    value = spec_json(model)
    value["rollout"] |= {"promptsPerStep": 10, "samplesPerPrompt": 500}
    value["resources"]["devicesPerNode"] = 4
    assert max_sequences(RLJobSpec.model_validate(value)) == 1024
    value["rollout"]["samplesPerPrompt"] = 5
    assert max_sequences(RLJobSpec.model_validate(value)) == 3 * 5
    del value["data"]["maxPromptTokens"]
    assert max_model_length(RLJobSpec.model_validate(value), ModelConfig.from_hf(model)) == 128
    value["rollout"]["engineArgs"] = {"max_model_len": 20}
    assert max_model_length(RLJobSpec.model_validate(value), ModelConfig.from_hf(model)) == 20


def test_environment_of_an_engine(model: Path) -> None:
    environment = engine_environment(_spec(model), cache_folder="/somewhere")
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert environment["OMP_NUM_THREADS"] == environment["NUMBA_NUM_THREADS"] == "1"
    assert environment["VLLM_CACHE_ROOT"] == "/somewhere/vllm"
    assert engine_environment(_spec(model, graphMode=True))["TORCHDYNAMO_DISABLE"] == "0"
    imported = subprocess.run(
        [sys.executable, "-c", "import rljob_worker.engine.seeds, rljob_api"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": environment["PYTHONPATH"]},
        timeout=60,
        check=False,
    )
    assert imported.returncode == 0


@pytest.mark.parametrize(
    ("tokens", "message"),
    [((), "no tokens"), (tuple(range(3, 44)), "at most 40"), ((5, 64), r"\[0, 64\)"), ((-1, 5), r"\[0, 64\)")],
)
def test_prompts_that_cannot_be_run_are_refused(tokens: tuple[int, ...], message: str) -> None:
    good = GenerationRequest(tuple(range(3, 43)), 0)
    check_requests([good], 24, 64, 64)
    with pytest.raises(ValueError, match=f"request 1: .*{message}"):
        check_requests([good, GenerationRequest(tokens, 0)], 24, 64, 64)


def test_a_request_is_as_long_as_its_own_limit() -> None:
    """A turn may have fewer tokens than the job's longest response: one that does not fit must not end all others."""
    long = tuple(range(3, 53))
    check_requests([GenerationRequest(long, 0, max_tokens=14)], 24, 64, 64)
    with pytest.raises(ValueError, match=r"request 1: a prompt of 50 tokens and a response of up to 15 .* at most 49"):
        check_requests(
            [GenerationRequest(long, 0, max_tokens=14), GenerationRequest(long, 0, max_tokens=15)], 1, 64, 64
        )
    check_requests([GenerationRequest((1,), 0, sampled_token_ids=(1, 2), max_tokens=3)], 2, 64, 64)
    with pytest.raises(ValueError, match="request 0: 2 tokens were sampled before, and a response has at most 2"):
        check_requests([GenerationRequest((1,), 0, sampled_token_ids=(1, 2), max_tokens=2)], 24, 64, 64)


def _marked_child(owner: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {reaper_process.OWNER_VARIABLE: owner}
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"], env=environment)


def test_sweep_removes_what_a_dead_engine_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(reaper, "private_folders", lambda prefix: [tmp_path])
    dead = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    started = processes.start_time(dead.pid) or "1"
    dead.wait(20)
    owner = f"{dead.pid}-{started}"
    left, other = _marked_child(owner), _marked_child("someone-else")
    names = ["psm_rljobtest0", "psm_rljobtest1"]
    for name in names:
        Path("/dev/shm", name).touch()
    (tmp_path / owner).write_text(json.dumps({"processes": {}, "names": names[:1]}))
    alive = tmp_path / f"{os.getpid()}-{processes.start_time(os.getpid())}"
    alive.write_text(json.dumps({"processes": {}, "names": names[1:]}))
    try:
        time.sleep(0.2)
        reaper.sweep_dead_engines()
        assert left.wait(60) == -signal.SIGKILL
        assert other.poll() is None
        assert not Path("/dev/shm", names[0]).exists()
        assert Path("/dev/shm", names[1]).exists()
        assert list(tmp_path.iterdir()) == [alive]
    finally:
        for child in (left, other):
            child.kill()
            child.wait(60)
        for name in names:
            Path("/dev/shm", name).unlink(missing_ok=True)


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_libraries.check_cpu_libraries()
    monkeypatch.setattr(cpu_libraries, "LIBRARIES", {"libnot-there.so.9": "package not-there"})
    with pytest.raises(UserError, match=r"need libnot-there\.so\.9 \(package not-there\): libnot-there.*No such file"):
        cpu_libraries.check_cpu_libraries()
