"""Reading data sets: JSONL, Parquet, Hugging Face dataset folders, the hubs, and generated ones."""

from __future__ import annotations

import codecs
import dataclasses
import gc
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from rljob_api import derived
from rljob_api.spec import DataSource, Hub, RLJobSpec, SyntheticData
from rljob_worker.data.chat import read_template
from rljob_worker.data.colors import QUESTION, color_rows
from rljob_worker.data.columns import TableRows
from rljob_worker.data.hub import check_hub, hub_failure, is_hub_id, modelscope
from rljob_worker.data.hub_answers import with_deadlines
from rljob_worker.data.labels import label_text
from rljob_worker.data.nested import lift, without_views
from rljob_worker.data.prompts import check_prompt, is_plain
from rljob_worker.data.rows import Row, RowFacts
from rljob_worker.data.seeds import SeededRows
from rljob_worker.data.synthetic import generate_rows
from rljob_worker.errors import JobError, UserError
from rljob_worker.host.encodings import not_text, without_mark
from rljob_worker.host.paths import home_expanded, what_is_at
from rljob_worker.types import IntArray
from rljob_worker.waiting import waiting_for

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import Table

IMAGE = "image"
"""Column of a generated row's picture."""
TURNS = "turns"
"""Among the columns that rewards are given: the turns of an episode."""
_LOOKED_AT = 100
_FILES = (".jsonl", ".parquet")
_HEAD_BYTES = 2**20
_AT_ONCE_BYTES = 2**24
"""Size of a file whose rows are all read before anything is imported: some 0.5 s."""
_SYMBOLS_AT_ONCE, _PICTURES_AT_ONCE, _SEEDS_AT_ONCE = 2**19, 32, 2**16
"""Generated data of which the same is true."""
_MAX_DEPTH = 100
"""Lists and objects inside each other, of what is sent from process to process."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A data set whose prompt and label columns were checked."""

    name: str
    """Name in metrics and in `Prompt.uid`."""
    field: str
    """Its place in the manifest, such as `spec.data.sources[1]`."""
    origin: str
    """The file, folder or hub id, for messages."""
    source: DataSource
    rows: Sequence[Row]
    fingerprint: str
    """Changes when the rows change, or the source's own chat template."""
    earlier: str | None = None
    """That fingerprint as earlier versions made it, where they made it in another way."""
    template: str | None = None
    """Text of that template."""
    facts: RowFacts = dataclasses.field(default_factory=RowFacts)
    row_hashes: Callable[[], IntArray] = lambda: np.empty(0, dtype=np.int64)
    """[rows]: changes where a row does; empty for rows that no file holds."""

    def reward_columns(self) -> frozenset[str]:
        """Columns of the first rows that are neither prompt nor label, and what an episode has in their place."""
        found = {name for row in self.rows[:_LOOKED_AT] for name in row}
        if self.source.environment is not None:
            found.add(TURNS)
        return frozenset(found - prompt_and_label(self.source) - {self.image_key})

    @property
    def image_key(self) -> str | None:
        """Column of its pictures; None where it has none."""
        synthetic = self.source.synthetic
        return IMAGE if synthetic is not None and synthetic.task == "NameColor" else self.source.image_key

    def place(self, row: int) -> str:
        """Name of a row in messages."""
        return f"{self.origin}, row {row}"


def prompt_and_label(source: DataSource) -> frozenset[str]:
    """Columns of a source's prompt and, where its rows have one, its label."""
    return frozenset(key for key in (source.prompt_key, source.label_key) if key is not None)


def data_sources(spec: RLJobSpec) -> list[tuple[str, DataSource]]:
    """The training data's sources, each with its place in the manifest."""
    return [(f"spec.{place}", source) for place, source in derived.data_sources(spec)]


def evaluation_sources(spec: RLJobSpec) -> list[tuple[str, DataSource]]:
    """The held-out data sets, each with its place in the manifest; none without `spec.evaluation`."""
    return [(f"spec.{place}", source) for place, source in derived.held_out_sources(spec)]


def load_sources(spec: RLJobSpec) -> list[LoadedSource]:
    """All training data; UserError when two sources share a name."""
    loaded = [load_source(source, field) for field, source in data_sources(spec)]
    fields: dict[str, str] = {}
    for source in loaded:
        if source.name in fields:
            raise UserError(
                f"{source.field}.name: {source.name!r} is the name of {fields[source.name]} already: "
                "give each source a name of its own"
            )
        fields[source.name] = source.field
    return loaded


