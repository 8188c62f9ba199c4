"""Contents of an image, as CycloneDX 1.6 JSON: Python's packages with their licences, and the system's.

`python sbom.py NAME` is run in the image by `make image-...`, which writes its output beside it. It needs nothing but
the standard library, and gives the same bytes for the same content. `python images/sbom.py --licences` prints
docs/licences.md, in an environment that has the packages.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

NOT_SAID = {
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",
    "openai-harmony": "Apache-2.0",
    "torch-memory-saver": "MIT",
}
"""Licences that metadata does not name, from the package's licence file; cuda-toolkit is an empty package of
NVIDIA's."""
SHIPPED = ("operator", "worker-cpu", "worker-ascend", "worker-cuda")
"""Lock files of the images, which are those of the extras `operator`, `cpu`, `ascend` and `cuda`."""
SECTIONS = (
    "What images and extras ship",
    "What the extras of experiment trackers add",
    "Tools of development and of the build",
)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "licences.md" if "__file__" in globals() else Path("licences.md")
"""In an image the script comes by standard input and has no place."""
_HEAD = """# Licences

As each package's own metadata says it, of the versions in `requirements/`, for whatever machine. What an image really
holds, its base and the system's packages included, is in the SBOM that `make image-...` writes beside it
(`dist/*.cdx.json`). `tests/images/test_licences.py` refuses GPL and AGPL in what is shipped; LGPL is neither. This page
is written by `make generate`.

uPlot 1.6.32 (MIT), which draws the charts of `report.html`, lies in `worker/rljob_worker/report/assets/uplot` as its
npm package has it, with its licence."""

_GPL = re.compile(r"(?<![A-Za-z])A?GPL|GNU (?:Affero )?General Public", re.IGNORECASE)
_SYSTEM = {
    "dpkg-query": ("deb", ["-W", "-f", "${Package}\t${Version}\t${Architecture}\n"]),
    "rpm": ("rpm", ["-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\t%{ARCH}\n"]),
}


def normalized(name: str) -> str:
    """A package's name as indexes know it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(package: Distribution) -> tuple[str, bool]:
    """A package's licence in its own words, empty where it says none; and whether that is an SPDX expression."""
    said = package.metadata
    if expression := said.get("License-Expression"):
        return expression, True
    name = normalized(said["Name"])
    if name in NOT_SAID:
        return NOT_SAID[name], True
    trove = [c.rpartition(" :: ")[2] for c in said.get_all("Classifier", []) if c.startswith("License :: ")]
    trove = [licence for licence in trove if licence != "OSI Approved"]
    free = (said.get("License") or "").strip()
    # Some put the whole text there.
    return "; ".join(trove) or (free if len(free) < 100 and "\n" not in free else free.split("\n")[0].strip()), False


def is_gpl(licence: str) -> bool:
    """Whether a licence leaves no choice but GPL or AGPL; LGPL is none of them."""
    return all(_GPL.search(choice) for choice in re.split(r"\s+OR\s+", licence))


def python_packages() -> dict[str, Distribution]:
    """Installed packages by name; of two of a name the one that is imported."""
    found: dict[str, Distribution] = {}
    for package in distributions():
        found.setdefault(normalized(package.metadata["Name"]), package)
    return dict(sorted(found.items()))


def bill(name: str) -> dict[str, Any]:
    """The bill of materials of this environment, called `name`."""
    packages = python_packages()
    purls = {key: f"pkg:pypi/{key}@{quote(package.version)}" for key, package in packages.items()}
    components = [_python_component(package, purls[key]) for key, package in packages.items()]
    components += _system_components()
    edges = [
        {"ref": purls[key], "dependsOn": sorted(purls[n] for n in _needs(package) if n in purls)}
        for key, package in packages.items()
    ]
    return _bill({"type": "container", "bom-ref": name, "name": name}, components, edges)


