"""Real jobs are run as the tests of the driver do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "driver"))
