"""Draw docs/images/report-tokens.png: `python docs/images/report_tokens.py RUN`, from the folder of a run.

The samples of the run's report, their tokens coloured, as headless Chromium shows them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import show  # noqa: E402

from rljob_worker.records.trajectories import read_trajectories  # noqa: E402
from rljob_worker.report.page import Heading, Place, document  # noqa: E402
from rljob_worker.report.page_data import sample_rows  # noqa: E402

HEIGHT = 760
"""Pixels."""


def main(run: Path) -> None:
    """Make a page of the newest samples alone, and take its picture."""
    step, _ = read_trajectories(run)
    samples = {"steps": [step], "rows": {str(step): sample_rows(run, step)}, "note": ""}
    data = {"runs": [], "samples": samples, "live": False}
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        page.write_text(document(f"Samples of step {step}", [Heading("All samples"), Place("samples")], {}, data))
        show(page.as_uri(), Path(folder), picture=picture)
        with Image.open(picture) as whole:
            whole.crop((0, 0, whole.width, HEIGHT)).quantize(128).save(
                Path(__file__).parent / "report-tokens.png", optimize=True
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