def bill_of_lock(name: str, version: str, lock: str) -> dict[str, Any]:
    """The bill of materials of what a lock file installs, on whatever machine.

    Args:
        name: of what it is the bill of.
        version: likewise.
        lock: the file's name in `requirements`, without its ending.
    """
    pattern = r"^([A-Za-z0-9._-]+)==([^\s;\\]+)((?:.*\\\n)(?:\s+--hash=.*\n?)+)"
    found = re.findall(pattern, _lock_text(lock), re.MULTILINE)
    said = licences({normalized(package) for package, _, _ in found})
    components = []
    for package, locked_version, rest in found:
        purl = f"pkg:pypi/{normalized(package)}@{quote(locked_version)}"
        licence = said[normalized(package)]
        hashes = [{"alg": "SHA-256", "content": one} for one in re.findall(r"--hash=sha256:([0-9a-f]{64})", rest)]
        one = {"type": "library", "bom-ref": purl, "name": package, "version": locked_version, "purl": purl}
        files = {"externalReferences": [{"type": "distribution", "url": purl, "hashes": hashes}]}
        components.append(
            {**one, **({} if licence == "?" else {"licenses": [{"license": {"name": licence}}]}), **files}
        )
    about = {"type": "application", "bom-ref": f"pkg:pypi/{name}@{version}", "name": name, "version": version}
    return _bill(about, components, [])


def _bill(about: dict[str, Any], components: list[dict[str, Any]], edges: list[dict[str, Any]]) -> dict[str, Any]:
    content = {"components": components, "dependencies": edges}
    serial = uuid.uuid5(uuid.NAMESPACE_URL, about["name"] + json.dumps(content, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": about},
        **content,
    }


def _python_component(package: Distribution, purl: str) -> dict[str, Any]:
    licence, spdx = licence_of(package)
    said: list[dict[str, Any]] = [{"expression": licence} if spdx else {"license": {"name": licence}}]
    component = {
        "type": "library",
        "bom-ref": purl,
        "name": package.metadata["Name"],
        "version": package.version,
        "purl": purl,
    }
    return {**component, "licenses": said} if licence else component


def _needs(package: Distribution) -> Iterator[str]:
    """Requirements without extras and markers, which are left to resolvers."""
    for requirement in package.requires or ():
        name, _, marker = requirement.partition(";")
        if "extra" not in marker:
            yield normalized(re.split(r"[\s\[(<>=!~@]", name.strip(), maxsplit=1)[0])


def _system_components() -> list[dict[str, Any]]:
    release = Path("/etc/os-release")
    found = re.search(r"^ID=\"?([\w.-]+)", release.read_text(), re.MULTILINE) if release.is_file() else None
    maker = found[1].lower() if found else "linux"
    components = []
    for program, (kind, options) in _SYSTEM.items():
        if shutil.which(program):
            listed = subprocess.run([program, *options], capture_output=True, text=True, check=True).stdout
            for name, version, architecture in sorted(line.split("\t") for line in listed.splitlines()):
                purl = f"pkg:{kind}/{maker}/{quote(name)}@{quote(version)}?arch={architecture}"
                ref = {"type": "library", "bom-ref": purl}
                components.append({**ref, "name": name, "version": version, "purl": purl})
    return components


def _lock_text(name: str) -> str:
    return (Path(__file__).resolve().parents[1] / "requirements" / f"{name}.txt").read_text(encoding="utf-8")


def locked(*names: str) -> set[str]:
    """Packages of lock files, whatever machine they are for."""
    texts = map(_lock_text, names)
    return {normalized(name) for text in texts for name in re.findall(r"^([A-Za-z0-9._-]+)==", text, re.MULTILINE)}


def licences(names: set[str]) -> dict[str, str]:
    """Licence of each package, sorted; of one that is not installed here what docs/licences.md says; else `?`."""
    installed = python_packages()
    written = rows(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    known = {**written, **NOT_SAID}
    return {
        name: (licence_of(installed[name])[0].replace("|", "/") if name in installed else known.get(name)) or "?"
        for name in sorted(names)
    }


def rows(text: str) -> dict[str, str]:
    """The licences in a part of docs/licences.md, by package."""
    return dict(re.findall(r"^\| ([a-z0-9-]+) \| (.*) \|$", text.replace("| package | licence |", ""), re.MULTILINE))


def page() -> str:
    """docs/licences.md."""
    shipped = locked(*SHIPPED)
    trackers = locked("trackers") - shipped
    tools = locked("cpu", "build") - shipped - trackers
    parts = [_HEAD]
    for title, names in zip(SECTIONS, (shipped, trackers, tools), strict=True):
        table = [f"| {name} | {licence} |" for name, licence in licences(names).items()]
        parts.append("\n".join([f"## {title}\n", "| package | licence |", "|---|---|", *table]))
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Print the bill, or the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="of the image")
    parser.add_argument("--licences", action="store_true")
    arguments = parser.parse_args()
    if arguments.licences:
        sys.stdout.write(page())
    elif arguments.name:
        json.dump(bill(arguments.name), sys.stdout, indent=1)
    else:
        parser.error("NAME or --licences is needed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