def load_source(source: DataSource, field: str) -> LoadedSource:
    """Read one source (`field` is its place in the manifest); UserError says what is wrong, and where."""
    loaded = _load_rows(source, field)
    template = read_template(source, field)
    if template is None:
        return loaded
    both = xxhash.xxh3_128_hexdigest(f"{loaded.fingerprint}\0{template}".encode())
    earlier = loaded.earlier and xxhash.xxh3_128_hexdigest(f"{loaded.earlier}\0{template}".encode())
    return replace(loaded, fingerprint=both, earlier=earlier, template=template)


def check_path(source: DataSource, field: str) -> None:
    """Refuse a path that is nothing to read, without reading it: UserError says why."""
    if source.path is None:
        return
    try:
        path = home_expanded(source.path)
        kind = what_is_at(path)
    except OSError as error:
        raise UserError(f"{field}.path: {source.path}: {error.strerror}") from None
    where = f"{field}.path: {path}"
    if kind == "nothing":
        if path.suffix in _FILES or not is_hub_id(source.path):
            raise UserError(f"{where} does not exist")
    elif path.suffix in _FILES:
        if kind != "file":
            raise UserError(f"{where} is not a file")
    elif kind == "file":
        raise UserError(f"{where}: not a .jsonl or .parquet file")
    elif kind != "folder":
        raise UserError(f"{where} is neither a file nor a folder")
    elif not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise UserError(
            f"{where} is not a dataset folder written by save_to_disk: it has neither state.json nor dataset_dict.json"
        )


def check_head(source: DataSource, field: str) -> LoadedSource | None:
    """Refuse a file whose first row is none, or lacks the columns: UserError says why.

    Returns:
        The rows, without the source's chat template, where to read or generate all of them takes no time; those of a
        large file are looked at once it is read.
    """
    if source.path is None:
        return _generated_at_once(source, field)
    path = Path(source.path).expanduser()
    if path.suffix not in _FILES or not path.is_file():
        return None
    head = _read(path, field, _HEAD_BYTES)
    if not head:
        raise UserError(f"{field}.path: {path} is empty: it has no rows")
    if path.suffix == ".parquet":
        _check_parquet(head, path, field)
    else:
        _check_first_line(head, path, source, field)
    return _load_rows(source, field) if path.stat().st_size <= _AT_ONCE_BYTES else None


def _generated_at_once(source: DataSource, field: str) -> LoadedSource | None:
    """Rows that take no time to generate: of pictures the first, of many others none."""
    made = source.synthetic
    if made is not None and made.task == "NameColor":
        few = made.model_copy(update={"rows": min(made.rows, _PICTURES_AT_ONCE)})
        return _load_rows(source.model_copy(update={"synthetic": few}), field)
    if made is not None:
        symbols = made.rows * (made.prompt_symbols + made.answer_symbols)
        return _load_rows(source, field) if symbols <= _SYMBOLS_AT_ONCE else None
    return _load_rows(source, field) if source.seeds is not None and source.seeds.count <= _SEEDS_AT_ONCE else None


def _check_first_line(head: bytes, path: Path, source: DataSource, field: str) -> None:
    lines = without_mark(head).split(b"\n")
    if len(head) == _HEAD_BYTES:
        # Its last line may go on behind what was read.
        lines.pop()
        if not any(line.strip() for line in lines):
            # Its first row is longer than that, and is looked at with the others.
            return
    first = next((number for number, line in enumerate(lines, start=1) if line.strip()), 0)
    _read_jsonl(b"\n".join(lines[:first]) or head[:4], path, source, field)


