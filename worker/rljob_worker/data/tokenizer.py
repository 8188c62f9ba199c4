"""The policy's tokenizer: taken from its checkpoint or hub, or trained on the job's own data."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.spec import DataSource, RandomModel, RLJobSpec
from rljob_worker.data.chat import ChatTemplate
from rljob_worker.data.hub import is_hub_id, snapshot
from rljob_worker.data.labels import label_text
from rljob_worker.data.prompts import parsed_prompt
from rljob_worker.data.sources import data_sources, evaluation_sources, load_source
from rljob_worker.errors import UserError
from rljob_worker.host.files import read_file, writing
from rljob_worker.models.facts import PICTURE_FILES, PICTURE_MODELS
from rljob_worker.models.json_files import check_token_numbers
from rljob_worker.models.pictures import MARK, PICTURE_TOKENS
from rljob_worker.models.random_pictures import save_processor
from rljob_worker.types import Generation

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("rljob.data")

TOKENIZER_FILES = (
    "tokenizer*",
    "*.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    *PICTURE_FILES,
)
"""Patterns of the files that a tokenizer consists of, and what makes input of pictures."""
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_FEW_TOKENS = 2048
_LONGEST_ERROR = 1000
ROLES, TOOL = ("system", "user", "assistant"), "tool"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


PICTURES_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' }}{% if message['content'] is string %}"
    "{{ message['content'] + ' ' }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '" + MARK + " ' }}{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The template of jobs with pictures."""
TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|tool|> ' }}{% for tool in tools %}{{ tool['function']['name'] + ' ' }}{% endfor %}{% endif %}"
    + CHAT_TEMPLATE
)
"""The template of jobs with tools; it lists their names."""


def prepare_tokenizer(spec: RLJobSpec, out: Path, spoken: Iterable[str] = ()) -> Path:
    """Put the job's tokenizer into the folder `out` and return it: a folder that transformers and vLLM load.

    `model.path`: the tokenizer files of the checkpoint folder or hub repository, as they are. `model.random`: a
    tokenizer trained on the prompts and labels of the job's data, the same for the same data. Raises UserError.

    Args:
        spec: the job.
        out: a folder, which is made.
        spoken: what environments say and take, for a tokenizer that is trained.
    """
    out.mkdir(parents=True, exist_ok=True)
    if spec.model.random is not None:
        tokenizer = _train(spec, spec.model.random, spoken)
        with writing(out):
            tokenizer.save_pretrained(out)
            if seeing(spec):
                save_processor(spec.model.random.config, out)
    elif spec.model.path is not None:
        _copy_files(_locate(spec), out, spec.model.path)
    else:
        raise UserError("spec.model: has neither path nor random: exactly one is needed")
    load_tokenizer(out, spec.model.path)
    return out


def load_tokenizer(folder: Path, called: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a local folder; UserError when there is none, or it has no end token.

    Args:
        folder: with its files.
        called: where they were copied from, for messages.
    """
    from transformers import AutoTokenizer

    try:
        check_token_numbers(folder, called)
    except UserError as error:
        raise UserError(f"spec.model: {error}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        _refuse_own_code(folder, error)
        raise UserError(f"spec.model: the tokenizer in {called or folder} does not load: {_said(error)}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"spec.model: the tokenizer in {called or folder} has no end token; tokenizer_config.json names one as "
            "eos_token"
        )
    return tokenizer


def _said(error: Exception) -> str:
    """A library's error, cut: it may quote a whole vocabulary."""
    return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]


