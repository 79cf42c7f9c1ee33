"""A toy that says it runs under the installed vLLM, so that its profile fits this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from support.toy import ToyEngine, ToySource
from tuner.engine.compat import serve
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts
from tuner.engine.shape import EngineShape


@dataclass(frozen=True, slots=True)
class InstalledSource(ToySource):
    """Starts toys that a shadow of the installed vLLM can stand in for."""

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Return the toy's facts under this vLLM and on this device."""
        return replace(
            ToySource.facts(self, values), vllm_version=serve.vllm_version(), device=_here()
        )

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> InstalledToy:
        """Start a toy at the ceiling."""
        self.facts(values)
        return InstalledToy(self, ceiling)


class InstalledToy(ToyEngine):
    """The toy of an InstalledSource."""

    def shape(self) -> EngineShape:
        """Return the toy's shape under this vLLM and on this device."""
        return replace(super().shape(), vllm_version=serve.vllm_version(), device=_here())


def _here() -> str:
    return serve.accelerator_name() or "toy"
