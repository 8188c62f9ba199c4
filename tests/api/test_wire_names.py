"""Names that cross a process border are the same in docs, charts and code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_api.wire import names
from rljob_api.wire.exit_codes import ExitCode

REPOSITORY = Path(__file__).parents[2]


def test_the_documentation_lists_the_exit_codes_that_there_are() -> None:
    text = (REPOSITORY / "docs/running.md").read_text(encoding="utf-8")
    table = text.partition("## Exit codes")[2].partition("\n## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)] == [code.value for code in ExitCode]


def test_the_command_line_explains_them() -> None:
    text = (REPOSITORY / "worker/rljob_worker/cli/main.py").read_text(encoding="utf-8")
    assert {int(code) for code in re.findall(r"^  (\d+) +\w", text, re.M)} == {code.value for code in ExitCode}


def test_the_chart_opens_the_ports_that_are_listened_on() -> None:
    text = (REPOSITORY / "helm/rljob/templates/networkpolicy.yaml").read_text(encoding="utf-8")
    assert {int(port) for port in re.findall(r"- port: (\d+)", text)} >= {names.DASHBOARD_PORT, names.DRIVER_PORT}


NOT_ONLY_OURS = (names.DRIVER_TOKEN_KEY, names.HEALTH_PATH, names.READY_PATH, names.METRICS_PATH)
"""Any server has such paths, the operator too."""
ONCE = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str | int)]
ONCE = [value for value in ONCE if value not in NOT_ONLY_OURS]


@pytest.mark.parametrize("value", ONCE)
def test_no_name_or_port_is_written_a_second_time(value: str | int) -> None:
    """In code; a documentation string may name them."""
    pattern = rf"= {value}\b" if isinstance(value, int) else f'"{re.escape(value)}"'
    files = (path for part in ("operator", "worker", "crds") for path in (REPOSITORY / part).rglob("*.py"))
    again = [path for path in files if re.search(pattern, path.read_text(encoding="utf-8"))]
    assert again == [Path(names.__file__)]
