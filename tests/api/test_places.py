"""Number of files of tests that need much of the machine and run at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.places import Places


def item(name: str, *markers: str) -> Any:
    return SimpleNamespace(path=Path(name), get_closest_marker=lambda marker: marker if marker in markers else None)


@contextmanager
def running(places: Places, this: Any, following: Any = None) -> Iterator[None]:
    protocol: Any = places.pytest_runtest_protocol(this, following)
    next(protocol)
    yield
    try:
        protocol.send(None)
    except StopIteration:
        return


def test_a_third_file_waits_until_one_has_ended(tmp_path: Path) -> None:
    first, second, third = (Places(tmp_path) for _ in range(3))
    begun = threading.Event()

    def run_third() -> None:
        with running(third, item("c", "slow")):
            begun.set()

    waiting = threading.Thread(target=run_third, daemon=True)
    with running(second, item("b", "slow")):
        with running(first, item("a", "slow"), item("a")):
            waiting.start()
            assert not begun.wait(0.5)
        assert not begun.wait(0.5), "the file goes on with its next test"
        with running(first, item("a"), item("d")):
            assert not begun.wait(0.5)
        assert begun.wait(60)
    waiting.join(60)


def test_fast_tests_and_the_nodes_wait_for_nobody(tmp_path: Path) -> None:
    first, second, node, fast = (Places(tmp_path) for _ in range(4))
    on_node = item("n", "slow", "node")
    with running(first, item("a", "slow")):
        with running(second, item("b", "slow")), running(node, on_node, on_node), running(fast, item("f")):
            pass
        assert node._held is None
        with running(node, on_node, item("m", "node")):
            pass
        assert node._held is not None, "one was free by then"
        with running(node, item("m", "node")):
            pass
    assert node._held is None
