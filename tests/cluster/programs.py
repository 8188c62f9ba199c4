"""The real Kubernetes programs that the cluster tests run, built from their Go modules and kept outside the checkout.

`python programs.py` builds what is missing. Each program is a file of its own, named by its version and recipe, in
`${XDG_CACHE_HOME:-~/.cache}/rljob/programs-<platform>/`; it appears there complete or not at all, so that an
interrupted build goes on where it stopped. A lock file for each program keeps two builders from doing the same work.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

KUBERNETES = "v1.36.3"
KUBERNETES_LIBRARIES = "v0.36.3"
GO_LANGUAGE = (1, 26)
BUILD_DEADLINE_SECONDS = 30 * 60
_NICE = 3
"""Same as `NICE` of support/lanes.py."""


@dataclass(frozen=True)
class Program:
    """One Go program: the module that holds it, the package to build, what else its build needs."""

    name: str
    module: str
    version: str
    package: str
    ldflags: str = "-s -w"
    libraries: str = (
        ""  # version of the k8s.io/* staging libraries that k8s.io/kubernetes replaces by folders of its own
    )
    files: Mapping[str, str] = field(default_factory=dict, hash=False)  # folder in the cache -> folder in the module
    source: str = ""  # a program of our own instead: its text; the module is what it needs

    @property
    def file_name(self) -> str:
        """Name in the cache folder: another version or another recipe is another file."""
        recipe: tuple[object, ...] = (
            self.module, self.version, self.package, self.ldflags, self.libraries, sorted(self.files.items()),
            *([self.source] if self.source else []),
        )  # fmt: skip
        return f"{self.name}-{self.version}-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:8]}"


def _kubernetes(name: str) -> Program:
    # Without gitVersion clients cannot parse what the server says its version is.
    version = "k8s.io/component-base/version"
    major, minor, _ = KUBERNETES.removeprefix("v").split(".")
    stamp = f"-X {version}.gitVersion={KUBERNETES} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"
    return Program(
        name,
        "k8s.io/kubernetes",
        KUBERNETES,
        f"k8s.io/kubernetes/cmd/{name}",
        f"-s -w {stamp}",
        KUBERNETES_LIBRARIES,
    )


def _kuberay(version: str) -> Program:
    module = "github.com/ray-project/kuberay/ray-operator"
    return Program(f"ray-operator-{version}", module, f"v{version}", module, files={"crds": "config/crd/bases"})


def _own(name: str, module: str, version: str) -> Program:
    source = (Path(__file__).parent / "go" / name.replace("-", "_") / "main.go").read_text()
    return Program(name, module, version, ".", source=source)


PROGRAMS = {
    program.name: program
    for program in (
        Program("etcd", "go.etcd.io/etcd/server/v3", "v3.6.10", "go.etcd.io/etcd/server/v3"),
        _kubernetes("kube-apiserver"),
        _kuberay("1.6.2"),
        Program("kwok", "sigs.k8s.io/kwok", "v0.7.0", "sigs.k8s.io/kwok/cmd/kwok", files={"kustomize": "kustomize"}),
        _kubernetes("kube-controller-manager"),
        _kubernetes("kube-scheduler"),
        Program(
            "kueue",
            "sigs.k8s.io/kueue",
            "v0.17.0",
            "sigs.k8s.io/kueue/cmd/kueue",
            files={"config": "config/components"},
        ),
        Program("helm", "helm.sh/helm/v3", "v3.20.2", "helm.sh/helm/v3/cmd/helm"),
        _kuberay("1.5.1"),
        _kubernetes("kubectl"),
        _kubernetes("kubelet"),
        _kubernetes("kube-proxy"),
        Program("coredns", "github.com/coredns/coredns", "v1.14.7", "github.com/coredns/coredns"),
        _own("device-plugin", "k8s.io/kubelet", KUBERNETES_LIBRARIES),
        _own("pause", "k8s.io/kubelet", KUBERNETES_LIBRARIES),
    )
}


def folder() -> Path:
    """Return the folder that holds the built programs."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_home / "rljob" / f"programs-{platform.system().lower()}-{platform.machine()}"


def program(name: str) -> Path:
    """Return the path of a program of PROGRAMS; builds it first where it is not there yet."""
    wanted = PROGRAMS[name]
    return _path(wanted) if _path(wanted).exists() else _build(wanted)


def _path(wanted: Program) -> Path:
    return folder() / wanted.file_name / wanted.name


def files(name: str, what: str) -> Path:
    """Return a folder of the program's module that was kept beside it: KubeRay's `crds`, kwok's `kustomize`."""
    return program(name).parent / what


@cache
def missing() -> str:
    """Return what this machine lacks to run the tests, the programs included, as a sentence, or an empty string."""
    if problem := missing_to_run():
        return problem
    if unbuilt := _unbuilt():
        how = f"The cluster tests need {', '.join(unbuilt)}, which `make cluster-programs` builds once."
        return f"{how} {missing_to_build()}".strip()
    return ""


@cache
def missing_to_make() -> str:
    """Return what this machine lacks to run the programs, or to build those that are not built, as a sentence."""
    return missing_to_run() or missing_to_build()


def _unbuilt() -> list[str]:
    return [wanted.name for wanted in PROGRAMS.values() if not _path(wanted).exists()]


@cache
def missing_to_run() -> str:
    """Return what this machine lacks to run the programs once they are built, as a sentence, or an empty string."""
    if sys.platform != "linux":
        return "The cluster tests need Linux."
    if os.geteuid() != 0:
        return "The cluster tests need root (to make a network namespace)."
    commands = [command for command in ("ip", "nsenter", "unshare") if shutil.which(command) is None]
    if commands:
        return f"The cluster tests need the commands {', '.join(commands)} (packages iproute2 and util-linux)."
    return _namespace_problem()


