"""Parsing of the vendors' programs' output."""

from __future__ import annotations

import recorded
from hypothesis import example, given
from hypothesis import strategies as st

from rljob_worker.doctor import parsers


def test_npu_smi_of_a2_gives_a_chip_a_card() -> None:
    table = parsers.npu_smi_info(recorded.NPU_SMI_A2)
    assert table.version == "24.1.0.3"
    assert [(c.index, c.name, c.health, c.used_mib, c.total_mib) for c in table.chips] == [
        (0, "910B3", "OK", 3397, 65536),
        (1, "910B3", "OK", 3396, 65536),
        (7, "910B3", "OK", 3396, 65536),
    ]


def test_npu_smi_of_a3_gives_two_chips_a_card_by_their_physical_number() -> None:
    table = parsers.npu_smi_info(recorded.NPU_SMI_A3)
    assert [(c.index, c.used_mib) for c in table.chips] == [(0, 3419), (1, 2874), (15, 31877)]
    assert table.chips[0].processes == ("python3.1 (632268)",)
    assert table.chips[1].processes == ()


def test_npu_smi_names_who_holds_memory() -> None:
    by_index = {chip.index: chip for chip in parsers.npu_smi_info(recorded.NPU_SMI_BUSY).chips}
    assert by_index[1].processes == ("rayMyLLM.__in (3180736)",)
    assert by_index[7].processes == ()


def test_files_of_driver_and_toolkit() -> None:
    driver = parsers.properties(recorded.DRIVER_INFO)
    assert driver["package_version"] == "25.3.rc1"
    assert parsers.firmware_range(recorded.DRIVER_INFO) == ("7.0.0", "8.9.9")
    assert parsers.firmware_range("Version=1") is None
    assert parsers.properties(recorded.CANN_INFO)["version"] == "8.3.RC1"
    assert parsers.properties(recorded.NPU_SMI_BOARD)["Firmware Version"] == "7.1.0.7.220"


def test_hccn_tool() -> None:
    assert parsers.hccn_link(recorded.HCCN_LINK) == "UP"
    assert parsers.hccn_link("link status: DOWN\n") == "DOWN"
    assert parsers.hccn_tls(recorded.HCCN_TLS) is False
    assert parsers.hccn_tls(recorded.HCCN_TLS.replace("switch[0]", "switch[1]")) is True
    assert parsers.hccn_tls("no certificate found\n") is False
    assert parsers.hccn_address(recorded.HCCN_IP) == "10.20.11.16"
    assert parsers.hccn_ping(recorded.HCCN_PING) == (3, 3)
    assert parsers.hccn_ping(recorded.HCCN_PING_LOSS) == (3, 2)


def test_nvidia_smi() -> None:
    table = parsers.nvidia_smi("0, NVIDIA H200, 4, 143771\n1, NVIDIA H200, 70000, 143771\n")
    assert [(c.index, c.name, c.used_mib, c.total_mib) for c in table.chips] == [
        (0, "NVIDIA H200", 4, 143771),
        (1, "NVIDIA H200", 70000, 143771),
    ]


@example(",,0,")
@given(st.text(alphabet="|+= :0123456789abc/\n,[]", max_size=300))
def test_nothing_that_a_program_prints_breaks_a_parser(text: str) -> None:
    assert parsers.npu_smi_info(text).version is None
    parsers.nvidia_smi(text)
    parsers.properties(text)
    assert parsers.hccn_link(text) is None
    assert parsers.hccn_tls(text) is None
    parsers.hccn_address(text)
    assert parsers.hccn_ping(text) is None
    parsers.firmware_range(text)