def _read(path: Path, field: str, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        kind = UserError if isinstance(error, PermissionError) else JobError
        raise kind(f"{field}.path: {path} cannot be read: {error.strerror}") from None


def _check_parquet(head: bytes, path: Path, field: str) -> None:
    if not head.startswith(b"PAR1"):
        what = not_text(head, "a Parquet file is needed") or "does not begin with PAR1"
        raise UserError(f"{field}.path: {path} is not a readable Parquet file: it {what}")


def _load_rows(source: DataSource, field: str) -> LoadedSource:
    if source.synthetic is not None:
        return _load_synthetic(source, field)
    if source.seeds is not None:
        return _load_seeds(source, field)
    if source.path is None:
        raise UserError(f"{field}: has neither path, synthetic nor seeds: exactly one is needed")
    check_path(source, field)
    path = Path(source.path).expanduser()
    default_name = path.stem if path.is_file() else path.name
    if path.suffix == ".jsonl":
        content = _read(path, field)
        lines = _read_jsonl(content, path, source, field)
        loaded = LoadedSource(
            source.name or default_name, field, source.path, source, lines.rows,
            xxhash.xxh3_128_hexdigest(content), facts=lines.facts, row_hashes=lambda: lines.hashes,
        )  # fmt: skip
    else:
        if path.suffix == ".parquet":
            content = _read(path, field)
            _check_parquet(content[:64], path, field)
            fingerprint = xxhash.xxh3_128_hexdigest(content)
            rows = TableRows(_read_parquet(path, field), str(path), source, field)
        else:
            rows = TableRows(_load_dataset(path, source, field), source.path, source, field)
            fingerprint = rows.fingerprint()
        loaded = LoadedSource(
            source.name or default_name, field, source.path, source, rows, fingerprint,
            facts=rows.facts, row_hashes=rows.hashes,
        )  # fmt: skip
    if not loaded.rows:
        raise UserError(f"{field}.path: {source.path} is empty: it has no rows")
    return loaded


def _load_synthetic(source: DataSource, field: str) -> LoadedSource:
    assert source.synthetic is not None
    if source.synthetic.task == "NameColor":
        return _load_colors(source, source.synthetic, field)
    pairs = generate_rows(source.synthetic)
    rows = [
        {source.prompt_key: prompt} | ({source.label_key: answer} if source.label_key else {})
        for prompt, answer in pairs
    ]
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(pairs).encode())
    name = source.name or source.synthetic.task
    return LoadedSource(name, field, f"{field}.synthetic", source, rows, fingerprint)


def _load_colors(source: DataSource, data: SyntheticData, field: str) -> LoadedSource:
    drawn = color_rows(data)
    rows: list[Row] = [
        {source.prompt_key: QUESTION, IMAGE: picture}
        | ({source.label_key: " ".join([name] * data.answer_symbols)} if source.label_key else {})
        for name, picture in drawn
    ]
    said = hashlib.sha256()
    for name, picture in drawn:
        said.update(name.encode() + b"\0" + picture)
    return LoadedSource(source.name or data.task, field, f"{field}.synthetic", source, rows, said.hexdigest()[:32])


def _load_seeds(source: DataSource, field: str) -> LoadedSource:
    """Other settings of the environment make other data of the same seeds."""
    assert source.seeds is not None
    assert source.environment is not None
    environment = source.environment
    gymnasium, openenv = environment.gymnasium, environment.openenv
    kind = environment.name or environment.python or (gymnasium and gymnasium.id) or (openenv and openenv.url)
    # One that runs has the fingerprint that it had before there was another kind.
    kinds = {"name", "gymnasium", "python", "args", *(["openenv"] if openenv is not None else [])}
    # Earlier versions took keys in the order given, so that a cluster, whose API server sorts them, made another one.
    fingerprint, earlier = (
        xxhash.xxh3_128_hexdigest(f"{source.seeds.model_dump_json()}\0{said}".encode())
        for said in (environment.canonical_json(kinds), environment.model_dump_json(include=kinds))
    )
    name = source.name or re.sub(r"[^\w.-]+", "-", str(kind)).strip(".-")
    unlabelled = source.model_copy(update={"label_key": None})
    rows = SeededRows(source.seeds)
    return LoadedSource(name, field, f"{field}.seeds", unlabelled, rows, fingerprint, earlier)


@dataclass(frozen=True, slots=True)
class _Lines:
    rows: list[Row]
    facts: RowFacts
    hashes: IntArray


def _read_jsonl(content: bytes, path: Path, source: DataSource, field: str) -> _Lines:
    if what := not_text(content[:64], "JSON lines in UTF-8 are needed"):
        raise UserError(f"{field}.path: {path} {what}")
    rows: list[Row] = []
    facts, hashes, name = RowFacts(), list[int](), str(path)
    with _few_collections():
        for number, line in enumerate(without_mark(content).split(b"\n"), start=1):
            line = line.strip()
            if not line:
                continue
            row = _row(line, name, number)
            lift(row, (source.prompt_key, source.label_key))
            prompt = row.get(source.prompt_key)
            label = None if source.label_key is None else row.get(source.label_key)
            if not is_plain(prompt) or (source.label_key is not None and not is_plain(label)):
                _check_row(row, source, field, f"{name}, line {number} (row {len(rows)})", facts)
            rows.append(row)
            hashes.append(xxhash.xxh3_64_intdigest(line))
    return _Lines(rows, facts, np.array(hashes, dtype=np.uint64).view(np.int64))


