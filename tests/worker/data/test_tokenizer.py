from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.warm.protocol import ENGINE
from support.warm.scripts import answer_in, run_text

from rljob_api.spec import RLJobSpec
from rljob_worker.data.tokenizer import decode_responses, load_tokenizer, prepare_tokenizer
from rljob_worker.errors import UserError
from rljob_worker.types import Generation

MakeSpec = Callable[..., RLJobSpec]
SYNTHETIC = {"synthetic": {"rows": 64, "symbols": 5}}


def random_model(**tokenizer: Any) -> dict[str, Any]:
    return {"random": {"config": {"model_type": "qwen3"}, "tokenizer": tokenizer}}


def generation(token_ids: list[int], finish_reason: str = "stop", stop_text: str | None = None) -> Generation:
    return Generation(np.array(token_ids), np.zeros(len(token_ids), np.float32), finish_reason, stop_text)


def test_a_word_tokenizer_has_the_words_of_the_data(make_spec: MakeSpec, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(prepare_tokenizer(make_spec(SYNTHETIC), tmp_path / "tokenizer"))
    assert sorted(tokenizer.get_vocab()) == sorted(["<pad>", "<eos>", "<unk>", *"abcde"])
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token) == ("<pad>", "<eos>", "<unk>")
    ids = tokenizer("a  c e")["input_ids"]
    assert tokenizer.decode(ids) == "a c e"
    assert tokenizer("zebra")["input_ids"] == [tokenizer.unk_token_id]


def test_evaluation_data_counts_too(make_spec: MakeSpec, write_jsonl: Callable[..., str], tmp_path: Path) -> None:
    path = write_jsonl([{"prompt": "held out", "label": "words"}])
    spec = make_spec(SYNTHETIC, evaluation={"data": {"path": path}})
    assert {"held", "out", "words"} <= set(load_tokenizer(prepare_tokenizer(spec, tmp_path / "t")).get_vocab())


def test_the_vocabulary_bound_keeps_the_most_frequent_words(
    make_spec: MakeSpec, write_jsonl: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl([{"prompt": "c c c b b", "label": "a d"}])
    spec = make_spec({"path": path}, model=random_model(vocabSize=6))
    vocabulary = load_tokenizer(prepare_tokenizer(spec, tmp_path / "t")).get_vocab()
    assert {"a", "b", "c"} <= set(vocabulary)
    assert len(vocabulary) == 6
    assert "6 holds 3 of the data's 4 words" in caplog.text
    with pytest.raises(UserError, match="vocabSize: 3 leaves no room"):
        prepare_tokenizer(make_spec({"path": path}, model=random_model(vocabSize=3)), tmp_path / "u")


def test_a_bpe_tokenizer_gives_the_text_back(
    make_spec: MakeSpec, write_jsonl: Callable[..., str], tmp_path: Path
) -> None:
    texts = [f"What is {i} plus {i}? übrig" for i in range(50)]
    path = write_jsonl([{"prompt": text, "label": str(2 * i)} for i, text in enumerate(texts)])
    spec = make_spec({"path": path}, model=random_model(kind="BPE", vocabSize=100))
    tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path / "t"))
    assert len(tokenizer) <= 100
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(texts[0])["input_ids"]) < len(texts[0]) / 2
    with pytest.raises(UserError, match="vocabSize: 10 is too small"):
        prepare_tokenizer(make_spec({"path": path}, model=random_model(kind="BPE", vocabSize=10)), tmp_path / "u")


def test_training_is_the_same_in_every_process() -> None:
    program = (
        "from rljob_worker.data.tokenizer import _train_bpe, _train_word;"
        "texts = [f'x{i % 7} y{i % 5} z{i % 3} {i}' for i in range(200)];"
        "[print(train(texts, ['<unk>'], 80).to_str()) for train in (_train_word, _train_bpe)]"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, timeout=120,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert outputs[0] == outputs[1]
    assert outputs[0].count(b"<unk>") >= 2


def test_a_trained_chat_template(make_spec: MakeSpec, write_jsonl: Callable[..., str], tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]
    path = write_jsonl([{"prompt": messages, "label": "yes"}])
    spec = make_spec({"path": path, "applyChatTemplate": True})
    tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path / "t"))
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|> be brief <|user|> hi there <|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert len(ids) == 7


