"""What every engine refuses, whatever stands behind it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Engine, EngineInfo, Prompt, Step
from tuner.errors import EngineError

STUCK_TURNS: Final = 10_000
"""Turns without a batch and without a token before an engine counts as stuck: ours; a healthy
one takes one such turn after its last request."""


class GuardedEngine(Engine):
    """An engine that refuses what none can do; what it does itself is in its own methods."""

    _info: EngineInfo
    _limits: EngineLimits
    _stuck_turns = 0

    @property
    def info(self) -> EngineInfo:
        """What is known of this engine."""
        return self._info

    @property
    def limits(self) -> EngineLimits:
        """The limits that hold now."""
        return self._limits

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits. Raises: EngineError while busy or above the ceiling."""
        if self.has_work():
            raise EngineError("limits change only while the engine is idle")
        if not limits.within(self._info.ceiling):
            raise EngineError(
                f"limits {limits} lie above the start-up values {self._info.ceiling}",
                "start the engine with a higher ceiling",
            )
        if limits != self._limits:
            self._take(limits)
            self._limits = limits

    def reset(self) -> None:
        """Forget the prefix cache, and what was prepared. Raises: EngineError while busy."""
        if self.has_work():
            raise EngineError("the prefix cache is cleared only while the engine is idle")
        self._forget()

    def prepare(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Nothing: no time is charged for what happens between two steps."""

    def step(self) -> Step:
        """Take one turn. Raises: EngineError without work, or once nothing can be scheduled."""
        if not self.has_work():
            raise EngineError("a step was asked of an engine without work")
        step = self._turn()
        self._stuck_turns = 0 if step.batch or step.emitted else self._stuck_turns + 1
        if self._stuck_turns > STUCK_TURNS:
            raise EngineError(
                f"the engine took {STUCK_TURNS} turns without scheduling anything",
                "a request may be larger than the KV cache; see the engine's log",
            )
        return step

    def _take(self, limits: EngineLimits) -> None:
        """Change the limits of an idle engine, if that takes anything. Raises: EngineError."""

    def _forget(self) -> None:
        """Clear an idle engine's prefix cache, if it has one. Raises: EngineError."""

    @abstractmethod
    def _turn(self) -> Step:
        """Take one turn of an engine that has work."""
