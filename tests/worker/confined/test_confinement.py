"""Reach of confined code: attacks from inside, as root, as another user and as in a pod."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import rljob_worker
from rljob_api import safe_text
from rljob_worker.confined import keeper, landlock, usage
from rljob_worker.confined.bounds import Bounds
from rljob_worker.confined.files import Files

HERE = Path(__file__).parent
NEWEST = 1000
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="to become another user")
needs_landlock = pytest.mark.skipif(landlock.abi() < landlock.SIGNALS_SINCE, reason="a kernel without Landlock")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that all users reach, with the code of keepers, attacks and things to attack."""
    folder = Path(tempfile.mkdtemp(prefix="confined-", dir="/tmp"))
    (package := folder / "root" / "rljob_worker").mkdir(parents=True)
    source = Path(rljob_worker.__path__[0])
    (package / "__init__.py").touch()
    for name in ("confined", "host", "sandbox"):
        shutil.copytree(source / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(safe_text.__file__, folder / "root")
    for name in ("code", "read", "write", "tmp"):
        (folder / name).mkdir()
    for name in ("attacks.py", "victim.py", "program_attacks.py", "program_runner.py"):
        shutil.copy(HERE / name, folder / "code")
    for name in ("secret", "code/data", "code/other", "code/.env", "read/data"):
        (folder / name).write_text("SECRET")
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    for name in ("write", "tmp"):
        (folder / name).chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def confined(
    place: Path, who: str, *command: str, abi: int = NEWEST, **bounds: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program of `place` confined, below a process with a secret."""
    files = Files(
        read=(str(place / "read"), str(place / "root"), "/mnt", sys.base_prefix, sys.prefix),
        around=(str(place / "code"),),
        write=(str(place / "write"),),
    )
    bounds = asdict(Bounds(**{"memory": 2**28, "files": files} | bounds))
    given = json.dumps(
        bounds | {"descriptors": [], "temporary": str(place / "tmp"), "safe_text": str(place / "root" / "safe_text.py")}
    )
    started = [sys.executable, "-I", "-S", str(place / "code" / "victim.py"), who, str(abi), str(place / "root"), given]
    return subprocess.run([*started, *command], capture_output=True, text=True, timeout=120, env={"PATH": os.defpath})


WHO = ["root", pytest.param("user", marks=needs_root), pytest.param("pod", marks=needs_root)]


@needs_landlock
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("network", [True, False])
def test_attacks_are_refused_and_work_is_done(place: Path, who: str, network: bool) -> None:
    done = confined(place, who, str(place / "code" / "attacks.py"), str(place), network=network)
    if who == "pod" and not network:
        assert done.returncode == keeper.NO_NETWORK_NAMESPACE
        return
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stderr.removeprefix("reward | "))
    succeeded = [name for kind in ("refused", "landlock") for name, error in outcomes[kind].items() if not error]
    assert not succeeded
    assert not any(outcomes["allowed"].values()), outcomes["allowed"]
    assert not list((place / "tmp").iterdir())


@pytest.mark.parametrize("who", WHO)
def test_a_kernel_without_landlock_protects_what_capabilities_and_calls_do(place: Path, who: str) -> None:
    done = confined(place, who, str(place / "code" / "attacks.py"), str(place), abi=0)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stderr.removeprefix("reward | "))
    succeeded = {name for name, error in outcomes["refused"].items() if not error}
    # Of a user without capabilities, who may look at all processes of that user.
    same_user = {"a secret in any process", "environ", "mem", "files through root"}
    if who == "root":
        # Confined processes of others, such as those of tests beside this one, have no more rights than this one.
        assert succeeded <= {"a secret in any process"}
    else:
        assert succeeded == same_user
    assert not any(outcomes["allowed"].values()), outcomes["allowed"]


@needs_landlock
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("abi", [1, 3, 5])
def test_an_older_landlock_lacks_what_the_page_says(place: Path, who: str, abi: int) -> None:
    done = confined(place, who, str(place / "code" / "attacks.py"), str(place), abi=abi)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stderr.removeprefix("reward | "))
    assert not [name for name, error in outcomes["refused"].items() if not error]
    succeeded = {name for name, error in outcomes["landlock"].items() if not error}
    # The file is root's.
    cut_off = {"truncate"} if abi < 3 and who == "root" else set()
    assert succeeded == {"signal", "signal to the keeper"} | cut_off
    if not cut_off:
        assert not any(outcomes["allowed"].values()), outcomes["allowed"]


HOLDERS = {
    "memfd": "fs = [os.memfd_create('m') for _ in range(4)]; [os.write(f, b'x' * 2**24) for f in fs for _ in range(6)]",
    "mapped memfd": "f = os.memfd_create('m'); os.ftruncate(f, 2**29); m = mmap.mmap(f, 2**29)\n"
    "for i in range(0, 2**29, 4096): m[i] = 1",
    "shared mapping": "m = mmap.mmap(-1, 2**29)\nfor i in range(0, 2**29, 4096): m[i] = 1",
    "files in memory": "f = open('/dev/shm/x-%d' % os.getpid(), 'wb'); os.unlink(f.name)\n"
    "for _ in range(24): f.write(b'x' * 2**24)",
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_counts_whatever_holds_it(place: Path, holder: str) -> None:
    program = place / "code" / "holder.py"
    program.write_text(f"import mmap, os, time\n{HOLDERS[holder]}\ntime.sleep(60)")
    opened = Files(read=("/",), write=("/dev/shm",))
    done = confined(place, "root", str(program), files=opened, memory=2**28)
    assert done.returncode == keeper.OVER_MEMORY, done.stderr


def test_memory_that_is_held_twice_counts_once(place: Path) -> None:
    program = place / "code" / "holder.py"
    program.write_text(
        "import mmap, os, time\nf = os.memfd_create('m'); os.ftruncate(f, 2**27); m = mmap.mmap(f, 2**27)\n"
        "for i in range(0, 2**27, 4096): m[i] = 1\nos.fork(); sum(m[::4096]); time.sleep(1.2)"
    )
    done = confined(place, "root", str(program), files=Files(read=("/",)), memory=2**28)
    assert done.returncode == 0, done.stderr


def test_processes_that_end_while_they_are_looked_at_are_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both end after their memory was read, and before it was read which part of it is a file that counts once."""
    holder = (
        "import mmap, os, sys\nf = os.memfd_create('m'); os.ftruncate(f, 2**27); m = mmap.mmap(f, 2**27)\n"
        "for i in range(0, 2**27, 4096): m[i] = 1\n"
        "c = os.fork(); sum(m[::4096])\nif not c: os.write(1, b'.')\n"
        "else: os.write(1, b'%d ' % c)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        said = b""
        while not (b"." in said and b" " in said):
            said += os.read(parent.stdout.fileno(), 100)
        pids = [parent.pid, int(said.replace(b".", b""))]
        files = usage.NamelessFiles.of(pids)
        mapped = usage._mapped_of
        assert not usage.exceeds(pids, 2**28, files.memory, 0)
        assert usage.exceeds(pids, 2**27, files.memory, 0)

        def mapped_when_all_have_ended(pid: int, files: dict[usage.File, int]) -> int:
            for one in reversed(pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            parent.wait()
            return mapped(pid, files)

        monkeypatch.setattr(usage, "_mapped_of", mapped_when_all_have_ended)
        assert not usage.exceeds(pids, 2**28, files.memory, 0)


@pytest.mark.parametrize(
    "program",
    [
        "for i in range(9): open(f'{t}/{i}', 'wb').write(b'x' * 2**20)",
        "f = open(f'{t}/x', 'wb'); os.unlink(f.name); f.write(b'x' * 9 * 2**20); f.flush()",
        "for i in range(300): open(f'{t}/{i}', 'w')",
        "for i in range(300): os.mkdir('d'); os.chdir('d')\nopen('large', 'wb').write(b'x' * 9 * 2**20)",
    ],
)
def test_the_temporary_folder_is_bounded_and_goes(place: Path, program: str) -> None:
    file = place / "code" / "filler.py"
    file.write_text(f"import os, time\nt = os.environ['TMPDIR']; os.chdir(t)\n{program}\ntime.sleep(60)")
    done = confined(place, "root", str(file), scratch_bytes=2**23, files_made=200)
    assert done.returncode == keeper.OVER_FILES, done.stderr
    assert not list((place / "tmp").iterdir())


@needs_root
def test_a_folder_that_is_closed_and_deep_goes(place: Path) -> None:
    file = place / "code" / "closer.py"
    file.write_text(
        "import os\nos.chdir(os.environ['TMPDIR'])\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\n"
        "os.chdir(os.environ['TMPDIR']); os.chmod('d/d', 0); os.chmod('.', 0o500)"
    )
    assert confined(place, "user", str(file)).returncode == 0
    assert not list((place / "tmp").iterdir())


@needs_root
@needs_landlock
def test_a_program_that_cannot_be_measured_is_ended(place: Path) -> None:
    file = place / "code" / "hider.py"
    file.write_text(
        "import os, shutil\nown = os.environ['TMPDIR'] + '/sleep'\nshutil.copy('/bin/sleep', own)\n"
        "os.chmod(own, 0o111)\n"
        "os.execv(own, ['sleep', '60'])"
    )
    assert confined(place, "user", str(file)).returncode == keeper.HIDDEN
