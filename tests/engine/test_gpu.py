"""What the driver says of the GPUs is kept with a replay, and who else is on them is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from support.cuda_toy import CudaSource, FakeNvml
from support.traffic import a_trace
from tuner.engine.compat import serve
from tuner.engine.demo import demo_engine_args
from tuner.engine.gpu import GpuLog, Gpus, GpuWatch
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, EngineError
from tuner.replay.arrivals import ClockKind
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan, doubts
from tuner.replay.process import EngineProcess

HEAT, POWER_CAP = 0x20, 0x04
LIMITS = EngineLimits(8, 256)
GIB = 1 << 30


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Return a driver that the tool finds."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def the_gpus(**values: object) -> Gpus:
    gpus = Gpus.of(values)
    assert gpus is not None
    return gpus


def test_a_replay_keeps_the_clocks_that_it_was_measured_at(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    nvml.says |= {"clocks": (1980, 1410, 1755), "reasons": (0, POWER_CAP, 0)}
    with EngineProcess(CudaSource(), tmp_path / "log") as host:
        host.start({}, LIMITS)
        host.load("all", a_trace([0.0, 1.6]), 0)
        log = host.replay("all", LIMITS, ReplayPlan(clock=ClockKind.WALL))
    assert log.gpu is not None
    assert log.gpu.samples >= 3
    assert (log.gpu.sm_mhz_min, log.gpu.sm_mhz_max) == (1410, 1980)
    assert log.gpu.capped_ratio > 0
    measured = measure([log, log])
    shown = measured.as_json()["gpu"]
    assert shown["power_w"] == pytest.approx(612.4)
    assert shown["samples"] == 2 * log.gpu.samples
    assert Caveat.GPU_SLOWED not in measured.caveats


def test_heat_is_a_caveat_and_a_power_limit_is_none(nvml: FakeNvml) -> None:
    def seen(**says: object) -> GpuLog:
        nvml.says |= says
        watch = GpuWatch(the_gpus())
        for _ in range(4):
            watch._next_s = 0.0
            watch.look()
        log = watch.log()
        assert log is not None
        return log

    capped = seen(reasons=(POWER_CAP,))
    assert (capped.is_slowed, capped.capped_ratio) == (False, 1.0)
    hot = seen(reasons=(0, HEAT))
    assert (hot.is_slowed, hot.slowed_ratio, hot.reasons) == (True, 0.5, ("heat",))
    assert "slowed down 50 % (heat)" in hot.text
    both = GpuLog.pooled([capped, None, hot])
    assert both is not None
    assert (both.samples, both.slowed_ratio, both.reasons) == (8, 0.25, ("heat",))


def test_the_driver_is_not_asked_more_often_than_it_averages(nvml: FakeNvml) -> None:
    watch = GpuWatch(the_gpus())
    for _ in range(100):
        watch.look()
    assert nvml.asked == 1


def test_others_on_the_gpu_are_named_before_the_start_and_beside_its_failure(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    pid = os.getpid()
    nvml.says["processes"] = (
        SimpleNamespace(pid=pid, usedGpuMemory=20 * GIB),
        SimpleNamespace(pid=999_999_999, usedGpuMemory=GIB // 4),
    )
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    with EngineProcess(CudaSource(), tmp_path / "log") as host:
        started = host.start({}, LIMITS)
    assert started.others == (f"{name} (process {pid}) with 20.0 GiB",)
    assert any(f"shared with {name}" in line for line in started.notes)
    with (
        EngineProcess(CudaSource(memory_blocks=1), tmp_path / "log") as host,
        pytest.raises(
            EngineError, match=f"cache blocks; the GPU is shared with {re.escape(name)}"
        ),
    ):
        host.start({}, LIMITS)


def test_the_engines_own_processes_are_not_others(nvml: FakeNvml) -> None:
    mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=20 * GIB)
    nvml.says |= {"processes": (mine,), "used": 20 * GIB}
    gpus = the_gpus()
    assert len(gpus.others(None)) == 1
    nvml.says["used"] = 0
    assert gpus.others(os.getsid(0)) == []


def test_memory_that_nobody_here_holds_is_named_too(nvml: FakeNvml) -> None:
    """As in a container, which does not see the processes of others."""
    nvml.says["used"] = 30 * GIB
    assert the_gpus().others(None) == ["what is not seen from here, with 30.0 GiB"]


@pytest.mark.parametrize(
    ("visible", "values", "count"),
    [
        (None, {}, 1),
        (None, {"tensor-parallel-size": 2}, 2),
        ("3,1", {"tensor_parallel_size": "2"}, 2),
        ("GPU-2c2", {}, 1),
        ("GPU-2c2fa1d4-0000,GPU-1", {"tensor-parallel-size": 2}, 2),
        ("", {}, 0),
        ("9", {}, 0),
    ],
)
def test_the_gpus_that_cuda_shows_are_asked(
    nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    values: dict[str, object],
    count: int,
) -> None:
    nvml.says["devices"] = 4
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = Gpus.of(values)
    assert (0 if gpus is None else len(gpus.sample())) == count


def test_a_gpu_that_is_not_known_for_sure_is_not_watched_and_that_is_told(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA counts the fastest first, the driver by slots: 0 may be the card of the display."""
    nvml.says |= {"devices": 2, "names": ("NVIDIA T400", "NVIDIA H100 PCIe"), "used": 30 * GIB}

    def told(**environment: str) -> tuple[str, ...]:
        with monkeypatch.context() as here:
            for name, value in environment.items():
                here.setenv(name, value)
            with EngineProcess(CudaSource(), tmp_path / "log") as host:
                started = host.start({}, LIMITS)
        is_told = any("no GPU is watched" in line for line in started.notes)
        assert is_told is not bool(started.others)
        return started.notes

    assert any("CUDA_DEVICE_ORDER=PCI_BUS_ID" in line for line in told())
    assert any("several kinds" in line for line in told(CUDA_VISIBLE_DEVICES="1"))
    told(CUDA_DEVICE_ORDER="PCI_BUS_ID")
    told(CUDA_VISIBLE_DEVICES="GPU-1c2fa")
    unknown = told(CUDA_VISIBLE_DEVICES="GPU-7")
    assert any("CUDA_VISIBLE_DEVICES=GPU-7 names one" in line for line in unknown)


