"""The trainer: one rank, as the driver calls it; what every training backend shares."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rljob_api import derived
from rljob_api.json_types import JsonObject
from rljob_api.spec import RLJobSpec
from rljob_worker.algorithms import get_algorithm
from rljob_worker.devices import get_device
from rljob_worker.devices.profiling import ProfileOrder, ProfileResult, WorkProfiler
from rljob_worker.errors import StopRequested
from rljob_worker.memory.ledger import LedgerEntry, MemoryLedger
from rljob_worker.models.pictures import PictureFacts, batch_pictures
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.backend import TrainerBackend
from rljob_worker.trainer.build import builder
from rljob_worker.trainer.checked_file import CheckedFile, damage
from rljob_worker.trainer.critic import Critic
from rljob_worker.trainer.forward_passes import ForwardPasses
from rljob_worker.trainer.objective import PolicyLoss, reported_log_probs
from rljob_worker.trainer.planned_step import PlannedStep
from rljob_worker.trainer.rank_backend import MemoryMove
from rljob_worker.trainer.rendezvous import Notices
from rljob_worker.trainer.reports import TrainerMemory, TrainerStarted
from rljob_worker.trainer.step_updates import Applied, StepUpdates
from rljob_worker.trainer.weight_sender import WeightSender
from rljob_worker.types import FloatArray, IntArray, Picture, SamplingParams, StepMetrics, TrainBatch, TrainerReport
from rljob_worker.weightsync.route import Route


class Trainer:
    """One rank of the training job. Every rank gets the same calls, in the same order, with the same batch.

    Methods other than `request_stop`, `memory`, `profile` and `busy_seconds` are to be called from one thread.
    """

    def __init__(
        self,
        spec: JsonObject,
        *,
        rank: int,
        world_size: int,
        store: str,
        secret: str,
        model_folder: str,
        total_updates: int,
        critic_folder: str | None = None,
        teacher_folder: str | None = None,
        route: Route | None = None,
    ) -> None:
        """Remember what to build; `setup` builds it.

        Args:
            spec: the RLJobSpec as JSON, by alias.
            rank: number of this trainer among all.
            world_size: number of trainers.
            store: where the trainers meet; see `rendezvous`.
            secret: what only the trainers of this job know, the same for all.
            model_folder: Hugging Face folder with the starting weights.
            total_updates: optimizer updates of the whole job, for the learning rate.
            critic_folder: Hugging Face folder that the critic starts from; None: the policy's.
            teacher_folder: Hugging Face folder of the teacher, where the algorithm has one.
            route: of the weights to the engines; None: nobody takes them.
        """
        self.spec = RLJobSpec.model_validate(spec)
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._notices = Notices(secret)
        self._model_folder = Path(model_folder)
        self._critic_folder = None if critic_folder is None else Path(critic_folder)
        self._teacher_folder = None if teacher_folder is None else Path(teacher_folder)
        self._route = route
        self._total_updates = total_updates
        layout = ParallelLayout.of_training(self.spec.training, world_size, rank)
        place = layout.place_in_node(derived.trainers_per_node(self.spec))
        self._device = get_device(self.spec.resources.profile.value, place)
        self._algorithm = get_algorithm(self.spec.algorithm.name)
        self._needs_reference = self._algorithm.needs_reference(self.spec.algorithm)
        self._stop_requested = threading.Event()
        self._busy = 0.0
        self.planned: PlannedStep | None = None
        """The step that a call has begun; `train` takes a batch as it is planned here."""
        self._critic: Critic | None = None
        self._profiler = WorkProfiler(self._device.name)

    # --- life -------------------------------------------------------------------------------

    def setup(self) -> TrainerStarted:
        """Build this rank, awake; collective."""
        started = time.perf_counter()
        if "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        backend = builder(self.spec)(
            self.spec,
            self._device,
            rank=self._rank,
            world_size=self._world_size,
            store=self._store,
            model_folder=self._model_folder,
            critic_folder=self._critic_folder,
            teacher_folder=self._teacher_folder,
            stop=self._stop_requested,
            notices=self._notices,
        )
        self.backend: TrainerBackend = backend
        self.passes = ForwardPasses(backend, self.spec)
        self._updates = StepUpdates(backend, self.spec.training.optimizer, self._total_updates)
        self._critic = self._critic_of(backend)
        self._weight_sender = WeightSender(backend, self.spec, self._device, self._route)
        self._ledger = MemoryLedger(backend.layout.rank, self._device, backend.memory)
        built = time.perf_counter()
        # What is there now stays. Each sleep looks for garbage, and would look at 450,000 objects of imports: 0.25 s.
        gc.collect()
        gc.freeze()
        return TrainerStarted(
            device=self._device.identity(),
            coordinates=backend.layout.coordinates(),
            parameters=backend.parameter_count,
            seconds=built - started,
        )

    def sleep(self) -> TrainerMemory:
        """Give the memory of weights, gradients and optimizer away; nothing when asleep.

        Where `memorySaver.releaseProcessGroups` says so, communicators go too, and the call is collective.
        """
        return self._moved("sleep", self.backend.sleep())

    def wake_up(self) -> TrainerMemory:
        """Take it back; nothing when awake. Raises when too little memory is free, and stays asleep then."""
        return self._moved("wake_up", self.backend.wake_up())

    def _moved(self, what: str, move: MemoryMove) -> TrainerMemory:
        return TrainerMemory(move.transition, move.group_seconds, self.memory(what))

    def memory(self, phase: str = "now") -> LedgerEntry:
        """A reading of the memory ledger, in bytes; thread-safe, frees nothing."""
        return self._ledger.record(phase)

    def busy_seconds(self) -> float:
        """Seconds spent computing since `setup`; thread-safe."""
        return self._busy

    def profile(self, order: ProfileOrder | None) -> list[ProfileResult]:
        """Profile the next `train`, or no more; what became of earlier orders. Thread-safe."""
        self._profiler.ask(order)
        return self._profiler.results()

    def request_stop(self) -> None:
        """End a running or coming `train`, `log_probs` or `ref_log_probs` with StopRequested; thread-safe.

        The trainer is then in the state before the step. A step whose last optimizer update has begun is completed.
        """
        self._stop_requested.set()

    def close(self) -> None:
        """Drop the slots and leave the process group."""
        self._weight_sender.close()
        self.backend.close()

    # --- a step -----------------------------------------------------------------------------

    def plan(self, batch: TrainBatch) -> PlannedStep:
        """The step of a batch: planned once for its forward passes and `train`, and kept in `planned` until then."""
        if self.planned is not None and self.planned.batch is batch:
            return self.planned
        advantages = None if self._critic is None else self._critic.advantages_of(batch)
        self.planned = PlannedStep.of(batch, self.backend, self.spec, advantages)
        return self.planned

    def values(self, batch: TrainBatch) -> None:
        """Values of the coming calls' batch, and advantages of its rewards; kept here. Collective."""
        assert self._critic is not None
        with self._computing("values"):
            self.planned = None
            self._critic.compute_values(batch)

    def critic_train(self, batch: TrainBatch, *, alone: bool) -> StepMetrics:
        """All updates of the critic in a step; collective.

        Args:
            batch: all samples of the step, as `values` got it.
            alone: whether the step ends with it, and the policy stays as it is. Otherwise what it changed is undone
                where `train` of the same batch changes nothing.

        Returns:
            The metrics, as of `train`.

        Raises:
            StopRequested: on all ranks; the critic is as before the step.
        """
        assert self._critic is not None
        with self._computing("critic_train"):
            try:
                report = self._critic.train(batch)
            finally:
                if self._device.own_memory:
                    self._device.empty_cache()
            if alone and report.applied:
                self._critic.settle()
        return report

    def ref_log_probs(self, batch: TrainBatch, sampling: SamplingParams) -> None:
        """Log-probabilities of the coming `train` call's batch under the starting weights; kept here. Collective."""
        with self._computing("ref_log_probs"):
            step = self.plan(batch)
            step.reference_log_probs = self.passes.reference_log_probs(step.updates, sampling)

    def teacher_log_probs(self, batch: TrainBatch, sampling: SamplingParams) -> None:
        """The teacher's probabilities for the coming `train` call's batch; kept here, on the host. Collective."""
        with self._computing("teacher_log_probs"):
            step = self.plan(batch)
            step.teach(self.passes.teacher_tables(step.updates, sampling))

    def log_probs(self, batch: TrainBatch, sampling: SamplingParams) -> None:
        """Log-probabilities of the coming `train` call's batch before its updates; kept here. Collective.

        Does nothing where the training forward gives them: with one optimizer update a step.
        """
        with self._computing("log_probs"):
            step = self.plan(batch)
            if self._algorithm.needs_old_log_probs(len(step.updates)):
                step.old_log_probs = self.passes.log_probs(step.updates, sampling)

    def train(self, batch: TrainBatch, sampling: SamplingParams, version: int, reported: int = 0) -> StepMetrics:
        """All optimizer updates of a step; collective.

        Args:
            batch: all samples of the step, the same on every rank.
            sampling: how they were sampled; the same transform is applied to the logits.
            version: weight version that the step leads to.
            reported: of the first so many samples the log-probabilities before the updates are reported.

        Returns:
            The metrics, reduced over ranks. After a loss or gradient that is not finite, `applied` is False, the
            weights and the optimizer are as before the step, and `detail["reason"]` says where it was found.

        Raises:
            StopRequested: on all ranks; the weights and the optimizer are as before the step.
            RuntimeError: tokens of the batch were sampled by weights that this step does not start from or follow.
        """
        with self._computing("train"), self._profiler.work():
            if len(batch.versions) and (newest := int(batch.versions.max())) >= version:
                raise RuntimeError(f"train: tokens were sampled by weights {newest}; the step leads to {version} only")
            step = self.plan(batch)
            try:
                self._check_inputs(step)
                losses = step.losses(self.spec, sampling, self.passes.vocab_size, version, reported)
                applied = self._apply(step, losses)
                layout = self.backend.layout
                # Of ranks that computed the same values, one.
                telling = layout.tp_rank == layout.cp_rank == 0
                log_probs = reported_log_probs(losses, reported) if telling else None
            finally:
                self.planned = None
                if self._device.own_memory:
                    # What the passes left in the allocator's cache would lie beside the engine's weights.
                    self._device.empty_cache()
        return replace(step.report(applied, version, layout.samples), log_probs=log_probs)

    def score(
        self,
        token_lists: Sequence[IntArray],
        sampling: SamplingParams | None = None,
        pictures: Sequence[Sequence[Picture]] | None = None,
    ) -> list[FloatArray]:
        """Log-probability of each token but the first, given those before it; collective.

        Args:
            token_lists: N sequences.
            sampling: transform of the logits; default: none (temperature 1).
            pictures: of each sequence; None: there are none.

        Returns:
            N arrays [length - 1] float32, the same on all ranks.
        """
        with self._computing("score"):
            tokens = [np.asarray(tokens, dtype=np.int64) for tokens in token_lists]
            seen = None
            if pictures is not None:
                seen = batch_pictures(tokens, pictures, PictureFacts.of_folder(self._model_folder))
            return self.passes.score(tokens, sampling or SamplingParams(max_tokens=1), seen)

    # --- weight hand-over -------------------------------------------------------------------

    def take_route(self, route: Route) -> None:
        """Send weights by another route, to other engines, from the next hand-over on."""
        self._weight_sender.take_route(route)

    def send_weights(self, version: int, seconds: float) -> TrainerReport:
        """Hand the weights to the engines of this host; returns when every engine has verified them. Collective.

        Args:
            version: number of the weights.
            seconds: deadline from now.

        Raises:
            WeightSyncError: it failed on some side; names the party, the version and the bucket.
        """
        with self._computing("send_weights"):
            return self._weight_sender.send(version, seconds)

    # --- state ------------------------------------------------------------------------------

    def save(self, folder: str) -> list[CheckedFile]:
        """Write this rank's state to `folder`, synced to disk; works asleep and awake.

        It is that of the last completed step, also between the critic's updates and the policy's.
        """
        try:
            files = [self.backend.save(folder, updates=self._updates.done)]
            if self._critic is not None:
                self._critic.updates.undo()
                files.append(self._critic.save(folder))
            return files
        finally:
            self._device.empty_host_cache()

    def damage(self, folder: str, files: Sequence[CheckedFile]) -> str:
        """Damage of this rank's share of a checkpoint's files; empty when there is none."""
        found = (damage(folder, file) for file in files[self._rank :: self._world_size])
        return "; ".join(filter(None, found))

    def load(self, folder: str) -> str:
        """Continue from a saved state.

        Returns:
            From which parallel layout to which it was resharded; empty where that is the same.

        Raises:
            ValueError: it is another precision's or model's, or missing or damaged.
        """
        self.backend.require_awake("load")
        loaded = self.backend.load(folder)
        self._updates.done = loaded.updates
        if self._critic is not None:
            self._critic.load(folder)
        return loaded.resharded

    # --- inside -----------------------------------------------------------------------------

    @contextmanager
    def _computing(self, what: str) -> Iterator[None]:
        self.backend.require_awake(what)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._busy += time.perf_counter() - started

    def _critic_of(self, backend: TrainerBackend) -> Critic | None:
        settings = derived.critic(self.spec)
        if backend.critic is None or settings is None:
            return None
        total, longest = self.spec.steps * settings.updates_per_step, derived.longest_sampled(self.spec)
        return Critic(backend.critic, self.spec, settings, backend.layout, total, longest)

    def _apply(self, step: PlannedStep, losses: Sequence[PolicyLoss]) -> Applied:
        """Update the policy; where it stays as before the step, so does the critic."""
        try:
            applied = self._updates.run(step.updates, losses)
        except StopRequested:
            if self._critic is not None:
                self._critic.updates.undo()
            raise
        if self._critic is not None:
            if applied.fault is not None:
                self._critic.updates.undo()
            self._critic.settle()
        return applied

    def _check_inputs(self, step: PlannedStep) -> None:
        updates = len(step.updates)
        if step.old_log_probs is None and self._algorithm.needs_old_log_probs(updates):
            raise RuntimeError(f"train: {updates} updates a step need log_probs() of the same batch first")
        if step.reference_log_probs is None and self._needs_reference:
            raise RuntimeError("train: algorithm.kl needs ref_log_probs() of the same batch first")
        if self.backend.teacher is not None and not step.taught:
            raise RuntimeError("train: algorithm.distill needs teacher_log_probs() of the same batch first")
