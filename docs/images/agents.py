"""Draw the picture of docs/agents.md: `python docs/images/agents.py [FOLDER FOR PNGS]`."""

from __future__ import annotations

from pathlib import Path

from drawing import DRIVER, ENGINE, FRAME, INK, PAPER, USER, Drawing, main


def episode() -> Drawing:
    """One episode of two turns: who works when, and the stream that comes of it."""
    d = Drawing(43)
    rows = {"engine": 30, "driver": 23.5, "environment": 17}
    for row, y in rows.items():
        d.note(1, y + 3.6, row, weight="bold", fontsize=9)
        d.bar(14, y, 85, 5, "", FRAME)
    d.note(
        14,
        41.5,
        "one episode of two turns, from left to right; all episodes of a step play beside each other",
        fontsize=9,
    )
    d.note(
        14,
        38.6,
        "what is coloured works; where no engine has any episode's answer to write, the phase is env_wait",
        fontsize=7.5,
    )
    works = [
        ("environment", 14, 9, "reset(seed)", USER),
        ("driver", 23, 9, "observation\nto tokens", DRIVER),
        ("engine", 32, 12, "answer 1", ENGINE),
        ("driver", 44, 8, "tokens\nto text", DRIVER),
        ("environment", 52, 9, "step('Right')", USER),
        ("driver", 61, 9, "observation\nto tokens", DRIVER),
        ("engine", 70, 12, "answer 2", ENGINE),
        ("driver", 82, 8, "tokens\nto text", DRIVER),
        ("environment", 90, 9, "step('Down')\ndone", USER),
    ]
    for row, x, width, name, color in works:
        d.bar(x, rows[row], width, 5, name, color)
    d.note(1, 13.1, "stream", weight="bold", fontsize=9)
    spans = [
        (14, 18, "<|user|> P _ _ G <|assistant|>", PAPER),
        (32, 12, "Right <eos>", ENGINE),
        (44, 26, "<|user|> _ P _ G <|assistant|>", PAPER),
        (70, 12, "Down <eos>", ENGINE),
    ]
    for x, width, text, color in spans:
        d.bar(x, 9, width, 5, text, color)
    for x, width, text in (
        (14, 18, "prompt"),
        (32, 12, "sampled"),
        (44, 26, "observed: appended, not trained on"),
        (70, 12, "sampled"),
    ):
        d.axes.text(x + width / 2, 7.4, text, ha="center", va="center", color=INK, fontsize=7.5)
    d.note(
        14,
        4.6,
        "tokens are only appended, and none is made twice: the trainer reads the stream as the engine did. The sum of "
        "the steps' rewards\nis that of all sampled tokens; the last observation is recorded and not in the stream",
        fontsize=7.5,
    )
    return d


if __name__ == "__main__":
    main({"episode": episode}, Path(__file__).parent)
