from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_process import RemoteEngine
from interruptions import gone_on_with, harvested, kept, rounding
from rollout_models import END, FIRST_WORD, MAX_PROMPT, MAX_RESPONSE, VOCAB, group_requests, spec_json
from support.samples import ALL, unless_all, unless_drawn
from transformers import Qwen3ForCausalLM

from rljob_worker.engine.reports import EngineSlept
from rljob_worker.errors import JobError, StopRequested, WeightSyncError
from rljob_worker.tensor_slice import Piece
from rljob_worker.types import Cut, Generation, GenerationRequest, Quota, SamplingParams
from rljob_worker.weightsync.plan import build_plan
from rljob_worker.weightsync.routes import HostRoute
from rljob_worker.weightsync.trainer import WeightSyncTrainer

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_tokens=MAX_RESPONSE, ignore_eos=True)
INTERRUPTIONS = 34 if ALL else 2
"""Each is tried in three ways."""


def _generate(
    engine: RemoteEngine, requests: list[GenerationRequest], sampling: SamplingParams = SAMPLING
) -> list[Generation]:
    return engine.call("generate", requests, sampling, engine.call("weight_version"))


def _take_a_turn(engine: RemoteEngine) -> EngineSlept:
    report: EngineSlept = engine.call("sleep")
    engine.call("wake_weights")
    engine.call("wake_kv")
    return report


def _equal(left: list[Generation], right: list[Generation], atol: float = 0.0) -> bool:
    return all(
        np.array_equal(a.token_ids, b.token_ids)
        and a.log_probs.shape == b.log_probs.shape
        and np.allclose(a.log_probs, b.log_probs, rtol=0, atol=atol)
        for a, b in zip(left, right, strict=True)
    )


def test_two_processes_agree_bit_for_bit_and_a_turn_changes_nothing(engines: list[RemoteEngine]) -> None:
    requests = group_requests()
    first, second = (_generate(engine, requests) for engine in engines)
    assert _equal(first, second)
    _take_a_turn(engines[0])
    assert _equal(_generate(engines[0], requests), first)


def test_tokens_do_not_depend_on_the_rest_of_the_batch(engines: list[RemoteEngine]) -> None:
    requests = group_requests()
    together = _generate(engines[0], requests)
    split = _generate(engines[0], requests[:12]) + _generate(engines[1], requests[12:])
    backwards = _generate(engines[1], requests[::-1])[::-1]
    for other in (split, backwards):
        for a, b in zip(together, other, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids)
            # Matrix kernels round differently with another number of rows.
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-5)


def test_a_response_is_continued_to_the_same_bits(engines: list[RemoteEngine]) -> None:
    requests = group_requests()
    expected = _generate(engines[0], requests)
    for sampled in (1, 9, MAX_RESPONSE - 1):
        begun = [Generation(g.token_ids[:sampled], g.log_probs[:sampled], "") for g in expected]
        assert _equal(gone_on_with(engines[1], requests, begun, SAMPLING), expected, rounding()), (
            f"after {sampled} tokens"
        )
    full = replace(requests[0], sampled_token_ids=tuple(map(int, expected[0].token_ids)))
    with pytest.raises(ValueError, match="request 0: 24 tokens were sampled before, and a response has at most 24"):
        _generate(engines[1], [full])


@pytest.mark.parametrize("seed", range(INTERRUPTIONS))
def test_an_interruption_changes_nothing(engines: list[RemoteEngine], seed: int) -> None:
    """Kept in the engine, submitted to another one, and submitted with other neighbours."""
    requests = group_requests(step=seed)
    expected = _generate(engines[0], requests)
    delay = random.Random(seed)
    responses, pauses = kept(engines[0], requests, SAMPLING, delay)
    assert _equal(responses, expected, rounding()), f"held {pauses} times"

    begun = harvested(engines[0], requests, SAMPLING, delay)
    assert _equal(gone_on_with(engines[1], requests, begun, SAMPLING), expected, rounding())
    half = gone_on_with(engines[1], requests[::2], begun[::2], SAMPLING)
    for one, other in zip(half, expected[::2]):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.abs(one.log_probs - other.log_probs).max() <= 1e-5