def _refuse_own_code(folder: Path, error: Exception) -> None:
    """Name the file where a tokenizer does not load because it is one of the model's own code."""
    path = folder / "tokenizer_config.json"
    try:
        code = json.loads(read_file(path))["auto_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return
    raise UserError(
        f"spec.model: {path.name}: auto_map asks for code of the model's own ({json.dumps(code)[:200]}), which RLJob "
        "does not run; use a model whose tokenizer transformers has a class for, or save this one as tokenizer.json "
        "(PreTrainedTokenizerFast) and take auto_map out"
    ) from error


def tokens_added_after(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that the tokenizer adds at the end of every text, such as an end token."""
    try:
        plain = tokenizer("a b", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a b")["input_ids"]
    except Exception as error:
        raise UserError(f"spec.model: the tokenizer makes no tokens of text: {_said(error)}") from error
    starts = range(len(whole) - len(plain) + 1)
    start = next((start for start in starts if whole[start : start + len(plain)] == plain), None)
    return () if start is None or not plain else tuple(whole[start + len(plain) :])


def decode_responses(tokenizer: PreTrainedTokenizerBase, generations: Sequence[Generation]) -> list[str]:
    """The text of each response, without the end token or stop string that ended it.

    Other special tokens stay in the text: a response must not pass as another one by hiding them.
    """
    token_ids = [
        (generation.token_ids[:-1] if _ended_by_token(generation) else generation.token_ids).tolist()
        for generation in generations
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not tokenizer.clean_up_tokenization_spaces:
        # A batch wakes a thread for each core, which takes longer than some short answers do.
        few = sum(map(len, token_ids)) <= _FEW_TOKENS
        decode = backend.decode
        texts = [decode(ids, False) for ids in token_ids] if few else backend.decode_batch(token_ids, False)
    else:
        texts = tokenizer.batch_decode(token_ids, skip_special_tokens=False)
    return [
        text[: text.rfind(generation.stop_text)] if generation.stop_text and generation.stop_text in text else text
        for text, generation in zip(texts, generations)
    ]


def _ended_by_token(generation: Generation) -> bool:
    return generation.finish_reason == "stop" and generation.stop_text is None


def _locate(spec: RLJobSpec) -> Path:
    assert spec.model.path is not None
    folder = Path(spec.model.path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"spec.model.path: {folder} is a file: a checkpoint folder or hub id is needed")
    if not is_hub_id(spec.model.path):
        raise UserError(f"spec.model.path: {folder} does not exist")
    model = spec.model
    return snapshot(spec.model.path, model.hub, "spec.model", revision=model.revision, patterns=TOKENIZER_FILES)


def _copy_files(folder: Path, out: Path, name: str) -> None:
    files = sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)})
    if not any(file.is_file() for file in files):
        raise UserError(
            f"spec.model.path: {name} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is in {folder}"
        )
    for file in files:
        if file.suffix == ".py":
            # Code of the model's own, which nothing here runs.
            continue
        if file.is_dir():
            shutil.copytree(file, out / file.name, dirs_exist_ok=True)
        elif file.resolve() != (out / file.name).resolve():
            shutil.copyfile(file, out / file.name)


def _train(spec: RLJobSpec, model: RandomModel, spoken: Iterable[str]) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    sources = data_sources(spec) + evaluation_sources(spec)
    chat = any(source.apply_chat_template for _, source in sources)
    tools = any(source.environment is not None and source.environment.tools is not None for _, source in sources)
    roles = [*(ROLES if chat else ()), *([TOOL] if tools else [])]
    special = [PAD, EOS, UNKNOWN, *(f"<|{role}|>" for role in roles), *(PICTURE_TOKENS if seeing(spec) else ())]
    train = _train_word if model.tokenizer.kind == "Word" else _train_bpe
    tokenizer = train(chain(_texts(sources), spoken), special, model.tokenizer.vocab_size)
    arguments: dict[str, Any] = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNKNOWN}
    if chat:
        template = PICTURES_TEMPLATE if seeing(spec) else TOOLS_TEMPLATE if tools else CHAT_TEMPLATE
        arguments["chat_template"] = template
    if special[3:]:
        arguments["additional_special_tokens"] = special[3:]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **arguments)


def seeing(spec: RLJobSpec) -> bool:
    """Whether a random model takes pictures, whose tokens its tokenizer then has."""
    return spec.model.random is not None and spec.model.random.config.get("model_type") in PICTURE_MODELS


def _texts(sources: Iterable[tuple[str, DataSource]]) -> Iterator[str]:
    for field, source in sources:
        loaded = load_source(source, field)
        chat = None
        if source.chat is not None and source.apply_chat_template:
            chat = ChatTemplate(source, field, _renderer(), loaded.template)
        if source.seeds is not None:
            # What is said there, its environment says.
            if chat is not None and source.chat is not None and source.chat.system is not None:
                yield source.chat.system
            continue
        for number, row in enumerate(loaded.rows):
            prompt = parsed_prompt(row[source.prompt_key])
            if chat is not None:
                yield chat.render(prompt, loaded.place(number))
            else:
                yield from [prompt] if isinstance(prompt, str) else (str(message["content"]) for message in prompt)
            if source.label_key is not None:
                yield label_text(row[source.label_key])


def _renderer() -> PreTrainedTokenizerBase:
    """A tokenizer that can only render, for what the words of the one to be trained are taken from."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=EOS, pad_token=PAD, chat_template=CHAT_TEMPLATE)


def _train_word(texts: Iterable[str], special: list[str], vocab_size: int) -> Tokenizer:
    """The most frequent words; equally frequent ones in alphabetical order, so that runs agree."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    words = [word for word in sorted(counts, key=lambda word: (-counts[word], word)) if word not in special]
    kept = words[: max(0, vocab_size - len(special))]
    if not words:
        raise UserError(
            "spec.model.random.tokenizer: there are no words to train it on: all texts of data and environments are "
            "white space; kind: BPE also learns that"
        )
    if not kept:
        raise UserError(f"spec.model.random.tokenizer.vocabSize: {vocab_size} leaves no room for words")
    if len(kept) < len(words):
        logger.warning(
            "spec.model.random.tokenizer.vocabSize: %d holds %d of the data's %d words; the others become %s",
            vocab_size, len(kept), len(words), UNKNOWN,
        )  # fmt: skip
    vocabulary = {token: index for index, token in enumerate([*special, *kept])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _train_bpe(texts: Iterable[str], special: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the bytes that occur in the data."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise UserError(
            f"spec.model.random.tokenizer.vocabSize: {vocab_size} is too small: "
            f"the data's characters and the special tokens alone are {tokenizer.get_vocab_size()}"
        )
    return tokenizer
