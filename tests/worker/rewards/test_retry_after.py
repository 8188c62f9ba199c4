"""Times that a server which is overloaded wants to be left alone."""

from __future__ import annotations

import pytest

from rljob_worker.sandbox import http_calls
from rljob_worker.sandbox.http_calls import retry_after

NOW = 1_700_000_000.0
"""Tue, 14 Nov 2023 22:13:20 GMT."""


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3),
        (" 3 ", 3),
        ("0.5", 0.5),
        ("86400", 86400),
        ("Tue, 14 Nov 2023 22:13:50 GMT", 30),
        ("Tue, 14 Nov 2023 23:13:50 +0100", 30),
        ("Tue, 14 Nov 2023 22:13:50", 30),
        ("Tue, 14 Nov 2023 22:13:10 GMT", 0),
        ("", 0),
        ("soon", 0),
        ("-1", 0),
        ("nan", 0),
        ("1e9", 0),
        ("9" * 40, 0),
        ("Tue, 99 Nov 99999 22:13:10 GMT", 0),
    ],
)
def test_a_number_or_a_date_is_kept(monkeypatch: pytest.MonkeyPatch, value: str, seconds: float) -> None:
    monkeypatch.setattr(http_calls.time, "time", lambda: NOW)
    assert retry_after(value) == seconds
