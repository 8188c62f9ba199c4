"""The generation of NPUs that the image's vllm-ascend was built for, held against the profile and the chips.

`vllm_ascend/_build_info.py` holds it (`__device_type__`): setup.py writes `A2`, `A3`, `A5` or `_310P`, by SOC_VERSION,
when the package is built. An engine on another generation fails only when its first kernel runs.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

from rljob_api.profiles import PROFILES
from rljob_api.wanted import Wanted
from rljob_worker.doctor.facts import NodeFacts
from rljob_worker.doctor.findings import Finding, not_applicable, ok, problem, warning

_GENERATIONS = (
    # Profiles and npu-smi: 910B1 to 910B4-1.
    (re.compile(r"910B"), "A2"),
    # Profiles call the package 910C; npu-smi calls each of its two dies Ascend910 (tests/worker/doctor/recorded.py).
    (re.compile(r"910C|910_93|Ascend910$"), "A3"),
    (re.compile(r"950"), "A5"),
    (re.compile(r"310P"), "_310P"),
)
_IMAGES = {"A2": "ascend-a2", "A3": "ascend-a3"}


def generation(chip: str) -> str | None:
    """Generation of a chip as vllm-ascend names it; None for a name that is not known."""
    return next((name for pattern, name in _GENERATIONS if pattern.search(chip)), None)


def built_for() -> str | None:
    """Generation that the installed vllm-ascend was built for; None without one, or where its file does not say."""
    found = importlib.util.find_spec("vllm_ascend")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        try:
            tree = ast.parse((Path(folder) / "_build_info.py").read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__device_type__":
                return ast.literal_eval(node.value) if isinstance(node.value, ast.Constant) else None
    return None


def check(facts: NodeFacts, wanted: Wanted | None) -> list[Finding]:
    """The image's generation against the chips of this node; against the profile's where none is seen."""
    name = "vllm-ascend's device type"
    if facts.kind != "npu":
        return []
    if facts.built_for is None:
        return [not_applicable(name, "vllm_ascend/_build_info.py does not say it")]
    chips = {chip.name for chip in facts.devices.chips} if facts.devices is not None else set()
    profile = PROFILES[wanted.profile] if wanted is not None else None
    if not chips and profile is not None and profile.chip is not None:
        chips = {profile.chip}
    if not chips:
        return [not_applicable(name, f"{facts.built_for}; no chip was seen to hold it against")]
    unlike = sorted(chip for chip in chips if generation(chip) not in (None, facts.built_for))
    if unlike:
        right = generation(unlike[0])
        image = f"rljob-worker-ascend for {_IMAGES[right]}" if right in _IMAGES else "an image"
        fix = f"take {image} (images/worker-ascend: BASE_IMAGE), whose vllm-ascend was built for {right}"
        return [problem(name, facts.built_for, f"{right} ({', '.join(unlike)})", fix)]
    unknown = sorted(chip for chip in chips if generation(chip) is None)
    if unknown:
        text = f"the doctor does not know the generation of {', '.join(unknown)}; compare it by hand"
        return [warning(name, facts.built_for, "the chips' generation", text)]
    return [ok(name, facts.built_for, f"that of {', '.join(sorted(chips))}")]
