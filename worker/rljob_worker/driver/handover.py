"""The weights from trainers to engines, and the fixed prompts that both sides are compared on."""

from __future__ import annotations

from rljob_api import RLJobSpec
from rljob_worker.cluster.cluster import Cluster
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.driver.probe import WeightProbe
from rljob_worker.driver.sync_report import lost_in_rounding, sync_report
from rljob_worker.engine.engine import Engine
from rljob_worker.errors import ProcessDiedError
from rljob_worker.records.writer import RecordWriter
from rljob_worker.rollouts.step import Progress
from rljob_worker.trainer.trainer import Trainer


class Handover:
    """Brings the engines to the trainers' weights, awake on both sides.

    Args:
        spec: the job.
        cluster: its processes.
        calls: waits for them.
        probe: fixed prompts that both sides are compared on.
        records: where weight syncs are noted.
        progress: how far the job is.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        cluster: Cluster,
        calls: PhaseCalls,
        probe: WeightProbe,
        records: RecordWriter,
        progress: Progress,
    ) -> None:
        self._spec = spec
        self._cluster = cluster
        self._calls = calls
        self._probe = probe
        self._records = records
        self._progress = progress

    def update_weights(self) -> None:
        """Hand the weights over: trainers send while engines receive; both verify."""
        version, seconds = self._progress.weight_version, self._calls.deadline("update_weights")
        self._cluster.settle_engines(self._calls)
        while True:
            senders = self._cluster.trainers.call(Trainer.send_weights, version, seconds)
            receivers = self._cluster.engines.call(Engine.receive_weights, version, seconds)
            try:
                # Both sides keep the deadline themselves and say what they waited for; the driver only backs them up.
                sent, received = self._calls.calls.gather_both("update_weights", senders, receivers, seconds + 5.0)
                break
            except ProcessDiedError as error:
                # Where it was an engine, the hand-over ends for all, and those that are left take the weights anew.
                if not self._cluster.goes_on_without(error, version, self._calls):
                    raise
        self._records.weights(sync_report(version, sent, received, self._spec.resources.nodes))
        self._records.metrics(lost_in_rounding(sent))
        if self.due_probe():
            scores = self._calls.gather("score", self._cluster.trainers.call(Trainer.score, self._probe.tokens))
            self._probe.score_trainers(scores)

    def due_probe(self) -> bool:
        """Whether the fixed-prompt probe runs this step."""
        every = self._spec.weight_sync.probe_every_steps
        return every > 0 and self._progress.step % every == 0

    def probe_weights(self) -> None:
        """Compare both sides' log-probabilities of fixed prompts: catches what changed after it was landed."""
        engines = self._cluster.engines
        while True:
            try:
                scores = self._calls.gather("score", engines.call(Engine.score, self._probe.tokens))
                break
            except ProcessDiedError as error:
                engines.on_loss(error)
        self._records.metrics(self._probe.compare(scores, self._progress.weight_version))

    def first(self) -> None:
        """Bring engines to the trainers' weights through the same verified path as every later step."""
        self.update_weights()
        if self.due_probe():
            self.probe_weights()