def test_requests_join_a_running_generation_and_a_cut_ends_it_between_two_steps(engine: RemoteEngine) -> None:
    requests = [replace(request, group=i // 4) for i, request in enumerate(group_requests())]
    sampling = replace(SAMPLING, ignore_eos=False, max_tokens=MAX_RESPONSE)
    expected = _generate(engine, requests, sampling)
    lengths = [max(len(g.token_ids) for g in expected[4 * i : 4 * i + 4]) for i in range(8)]
    assert len(set(lengths)) > 1, "all groups end in the same step: nothing is cut"
    version = engine.call("weight_version")

    first = sorted(range(8), key=lengths.__getitem__)[:3]
    slow = lengths.index(max(lengths))
    any_three, the_slow = Quota(3, frozenset(range(8))), Quota(1, frozenset({slow}))
    for quotas, steps in (((any_three,), lengths[first[-1]]), ((any_three, the_slow), lengths[slow])):
        responses = engine.call("generate", requests, sampling, version, cut=Cut(quotas))
        for response, other in zip(responses, expected):
            assert len(response.token_ids) == min(steps, len(other.token_ids))
            assert bool(response.finish_reason) is (len(other.token_ids) <= steps)
        assert _equal(gone_on_with(engine, requests, responses, sampling), expected, rounding())

    engine.send("generate", requests[:8], sampling, version, more=True)
    time.sleep(0.1)
    with pytest.raises(ValueError, match="request 0: the prompt has no tokens"):
        engine.call("requests.submit", [GenerationRequest((), 0)])
    engine.call("requests.submit", requests[8:])
    engine.call("requests.close")
    responses = engine.wait()
    assert [len(g.token_ids) for g in responses] == [len(g.token_ids) for g in expected]
    for call in (("requests.submit", requests), ("requests.pause", 1.0), ("requests.harvest",)):
        with pytest.raises(RuntimeError, match="no generation runs"):
            engine.call(*call)


def test_samples_of_a_group_differ_and_steps_differ(engine: RemoteEngine) -> None:
    requests = group_requests(prompts=1, samples=8)
    responses = _generate(engine, requests)
    assert len({tuple(g.token_ids.tolist()) for g in responses}) == 8
    again = _generate(engine, [replace(r, seed=r.seed + 1000) for r in requests])
    assert all(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(responses, again))


def _reference_log_probs(
    model: Path, request: GenerationRequest, response: Generation, sampling: SamplingParams
) -> np.ndarray:
    """Written from the definitions: temperature, then the smallest set of most likely tokens with mass >= top_p."""
    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = torch.tensor([*request.prompt_token_ids, *response.token_ids])
    with torch.no_grad():
        logits = network(tokens[None]).logits[0, len(request.prompt_token_ids) - 1 : -1].double()
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    probabilities, order = logits.softmax(-1).sort(-1, descending=True)
    mass_before = probabilities.cumsum(-1) - probabilities
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, mass_before < sampling.top_p)
    if sampling.top_k:
        kept &= logits >= logits.topk(sampling.top_k).values[:, -1:]
    kept_log_probs = logits.masked_fill(~kept, float("-inf")).log_softmax(-1)
    return kept_log_probs.gather(-1, torch.from_numpy(response.token_ids)[:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    "sampling",
    [SAMPLING, replace(SAMPLING, temperature=0.7, top_p=0.9), replace(SAMPLING, temperature=1.3, top_k=5)],
    ids=["plain", "temperature-top-p", "top-k"],
)
def test_log_probs_are_those_of_the_distribution_sampled_from(
    engine: RemoteEngine, model: Path, sampling: SamplingParams
) -> None:
    requests = group_requests()[::5]
    for request, response in zip(requests, _generate(engine, requests, sampling)):
        expected = _reference_log_probs(model, request, response, sampling)
        assert response.log_probs.dtype == np.float32
        np.testing.assert_allclose(response.log_probs, expected, atol=1e-4)


def test_greedy_takes_the_most_likely_token_whatever_the_seed(engine: RemoteEngine, model: Path) -> None:
    requests = group_requests(prompts=4, samples=2)
    responses = _generate(engine, requests, replace(SAMPLING, temperature=0.0))
    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for request, response in zip(requests, responses):
        tokens = torch.tensor([*request.prompt_token_ids, *response.token_ids])
        with torch.no_grad():
            logits = network(tokens[None]).logits[0, len(request.prompt_token_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == response.token_ids.tolist()
    assert _equal(responses[::2], responses[1::2])


def test_score_equals_generation_and_is_not_fooled_by_cached_prefixes(engine: RemoteEngine) -> None:
    requests = group_requests()[::4]
    responses = _generate(engine, requests)
    sequences = [np.array([*r.prompt_token_ids, *g.token_ids]) for r, g in zip(requests, responses)]
    for _ in range(2):
        scores = engine.call("score", sequences)
        for request, response, sequence, score in zip(requests, responses, sequences, scores):
            assert score.dtype == np.float32
            assert score.shape == (len(sequence) - 1,)
            np.testing.assert_allclose(score[len(request.prompt_token_ids) - 1 :], response.log_probs, atol=1e-5)


def test_end_token_and_truncation_are_reported(engine: RemoteEngine) -> None:
    requests = group_requests(prompts=8, samples=16, step=3)
    responses = _generate(engine, requests, replace(SAMPLING, ignore_eos=False))
    reasons = {response.finish_reason for response in responses}
    assert reasons == {"stop", "length"}
    for response in responses:
        ended = response.token_ids.tolist()[-1] == END
        assert response.finish_reason == ("stop" if ended else "length")
        assert END not in response.token_ids[:-1]
        assert ended or len(response.token_ids) == MAX_RESPONSE
        assert len(response.log_probs) == len(response.token_ids)


def test_stop_token_ids_end_a_response(engine: RemoteEngine) -> None:
    requests = group_requests(step=4)
    free = _generate(engine, requests)
    token = int(free[0].token_ids[5])
    stopped = _generate(engine, requests, replace(SAMPLING, stop_token_ids=(token,)))
    for before, after in zip(free, stopped):
        where = np.flatnonzero(before.token_ids == token)
        length = where[0] + 1 if len(where) else MAX_RESPONSE
        assert after.token_ids.tolist() == before.token_ids[:length].tolist()
        assert after.stop_text is None
    assert stopped[0].finish_reason == "stop"


def test_stop_strings_end_a_response_and_stay_in_its_tokens(engine: RemoteEngine) -> None:
    requests = group_requests(step=5)
    free = _generate(engine, requests)
    row, text = next((i, text) for i, g in enumerate(free) if (text := _pair_of_words(g.token_ids.tolist())))
    sampling = replace(SAMPLING, stop=(text,))
    stopped = _generate(engine, requests, sampling)
    assert stopped[row].finish_reason == "stop"
    assert stopped[row].stop_text == text
    assert stopped[row].token_ids.tolist() == free[row].token_ids[:8].tolist()
    np.testing.assert_allclose(stopped[row].log_probs, free[row].log_probs[:8], atol=2e-5)
    assert any(response.stop_text is None and response.finish_reason == "length" for response in stopped)
    begun = [Generation(free[row].token_ids[:7], free[row].log_probs[:7], "")]
    (rest,) = gone_on_with(engine, requests[row : row + 1], begun, sampling)
    assert (rest.stop_text, len(rest.token_ids)) == (text, 8), "the stop string began in what was sampled before"


def _pair_of_words(tokens: list[int]) -> str:
    """Text of the seventh and eighth token, where it stands nowhere before; empty where they are no words."""
    if not all(FIRST_WORD <= token < VOCAB - 1 for token in tokens[:8]):
        return ""
    words = [f"w{token - FIRST_WORD}" for token in tokens[:8]]
    text = " ".join(words[6:])
    return "" if text in " ".join(words[:7]) else text


def test_prompts_that_are_too_long_are_refused_and_the_engine_lives_on(engine: RemoteEngine) -> None:
    long = GenerationRequest(tuple([FIRST_WORD] * (MAX_PROMPT + 1)), 0)
    with pytest.raises(ValueError, match=f"request 1: a prompt of {MAX_PROMPT + 1} tokens .* at most {MAX_PROMPT}"):
        _generate(engine, [group_requests()[0], long])
    fits = replace(long, prompt_token_ids=long.prompt_token_ids[1:])
    assert len(_generate(engine, [fits])[0].token_ids) == MAX_RESPONSE


def test_sampling_that_vllm_would_change_is_refused(engine: RemoteEngine) -> None:
    with pytest.raises(ValueError, match=r"temperature: 0.001 is below"):
        _generate(engine, group_requests()[:1], replace(SAMPLING, temperature=0.001))
    with pytest.raises(ValueError, match="token ids must be in"):
        _generate(engine, [GenerationRequest((VOCAB,), 0)])


def test_wrong_weight_version_is_refused(engine: RemoteEngine) -> None:
    version = engine.call("weight_version")
    with pytest.raises(JobError, match=f"engine-0 holds weights of version {version}, not {version + 1}"):
        engine.call("generate", group_requests()[:1], SAMPLING, version + 1)


def test_turns_free_the_kv_cache_and_refuse_other_orders(engine: RemoteEngine) -> None:
    _generate(engine, group_requests())
    before = engine.call("memory").resident_bytes
    report = engine.call("sleep")
    assert report.released_bytes > 0
    assert report.released_weight_bytes == 0
    assert before - report.memory.resident_bytes >= report.released_bytes // 2
    for operation, arguments in (("sleep", ()), ("wake_kv", ()), ("score", ([np.array([3, 4])],))):
        with pytest.raises(RuntimeError, match=f"{operation} is not allowed while ASLEEP"):
            engine.call(operation, *arguments)
    with pytest.raises(RuntimeError, match="generate is not allowed while ASLEEP"):
        engine.call("generate", group_requests(), SAMPLING, 0)
    assert engine.call("wake_weights").resumed_bytes == 0
    with pytest.raises(RuntimeError, match="generate is not allowed while WEIGHTS"):
        engine.call("generate", group_requests(), SAMPLING, 0)
    engine.call("wake_kv")
    assert _take_a_turn(engine).released_bytes == 0


def test_abort_ends_a_running_generation_and_the_engine_goes_on(engines: list[RemoteEngine]) -> None:
    engine = engines[1]
    expected = _generate(engine, group_requests())
    many = [replace(request, seed=i) for i, request in enumerate(group_requests() * 40)]
    engine.send("generate", many, SAMPLING, engine.call("weight_version"))
    time.sleep(0.5)
    engine.send("abort")
    assert engine.wait() is None
    with pytest.raises(StopRequested):
        engine.wait()
    _take_a_turn(engine)
    assert _equal(_generate(engine, group_requests()), expected)


def test_an_abort_ahead_of_a_generation_ends_it_at_once(engine: RemoteEngine) -> None:
    engine.call("abort")
    with pytest.raises(StopRequested):
        _generate(engine, group_requests())
    assert len(_generate(engine, group_requests())) == 32


class _Trainer:
    """Sends a Hugging Face model's tensors to both engines, from a thread."""

    def __init__(self, network: Any, folder: Path) -> None:
        self._weights = {name: tensor.detach() for name, tensor in network.state_dict().items()}
        pieces = [
            Piece(name, tuple(weight.shape), None, 0, 0, read, read, weight.data_ptr, lambda tensor: None)
            for name, weight in self._weights.items()
            for read in [partial(self._weights.__getitem__, name)]
        ]
        manifest = [(name, tuple(weight.shape)) for name, weight in self._weights.items()]
        plan = build_plan(manifest, {0: [piece.place for piece in pieces]}, dtype=torch.float32, engines=2)
        self._sender = WeightSyncTrainer(pieces, plan, trainer=0, route=HostRoute(folder))

    def send(self, version: int) -> threading.Thread:
        thread = threading.Thread(target=self._sender.update_weights, args=(version, 60.0))
        thread.start()
        return thread

    def close(self) -> None:
        self._sender.close()


def test_weights_of_a_new_version_are_generated_with_and_a_failed_sync_is_not(
    engines: list[RemoteEngine], model: Path
) -> None:
    requests = group_requests(step=6)
    before = _generate(engines[0], requests)
    begun = [Generation(g.token_ids[:11], g.log_probs[:11], "") for g in before]
    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    trainer = _Trainer(network, model.parent / "sync")
    original = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
        _sync(engines, trainer, 1)
        assert [engine.call("weight_version") for engine in engines] == [1, 1]
        with pytest.raises(JobError, match="holds weights of version 1, not 0"):
            engines[0].call("generate", requests, SAMPLING, 0)
        changed = _generate(engines[0], requests)
        assert not _equal(changed, before)
        assert _equal(_generate(engines[1], requests), changed)
        spans = gone_on_with(engines[0], requests, begun, SAMPLING)
        sequence = np.array([*requests[0].prompt_token_ids, *changed[0].token_ids])
        with torch.no_grad():
            expected = network(torch.from_numpy(sequence)[None]).logits[0, :-1].log_softmax(-1)
        expected = expected.gather(-1, torch.from_numpy(sequence[1:])[:, None])[:, 0]
        np.testing.assert_allclose(engines[0].call("score", [sequence])[0], expected, atol=1e-4)
        second = engines[0].call("score", _sequences(requests, spans))

        engines[0].call("sleep")
        engines[0].call("wake_weights")
        with pytest.raises(WeightSyncError, match="version 2"):
            engines[0].call("receive_weights", 2, 1.0)  # no trainer sends
        engines[0].call("wake_kv")
        assert engines[0].call("weight_version") is None
        with pytest.raises(JobError, match="holds weights of version None, not 1"):
            engines[0].call("generate", requests, SAMPLING, 1)

        network.load_state_dict(original)
        _sync(engines, trainer, 3)
        assert _equal(_generate(engines[0], requests), before)
        first = engines[0].call("score", _sequences(requests, spans))
        for request, response, *scores in zip(requests, spans, first, second):
            start = len(request.prompt_token_ids) - 1
            rescored = np.concatenate([scores[0][start : start + 11], scores[1][start + 11 :]])
            np.testing.assert_allclose(response.log_probs, rescored, atol=1e-4)
        assert any(np.abs(a[-12:] - b[-12:]).max() > 0.01 for a, b in zip(first, second)), "the versions are alike"
    finally:
        trainer.close()


def _sequences(requests: list[GenerationRequest], responses: list[Generation]) -> list[np.ndarray]:
    return [np.array([*a.prompt_token_ids, *b.token_ids]) for a, b in zip(requests, responses)]


def _sync(engines: list[RemoteEngine], trainer: _Trainer, version: int) -> None:
    for engine in engines:
        engine.call("sleep")
        engine.call("wake_weights")
    thread = trainer.send(version)
    for engine in engines:
        engine.send("receive_weights", version, 60.0)
    for engine in engines:
        report = engine.wait()
        assert report["verified"]
        assert report["version"] == version
    thread.join(60)
    for engine in engines:
        engine.call("wake_kv")


@pytest.fixture
def wide_engine(model: Path) -> Iterator[RemoteEngine]:
    # Its reaper finds its workers by their variables, which a fork shows none of.
    engine = RemoteEngine(spec_json(model, tensor_parallel=2), model, model.parent / "engine-tp2.log", cold=True)
    yield engine
    engine.process.kill()
    engine.process.wait(20)


@unless_all("starts an engine of its own")
def test_a_new_process_goes_on_to_the_same_bits(engines: list[RemoteEngine], model: Path) -> None:
    requests = group_requests()
    expected = _generate(engines[0], requests)
    other = RemoteEngine(spec_json(model, engines=2, maxNumSeqs=32), model, model.parent / "engine-new.log")
    try:
        other.call("start")
        for seed in range(INTERRUPTIONS):
            begun = harvested(engines[0], requests, SAMPLING, random.Random(seed))
            assert _equal(gone_on_with(other, requests, begun, SAMPLING), expected, rounding())
    finally:
        other.close()


def _descendants(pid: int) -> set[int]:
    from rljob_worker.host.processes import living

    processes, family = living(), {pid}
    while more := {p for p, (parent, _) in processes.items() if parent in family} - family:
        family |= more
    return family


def _shared_memory_of(pids: set[int]) -> set[str]:
    from rljob_worker.host.reaper_process import shared_memory_names

    return {name for name in shared_memory_names(pids) if Path("/dev/shm", name).exists()}


def _gone(pids: set[int], seconds: float) -> set[int]:
    """Ids of the processes that still live after waiting."""
    from rljob_worker.host.processes import living

    deadline = time.monotonic() + seconds
    while (left := pids & living().keys()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@unless_drawn("a wide engine that is killed at work")
def test_tensor_parallel_engine_agrees_and_kill_leaves_nothing(
    engines: list[RemoteEngine], wide_engine: RemoteEngine
) -> None:
    requests = group_requests()
    expected = _generate(engines[0], requests)
    report = wide_engine.call("start")
    assert report.devices == ("host:cpu:0", "host:cpu:1")
    responses = _generate(wide_engine, requests)
    same = sum(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(expected, responses))
    assert same == len(requests)
    assert max(np.abs(a.log_probs - b.log_probs).max() for a, b in zip(expected, responses)) < 1e-4
    for seed in range(INTERRUPTIONS):
        assert _equal(kept(wide_engine, requests, SAMPLING, random.Random(seed))[0], responses, rounding())
        begun = harvested(wide_engine, requests, SAMPLING, random.Random(seed))
        assert _equal(gone_on_with(wide_engine, requests, begun, SAMPLING), responses, rounding())
    assert _take_a_turn(wide_engine).released_bytes > 0

    family = _descendants(wide_engine.process.pid)
    names = _shared_memory_of(family)
    assert len(family) >= 4  # itself, the reaper, two workers
    assert names
    wide_engine.process.kill()
    wide_engine.process.wait(60)
    assert not _gone(family, 60.0)
    assert not {name for name in names if Path("/dev/shm", name).exists()}


@unless_drawn("a wide engine that is killed while it loads")
def test_kill_while_workers_are_loading_leaves_nothing(wide_engine: RemoteEngine) -> None:
    wide_engine.send("start")
    deadline = time.monotonic() + 200
    while len(family := _descendants(wide_engine.process.pid)) < 4:
        assert time.monotonic() < deadline, wide_engine.log.read_text()[-3000:]
        time.sleep(0.05)
    time.sleep(1.0)
    family |= _descendants(wide_engine.process.pid)
    wide_engine.process.kill()
    wide_engine.process.wait(60)
    assert not _gone(family, 60.0)
