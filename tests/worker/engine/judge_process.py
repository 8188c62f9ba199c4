"""A judge's engine in a process of its own: judges the texts of a file, sleeps, and judges them again."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rljob_worker.engine.judge import JudgeEngine

if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    engine = JudgeEngine(given["spec"], model_folder=given["folder"], max_tokens=given["max_tokens"], device=0)
    engine.start()

    def judged(texts: list[list[int]]) -> list[object]:
        if given["writes"]:
            return [asdict(said) for said in engine.write(texts, range(len(texts)))]
        return [*engine.score(texts)]

    answer: dict[str, object] = {"first": judged(given["texts"])}
    slept = engine.sleep()
    engine.wake()
    answer |= {"released": slept.released_bytes, "again": judged(given["texts"])}
    try:
        judged([[0] * (given["max_tokens"] + 1)])
    except ValueError as error:
        answer["too_long"] = str(error)
    engine.shutdown(process_ends=True)
    print(f"\nANSWER {json.dumps(answer)}", flush=True)
