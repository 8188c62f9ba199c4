"""`rljob doctor JOB --deep` on a machine whose devices are the stand-ins for CANN, as in the first hour on an NPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cann.build import Cann
from jobs import manifest
from recorded import DRIVER_INFO, HCCN_IP, HCCN_LINK, HCCN_TLS, NPU_SMI_A2, NPU_SMI_BOARD
from support.samples import unless_drawn

pytestmark = pytest.mark.slow

DEVICES = 2
OLD_DRIVER, DRIVER = "25.3.rc1", "26.0.rc1"
MACHINE = """
set -e
for folder in /dev /usr/local; do
    place=$1$folder
    mkdir -p $place/seen
    mount -t tmpfs none $place
    mkdir $place/above $place/work $place/seen
    mount -t overlay none -o lowerdir=$folder,upperdir=$place/above,workdir=$place/work $place/seen
done
touch $1/dev/seen/davinci0 $1/dev/seen/davinci1
mkdir -p $1/usr/local/seen/Ascend/driver $1/usr/local/seen/bin
cp $1/version.info $1/usr/local/seen/Ascend/driver
cp $1/npu-smi $1/hccn_tool $1/usr/local/seen/bin
mount --rbind /dev/shm $1/dev/seen/shm
mount --move $1/dev/seen /dev
mount --move $1/usr/local/seen /usr/local
shift
exec "$@"
"""
"""In a mount namespace: device files, the driver's folder and the vendors' programs, where a machine with NPUs has
them."""
ELSEWHERE = {
    "torch": "torch_npu 2.11.0.post3 fits torch 2.11, which the tests have; NPUs' image has 2.10",
    "vllm-ascend": "0.23.0.post1 is published as source alone",
    "torch_npu": "as torch",
    "memory saver digest": "an image records it",
}
TRIED = {
    "memory given back and taken again",
    "checksum on the device as on the CPU",
    "a tensor shared between two processes",
    "all-reduce over the visible devices",
    "memory after vLLM's sleep",
    "captured graphs over a sleep and new weights",
}


def program(path: Path, *answers: tuple[str, str]) -> None:
    """A vendor's program: the text of the first answer whose word stands among the arguments."""
    cases = "".join(f"*{word}*) cat <<'END'\n{text}END\n;;\n" for word, text in answers)
    path.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}esac\n')
    path.chmod(0o755)


def machine(folder: Path) -> list[str]:
    """The command behind which a program sees two healthy NPUs."""
    (folder / "version.info").write_text(DRIVER_INFO.replace(OLD_DRIVER, DRIVER))
    shown = "".join(line for line in NPU_SMI_A2.splitlines(keepends=True) if not line.startswith("| 7 "))
    program(folder / "npu-smi", ("board", NPU_SMI_BOARD), ("info", shown.replace("910B3", "910B1")))
    program(folder / "hccn_tool", ("-link", HCCN_LINK), ("-tls", HCCN_TLS), ("-ip", HCCN_IP))
    return ["unshare", "--mount", "sh", "-c", MACHINE, "sh", str(folder)]


@unless_drawn("doctor --deep on NPUs")
def test_the_doctor_is_content_with_a_machine_that_jobs_run_on(cann: Cann, tmp_path: Path) -> None:
    job = manifest(tmp_path, resources={"profile": "ascend-a2", "nodes": 1, "devicesPerNode": DEVICES})
    command = [*machine(tmp_path), str(Path(sys.executable).with_name("rljob")), "doctor", str(job), "--deep", "--json"]
    environment = os.environ | cann.shell(tmp_path, DEVICES)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout.startswith("{"), done.stderr
    findings = {found["name"]: found for found in json.loads(done.stdout)["findings"]}
    unhappy = {name: found for name, found in findings.items() if found["status"] in ("problem", "warning")}
    assert unhappy.keys() <= ELSEWHERE.keys(), unhappy
    assert {name for name in TRIED if findings[name]["status"] == "ok"} == TRIED, findings
    assert str(cann.folder) in findings["LD_PRELOAD of trainers"]["found"] + findings["memory saver library"]["found"]
