"""Draw the pictures of docs/concepts.md: `python docs/images/concepts.py [FOLDER FOR PNGS]`."""

from __future__ import annotations

from pathlib import Path

from drawing import DRIVER, ENGINE, FRAME, INK, OPERATOR, PAPER, TRAINER, USER, Drawing, main

IDLE = "#e5e7eb"


def step() -> Drawing:
    """The phases of a step in their order, and who works in each."""
    d = Drawing(33)
    rows = {"engine": 21, "driver": 14.5, "trainer": 8}
    for row, y in rows.items():
        d.note(1, y + 3.6, row, weight="bold", fontsize=9)
        d.bar(9, y, 90, 5, "", IDLE if row != "driver" else PAPER)
    phases = [
        ("rollout", 9, 25, "engine", ENGINE),
        ("reward", 34, 5, "driver", DRIVER),
        ("rollout_\nsleep", 39, 6, "engine", ENGINE),
        ("wake_up", 45, 6, "trainer", TRAINER),
        ("ref_log_probs\nlog_probs\nactor_train", 51, 17, "trainer", TRAINER),
        ("check-\npoint", 68, 5, "trainer", TRAINER),
        ("wake_\nweights", 73, 6, "engine", ENGINE),
        ("update_weights", 79, 7, "both", FRAME),
        ("sleep", 86, 4, "trainer", TRAINER),
        ("wake_\nkv", 90, 4, "engine", ENGINE),
        ("eval", 94, 5, "engine", ENGINE),
    ]
    for name, x, width, row, color in phases:
        if row == "both":
            d.bar(x, rows["engine"], width, 5, "receives", ENGINE)
            d.bar(x, rows["trainer"], width, 5, "sends", TRAINER)
            d.bar(x, rows["driver"], width, 5, "update_\nweights", PAPER)
        else:
            d.bar(x, rows[row], width, 5, name, color)
    d.bar(9, rows["driver"], 25, 5, "rewards are scored beside it", DRIVER)
    d.bar(51, rows["driver"], 17, 5, "advantages, batches", DRIVER)
    d.note(9, 31.5, "one step, from left to right: what is coloured works, what is grey sleeps or waits", fontsize=9)
    for x, width in ((39, 12), (73, 21)):
        d.axes.plot([x, x, x + width, x + width], [7.2, 6.4, 6.4, 7.2], color=INK, linewidth=1)
    d.note(44, 5.5, "switch: the six phases under the two brackets, what sharing the devices costs")
    d.note(
        9,
        2.6,
        "widths are not to scale; checkpoint and eval only when due, ref_log_probs and log_probs only "
        "where the algorithm needs them",
        fontsize=7.5,
    )
    return d


def switch() -> Drawing:
    """Who holds the memory of a device, phase by phase."""
    d = Drawing(44)
    d.note(2, 42.5, "memory of one device, phase by phase", weight="bold", fontsize=9)
    columns = [
        "rollout",
        "rollout_sleep",
        "wake_up",
        "actor_train",
        "rollout_wake\n_weights",
        "update\n_weights",
        "sleep",
        "rollout_wake\n_kv",
    ]
    kv, weights = ("KV cache", 17.0), ("engine's\nweights", 5.0)
    trainer, work = ("trainer's weights,\ngradients, optimizer", 13.0), ("activations", 7.0)
    held = [
        [(weights, ENGINE), (kv, ENGINE)],
        [],
        [(trainer, TRAINER)],
        [(trainer, TRAINER), (work, TRAINER)],
        [(trainer, TRAINER), (weights, ENGINE)],
        [(trainer, TRAINER), (weights, ENGINE)],
        [(weights, ENGINE)],
        [(weights, ENGINE), (kv, ENGINE)],
    ]
    for number, (name, parts) in enumerate(zip(columns, held, strict=True)):
        x, y = 2 + number * 12.2, 11.0
        d.bar(x, y, 10.6, 27, "", PAPER)
        for (text, size), color in parts:
            d.bar(x, y, 10.6, size, text, color)
            y += size
        d.axes.text(x + 5.3, 9, name, ha="center", va="center", color=INK, fontsize=8, linespacing=1.2)
    d.axes.text(14.2 + 5.3, 24.5, "free", ha="center", va="center", color=INK, fontsize=7)
    d.arrow((67.7, 20.5), (67.7, 24.2))
    d.bar(
        2,
        0.8,
        95.9,
        4.6,
        "host memory: while the trainer sleeps, the memory saver's copy of what it has; of the engine nothing is kept",
        TRAINER,
    )
    d.note(2, 7.4, "state at the end of each phase; heights are not to scale", fontsize=7.5)
    return d