def test_a_checkpoints_tokenizer_files_are_taken_as_they_are(make_spec: MakeSpec, tmp_path: Path) -> None:
    checkpoint = prepare_tokenizer(make_spec(SYNTHETIC), tmp_path / "checkpoint")
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    out = prepare_tokenizer(make_spec(SYNTHETIC, model={"path": str(checkpoint)}), tmp_path / "out")
    assert sorted(file.name for file in out.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert all(file.read_bytes() == (checkpoint / file.name).read_bytes() for file in out.iterdir())
    assert load_tokenizer(out).get_vocab() == load_tokenizer(checkpoint).get_vocab()


def test_code_of_a_model_folder_is_not_run_and_nobody_is_asked(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks whether to run it, and takes `y` from whatever is typed next."""
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    folder = prepare_tokenizer(make_spec(SYNTHETIC), tmp_path / "evil")
    ran = tmp_path / "ran"
    (folder / "tokenizer_evil.py").write_text(
        f"from transformers import PreTrainedTokenizerFast\nopen({str(ran)!r}, 'w')\n"
        "class Evil(PreTrainedTokenizerFast): pass\n"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "tokenizer_evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    spec = make_spec(SYNTHETIC, model={"path": str(folder)})
    with pytest.raises(UserError, match=r"tokenizer_config\.json: auto_map asks for code .*tokenizer_evil\.Evil"):
        prepare_tokenizer(spec, tmp_path / "out")
    assert not ran.exists()
    assert not (tmp_path / "out" / "tokenizer_evil.py").exists()


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_token_with_a_number_without_end_is_named_with_its_file(
    file: str, make_spec: MakeSpec, tmp_path: Path
) -> None:
    folder = prepare_tokenizer(make_spec(SYNTHETIC), tmp_path / "far")
    content = json.loads((folder / file).read_text())
    token = {"content": "<far>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"normalized": False}
    if file == "tokenizer.json":
        content["added_tokens"].append({"id": 4 * 10**9, **token})
    else:
        content["added_tokens_decoder"] = {**content.get("added_tokens_decoder", {}), str(4 * 10**9): token}
    (folder / file).write_text(json.dumps(content))
    said = rf"^spec\.model: .*far/{file}: token '<far>' has the number 4000000000, and the tokenizer has \d+ tokens"
    with pytest.raises(UserError, match=said):
        load_tokenizer(folder)
    with pytest.raises(UserError, match=said):
        prepare_tokenizer(make_spec(SYNTHETIC, model={"path": str(folder)}), tmp_path / "out")


def test_what_a_library_says_of_a_tokenizer_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object, **__: object) -> None:
        raise ValueError("x" * 10**6)

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", raises)
    with pytest.raises(UserError, match="does not load: ValueError: xxx") as error:
        load_tokenizer(tmp_path)
    assert len(str(error.value)) < 1200 + len(str(tmp_path))


def test_wrong_model_paths_are_named(make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: object, match: str, **fields: Any) -> None:
        with pytest.raises(UserError, match=match):
            prepare_tokenizer(make_spec(SYNTHETIC, model={"path": str(path)} | fields), tmp_path / "out")

    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", r"spec\.model\.path: .*empty has no tokenizer")
    fails(tmp_path / "nowhere", r"spec\.model\.path: .*nowhere does not exist")
    (tmp_path / "file").write_text("")
    fails(tmp_path / "file", "is a file")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    fails(tmp_path / "broken", "does not load")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    fails("owner/model", r"spec\.model\.hub: ModelScope needs the Python package 'modelscope'", hub="ModelScope")


def test_responses_lose_what_ended_them_and_nothing_else(make_spec: MakeSpec, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(prepare_tokenizer(make_spec(SYNTHETIC), tmp_path / "t"))
    a, b, c = (tokenizer.convert_tokens_to_ids(symbol) for symbol in "abc")
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert decode_responses(
        tokenizer,
        [
            generation([a, b, eos]),
            generation([a, b, c], "length"),
            generation([a, eos, b], "length"),
            generation([pad, a, eos]),
            generation([a, b, c, b, c], "stop", stop_text="b c"),
            generation([eos]),
        ],
    ) == ["a b", "a b c", "a <eos> b", "<pad> a", "a b c ", ""]


@pytest.mark.slow
def test_vllm_loads_it(make_spec: MakeSpec, tmp_path: Path) -> None:
    script = (
        "import json, sys; from vllm.tokenizers import get_tokenizer; "
        "print(json.dumps(get_tokenizer(sys.argv[1]).encode('a b')))"
    )
    folder = prepare_tokenizer(make_spec(SYNTHETIC), tmp_path / "t")
    assert answer_in(run_text(ENGINE, script, tmp_path, folder)) == load_tokenizer(folder)("a b")["input_ids"]
