"""The memory of a job whose trainers and engines have devices of their own: neither ever sleeps."""

from __future__ import annotations

from rljob_api import derived
from rljob_worker.planning.memory import Planner, Rank, rank_title, stages_that_differ
from rljob_worker.planning.tables import MemoryTable, PhaseMemory, used


class TwoGroupsPlanner(Planner):
    """Trainers' devices, engines' devices, and the nodes that hold one kind or both."""

    def device_tables(self) -> list[MemoryTable]:
        """Each kind of trainer, and the engines' ranks."""
        trainers = [
            MemoryTable(f"trainers, {rank_title(self._job, stage)}", self._device_bytes, self._training(stage))
            for stage in stages_that_differ(self._job)
        ]
        ranks = derived.engines(self._spec) * self._job.engine_tp
        what = "tensors of a rank, part of the host memory" if self._cpu else "device"
        return [*trainers, MemoryTable(f"engines, {what}: every rank ({ranks})", self._device_bytes, self._serving())]

    def host_tables(self, node_bytes: int | None) -> list[MemoryTable]:
        """One for each group of nodes: the fullest of its nodes."""
        tables = []
        for group in derived.node_groups(self._spec):
            engines = group.engine_devices // self._job.engine_tp if group.devices else 0
            held = [f"trainers: {group.trainers}"] * bool(group.trainers) + [f"engines: {engines}"] * bool(engines)
            nodes = range(group.nodes) if group.trainers else range(1)
            every = [self._host(self._job.stages_of_node(node) if group.trainers else [], engines) for node in nodes]
            tables.append(self.host_table(group, f"host memory of a worker pod ({', '.join(held)})", node_bytes, every))
        return tables

    # --- devices -----------------------------------------------------------------------------

    def _training(self, stage: int) -> list[PhaseMemory]:
        """Peaks of a trainer's device, in the order of its lane."""
        rank = self.rank(stage)
        awake = self._awake(rank)
        parts = [("batch_wait", awake), *self._learning(rank), ("checkpoint", awake)]
        parts += [("update_weights", awake | {"merged": rank.state.merging})]
        return [PhaseMemory(phase, used(components | self._with_trainer)) for phase, components in parts]

    def _serving(self) -> list[PhaseMemory]:
        """Peaks of an engine's device: the KV cache stays while new weights land."""
        always = self._with_engine | {"engine weights": self.engine.weights, "KV cache": self.engine.kv_cache}
        parts = [("rollout", self.engine.work), ("update_weights", self.engine.landing)]
        parts += [("eval", self.engine.work)] * (self._spec.evaluation is not None)
        return [PhaseMemory(phase, used(always | {"engine work": nbytes})) for phase, nbytes in parts]

    # --- a node ------------------------------------------------------------------------------

    def _host(self, stages: list[int], engines: int) -> list[PhaseMemory]:
        """Peaks of a node with trainers of these stages and so many engines, which may peak at the same time."""
        ranks: list[Rank] = [self.rank(stage) for stage in stages]
        # Both ends have slots of their own where nothing but the network is between them.
        ends = bool(ranks) + engines * self._job.engine_tp if derived.has_nodes_apart(self._spec) else 1
        fixed = {
            "processes": self._processes(len(ranks), engines),
            "staging slots": ends * self.slots if self._cpu else 0,
            **self._kept(ranks),
        }
        serving = engines * self._job.engine_tp * max(phase.total for phase in self._serving())
        if not self._cpu:
            return [PhaseMemory("every phase", used(fixed))]
        rows = list(zip(*(self._training(stage) for stage in stages), strict=True))
        if not rows:
            return [PhaseMemory("every phase", used(fixed | {"tensors": serving}))]
        return [
            PhaseMemory(row[0].phase, used(fixed | {"tensors": serving + sum(phase.total for phase in row)}))
            for row in rows
        ]
