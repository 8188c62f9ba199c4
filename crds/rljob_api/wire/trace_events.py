"""Chrome's trace events, which ui.perfetto.dev and chrome://tracing read: the forms that traces of RLJob have.

The format is "Trace Event Format" (Google, 2016): complete events `X`, instants `i`, counters `C`, metadata `M`, and
times in microseconds. Slices of a lane must lie beside or within each other; here they lie beside each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the picture: a thread of a process, in the format's terms."""

    place: str
    """The members `pid` and `tid`."""


class TraceEvents:
    """Collects the events of a trace, each as its JSON text.

    Args:
        origin: Unix seconds that the trace's times count from.
    """

    def __init__(self, origin: float) -> None:
        self.origin = origin
        self._texts: list[str] = []
        self._lanes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def process(self, number: int, name: str) -> None:
        """Name a group of lanes; groups are in the order of their numbers."""
        self._describe("process_name", f'"pid":{number},"tid":0', {"name": name})
        self._describe("process_sort_index", f'"pid":{number},"tid":0', {"sort_index": number})

    def lane(self, process: int, name: str) -> Lane:
        """Make a lane of a group; lanes are in the order in which they are made."""
        number = self._lanes[process] = self._lanes.get(process, 0) + 1
        lane = Lane(f'"pid":{process},"tid":{number}')
        self._describe("thread_name", lane.place, {"name": name})
        self._describe("thread_sort_index", lane.place, {"sort_index": number})
        return lane

    def at(self, time: float) -> int:
        """Microseconds of the trace, of Unix seconds."""
        return round((time - self.origin) * 1e6)

    def slice(self, lane: Lane, name: str, category: str, begin: int, end: int, args: str = "{}") -> None:
        """Add something that lasted: begin and end in microseconds of the trace, `args` the text of an object."""
        self._texts.append(
            f'{{"ph":"X","name":{_quoted(name)},"cat":"{category}","ts":{begin},"dur":{end - begin},{lane.place},'
            f'"args":{args}}}'
        )

    def instant(self, lane: Lane, name: str, time: int, args: Mapping[str, Any]) -> None:
        """Add something that happened."""
        self._texts.append(
            f'{{"ph":"i","s":"p","name":{_quoted(name)},"cat":"event","ts":{time},{lane.place},'
            f'"args":{json_text(args)}}}'
        )

    def counter(self, process: int, name: str, time: int, value: float) -> None:
        """Add a finite value of a curve."""
        self._texts.append(
            f'{{"ph":"C","name":{_quoted(name)},"cat":"metric","ts":{time},"pid":{process},"tid":0,'
            f'"args":{{"value":{value!r}}}}}'
        )

    def add(self, text: str) -> None:
        """Add an event of another trace, as its text."""
        self._texts.append(text)

    def pieces(self, about: Mapping[str, Any]) -> Iterable[str]:
        """The document, in pieces.

        Args:
            about: said of the trace as a whole.
        """
        data = json_text({**about, "origin_unix_seconds": self.origin})
        yield f'{{"displayTimeUnit":"ms","otherData":{data},"traceEvents":[\n'
        for start in range(0, len(self._texts), _PIECE):
            piece = ",\n".join(self._texts[start : start + _PIECE])
            yield piece if start + _PIECE >= len(self._texts) else piece + ",\n"
        yield "\n]}\n"

    def _describe(self, what: str, place: str, args: Mapping[str, Any]) -> None:
        self._texts.append(f'{{"ph":"M","name":"{what}",{place},"args":{json_text(args)}}}')


_PIECE = 4096
"""Events a piece."""


@cache
def _quoted(name: str) -> str:
    return json.dumps(name)


def json_text(content: Mapping[str, Any]) -> str:
    """An object as the trace holds it; numbers that JSON has no name for as texts."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value
