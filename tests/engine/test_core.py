"""vLLM's core in this process: ended once, and driven alike where its workers are processes."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from support.live_parts import start_live
from support.traffic import a_trace, kept
from tuner.engine.compat import graphs
from tuner.engine.compat.core import largest_batch_bytes
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.errors import Caveat
from tuner.replay.loop import replay
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Outcome
from tuner.traffic.prompts import PromptSource

pytestmark = [pytest.mark.engine, pytest.mark.model]

CEILING = EngineLimits(8, 512)


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def test_an_engine_is_ended_once_also_when_it_is_collected() -> None:
    """A second end would destroy the process groups of the engine that comes after."""
    engine = start_live(demo_engine_args(), CEILING)
    executor = type(engine._running_core._core.model_executor)
    shutdown, ended = executor.shutdown, []
    with patch.object(executor, "shutdown", lambda self: ended.append(shutdown(self))):
        engine.close()
        del engine
        gc.collect()
    assert len(ended) == 1


@pytest.mark.parametrize("is_own", [True, False])
def test_what_was_offloaded_is_forgotten_and_a_store_of_others_left_alone(
    tmp_path: Path, *, is_own: bool
) -> None:
    """The second replay found every prompt of the first, and took a tenth of its time."""
    store = {
        "kv_connector": "OffloadingConnector" if is_own else "ExampleConnector",
        "kv_connector_module_path": "support.kv_stores" if is_own else None,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    values = {**demo_engine_args(), "kv-transfer-config": json.dumps(store)}
    trace = a_trace([0.0, 1.0, 2.0], prompt=256, output=3)
    engine = start_live(values, CEILING)
    try:
        prompts = PromptSource(trace, engine.info.vocab_size)
        found = [
            measure([replay(engine, trace, prompts, ReplayPlan())]).prefix_cache_hit_ratio
            for _ in range(2)
        ]
    finally:
        engine.close()
    assert found == ([0.0, 0.0] if is_own else [0.0, pytest.approx(0.5)])
    assert (Caveat.KV_KEPT_ELSEWHERE in LiveSource().facts(values).caveats) is not is_own


@pytest.mark.slow
def test_workers_that_are_processes_are_timed_and_read_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    engine = start_live({**demo_engine_args(), "tensor-parallel-size": 2}, CEILING)
    try:
        trace = a_trace([0.0] * 6, prompt=40, output=5)
        engine.set_limits(EngineLimits(4, 128))
        prompts = PromptSource(trace, engine.info.vocab_size)
        log = replay(engine, trace, prompts, ReplayPlan(keep_steps=True))
        executor = engine._running_core._core.model_executor
        shown = graphs.Shown((1, 2), 2)
        assert executor.collective_rpc(graphs.show, args=(shown,)) == [True, True]
        # Of a CPU's memory vLLM measures nothing.
        assert executor.collective_rpc(largest_batch_bytes) == [0, 0]
    finally:
        engine.close()
    assert log.timelines.count(Outcome.COMPLETED) == len(trace)
    steps = kept(log)
    assert steps.prefill_tokens.sum() == 6 * 40
    assert steps.decode_seqs.sum() == 6 * 4
    assert steps.running.max() == 4
    assert (steps.duration_s[steps.prefill_tokens > 0] > 0).all()