def missing_to_build() -> str:
    """Return what this machine lacks to build those programs that are not built, as a sentence, or an empty string."""
    if not _unbuilt():
        return ""
    wanted = ".".join(map(str, GO_LANGUAGE))
    if shutil.which("go") is None:
        return f"To build them Go {wanted} or newer is missing."
    said = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, timeout=30).stdout.strip()
    found = re.match(r"go(\d+)\.(\d+)", said)
    if found is None or tuple(map(int, found.groups())) < GO_LANGUAGE:
        return f"To build them Go {wanted} or newer is missing: `go env GOVERSION` says {said!r}."
    return ""


def _namespace_problem() -> str:
    tried = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        return f"The cluster tests need the right to make network namespaces: {tried.stderr.strip()}"
    return ""


def _build(wanted: Program) -> Path:
    target = folder() / wanted.file_name
    with locked(folder() / f"{wanted.name}.lock"):
        if (target / wanted.name).exists():
            return target / wanted.name
        for left_over in folder().glob(f".{wanted.name}-tmp-*"):
            shutil.rmtree(left_over)
        started = time.monotonic()
        print(f"Building {wanted.name} {wanted.version} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix=f".{wanted.name}-tmp-", dir=folder()) as scratch:
            result = Path(scratch) / "result"
            result.mkdir()
            _compile(wanted, Path(scratch), result / wanted.name)
            for name, inside in wanted.files.items():
                _copy_from_module(wanted, Path(scratch), inside, result / name)
            result.rename(target)
        print(f"Built {wanted.name} {wanted.version} in {time.monotonic() - started:.0f} s", flush=True)
    return target / wanted.name


def _compile(wanted: Program, scratch: Path, output: Path) -> None:
    """Build inside a module that only requires the program's: `go install` refuses modules with replace directives."""
    requirement = f"module rljob.dev/programs\n\ngo 1.26.0\n\nrequire {wanted.module} {wanted.version}\n"
    (scratch / "go.mod").write_text(requirement + _library_replacements(wanted, scratch))
    if wanted.source:
        (scratch / "main.go").write_text(wanted.source)
    _go(scratch, "build", "-trimpath", "-ldflags", wanted.ldflags, "-o", str(output), wanted.package)


def _library_replacements(wanted: Program, scratch: Path) -> str:
    if not wanted.libraries:
        return ""
    text = (_module_folder(wanted, scratch) / "go.mod").read_text()
    names = re.findall(r"^\s+(k8s\.io/\S+) => \./staging/", text, re.MULTILINE)
    return "".join(f"replace {name} => {name} {wanted.libraries}\n" for name in names)


def _copy_from_module(wanted: Program, scratch: Path, inside: str, target: Path) -> None:
    shutil.copytree(_module_folder(wanted, scratch) / inside, target)
    for path in (target, *target.rglob("*")):  # the module cache is read-only; its copy must be removable
        path.chmod(0o755 if path.is_dir() else 0o644)


def _module_folder(wanted: Program, scratch: Path) -> Path:
    said = _go(scratch, "mod", "download", "-json", f"{wanted.module}@{wanted.version}")
    return Path(json.loads(said)["Dir"])


def _go(scratch: Path, *arguments: str) -> str:
    """Run the go command in the scratch module. Raises RuntimeError with the end of what it said."""
    # Nobody debugs them: a tenth of the compiler's time, and `-s` leaves that out of the program anyway.
    flags = f"-mod=mod -buildvcs=false -gcflags=all=-dwarf=false {os.environ.get('RLJOB_GOFLAGS', '')}".strip()
    settings = {"GOFLAGS": flags, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off", "GOGC": "400"}
    environment = {**os.environ, **settings}
    done = subprocess.run(
        ["go", *arguments],
        cwd=scratch,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_SECONDS,
        preexec_fn=_stay_behind,
    )
    if done.returncode:
        raise RuntimeError(f"`go {' '.join(arguments)}` failed:\n{done.stderr[-4000:] or done.stdout[-4000:]}")
    return done.stdout


def _stay_behind() -> None:
    """PR_SET_PDEATHSIG: a build whose builder was killed would go on for minutes.

    It has the tests' share of the processors: those that wait for it are the longest chain of them.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    os.nice(_NICE)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which other builders wait for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + BUILD_DEADLINE_SECONDS
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"Another build has held {path} for {BUILD_DEADLINE_SECONDS} s") from None
                time.sleep(1)
        yield


def build_all() -> None:
    """Build what is missing: Kubernetes' own programs, which share most of what is compiled, beside the others.

    A process that is done with those goes on with the rest of the others.
    """
    kubernetes = [name for name, wanted in PROGRAMS.items() if wanted.module.startswith("k8s.io/")]
    others = deque(name for name in PROGRAMS if name not in kubernetes)

    def build(names: Sequence[str] = ()) -> None:
        for name in names:
            program(name)
        while True:
            try:
                name = others.popleft()
            except IndexError:
                return
            program(name)

    with ThreadPoolExecutor() as pool:
        for built in [pool.submit(build, kubernetes), pool.submit(build)]:
            built.result()


def main() -> None:
    """Build the programs named on the command line, or all of them where this machine can."""
    if not sys.argv[1:] and not _unbuilt():
        return
    if problem := missing_to_make():
        print(f"The Kubernetes programs of the cluster tests are not built. {problem}")
        return
    if not sys.argv[1:]:
        build_all()
    for name in sys.argv[1:] or PROGRAMS:
        print(program(name), flush=True)


if __name__ == "__main__":
    main()
