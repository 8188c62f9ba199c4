"""Records that a tracker's package has stored offline, as JSON: `PYTHON read_tracker.py NAME FOLDER`."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768


def log_records(path: Path) -> Iterator[bytes]:
    """Records of LevelDB's log format behind a file header of 7 bytes; W&B's and SwanLab's files are such logs."""
    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if _BLOCK - at % _BLOCK < 7:
            at += _BLOCK - at % _BLOCK
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


def wandb(folder: Path) -> dict[str, Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {"ids": [], "scalars": [], "tables": 0, "config": {}, "steps over": []}
    for path in sorted(folder.rglob("*.wandb")):
        for content in log_records(path):
            record = Record.FromString(content)
            if record.HasField("run"):
                found["ids"].append(record.run.run_id)
                found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
                found["name"] = record.run.display_name
            elif record.HasField("metric"):
                found["steps over"].append([record.metric.glob_name, record.metric.step_metric])
            elif record.HasField("history"):
                row = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                found["tables"] += any(name.partition(".")[0] == "samples" for name in row)
                if "train/loss" in row:
                    found["scalars"].append([row["step"], row["train/loss"]])
    return found


def mlflow(folder: Path) -> dict[str, Any]:
    import os

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(folder.as_uri())
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    (run,) = runs
    history = client.get_metric_history(run.info.run_id, "train/loss")
    config: dict[str, Any] = {}
    for name, text in run.data.params.items():
        config[name] = text
    return {
        "ids": [run.info.run_id],
        "name": run.info.run_name,
        "status": run.info.status,
        "scalars": [[metric.step, metric.value] for metric in history],
        "tables": len(client.list_artifacts(run.info.run_id, "samples")),
        "config": {"steps": int(config["steps"]), "names": sorted(config)},
    }


def clearml(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"ids": [], "scalars": [], "tables": 0}
    for session in sorted((folder / "offline").glob("*/task.json"), key=lambda path: path.stat().st_mtime):
        task = json.loads(session.read_text())
        found["ids"].append(task["id"])
        found["name"] = task["name"]
        found["config"] = {"steps": int(task["hyperparams"]["job"]["steps"]["value"])}
        for line in (session.parent / "metrics.jsonl").read_text().splitlines():
            for event in json.loads(line):
                if event["type"] == "plot":
                    found["tables"] += 1
                elif (event["metric"], event["variant"]) == ("train", "loss"):
                    found["scalars"].append([event["iter"], event["value"]])
    return found


def swanlab(folder: Path) -> dict[str, Any]:
    import yaml
    from google.protobuf.json_format import MessageToDict
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found: dict[str, Any] = {"ids": [], "scalars": [], "tables": 0}
    for path in sorted(folder.rglob("*.swanlab")):
        for content in log_records(path):
            record = MessageToDict(Record.FromString(content))
            if "start" in record:
                found |= {"ids": [*found["ids"], record["start"]["id"]], "name": record["start"]["name"]}
            found["tables"] += record.get("media", {}).get("key") == "samples"
            scalar = record.get("scalar", {})
            if scalar.get("key") == "train/loss":
                found["scalars"].append([int(scalar["step"]), scalar["value"]["number"]])
        text = (path.parent / "files" / "config.yaml").read_text()
        found["config"] = {name: item["value"] for name, item in yaml.safe_load(text).items() if "value" in item}
    return found


def trackio(folder: Path) -> dict[str, Any]:
    import os

    os.environ["TRACKIO_DIR"] = str(folder)
    from trackio import SQLiteStorage

    (project,) = SQLiteStorage.get_projects()
    (run,) = SQLiteStorage.get_runs(project)
    logs = SQLiteStorage.get_logs(project, run)
    return {
        "ids": [run],
        "name": run,
        "scalars": [[entry["step"], entry["train/loss"]] for entry in logs if "train/loss" in entry],
        "tables": sum("samples" in entry for entry in logs),
        "config": SQLiteStorage.get_run_config(project, run),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
