"""Real output of vendors' programs, where it was published; shortened by whole lines only."""

from __future__ import annotations

# vllm-project/vllm-ascend issue 4256: 8 x 910B3, driver 24.1.0.3
NPU_SMI_A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0.3                 Version: 24.1.0.3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 91.1        32                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3397 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 88.6        34                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3396 / 65536         |
+===========================+===============+====================================================+
| 7     910B3               | OK            | 90.0        36                0    / 0             |
| 0                         | 0000:42:00.0  | 0           0    / 0          3396 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
+===========================+===============+====================================================+
"""

# The process table of a job that hung at its start on 8 x 910B1, published with a vllm-ascend issue; the device's two
# lines are those of the same table.
NPU_SMI_BUSY = """\
| 7     910B1               | OK            | 96.6        48                0    / 0             |
| 0                         | 0000:42:00.0  | 0           0    / 0          3379 / 65536         |
+===========================+===============+====================================================+
| 1     910B2               | OK            | 88.7        37                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3395 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 1       0                 | 3180736       | rayMyLLM.__in            | 60889                   |
+===========================+===============+====================================================+
"""

# vllm-project/vllm-ascend issue 12980: A3, two chips a card, driver 26.0.rc2
NPU_SMI_A3 = """\
+------------------------------------------------------------------------------------------------------------------+
| npu-smi 26.0.rc2                            Version: 26.0.rc2                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     0                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |
+------------------------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -                    34                      0    / 0                |
| 1     1                   | 0000:9F:00.0  | 0                    0    / 0                2874 / 65536            |
+===========================+===============+======================================================================+
| 7     Ascend910           | OK            | -                    35                      0    / 0                |
| 1     15                  | 0000:83:00.0  | 0                    0    / 0                31877/ 65536            |
+===========================+===============+======================================================================+
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    | Process id in container |
+===========================+===============+======================================================================+
| 0       0                 | 632268        | python3.1          | 197                   | NA                      |
+===========================+===============+======================================================================+
| No running processes found in NPU 1                                                                              |
+===========================+===============+======================================================================+
"""

# Ascend/mind-cluster, troubleshooting guide: `npu-smi info -i N -t board`
NPU_SMI_BOARD = """\
        NPU ID                         : 0
        Software Version               : 23.0.5
        Firmware Version               : 7.1.0.7.220
        Compatibility                  : OK
        Board ID                       : 0x02
        PCIe Bus Info                  : 0000:61:00.0
        Chip Count                     : 1
"""

# cann/pypto's documentation, driver too old: /usr/local/Ascend/driver/version.info
DRIVER_INFO = """\
Version=25.3.rc1
ascendhal_version=7.35.23
aicpu_version=1.0
Innerversion=V100R001C23SPC002B212
compatible_version=[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C22],[V100R001C23]
compatible_version_fw=[7.0.0,8.9.9]
package_version=25.3.rc1
"""

# vllm-project/vllm-ascend issue 4256: ascend_toolkit_install.info
CANN_INFO = """\
package_name=Ascend-cann-toolkit
version=8.3.RC1
innerversion=V100R001C23SPC001B235
compatible_version=[V100R001C15],[V100R001C18],[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C23]
arch=aarch64
os=linux
path=/usr/local/Ascend/ascend-toolkit/8.3.RC1/aarch64-linux
"""

# Ascend/mind-cluster, troubleshooting guide: hccn_tool -i 0 -link -g, -tls -g, -ip -g
HCCN_LINK = "link status: UP\n"
HCCN_TLS = (
    "dev_id:0, tls switch[0](0:disable, 1:enable), tls preconfigured[1](0:non-preset, 1:preset), "
    "tls alarm time threshold[60]days\n"
)
HCCN_IP = "ipaddr:10.20.11.16\nnetmask:255.255.255.0\n"

# MindSpeed-LLM's multi-node guide: hccn_tool -i 0 -ping -g address 10.10.100.10, and what a loss looks like
HCCN_PING = """\
device 0 PING 10.10.100.10
recv seq=0,time=0.067000ms
recv seq=1,time-0.049000ms
recv seq=2,time=0.047000ms
3 packets transmitted, 3 received, 0.00% packet loss
"""
HCCN_PING_LOSS = """\
recv time out seq=O
recv seq=1,time=0.097000ms
recv seq=2,time=0.066000ms
3 packets transmitted, 2 received, 33.33% packet loss
"""
