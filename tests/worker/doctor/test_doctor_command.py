"""`rljob doctor` as a person runs it, on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.ports import free_port

from rljob_api.wanted import Wanted
from rljob_worker.doctor.collect import busy, collect, kind_of
from rljob_worker.doctor.process import look
from rljob_worker.doctor.saver import recorded_digest
from rljob_worker.doctor.sharing import shared_memory_problem

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3-4b-grpo-8x910b1.yaml"


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rljob_worker.cli.main", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **variables},
    )


def document(*arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    done = doctor(*arguments, "--json", **variables)
    return done.returncode, json.loads(done.stdout)


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in report["findings"]}


def test_this_machine_passes_and_every_line_says_what_was_found(tmp_path: Path) -> None:
    code, report = document()
    assert code == 0
    assert report["format"] == 1
    assert (report["kind"], report["profile"], report["scope"]) == ("cpu", None, "node")
    assert report["result"] in ("ok", "warning")
    findings = by_name(report)
    assert findings["python"]["status"] == "ok"
    assert findings["memory between processes"]["status"] == "ok"
    assert findings["devices"]["status"] == "not applicable"
    for finding in report["findings"]:
        assert list(finding) == ["name", "status", "node", "found", "wanted", "fix"]
        assert finding["found"]
        assert bool(finding["fix"]) == (finding["status"] in ("warning", "problem"))


def test_a_job_for_npus_does_not_pass_here(tmp_path: Path) -> None:
    status = tmp_path / "status"
    done = doctor(str(EXAMPLE), "--termination-message", str(status))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any(line.startswith("problem  driver: ") and "fix: mount /usr/local/Ascend/driver" in line for line in lines)
    # The loader of a process that was really started with a trainer's variables says so.
    assert any("LD_PRELOAD of trainers: ERROR: ld.so: object" in line for line in lines)
    assert lines[-1].endswith("looked at this node alone (" + socket.gethostname() + ")")
    assert status.read_text().startswith("the doctor found ")
    assert "driver: " in status.read_text()


def test_dev_shm_that_is_too_small_for_the_job(tmp_path: Path) -> None:
    manifest = yaml.safe_load((EXAMPLE.parent / "quickstart.yaml").read_text())
    manifest["spec"]["storage"] = {"sharedMemory": "4Ti"}
    manifest["spec"].setdefault("resources", {})["worker"] = {"memory": "8Ti"}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    code, report = document(str(file))
    assert code == 1
    assert [f["name"] for f in report["findings"] if f["status"] == "problem"] == ["/dev/shm"]
    assert by_name(report)["/dev/shm"]["wanted"].endswith("(spec.storage.sharedMemory)")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--wanted", "{"], "--wanted: "),
        (["--set", "spec.steps=1"], "--set: needs a manifest"),
        (["--ray", "--head", "x"], "--head: with --ray"),
        (["no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], said: str) -> None:
    done = doctor(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_wishes_travel_as_the_operator_hands_them_over() -> None:
    job = yaml.safe_load(EXAMPLE.read_text())
    from rljob_api.validation import load_manifest

    wanted = Wanted.of(load_manifest(job).spec)
    code, report = document("--wanted", wanted.model_dump_json(by_alias=True))
    assert (code, report["kind"], report["profile"]) == (1, "npu", "ascend-a2")


def test_a_preload_that_breaks_every_process(tmp_path: Path) -> None:
    """A library that needs one which is not there, as the memory saver without CANN on LD_LIBRARY_PATH."""
    source, needed, library = tmp_path / "a.c", tmp_path / "libneeded.so", tmp_path / "libsaver.so"
    source.write_text("int nothing(void) { return 0; }\n")
    for command in (
        ["cc", "-shared", "-fPIC", "-o", needed, source],
        ["cc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", library, source, "-L", tmp_path, "-lneeded"],
    ):
        subprocess.run([str(part) for part in command], check=True, timeout=60)
    whole = look({"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(tmp_path)})
    assert (whole.problem, whole.ignored, whole.saver_hooked) == ("", "", False)
    needed.unlink()
    broken = look({"LD_PRELOAD": str(library)})
    assert broken.problem.startswith("ended with exit code 127: ")
    assert "libneeded.so" in broken.problem


def test_a_preload_that_is_there_hooks(tmp_path: Path) -> None:
    source, library = tmp_path / "a.c", tmp_path / "torch_memory_saver_hook.so"
    source.write_text("int tms_pause(const char *tag) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    seen = look({"LD_PRELOAD": str(library), "TMS_HOOK_MODE": "preload"})
    assert seen.saver_hooked
    assert seen.libraries == (str(library),)
    assert seen.variables["TMS_HOOK_MODE"] == "preload"
    assert look({}).saver_hooked is False


def test_a_port_that_somebody_holds() -> None:
    with socket.socket() as holder:
        # None of the kernel's: another process could be given it as soon as it is closed.
        port = free_port("0.0.0.0")
        holder.bind(("", port))
        holder.listen(1)
        assert busy([port]) == (port,)
        seen = collect(None, [f"127.0.0.1:{port}"]).unreachable
    assert busy([port]) == ()
    gone = collect(None, [f"127.0.0.1:{port}"]).unreachable
    assert (list(seen.values()), all(gone.values())) == ([""], True)


def test_a_folder_that_nothing_can_be_shared_in(tmp_path: Path) -> None:
    assert shared_memory_problem(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    assert "No such file" in shared_memory_problem(tmp_path / "missing")


def test_the_devices_of_the_machine_decide_where_no_job_does(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert kind_of(None, tmp_path) == "cpu"
    (tmp_path / "dev" / "nvidiactl").touch()
    assert kind_of(None, tmp_path) == "cpu"
    (tmp_path / "dev" / "nvidia0").touch()
    assert kind_of(None, tmp_path) == "cuda"
    (tmp_path / "dev" / "davinci12").touch()
    assert kind_of(None, tmp_path) == "npu"


def test_the_digest_that_the_image_recorded(tmp_path: Path) -> None:
    library, link, digests = tmp_path / "built.so", tmp_path / "link.so", tmp_path / "digests"
    library.write_bytes(b"x")
    link.symlink_to(library)
    assert recorded_digest(link, digests) is None
    subprocess.run(f"sha256sum {library} {tmp_path}/other > {digests}", shell=True, cwd=tmp_path, timeout=20)
    known = hashlib.sha256(b"x").hexdigest()
    assert recorded_digest(library, digests) == recorded_digest(link, digests) == known
    assert recorded_digest(tmp_path / "other", digests) is None
