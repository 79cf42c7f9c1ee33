"""vLLM on the demo model in the process of the tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveEngine, LiveSource

# vLLM on a CPU looks through all modules for kernels of its own, and fails on an object of this
# one that claims to have every attribute. An engine's own process starts before it is imported.
_HIDDEN = "llvmlite.binding.ffi"


def start_live(
    values: Mapping[str, object], ceiling: EngineLimits, *, is_greedy: bool = False
) -> LiveEngine:
    """Start vLLM at the ceiling, also where numba was imported before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, _HIDDEN, raising=False)
        return LiveSource(is_greedy).start(values, ceiling)