@contextmanager
def _few_collections() -> Iterator[None]:
    """Millions of rows that stay: looking for circles among them takes as long as reading them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_row(row: Row, source: DataSource, field: str, place: str, facts: RowFacts) -> None:
    for name, key in (("promptKey", source.prompt_key), ("labelKey", source.label_key)):
        if key is not None and row.get(key) is None:
            state = "is null" if key in row else "is absent"
            raise UserError(
                f"{place}: key {key!r} ({field}.{name}) {state}; the keys there are: {', '.join(map(repr, row))}"
            )
    facts.note_messages(check_prompt(row[source.prompt_key], place, field, source), place)
    if source.label_key is not None:
        try:
            facts.note_label(label_text(row[source.label_key]), place)
        except ValueError as error:
            raise UserError(f"{place}: the label ({source.label_key!r}, {field}.labelKey) {error}") from None


def _row(line: bytes, name: str, number: int) -> Row:
    try:
        row = _DECODER.decode(line.decode())
        if not isinstance(row, dict):
            wrong = f"a JSON object is needed, not {type(row).__name__}"
        elif _SURROGATE.search(line) and not _is_text(row):
            wrong = "holds half a character (a lone surrogate like \\ud800), which is no text"
        elif line.count(b"[") + line.count(b"{") > _MAX_DEPTH and _is_deeper(row, _MAX_DEPTH):
            wrong = f"is nested deeper than {_MAX_DEPTH} levels"
        else:
            return row
    except json.JSONDecodeError as error:
        if line.startswith(codecs.BOM_UTF8):
            # Files with a mark each that were put together.
            return _row(without_mark(line), name, number)
        listed = "; the file is one list: JSON lines have an object in each line" if line == b"[" else ""
        wrong = f"not valid JSON: {error.msg} at column {error.colno}{listed}"
    except UnicodeDecodeError as error:
        wrong = f"not valid UTF-8: {error.reason} at byte {error.start}"
    except (ValueError, RecursionError) as error:
        wrong = f"not valid JSON: {error}"
    raise UserError(f"{name}, line {number}: {wrong}")


def _once(pairs: list[tuple[str, Any]]) -> Row:
    """An object; ValueError where a key stands twice, of which readers take the first or the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} stands twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _is_deeper(value: object, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(part, levels - 1) for part in parts)


def _is_text(row: Row) -> bool:
    """Whether all text of a row can be written: JSON's escapes can say halves of characters."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(path: Path, field: str) -> Table:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        names = parquet.read_schema(path).names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{field}.path: {path} has two columns called {twice!r}: each name once is needed")
        return without_views(parquet.read_table(path))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        # A column's name may be no text.
        raise UserError(f"{field}.path: {path} is not a readable Parquet file: {error}") from error


def _load_dataset(path: Path, source: DataSource, field: str) -> Table:
    """A whole split as an Arrow table, from a `save_to_disk` folder or a hub."""
    assert source.path is not None
    dataset = _load_folder(path, source, field) if path.is_dir() else _load_from_hub(source.path, source, field)
    return without_views(dataset.with_format("arrow")[:])


def _load_folder(path: Path, source: DataSource, field: str) -> Dataset:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except Exception as error:
        raise UserError(f"{field}.path: {path} does not load: {type(error).__name__}: {error}") from error
    if not isinstance(dataset, DatasetDict):
        return dataset
    if source.split not in dataset:
        raise UserError(f"{field}.split: {path} has no split {source.split!r}; it has: {', '.join(dataset)}")
    return dataset[source.split]


def _load_from_hub(name: str, source: DataSource, field: str) -> Dataset:
    try:
        if source.hub is Hub.MODEL_SCOPE:
            modelscope(field)
            check_hub(name, source.hub, "datasets", field)
            from modelscope.msdatasets import MsDataset

            dataset = MsDataset.load(name, subset_name=source.subset, split=source.split, trust_remote_code=False)
            return dataset.to_hf_dataset() if isinstance(dataset, MsDataset) else dataset
        check_hub(name, source.hub, "datasets", field)
        from datasets import load_dataset

        with with_deadlines(), waiting_for(f"files of {field}.path {name} from {source.hub.value}"):
            return load_dataset(name, source.subset, split=source.split)
    except (JobError, UserError):
        raise
    except Exception as error:
        raise hub_failure(name, source.hub, field, error) from error
