"""A reward and an environment that attack the pod they are in, as tests/worker/confined/attacks.py does, and a policy's
program that does, as program_attacks.py there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from node_jobs import NodeJob

CONFINED = Path(__file__).parent.parent / "worker" / "confined"
SAYS = "attacks that succeeded: "
STEP_SECONDS = 300
_ATTACKING = """\
import importlib.util
import json
import os
import re
import sys

import program_runner

FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def the_job():
    # The process whose keeper started this one.
    parent = open(f"/proc/{os.getppid()}/status").read()
    return int(re.search(r"PPid:\\s*(\\d+)", parent).group(1))


def by_itself():
    sys.argv = ["attacks.py", str(the_job()), FOLDER]
    spec = importlib.util.spec_from_file_location("attacks", f"{FOLDER}/code/attacks.py")
    attacks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attacks)
    tried = {**attacks.REFUSED, **attacks.REFUSED_BY_LANDLOCK}
    return [name for name, do in tried.items() if not attacks.outcome(do)], len(tried)


class Game:
    def reset(self, *, seed, options):
        return "attack", {}

    def step(self, action):
        if action == "itself":
            return json.dumps(by_itself()), 0.0, False, False, {}
        refused, allowed = program_runner.outcomes(the_job(), FOLDER, seconds=SECONDS)
        failed = [name for name, error in allowed.items() if error]
        succeeded = [name for name, error in refused.items() if not error]
        return json.dumps([succeeded + failed, len(refused)]), 0.0, True, False, {}
"""
_REWARD = """\
from attacking import by_itself
from pace import score as slow

attacked = []


async def score(response):
    if not attacked:
        attacked.append(True)
        succeeded, tried = by_itself()
        print("SAYS", succeeded, "of", tried)
    return await slow(response)
"""


def with_attacks(job: NodeJob) -> NodeJob:
    """Have the job's first score run the attacks on its driver, which has a secret among its variables."""
    folder = job.system.folder / "shared" / job.name
    for name in ("code", "read", "write"):
        (folder / name).mkdir()
    (folder / "write").chmod(0o777)
    for name in ("secret", "code/data", "code/other", "code/.env", "read/data"):
        (folder / name).write_text("SECRET")
    for name in ("attacks.py", "program_attacks.py", "program_runner.py"):
        shutil.copy(CONFINED / name, folder / "code")
    shutil.move(folder / "pace.py", folder / "code")
    (folder / "code" / "attacking.py").write_text(_ATTACKING.replace("SECONDS", str(STEP_SECONDS // 3)))
    (folder / "code" / "attacked.py").write_text(_REWARD.replace('"SAYS"', repr(SAYS.strip())))
    job.manifest["spec"]["reward"]["python"] = "/shared/code/attacked.py:score"
    job.manifest["spec"].setdefault("environment", {}).setdefault("variables", {})["TOKEN_OF_A_HUB"] = "SECRET"
    return job


def attacks_of_an_environment(job: NodeJob) -> dict[str, tuple[list[str], int]]:
    """Attacks that succeeded in the job's head pod, and how many were tried: by an environment, and by a program in a
    sandbox of its process."""
    play = ("/opt/rljob/bin/rljob", "env", "/shared/code/attacking.py:Game", "--json", "--actions", "itself", "program")
    done = job.run_in("head", *play, f"--step-seconds={STEP_SECONDS}", seconds=3 * STEP_SECONDS)
    # What it says on standard error may stand around it.
    steps = json.JSONDecoder().raw_decode(done[done.index("{") :])[0]["steps"]
    return {step["action"]: tuple(json.loads(step["observation"])) for step in steps}
