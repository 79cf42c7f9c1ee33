"""The GPUs that an engine takes, as their driver sees them: clocks, heat, who else is there.

Asked by the process that waits for the engine's, so that it costs no step anything. Needs
nvidia-ml-py, the driver's own interface; without it, or without a driver, nothing is known.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

from tuner.engine.serve_config import hyphenated

EVERY_S: Final = 0.5
"""How often the driver is asked: ours; it averages power over about a second."""
_UNKNOWN: Final = (
    "no GPU is watched: CUDA_VISIBLE_DEVICES={} names one that the driver does not know"
)
_OTHER_ORDER: Final = (
    "no GPU is watched: there are several kinds here, which CUDA counts fastest first and the "
    "driver by their slots; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID in "
    "CUDA_VISIBLE_DEVICES"
)
# What slows a GPU down that should not: NVML's bits for its clocks, and our words for them.
_SLOWED: Final = {
    0x08: "a hardware slowdown",
    0x20: "heat",
    0x40: "heat, by hardware",
    0x80: "its power supply",
}
_POWER_CAP: Final = 0x04
# What holds less of a GPU's memory is no engine: ours, above a bare CUDA context.
_OTHERS_BYTES: Final = 1 << 30
# Slowed down for a larger share of the time, a GPU is no measure: ours.
SLOWED_RATIO: Final = 0.05


@dataclass(frozen=True, slots=True)
class GpuLog:
    """What the driver said of the GPUs during a replay, over all of them and all `samples`.

    `slowed_ratio` is the share of the samples in which one ran below its clock for heat or
    supply, for the `reasons`; `capped_ratio` that in which its power limit held it, as it will
    in production.

    Units: MHz of the SM clock, watts in the mean, degrees Celsius at most.
    """

    samples: int
    sm_mhz_min: float
    sm_mhz_p50: float
    sm_mhz_max: float
    power_w: float
    temperature_c: float
    slowed_ratio: float
    capped_ratio: float
    reasons: tuple[str, ...] = ()

    @property
    def is_slowed(self) -> bool:
        """Whether it was slowed down for too long to measure anything."""
        return self.slowed_ratio > SLOWED_RATIO

    @property
    def text(self) -> str:
        """Return it as a line.

        >>> GpuLog(9, 1410.0, 1755.0, 1980.0, 612.4, 71.0, 0.0, 0.25).text
        'SM clock 1,755 MHz (1,410 … 1,980), 612 W, up to 71 °C, at its power limit 25 %'
        """
        words = (
            f"SM clock {self.sm_mhz_p50:,.0f} MHz ({self.sm_mhz_min:,.0f} … "
            f"{self.sm_mhz_max:,.0f}), {self.power_w:.0f} W, up to {self.temperature_c:.0f} °C"
        )
        if self.capped_ratio:
            words += f", at its power limit {self.capped_ratio:.0%}".replace("%", " %")
        if self.slowed_ratio:
            share = f"{self.slowed_ratio:.0%}".replace("%", " %")
            words += f", slowed down {share} ({', '.join(self.reasons)})"
        return words

    @classmethod
    def pooled(cls, logs: Sequence[Self | None]) -> Self | None:
        """Return several as one, the reasons in NVML's order; None where none is known."""
        known = [log for log in logs if log is not None]
        if not known:
            return None
        samples = sum(log.samples for log in known)

        def mean(name: str) -> float:
            weighted = sum(getattr(log, name) * log.samples for log in known)
            return float(weighted) / samples

        return cls(
            samples=samples,
            sm_mhz_min=min(log.sm_mhz_min for log in known),
            sm_mhz_p50=median(log.sm_mhz_p50 for log in known),
            sm_mhz_max=max(log.sm_mhz_max for log in known),
            power_w=mean("power_w"),
            temperature_c=max(log.temperature_c for log in known),
            slowed_ratio=mean("slowed_ratio"),
            capped_ratio=mean("capped_ratio"),
            reasons=tuple(
                words for words in _SLOWED.values() if any(words in r.reasons for r in known)
            ),
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {**asdict(self), "reasons": list(self.reasons)}


class Gpus:
    """The GPUs of an engine, through NVML; `notes` say why none of them are known."""

    def __init__(
        self,
        nvml: Any,  # noqa: ANN401 - untyped
        handles: Sequence[Any],
        notes: tuple[str, ...] = (),
    ) -> None:
        self._nvml, self._handles, self.notes = nvml, handles, notes

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self | None:
        """Return those that an engine with this configuration takes; None if there are none.

        They are the first that CUDA_VISIBLE_DEVICES names, as many as the engine has workers.
        """
        try:
            nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            return None
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            nvml.nvmlInit()
            every = _every(nvml)
            if _is_counted_otherwise(nvml, every, named):
                return cls(nvml, (), (_OTHER_ORDER,))
        except nvml.NVMLError:
            return None
        try:
            handles = _visible(nvml, every, named)[: _workers(values)]
        except nvml.NVMLError:
            return cls(nvml, (), (_UNKNOWN.format(named),))
        return cls(nvml, handles) if handles else None

    def others(self, own_session: int | None) -> list[str]:
        """Return who else holds memory of the GPUs, each with how much.

        Processes of the session are the engine's own.
        """
        found = {}
        for handle in self._handles:
            with suppress(self._nvml.NVMLError):
                for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    held = int(one.usedGpuMemory or 0)
                    if held >= _OTHERS_BYTES and _session_of(one.pid) != own_session:
                        found[one.pid] = f"{_name_of(one.pid)} with {held / 2**30:.1f} GiB"
                if not found:
                    held = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
                    if held >= _OTHERS_BYTES:
                        words = f"what is not seen from here, with {held / 2**30:.1f} GiB"
                        found[-1] = words
        return list(found.values())

    def sample(self) -> list[GpuLog]:
        """Return what the driver says of each GPU now; nothing of one that does not answer."""
        found = []
        for handle in self._handles:
            with suppress(self._nvml.NVMLError):
                found.append(self._sample(handle))
        return found

    def _sample(self, handle: Any) -> GpuLog:  # noqa: ANN401 - NVML's own, untyped
        """Return what the driver says of one GPU at one instant."""
        nvml = self._nvml
        # Its older name may go.
        name = "nvmlDeviceGetCurrentClocks{}Reasons".format
        asked = getattr(nvml, name("Event"), None) or getattr(nvml, name("Throttle"))
        sm_mhz = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        bits = int(asked(handle))
        reasons = tuple(words for bit, words in _SLOWED.items() if bits & bit)
        return GpuLog(
            1,
            *(sm_mhz, sm_mhz, sm_mhz),
            power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            temperature_c=float(
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            slowed_ratio=float(bool(reasons)),
            capped_ratio=float(bool(bits & _POWER_CAP)),
            reasons=reasons,
        )


class GpuWatch:
    """Looks at GPUs from time to time, for as long as a replay lasts."""

    def __init__(self, gpus: Gpus | None) -> None:
        self._gpus = gpus
        self._samples: list[GpuLog] = []
        self._next_s = 0.0

    def look(self) -> None:
        """Ask the driver, if that was not done a moment ago."""
        now_s = time.monotonic()
        if self._gpus is not None and now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self._samples += self._gpus.sample()

    def log(self) -> GpuLog | None:
        """Return what was seen, None where nothing was."""
        return GpuLog.pooled(self._samples)


def _every(nvml: Any) -> list[Any]:  # noqa: ANN401 - untyped
    """Return the handles of all GPUs that answer, by their slots."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            found.append(nvml.nvmlDeviceGetHandleByIndex(index))
    return found


def _is_counted_otherwise(nvml: Any, every: Sequence[Any], named: str | None) -> bool:  # noqa: ANN401 - untyped
    """Whether CUDA may count these GPUs in another order than the driver, which is by slots."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    is_counted = named is None or any(part.isdigit() for part in _parts(named))
    return is_counted and len({nvml.nvmlDeviceGetName(handle) for handle in every}) > 1


def _visible(nvml: Any, every: Sequence[Any], named: str | None) -> list[Any]:  # noqa: ANN401 - untyped
    """Return the handles of the GPUs that CUDA shows to a process, in its order."""
    if named is None:
        return list(every)
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(part))
        if part.isdigit()
        else _of_uuid(nvml, every, part)
        for part in _parts(named)
    ]


