"""Labels of `math` and `gsm8k`, read before a step needs them."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import xxhash

from rljob_api.spec import RewardSpec
from rljob_worker.data.labels import label_text
from rljob_worker.data.renderer import ScoredRows
from rljob_worker.data.reward_rows import RowRewards
from rljob_worker.data.sources import LoadedSource
from rljob_worker.errors import UserError
from rljob_worker.host.files import read_file, write_whole
from rljob_worker.host.sealed_json import sealed, unsealed
from rljob_worker.rewards.builtin import gsm8k_number
from rljob_worker.rewards.math_reward import read_label
from rljob_worker.rewards.weighted_parts import parts_of

logger = logging.getLogger("rljob.rewards")

CHECK_SECONDS = 10.0
"""Seconds that a job's start may wait for labels to be read."""
READERS: Mapping[str, Callable[[str], object]] = {"math": read_label, "gsm8k": gsm8k_number}
"""By a built-in reward that understands its labels: what reads one, or raises ValueError."""
VERSION = 6
"""Grows when a label is read in another way: what was kept of earlier checks is then not used."""
_SHOWN = 5
_NAMED = 20
"""Labels that the log and the events name; the others are counted."""
_CHUNK = 64
_REST_SECONDS = 0.005
"""Pause between chunks of labels that are read beside the first steps."""


@dataclass(slots=True)
class _Labels:
    """The labels of one source, and what was found so far."""

    source: LoadedSource
    readers: Sequence[str]
    fails: bool
    """Whether a label that cannot be read ends the job, once it is drawn."""
    rows: Iterator[tuple[int, str]]
    kept: Path
    left_out: frozenset[int] = frozenset()
    """Rows that are not used, whose labels may be wrong."""
    done: bool = False
    faults: list[tuple[int, str]] = field(default_factory=list)
    """(row, what is wrong), of rows that are used."""
    _all_faults: list[tuple[int, str]] = field(default_factory=list)
    """Faults of rows that are left out too: what is kept holds whichever those are."""
    _known: dict[int, str | None] = field(default_factory=dict)

    def read_some(self) -> None:
        """Read the next labels, those that are alike once."""
        for _ in range(_CHUNK):
            row, label = next(self.rows, (-1, ""))
            if row < 0:
                self.done = True
                self._keep()
                return
            key = xxhash.xxh3_64_intdigest(label.encode())
            if key not in self._known:
                self._known[key] = _fault(self.readers, label)
            if (wrong := self._known[key]) is not None:
                self._note(row, wrong)

    def load(self) -> None:
        """Take over what was found in the same file before."""
        try:
            kept = unsealed(read_file(self.kept).decode())["faults"]
            faults = [(int(row), str(wrong)) for row, wrong in kept]
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            return
        for row, wrong in faults:
            self._note(row, wrong)
        self.done = True

    def _note(self, row: int, wrong: str) -> None:
        self._all_faults.append((row, wrong))
        if row not in self.left_out:
            self.faults.append((row, wrong))

    def _keep(self) -> None:
        try:
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.kept, sealed({"faults": self._all_faults}), durable=False)
        except OSError as error:
            logger.info("what the check of labels found is not kept: %s", error)

    def describe(self, row: int, wrong: str) -> str:
        """A label that cannot be read, with its file and row."""
        return f"{self.source.place(row)}: {wrong}"


class LabelCheck:
    """Reads the labels of sources whose reward understands them: at once as far as time allows, the rest beside.

    Args:
        sources: with the reward of each, and the rows that are used.
        cache: folder where results are kept by the digest of the data.
    """

    def __init__(self, sources: Sequence[ScoredRows], cache: Path | None = None) -> None:
        cache = cache or cache_folder()
        self._all = [labels for source in sources for labels in _labels(source, cache)]
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = 0

    def run(self, seconds: float = CHECK_SECONDS) -> None:
        """Read what can be read in that time."""
        deadline = time.monotonic() + seconds
        for labels in self._all:
            labels.load()
            while not labels.done and time.monotonic() < deadline:
                labels.read_some()

    def refuse(self) -> None:
        """UserError where a label that was found unreadable would end the job when its prompt is drawn."""
        found = [(labels, *fault) for labels in self._all if labels.fails for fault in labels.faults]
        if not found:
            return
        shown = "\n".join(f"  {labels.describe(row, wrong)}" for labels, row, wrong in found[:_SHOWN])
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        names = " and ".join(dict.fromkeys(name for labels, _, _ in found for name in labels.readers))
        raise UserError(
            f"{found[0][0].source.field}: {len(found)} labels cannot be read by the reward {names}:\n{shown}{more}\n"
            "correct or remove these rows, leave those of the training data out with spec.data.skip, or set "
            "reward.onError: Score, with which their samples get reward.errorScore"
        )

    def start(self, tell: Callable[[str], None]) -> None:
        """Read the rest in a thread; `tell` gets a sentence for each of the first labels that cannot be read."""
        for labels in self._all:
            self._tell(labels, 0, tell)
        if not all(labels.done for labels in self._all):
            self._thread = threading.Thread(target=self._rest, args=(tell,), name="label-check", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _rest(self, tell: Callable[[str], None]) -> None:
        for labels in self._all:
            while not labels.done and not self._closing.wait(_REST_SECONDS):
                before = len(labels.faults)
                labels.read_some()
                self._tell(labels, before, tell)
        if self._told > _NAMED:
            logger.warning("%d labels cannot be read, of which %d were named", self._told, _NAMED)

    def _tell(self, labels: _Labels, start: int, tell: Callable[[str], None]) -> None:
        for row, wrong in labels.faults[start:]:
            self._told += 1
            if self._told <= _NAMED:
                tell(labels.describe(row, wrong))


def cache_folder() -> Path:
    """Folder of results that are kept from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob" / "labels"


def _labels(scored: ScoredRows, cache: Path) -> Iterator[_Labels]:
    """The labels of a source by the rewards that read them, which may follow from a column."""
    source, reward, count = scored.loaded, scored.reward, scored.count
    key = source.source.label_key
    values = [None] if scored.routed is None else list(scored.routed.values)
    rewards = RowRewards(reward)
    by_names: dict[tuple[str, ...], list[str | None]] = {}
    for value in values:
        if names := _readers(rewards.of_value(value)):
            by_names.setdefault(names, []).append(value)
    for names, own in by_names.items() if key is not None else ():
        said = [VERSION, source.fingerprint, key, list(names), count]
        said += [] if reward.by is None else [reward.by, sorted(map(str, own))]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(said).encode())
        rows = _rows_of(scored, str(key), names)
        yield _Labels(source, names, reward.on_error == "Fail", rows, cache / f"{digest}.json", scored.left_out)


def _readers(reward: RewardSpec | None) -> tuple[str, ...]:
    parts = [] if reward is None else parts_of(reward)
    return tuple(sorted({name for part in parts if (name := part.reward.name) in READERS and name is not None}))


def _rows_of(scored: ScoredRows, key: str, names: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(row, label) of the rows whose labels these rewards read."""
    rewards = RowRewards(scored.reward)
    for row, content in enumerate(islice(scored.loaded.rows, scored.count)):
        routed = scored.reward.by is not None
        if routed and (row in scored.left_out or _readers(rewards.of_row(content)) != names):
            continue
        yield row, label_text(content[key])


def _fault(readers: Sequence[str], label: str) -> str | None:
    for name in readers:
        try:
            READERS[name](label)
        except ValueError as error:
            return f"{error} (reward {name})"
    return None
