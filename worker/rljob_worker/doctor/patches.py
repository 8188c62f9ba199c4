"""The changes of upstream's software, held against what is installed: `rljob doctor --patches`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rljob_api.json_types import JsonObject
from rljob_api.looks import HEADING
from rljob_worker.doctor.findings import FORMAT, Finding, Status, not_applicable, ok, problem
from rljob_worker.doctor.output import line
from rljob_worker.upstream.install import PATCHES
from rljob_worker.upstream.patch import Patch, installed_version

GUIDE = "docs/upstream.md"


class PatchReport:
    """Every patch with the versions that are installed here, for devices of one kind."""

    def __init__(self, kind: str) -> None:
        versions = {package: installed_version(package) for patch in PATCHES for package in patch.versions}
        self._rows = [(patch, {name: versions[name] for name in patch.versions}) for patch in PATCHES]
        self.findings = [_finding(patch, installed, kind) for patch, installed in self._rows]

    def exit_code(self) -> int:
        """1 where a version is outside of a patch's range."""
        return int(any(finding.status is Status.PROBLEM for finding in self.findings))

    def document(self) -> JsonObject:
        """The patches as JSON; docs/upstream.md explains each field."""
        return {
            "format": FORMAT,
            "patches": [
                {
                    "name": patch.name,
                    "status": finding.status.value,
                    "processes": [process.value for process in patch.processes],
                    "devices": list(patch.devices),
                    "targets": list(patch.targets),
                    "versions": dict(patch.versions),
                    "installed": installed,
                    "why": patch.why,
                    "file": patch.file,
                    "test": patch.test,
                }
                for (patch, installed), finding in zip(self._rows, self.findings, strict=True)
            ],
        }

    def show(self, console: Console) -> None:
        """Print a table on a terminal, a line for each patch elsewhere."""
        if not console.is_terminal:
            for finding in self.findings:
                console.print(line(finding, with_node=False), highlight=False, markup=False, soft_wrap=True)
            return
        table = Table(box=None, pad_edge=False, header_style=HEADING)
        for heading in ("", "patch", "process", "device", "found", "made for", "changes", "why"):
            table.add_column(heading, overflow="fold")
        for (patch, _), finding in zip(self._rows, self.findings, strict=True):
            where = ", ".join(patch.processes), ", ".join(patch.devices)
            changes = "\n".join(patch.targets)
            table.add_row(finding.status, patch.name, *where, finding.found, _wanted(patch), changes, patch.why)
        console.print(table, markup=False)


def _finding(patch: Patch, installed: dict[str, str | None], kind: str) -> Finding:
    found = ", ".join(f"{package} {version or 'not installed'}" for package, version in installed.items())
    if kind not in patch.devices and None in installed.values():
        return not_applicable(patch.name, f"{found}, and no {' or '.join(patch.devices)} here")
    if patch.outside(installed):
        return problem(patch.name, found, _wanted(patch), f"see whether {patch.file} still holds ({GUIDE})")
    return ok(patch.name, found, _wanted(patch))


def _wanted(patch: Patch) -> str:
    return ", ".join(f"{package} {versions}" for package, versions in patch.versions.items())
