"""Choice of a job's training backend."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Protocol

from rljob_api.spec import RLJobSpec
from rljob_worker.devices import Device
from rljob_worker.trainer.backend import TrainerBackend
from rljob_worker.trainer.rendezvous import Notices
from rljob_worker.trainer.saved_state import folder_of


class BuildBackend(Protocol):
    """`build_backend` of the module `backend` in a backend's folder."""

    def __call__(
        self,
        spec: RLJobSpec,
        device: Device,
        *,
        rank: int,
        world_size: int,
        store: str,
        model_folder: Path,
        critic_folder: Path | None = None,
        teacher_folder: Path | None = None,
        stop: threading.Event,
        notices: Notices,
    ) -> TrainerBackend:
        """Build this rank of the job's backend with the checkpoint's weights, awake; collective.

        Args:
            spec: the job.
            device: this rank's.
            rank: number of this rank.
            world_size: number of ranks.
            store: where the ranks meet.
            model_folder: Hugging Face folder with the starting weights.
            critic_folder: the same of the critic, where the algorithm needs one; None: the policy's.
            teacher_folder: the same of the teacher, where the algorithm has one.
            stop: set when a running pass is to end early.
            notices: what the ranks agree on over the store.
        """
        ...


def builder(spec: RLJobSpec) -> BuildBackend:
    """The function that builds the job's backend; no other backend is imported."""
    build: BuildBackend = importlib.import_module(f"{folder_of(spec.training.backend)}.backend").build_backend
    return build
