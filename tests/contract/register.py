"""Contracts of other people's software that RLJob's device code relies on, one line each.

Made from it are the checks against the real sources (`test_register.py`) and `docs/ascend-contracts.md`
(`document.py`), and what it calls executed is called in the tests beside it. So a name that the product uses and that
is not here fails a test, and so does one here that the source lost or nothing uses.

Names of torch, vLLM, Megatron and Ray that jobs on CPU use are not here: whole jobs in the tests call them for real.
"""

from __future__ import annotations

import of_devices
import of_models
import of_rollout
from contracts import Contract

CONTRACTS: tuple[Contract, ...] = (*of_devices.CONTRACTS, *of_models.CONTRACTS, *of_rollout.CONTRACTS)
