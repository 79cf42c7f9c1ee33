"""What every engine refuses, whatever stands behind it."""

from __future__ import annotations

from typing import Final

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Engine, Step
from tuner.errors import EngineError

STUCK_TURNS: Final = 10_000
"""Turns without a batch and without a token before an engine counts as stuck: ours; a healthy
one takes one such turn after its last request."""


def check_new_limits(engine: Engine, limits: EngineLimits) -> None:
    """Refuse limits that the engine cannot take now.

    Raises: EngineError while it is busy, or if they lie above those it was started with.
    """
    if engine.has_work():
        raise EngineError("limits change only while the engine is idle")
    if not limits.within(engine.info.ceiling):
        raise EngineError(
            f"limits {limits} lie above the start-up values {engine.info.ceiling}",
            "start the engine with a higher ceiling",
        )


def check_idle(engine: Engine) -> None:
    """Refuse to clear the prefix cache of a busy engine. Raises: EngineError."""
    if engine.has_work():
        raise EngineError("the prefix cache is cleared only while the engine is idle")


def check_busy(engine: Engine) -> None:
    """Refuse a step of an engine without work. Raises: EngineError."""
    if not engine.has_work():
        raise EngineError("a step was asked of an engine without work")


class ProgressGuard:
    """Refuses to turn for ever when nothing can be scheduled."""

    def __init__(self) -> None:
        self._stuck_turns = 0

    def check(self, step: Step) -> None:
        """Count a turn that did nothing. Raises: EngineError after STUCK_TURNS of them."""
        self._stuck_turns = 0 if step.batch or step.emitted else self._stuck_turns + 1
        if self._stuck_turns > STUCK_TURNS:
            raise EngineError(
                f"the engine took {STUCK_TURNS} turns without scheduling anything",
                "a request may be larger than the KV cache; see the engine's log",
            )
