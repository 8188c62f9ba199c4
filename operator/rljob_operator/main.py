"""`rljob-operator`: runs the operator until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence

from rljob_operator.settings import Settings, SettingsProblem, parse_settings
from rljob_operator.shell.api.access import AccessProblem, find_access
from rljob_operator.shell.jobs.controller import Controller
from rljob_operator.state.reconcile import reconcile

_NEW_OBJECTS = 10_000
"""New objects between two looks of Python for dead cycles. With its usual 700 it walks over the caches several times an
event: 14 % of the operator's time with 250 jobs."""

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; exit code 0 after SIGTERM, 1 when a part broke, 2 when a setting is wrong."""
    try:
        settings = parse_settings(sys.argv[1:] if arguments is None else arguments)
        logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
        asyncio.run(_run(settings))
    except (SettingsProblem, AccessProblem) as error:
        print(f"rljob-operator: {error}", file=sys.stderr)
        return 2
    except Exception:
        logger.exception("stopping: a part of the operator broke")
        return 1
    return 0


async def _run(settings: Settings) -> None:
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    access = await find_access(settings.kubeconfig, settings.context)
    await Controller(access, settings, reconcile).run()  # until SIGTERM, which Kopf heeds


if __name__ == "__main__":
    sys.exit(main())
