"""The names of tool parsers that a manifest is checked by are those of the installed vLLM; its source is read alone."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from rljob_api.tool_parsers import TOOL_PARSERS


def test_they_are_vllms() -> None:
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    text = (Path(package.origin).parent / "tool_parsers" / "__init__.py").read_text(encoding="utf-8")
    registered = [
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_TOOL_PARSERS_TO_REGISTER"
    ]
    (table,) = registered
    assert sorted(ast.literal_eval(table)) == list(TOOL_PARSERS)
