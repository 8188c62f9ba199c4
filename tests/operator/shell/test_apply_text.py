"""The API server reads an applied body as YAML: any text comes back from it as it was."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from rljob_operator.shell.api.client import _apply_text


@pytest.mark.parametrize("reader", [yaml.SafeLoader, yaml.CSafeLoader])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text="\U0001f600 \u202e \x1b[2J \x7f\x85\x9f\u2028\u2029\ufeff\ufffe\uffff \\ud83d\\ude00 \"'`\t\n")
def test_any_text_is_read_as_it_was(reader: type[yaml.SafeLoader], text: str) -> None:
    sent = _apply_text({"apiVersion": "v1", "kind": "ConfigMap", "data": {"key": text}})
    assert yaml.load(sent, reader)["data"]["key"] == text
