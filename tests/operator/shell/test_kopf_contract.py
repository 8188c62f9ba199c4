"""Behaviour of Kopf that the operator relies on, that Kopf does not promise, and whose change would go unseen."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_type_hints

import kopf
from kopf._cogs.structs.references import Insights
from prometheus_client import CollectorRegistry

import rljob_operator
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.caches.informer import Informer, WatchTimes
from rljob_operator.shell.caches.informers import Informers
from rljob_operator.shell.kopf import handlers
from rljob_operator.shell.kopf.settings import kopf_settings


def test_one_private_name_is_used_in_one_place() -> None:
    code = Path(rljob_operator.__file__).parent
    found = {str(path.relative_to(code)): re.findall(r"kopf\._\S+", path.read_text()) for path in code.rglob("*.py")}
    assert {name: names for name, names in found.items() if names} == {
        "shell/kopf/process.py": ["kopf._cogs.structs.references"]
    }


def test_kopf_has_one_handler_of_objects() -> None:
    """Another one would see no event after the first list: those go to the caches past Kopf (`Informer.takes`)."""
    registry = kopf.get_default_registry()
    assert {handler.fn for handler in registry._watching.get_all_handlers()} == {handlers.learn}
    for others in (registry._changing, registry._spawning, registry._indexing):
        assert not list(others.get_all_handlers())


def test_kinds_can_be_named_to_kopf() -> None:
    assert inspect.signature(kopf.spawn_tasks).parameters["insights"].default is None
    hints = get_type_hints(Insights)
    assert str(hints["watched_resources"]).startswith("set[")
    insights = Insights()
    assert {"revised", "ready_resources"} <= {*hints, *vars(insights)}


def test_every_setting_is_one_of_kopfs() -> None:
    """Kopf's settings are plain dataclasses: a name that is none of theirs would be taken without a word."""
    metrics = OperatorMetrics(CollectorRegistry())
    informers = Informers(None, metrics, lambda _: None, lambda _: None)  # type: ignore[arg-type]
    ours, theirs = kopf_settings(informers, WatchTimes(), 10.0), kopf.OperatorSettings()
    for part, values in vars(ours).items():
        if hasattr(values, "__dict__"):
            assert vars(values).keys() == vars(getattr(theirs, part)).keys(), part
    assert isinstance(ours.watching.server_timeout, int)
    # The transport waits this long before it lets Kopf list again.
    assert ours.networking.request_timeout >= 1.2 * WatchTimes().longest_pause + 10.0


def test_selectors_are_those_of_the_informers() -> None:
    metrics = OperatorMetrics(CollectorRegistry())
    informers = Informers(None, metrics, lambda _: None, lambda _: None, ["a", "b"])  # type: ignore[arg-type]
    settings = kopf_settings(informers, WatchTimes(), 10.0)

    def selector(informer: Informer) -> list[str]:
        kind = informer.resource
        resource = kopf.Resource(kind.group, kind.version, kind.plural)
        return sorted(set(settings.watching.label_selectors.collect(resource)))

    for informer in informers:
        assert selector(informer) == ([informer.selector] if informer.selector else [])
