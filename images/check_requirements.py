"""Check in an image that is being built that what the worker needs is there, in versions that it accepts.

`check_requirements.py DISTRIBUTION[EXTRA] [--base NAME ...]` walks the requirements of an installed distribution. The
lock file has only what the base image lacks, so nothing else would say that the base holds another version than was
thought.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def problems(wanted: Requirement, base: list[str], environment: Path) -> Iterator[str]:
    """Requirements that are missing or of a wrong version, and packages that were installed over the base.

    Args:
        wanted: the distribution to begin with, and its extras.
        base: distributions that must be those of the base image, so not below `environment`.
        environment: folder of the environment that was made over the base's packages.
    """
    seen = set[str]()
    waiting = [(wanted, "")]
    while waiting:
        requirement, parent = waiting.pop()
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            yield f"{parent or 'the image'} needs {requirement}, which is not installed"
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            yield f"{parent or 'the image'} needs {requirement}, and {found.version} is installed"
        for extra in ("", *requirement.extras):
            if (key := f"{canonicalize_name(requirement.name)}[{extra}]") not in seen:
                seen.add(key)
                waiting += [(needed, requirement.name) for needed in _requirements(found, extra)]
    for name in base:
        if not _outside(name, environment):
            yield f"{name} must be the base image's own: it is missing, or was installed into {environment}"


def _requirements(found: Distribution, extra: str) -> Iterator[Requirement]:
    for text in found.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None:
            if not extra:
                yield requirement
        elif requirement.marker.evaluate({"extra": extra}) and (
            not extra or not requirement.marker.evaluate({"extra": ""})
        ):
            yield requirement


def _outside(name: str, environment: Path) -> bool:
    try:
        place = Path(str(distribution(name).locate_file(""))).resolve()
    except PackageNotFoundError:
        return False
    return not place.is_relative_to(environment.resolve())


def main() -> int:
    """Print each problem; 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distribution", type=Requirement)
    parser.add_argument("--base", nargs="*", default=[], help="distributions that must be the base image's own")
    arguments = parser.parse_args()
    found = list(problems(arguments.distribution, arguments.base, Path(sys.prefix)))
    for problem in found:
        print(problem, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