def weights() -> Drawing:
    """From a trainer's parameter to an engine's."""
    d = Drawing(32)
    d.box(
        1,
        13,
        22,
        18,
        "trainer",
        "Megatron's parameter:\nits tensor parallel part of\n"
        "linear_qkv, fc1 ...\n\nconvert.py: slices of\nthe Hugging Face tensors\n"
        "q_proj, k_proj, v_proj ...",
        TRAINER,
    )
    d.box(30, 13, 34, 18, "two slots that both sides have mapped", "", FRAME)
    d.bar(32, 19.5, 14, 6.5, "slot 1\nbucket i + 1: filled", PAPER)
    d.bar(48, 19.5, 14, 6.5, "slot 0\nbucket i: landing", PAPER)
    d.note(
        32,
        18.4,
        "shared memory on CPU, device IPC elsewhere;\na slot is filled anew when every engine has\n"
        "acknowledged what was in it",
        fontsize=7.5,
    )
    d.box(
        71,
        13,
        28,
        18,
        "engine",
        "vLLM's own parameters:\nits tensor parallel part of\nqkv_proj, gate_up_proj ...\n\n"
        "same layout: copied in place\nelse: repacked beside, for the\nkernel that reads it",
        ENGINE,
    )
    d.arrow((23, 22.7), (32, 22.7), "fills", (25, 24.1))
    d.arrow((62, 22.7), (71, 22.7), "lands", (65.3, 24.1))
    d.box(
        1,
        1,
        98,
        8.5,
        "before the engine may generate",
        "every tensor came exactly once with its shape and type   |   "
        "checksum of what was sent = checksum of what landed   |   every parameter\nwas written whole   |   "
        "all engines are done, all trainers commit: only then does the weight version advance",
        USER,
    )
    d.arrow((12, 13), (12, 9.5), "checksum of what is sent", (13, 11.3))
    d.arrow((85, 13), (85, 9.5), "checksum of what landed", (68, 11.3))
    return d


def operator() -> Drawing:
    """The operator's loop, and the life of a job."""
    d = Drawing(50)
    d.box(
        1,
        29,
        19,
        19,
        "API server",
        "RLJob: spec and status\nRayCluster, pods, Secret,\nNetworkPolicy, Events\nKueue, Volcano",
        USER,
    )
    d.box(
        27,
        29,
        20,
        19,
        "observed",
        "what the caches hold,\nwhat Ray says of the driver,\nstep records of the driver\n\nshell/jobs/observe.py",
        OPERATOR,
    )
    d.box(
        53,
        29,
        20,
        19,
        "reconcile",
        "pure: no I/O, no clock\nof its own; may be asked at\nany time, any number\nof times\n\nstate/reconcile.py",
        OPERATOR,
    )
    d.box(
        79,
        29,
        20,
        19,
        "plan",
        "a status, actions, Events,\nwhen to look again\n\nshell/jobs/carry_out.py,\nrender/ for the objects",
        OPERATOR,
    )
    d.arrow((20, 39), (27, 39))
    d.arrow((47, 39), (53, 39))
    d.arrow((73, 39), (79, 39))
    d.axes.plot([89, 89, 10.5], [29, 26, 26], color=INK, linewidth=1.2)
    d.arrow(
        (10.5, 26),
        (10.5, 29),
        "status first, then actions: what must not happen twice is written down before it is done",
        (24, 27.2),
    )
    phases = [("Pending", 1), ("Queued", 21), ("Starting", 41), ("Running", 61), ("Succeeded\nFailed", 83)]
    for name, x in phases:
        d.bar(x, 13, 14, 6, name, DRIVER)
    for start, end in ((15, 21), (35, 41), (55, 61), (75, 83)):
        d.arrow((start, 16), (end, 16))
    d.note(15.2, 22.4, "spec is valid,\nnames are free", fontsize=7)
    d.note(35.2, 22.4, "every pod\nhas its node", fontsize=7)
    d.note(55.2, 22.4, "the driver\nis ready", fontsize=7)
    d.note(76.2, 22.4, "it has ended, and no\nattempt follows", fontsize=7)
    d.bar(61, 2, 14, 5, "Suspended", DRIVER)
    d.arrow((70, 13), (70, 7), "suspend: saved, devices given back", (71, 9.6))
    d.axes.plot([61, 28, 28], [4.5, 4.5, 13], color=INK, linewidth=1.2)
    d.arrow((28, 12), (28, 13), "suspend: false", (36, 5.7))
    d.axes.plot([64, 64, 48], [13, 10, 10], color=INK, linewidth=1.2)
    d.arrow((48, 10), (48, 13), "another attempt, from the newest checkpoint", (34, 8.5))
    return d


if __name__ == "__main__":
    main({"step": step, "switch": switch, "weights": weights, "operator": operator}, Path(__file__).parent)
