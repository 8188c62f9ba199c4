"""vLLM's queues between the processes of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.warm.protocol import ENGINE
from support.warm.scripts import answer_in, run_text

from rljob_worker.upstream.vllm_waits import SPIN_SECONDS

pytestmark = pytest.mark.slow

SCRIPT = """
import json, threading, time
from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

install(Process.ENGINE_WORKER, "cpu")
writer = MessageQueue(1, 1)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
condition, said = reader._spin_condition, []
spins = [condition.busy_loop_s]

def read():
    while not said or said[-1] is not None:
        said.append(reader.dequeue(timeout=60))

threading.Thread(target=read).start()
sent = 0

def send(message):
    global sent
    writer.enqueue(message)
    sent += 1
    while len(said) < sent:
        time.sleep(0.01)

send(0)
# A busy machine may not have let it fall asleep by then.
while condition.busy_loop_s == spins[0] and sent < 20:
    time.sleep(spins[0] + 0.2)
    send(sent)
spins.append(condition.busy_loop_s)
for message in ("one", "more", None):
    time.sleep(0.05)
    send(message)
print(json.dumps([said[0], said[-3:], spins]))
"""


def test_a_reader_that_was_notified_once_spins_no_longer(tmp_path: Path) -> None:
    first, last, spins = answer_in(run_text(ENGINE, SCRIPT, tmp_path))
    assert (first, last) == (0, ["one", "more", None])
    assert spins == [1, SPIN_SECONDS], "vLLM's own, and that of a reader that was woken"
