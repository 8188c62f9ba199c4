"""Tell Kubeflow Trainer how a trial ended: `python report_metrics.py RUN`, in a pod of a TrainJob.

Sends `reward`, the mean of the run's last steps, and each evaluation by its name (`eval/NAME`). Address, certificate
and token are those that the feature gate TrainJobStatus puts into the pod.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import Request, urlopen

import rljob

LAST = 10
"""Steps that the reward is the mean of: that of one step is noisy."""
SECONDS = 30


def values(folder: str) -> dict[str, float]:
    """Metrics at the end of the run; of an evaluation its newest value."""
    found: dict[str, float] = {}
    rewards = []
    for row in rljob.load(folder).metrics():
        found |= {name: value for name, value in row.items() if name.startswith("eval/") and value is not None}
        if row.get("rollout/raw_reward") is not None:
            rewards.append(row["rollout/raw_reward"])
    last = rewards[-LAST:]
    return found | ({"reward": sum(last) / len(last)} if last else {})


def send(metrics: dict[str, float]) -> None:
    """Post them to the controller; raises where it does not take them, so that the trial fails and is not judged."""
    status = {
        "progressPercentage": 100,
        "metrics": [{"name": name, "value": repr(value)} for name, value in metrics.items()],
        "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text().strip()
    request = Request(
        os.environ["KUBEFLOW_TRAINER_SERVER_URL"],
        data=json.dumps({"trainerStatus": status}).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    trusted = ssl.create_default_context(cafile=os.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"])
    with urlopen(request, timeout=SECONDS, context=trusted):
        pass


if __name__ == "__main__":
    found = values(sys.argv[1])
    if "reward" not in found:
        sys.exit(f"{sys.argv[1]}: no step has a reward, there is nothing to report")
    send(found)
    print(json.dumps(found))
