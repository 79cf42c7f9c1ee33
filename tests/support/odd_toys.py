"""Toys that fail, take their time, or write down how they are started.

Apart from what runs jobs on them: each engine's process imports its source's module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from support.toy import EXIT_CODE, LAST_WORDS, ToyEngine, ToySource
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Step
from tuner.errors import EngineError


@dataclass(frozen=True, slots=True)
class FragileSource(ToySource):
    """A toy that starts and warms up at any ceiling, and fails in a replay above a cap."""

    fails_above: int = 1_000_000
    dies: bool = False

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> FragileEngine:
        """Start a toy at the ceiling."""
        self.facts(values)
        return FragileEngine(self, ceiling)


class FragileEngine(ToyEngine):
    """The toy of a FragileSource."""

    def __init__(self, source: FragileSource, ceiling: EngineLimits) -> None:
        super().__init__(source, ceiling)
        self._fragile = source
        self._cap = 0

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits, which the next step may not survive."""
        super().set_limits(limits)
        self._cap = limits.max_num_seqs

    def step(self) -> Step:
        """Fail, or schedule one batch."""
        if self._cap <= self._fragile.fails_above:
            return super().step()
        if self._fragile.dies:
            os.write(2, f"INFO toy: all is well\n{LAST_WORDS}\n".encode())
            os._exit(EXIT_CODE)
        raise EngineError(f"the toy has no memory for {self._cap} sequences")


@dataclass(frozen=True, slots=True)
class SlowSource(ToySource):
    """A toy whose replays each take a while in real time, so that others can join meanwhile."""

    pause_s: float = 0.0

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> SlowEngine:
        """Start a toy at the ceiling."""
        self.facts(values)
        return SlowEngine(self, ceiling)


class SlowEngine(ToyEngine):
    """The toy of a SlowSource."""

    def __init__(self, source: SlowSource, ceiling: EngineLimits) -> None:
        super().__init__(source, ceiling)
        self._pause_s = source.pause_s

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits, as every replay begins."""
        super().set_limits(limits)
        time.sleep(self._pause_s)


@dataclass(frozen=True, slots=True)
class LostSource(ToySource):
    """A toy whose device is lost."""

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> ToyEngine:  # noqa: ARG002
        """Fail. Raises: EngineError."""
        raise EngineError("the device is lost")


@dataclass(frozen=True, slots=True)
class LoggedSource(ToySource):
    """A toy that writes down each start at the limits, and may refuse the first at some."""

    log: str = ""
    refused: EngineLimits | None = None
    refuses: int = 0

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> ToyEngine:
        """Start a toy, unless it is to be refused. Raises: EngineError."""
        with Path(self.log).open("a") as log:
            log.write(f"{ceiling} {os.getpid()}\n")
        starts = Path(self.log).read_text().splitlines()
        tries = [line for line in starts if line.startswith(f"{self.refused} ")]
        if ceiling == self.refused and len(tries) <= self.refuses:
            raise EngineError("the device has 1 of 80 GiB free")
        return ToySource.start(self, values, ceiling)


@dataclass(frozen=True, slots=True)
class KnobSource(ToySource):
    """A toy whose steps take so many times as long with prefix caching, and that may not start.

    Which values an engine is started with is written down.
    """

    log: str = ""
    times: float = 1.0
    refuses: bool = False

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> ToyEngine:
        """Start a toy. Raises: EngineError."""
        is_on = values.get("enable-prefix-caching") is True
        with Path(self.log).open("a") as log:
            log.write(f"{ceiling} {'on' if is_on else 'off'}\n")
        if is_on and self.refuses:
            raise EngineError("the toy has no cache")
        costs = self.costs.scaled(self.times) if is_on else self.costs
        return ToySource.start(replace(self, costs=costs), values, ceiling)
