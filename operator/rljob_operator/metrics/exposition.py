"""Prometheus' text format, version 0.0.4.

prometheus_client keeps an object for each bucket of each series and makes one of each line: with a thousand jobs, 80 MB
and five seconds a scrape for the phases alone. Here a job's histogram is one formatted template.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from prometheus_client.utils import floatToGoString

from rljob_api.metrics import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def labels(**values: str) -> str:
    """`name="value",...` with the values escaped; what UTF-8 cannot hold becomes a question mark."""
    return ",".join(
        f'{name}="{value.encode("utf-8", "replace").decode().translate(_ESCAPES)}"' for name, value in values.items()
    )


def header(metric: Metric) -> str:
    """The HELP and TYPE lines of a family."""
    help_text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {metric.exposed_name} {help_text}\n# TYPE {metric.exposed_name} {metric.kind}\n"


def number(value: float) -> str:
    """A sample's value; whole numbers without an exponent."""
    if isinstance(value, int):
        return str(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


class HistogramTemplate:
    """All lines of one histogram series but for the job's labels and the numbers."""

    def __init__(self, metric: Metric, own_labels: str = "") -> None:
        name, rest = metric.name, f",{own_labels}" if own_labels else ""
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        after = [f'{rest},le="{bound}"}} %d\n{name}_bucket{{' for bound in bounds[:-1]]
        last = [f'{rest},le="+Inf"}} %d\n{name}_sum{{', f"{rest}}} %s\n{name}_count{{", f"{rest}}} %d\n"]
        self._around_labels = [f"{name}_bucket{{", *after, *last]

    def render(self, job_labels: str, cumulative: Sequence[int], total: float) -> str:
        """The lines of a job; `cumulative` ends with the number of all observations."""
        template = job_labels.replace("%", "%%").join(self._around_labels)
        return template % (*cumulative, number(total), cumulative[-1])