def test_nothing_is_known_without_the_library_or_a_driver(nvml: FakeNvml) -> None:
    nvml.says["devices"] = 0
    assert Gpus.of({}) is None
    assert GpuWatch(None).log() is None


def test_a_gpu_that_is_never_idle_runs_at_other_clocks_unless_idle_time_is_waited_out() -> None:
    facts = CudaSource(caveats=frozenset({Caveat.FULL_CLOCKS, Caveat.DEMO_MODEL})).facts({})
    answers = np.full(9, 50)
    assert doubts(facts, ReplayPlan(), answers) == facts.caveats
    assert doubts(facts, ReplayPlan(clock=ClockKind.WALL), answers) == {Caveat.DEMO_MODEL}


@pytest.mark.engine
def test_a_card_has_the_caveat_of_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    serve.prepare_environment()
    import torch
    from vllm import platforms

    config = serve.resolve_config(serve.parse_serve_values(demo_engine_args()))
    assert Caveat.FULL_CLOCKS not in serve.config_caveats(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card = SimpleNamespace(get_device_name=lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(platforms, "current_platform", card, raising=False)
    # A context on it would take memory from whoever serves there.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: pytest.fail("a context"))
    assert Caveat.FULL_CLOCKS in serve.config_caveats(config)
    assert serve.device_name() == "NVIDIA H100 80GB HBM3"


def test_the_drivers_own_library_has_every_function_that_is_asked() -> None:
    real = pytest.importorskip("pynvml")
    asked = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert [name for name in asked if not hasattr(real, name)] == []
    assert Gpus.of({}) is None, "this machine has a GPU after all"


PREPARED = """
import os, sys
from tuner.engine.live import LiveSource

LiveSource().prepare()
is_here = "vllm.v1.engine.llm_engine" in sys.modules
has_context = sys.modules["torch"].cuda.is_initialized()
print(is_here, has_context, os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"])
"""


@pytest.mark.engine
@pytest.mark.slow
def test_a_process_is_prepared_with_vllm_as_it_has_to_be_imported_and_no_context() -> None:
    command = [sys.executable, "-c", PREPARED]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False", "0"]
