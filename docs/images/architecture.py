"""Draw docs/images/architecture.svg: `python docs/images/architecture.py [FOLDER FOR A PNG]`."""

from __future__ import annotations

from pathlib import Path

from drawing import DRIVER, ENGINE, FRAME, INK, OPERATOR, PAPER, TRAINER, USER, Drawing, main


def draw() -> Drawing:
    """The picture."""
    d = Drawing()
    d.box(
        1, 47, 21, 13, "RLJob manifest", "one document, for a laptop\n(rljob run) and a cluster\n(kubectl apply)", USER
    )
    d.box(36, 47, 33, 13, "operator/", "shell/ watches and writes (Kopf)\nstate/ reconcile(observed) -> plan, pure\n"
          "render/ a job's objects, pure\nray/ metrics/", OPERATOR)  # fmt: skip
    d.box(
        79,
        47,
        20,
        13,
        "Seen from outside",
        "status, events, conditions\nkubectl rljob (plugin/)\nPrometheus, Grafana",
        USER,
    )
    d.box(1, 1, 98, 38, "RayCluster of the job", "", FRAME)
    d.box(3, 9.5, 25, 24.5, "head pod: driver", "driver/ the loop over phases\nrollouts/ prompts to groups\n"
          "cluster/ processes, calls\nrewards/ data/ algorithms/\nrecords/ steps.jsonl, HTTP\n"
          "checkpoints/, events", DRIVER)  # fmt: skip
    d.box(38, 3, 59, 32.5, "worker pod, one a node: each device is shared, they take turns", "", PAPER)
    d.box(40, 14, 22, 16, "trainer, one a device", "trainer/ Megatron-core, its\nmodels and conversion\n"
          "memory/ memory saver:\nsleeps while the engine\ngenerates", TRAINER)  # fmt: skip
    d.box(73, 14, 22, 16, "engine, one a TP group", "engine/ vLLM\nsleeps while the trainer\nlearns; never generates\n"
          "with weights of another\nversion", ENGINE)  # fmt: skip
    d.arrow((22, 53.5), (36, 53.5), "API server", (25.5, 55))
    d.arrow((69, 53.5), (79, 53.5))
    d.arrow((52, 47), (52, 39), "RayCluster, Secret, NetworkPolicy", (53, 43.3))
    d.arrow((40, 47), (20, 34), "submit, stop;\nread step records", (15.5, 43.3))
    d.arrow((28, 26), (40, 26), "train", (31.5, 27.3))
    d.axes.plot([28, 84], [11, 11], color=INK, linewidth=1.2)
    d.arrow((84, 11), (84, 14), "generate", (30.5, 12.3))
    d.arrow((62, 22), (73, 22), "update_weights", (62.4, 23.4))
    d.axes.text(62.4, 19.3, "two slots, device\nIPC, verified by\nchecksum", fontsize=7.5, color=INK, va="center")
    d.axes.text(40, 6.8, "weightsync/ devices/ host/ upstream/ are what both stand on; rljob doctor (doctor/) "
                "looks at the pod first", fontsize=7.5, color=INK, va="center")  # fmt: skip
    d.axes.text(3, 8.2, "crds/rljob_api/: the types of the manifest,\nthe status and all that processes tell each\n"
                "other; the CRD is generated from them", fontsize=7.5, color=INK, va="top",
                linespacing=1.35)  # fmt: skip
    return d


if __name__ == "__main__":
    main({"architecture": draw}, Path(__file__).parent)
