"""`--trust-unverified`, and what the readers of a run's checkpoints say on the way."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljob_api import RLJob
    from rljob_worker.checkpoints.reader import Checkpoints, Found

logger = logging.getLogger(__name__)


def add_trust_argument(command: argparse.ArgumentParser) -> None:
    """Add the option."""
    command.add_argument(
        "--trust-unverified",
        action="store_true",
        help="read checkpoints without a checksum of their own too, as earlier versions wrote them, where none is "
        "verified (spec.checkpoint.trustUnverified)",
    )


def trusting(job: RLJob) -> RLJob:
    """The job with `spec.checkpoint.trustUnverified`."""
    checkpoint = job.spec.checkpoint.model_copy(update={"trust_unverified": True})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"checkpoint": checkpoint})})


def checkpoints_of(folder: Path, spec: dict[str, Any], trust_unverified: bool) -> Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: the run folder.
        spec: the job's, as `run.json` has it.
        trust_unverified: the option.
    """
    from rljob_worker.checkpoints.reader import Checkpoints, checkpoint_root

    given = spec["checkpoint"]
    trusted = trust_unverified or given.get("trustUnverified") is True
    return Checkpoints(checkpoint_root(folder, given.get("path")), trust_unverified=trusted)


def say(found: Found) -> None:
    """Warn of what was passed over, and of what cannot be verified; nothing is renamed by a command that only reads."""
    for one in found.passed_over:
        logger.warning("%s is not used: %s", one.folder, one.reason)
    if not found.verified:
        logger.warning("%s is used as it is: it has no checksum of its own", found.folder)
