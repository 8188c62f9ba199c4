"""Link the memory saver's preload hook to where trainers load it from, and write down the digests of its libraries.

`link_memory_saver.py [--cuda-major N]` runs in the environment of an image that is being built. The digests are what
`rljob doctor` compares: one library in place of another is not seen otherwise, the loader takes any that has the name.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import sysconfig
from pathlib import Path

PRELOAD = "torch_memory_saver_hook_mode_preload"
TORCH = "torch_memory_saver_hook_mode_torch"
LINK = Path("lib") / f"{PRELOAD}.abi3.so"
"""Below the environment; `rljob_api.roles.MEMORY_SAVER_LIBRARY` is the whole path."""
DIGESTS = Path("memory-saver.sha256")


def library(packages: Path, stem: str, cuda_major: int | None) -> Path:
    """The one library of a hook mode that was installed, as the package itself looks for it.

    Raises:
        ValueError: there is none, or more than one: the package then refuses to start.
    """
    pattern = f"{stem}.*so" if cuda_major is None else f"{stem}_cu{cuda_major}.*so"
    found = sorted({*packages.glob(pattern), *(packages / "torch_memory_saver").glob(pattern)})
    if len(found) != 1:
        names = ", ".join(str(path) for path in found) or "none"
        raise ValueError(f"{packages}: the memory saver must have one library {pattern}, found: {names}")
    return found[0].resolve()


def link(environment: Path, packages: Path, cuda_major: int | None) -> str:
    """Make the link and the file of digests; return the file's text, one line a library as `sha256sum` writes it."""
    preload, torch = (library(packages, stem, cuda_major) for stem in (PRELOAD, TORCH))
    target = environment / LINK
    target.unlink(missing_ok=True)
    target.symlink_to(preload)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n" for path in (target, preload, torch)]
    (environment / DIGESTS).write_text("".join(lines), encoding="utf-8")
    return "".join(lines)


def main() -> int:
    """Print what was written down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda-major", type=int, help="which of the libraries for CUDA; none: there is one for all")
    arguments = parser.parse_args()
    try:
        print(link(Path(sys.prefix), Path(sysconfig.get_path("purelib")), arguments.cuda_major), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
