"""A toy that behaves as an engine on a CUDA device does, where none is at hand.

Its memory follows the limits that it was started with, and so do the sizes for which graphs are
captured; a step is padded to a graph, and without one takes longer. Sizes and seconds are
invented: nothing measured on it says anything about a device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from support.toy import EXIT_CODE, ToyEngine, ToySource
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Step
from tuner.engine.shape import EngineShape, Graphs
from tuner.errors import EngineError

NO_MEMORY = "No available memory for the cache blocks"
NO_WORKER = (
    "WorkerProc initialization failed due to an exception in a background process. "
    "See stack trace for root cause."
)
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB"


def sizes_at(limits: EngineLimits) -> tuple[int, ...]:
    """Return the sizes that vLLM captures by default: up to twice the cap, and to 512."""
    most = min(2 * limits.max_num_seqs, 512, limits.max_num_batched_tokens)
    sizes = [*(1, 2, 4), *range(8, 256, 8), *range(256, 513, 16)]
    return tuple(size for size in sizes if size <= most)


@dataclass(frozen=True, slots=True)
class CudaSource(ToySource):
    """Starts toys on a device of `memory_blocks`.

    A start keeps the larger of what the activations of its token budget and the sampler of its
    sequences take, and what each graph does; the rest is the KV cache. `hangs_above` and
    `breaks_above` are token budgets above which it never starts, or says so for another reason;
    with a cap above `overflows_above` a step takes more memory than there is, in the warm-up
    too if `overflows_at_once`. With `has_workers` it is a worker's log that says why no start
    fits, as with tensor parallelism.
    """

    memory_blocks: int = 2000
    token_blocks: float = 1 / 16
    seq_blocks: float = 1.0
    graph_blocks: float = 2.0
    eager_s: float = 0.004
    hides_graphs: bool = True
    hangs_above: int = 1_000_000
    breaks_above: int = 1_000_000
    overflows_above: int = 1_000_000
    overflows_at_once: bool = False
    has_workers: bool = False

    def blocks_at(self, limits: EngineLimits) -> int:
        """Return the KV blocks of an engine started with the limits."""
        kept = max(
            self.token_blocks * limits.max_num_batched_tokens,
            self.seq_blocks * limits.max_num_seqs,
        )
        return int(self.memory_blocks - kept - self.graph_blocks * len(sizes_at(limits)))

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> CudaEngine:
        """Start a toy at the ceiling. Raises: EngineError where it does not fit."""
        self.facts(values)
        if ceiling.max_num_batched_tokens > self.hangs_above:
            os.write(1, b"INFO toy: waiting for rank 1\n")
            time.sleep(3600)
        if ceiling.max_num_batched_tokens > self.breaks_above:
            raise EngineError("the engine did not start: no kernel image for this device")
        blocks = self.blocks_at(ceiling)
        if blocks * self.block_size < self.max_model_len:
            if self.has_workers:
                log = f"(Worker_TP1) ERROR {OUT_OF_MEMORY}\nRuntimeError: {NO_WORKER}\n"
                os.write(2, log.encode())
            why = NO_WORKER if self.has_workers else NO_MEMORY
            raise EngineError(f"the engine did not start: {why}")
        return CudaEngine(self, replace(self, num_blocks=blocks), ceiling)


class CudaEngine(ToyEngine):
    """The toy of a CudaSource."""

    def __init__(self, device: CudaSource, toy: ToySource, ceiling: EngineLimits) -> None:
        super().__init__(toy, ceiling)
        self._device, self._sizes = device, sizes_at(ceiling)
        self._may_overflow = device.overflows_at_once
        self._info = replace(
            self._info, captured_sizes=self._sizes, has_own_graphs=device.hides_graphs
        )

    def shape(self) -> EngineShape:
        """Return what a shadow has to know."""
        return replace(super().shape(), captured_sizes=self._info.captured_sizes)

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new limits, and the graphs of such an engine alone."""
        super().set_limits(limits)
        self._may_overflow = True
        if self._device.hides_graphs:
            self._sizes = sizes_at(limits)

    def step(self) -> Step:
        """Schedule one batch; it takes as long as the graph that it is padded to."""
        cap = self.limits.max_num_seqs
        if self._may_overflow and cap > self._device.overflows_above:
            os.write(2, f"{OUT_OF_MEMORY}\n".encode())
            os._exit(EXIT_CODE)
        step = super().step()
        if step.batch is None:
            return step
        tokens = step.batch.tokens
        padded = Graphs(self._sizes).padded(tokens, has_prompt=not step.batch.is_decode_only)
        if padded is None:
            return replace(step, duration_s=step.duration_s + self._device.eager_s)
        more_s = (padded - tokens) * self._device.costs.per_prefill_token_s
        return replace(step, duration_s=step.duration_s + more_s)


class FakeNvmlError(Exception):
    """What the driver's library raises."""


class FakeNvml:
    """The functions of NVML that are asked, on one device that says what it is told to."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    NVMLError = FakeNvmlError

    def __init__(self, **says: Any) -> None:
        self.says: dict[str, Any] = {
            "devices": 1,
            "names": ("NVIDIA H100 80GB HBM3",),
            "clocks": (1755,),
            "power_mw": 612_400,
            "temperature": 71,
            "reasons": (0,),
            "processes": (),
            "used": 0,
            **says,
        }
        self.asked = 0

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own name
        """Begin, where there is a driver."""
        if not self.says["devices"]:
            raise FakeNvmlError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - as above
        """Return how many devices there are."""
        count: int = self.says["devices"]
        return count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802 - as above
        """Return the handle of a device."""
        if index >= self.says["devices"]:
            raise FakeNvmlError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802 - as above
        """Return the handle of a device, of which all of the UUID has to be named."""
        for index in range(self.says["devices"]):
            if self.nvmlDeviceGetUUID(index) == uuid:
                return index
        raise FakeNvmlError("Not Found")

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802 - as above
        """Return the UUID of a device."""
        return f"GPU-{handle}c2fa1d4-0000"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802 - as above
        """Return the name of a device."""
        names: tuple[str, ...] = self.says["names"]
        return names[handle % len(names)]

    def nvmlDeviceGetClockInfo(self, _handle: int, _kind: int) -> int:  # noqa: N802 - as above
        """Return the next clock."""
        self.asked += 1
        clocks: tuple[int, ...] = self.says["clocks"]
        return clocks[(self.asked - 1) % len(clocks)]

    def nvmlDeviceGetPowerUsage(self, _handle: int) -> int:  # noqa: N802 - as above
        """Return milliwatts."""
        power: int = self.says["power_mw"]
        return power

    def nvmlDeviceGetTemperature(self, _handle: int, _sensor: int) -> int:  # noqa: N802 - as above
        """Return degrees."""
        degrees: int = self.says["temperature"]
        return degrees

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: int) -> int:  # noqa: N802 - as above
        """Return the bits of the sample whose clock was asked for last."""
        reasons: tuple[int, ...] = self.says["reasons"]
        return reasons[(self.asked - 1) % len(reasons)]

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> Any:  # noqa: N802 - as above
        """Return who is on the device."""
        return self.says["processes"]

    def nvmlDeviceGetMemoryInfo(self, _handle: int) -> Any:  # noqa: N802 - as above
        """Return its memory."""
        return type("Memory", (), {"used": self.says["used"]})()