def _of_uuid(nvml: Any, every: Sequence[Any], start: str) -> Any:  # noqa: ANN401 - untyped
    """Return the handle of the only GPU whose UUID begins so, as CUDA takes them."""
    found = [each for each in every if str(nvml.nvmlDeviceGetUUID(each)).startswith(start)]
    # A part of a GPU has a UUID of its own.
    return found[0] if len(found) == 1 else nvml.nvmlDeviceGetHandleByUUID(start)


def _parts(named: str) -> list[str]:
    return [part.strip() for part in named.split(",") if part.strip()]


def _workers(values: Mapping[str, object]) -> int:
    """Return how many GPUs an engine takes.

    >>> _workers({"tensor_parallel_size": "2", "pipeline-parallel-size": 2})
    4
    """
    said = {hyphenated(key): value for key, value in values.items()}
    count = 1
    for key in ("tensor-parallel-size", "pipeline-parallel-size"):
        with suppress(ValueError):
            count *= max(1, int(str(said.get(key, 1))))
    return count


def _session_of(pid: int) -> int | None:
    """Return the session of a process, None for one that is not of this machine's."""
    with suppress(OSError):
        return os.getsid(pid)
    return None


def _name_of(pid: int) -> str:
    with suppress(OSError):
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} (process {pid})"
    return f"process {pid}"
