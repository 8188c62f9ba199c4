"""A reward that attacks the pod it is scored in, as tests/worker/confined/attacks.py does."""

from __future__ import annotations

import shutil
from pathlib import Path

from node_jobs import NodeJob

ATTACKS = Path(__file__).parent.parent / "worker" / "confined" / "attacks.py"
SAYS = "attacks that succeeded: "
_REWARD = """\
import importlib.util
import os
import re
import sys

from pace import score as slow

attacked = []


def attack():
    parent = open(f"/proc/{os.getppid()}/status").read()
    sys.argv = ["attacks.py", re.search(r"PPid:\\s*(\\d+)", parent).group(1), "/shared"]
    spec = importlib.util.spec_from_file_location("attacks", "/shared/code/attacks.py")
    attacks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attacks)
    tried = {**attacks.REFUSED, **attacks.REFUSED_BY_LANDLOCK}
    print("SAYS", [name for name, do in tried.items() if not attacks.outcome(do)], "of", len(tried))


async def score(response):
    if not attacked:
        attacked.append(True)
        attack()
    return await slow(response)
"""


def with_attacks(job: NodeJob) -> NodeJob:
    """Have the job's first score run the attacks on its driver, which has a secret among its variables."""
    folder = job.system.folder / "shared" / job.name
    (folder / "code").mkdir()
    for name in ("secret", "code/data", "code/other", "code/.env"):
        (folder / name).write_text("SECRET")
    shutil.copy(ATTACKS, folder / "code")
    shutil.move(folder / "pace.py", folder / "code")
    (folder / "code" / "attacked.py").write_text(_REWARD.replace('"SAYS"', repr(SAYS.strip())))
    job.manifest["spec"]["reward"]["python"] = "/shared/code/attacked.py:score"
    job.manifest["spec"].setdefault("environment", {}).setdefault("variables", {})["TOKEN_OF_A_HUB"] = "SECRET"
    return job
