"""Tests of the operator talk to servers on this machine, without TLS or with an authority of their own."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client makes a TLS context; to read this machine's authorities into one takes 20 ms, mostly for nothing."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
