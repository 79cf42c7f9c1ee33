"""Predictions come from the simulator, and from vLLM's own scheduler where it is in doubt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.same_replay import assert_same_replay
from support.shadow_files import a_profile
from support.shadow_parts import RandomTraffic
from support.traffic import a_trace
from tuner.engine.compat.scheduler import SchedulerCore
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.runner import Failure
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Agreement, KvStart, Profile
from tuner.shadow.simulator import room_for
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import Trace

LIMITS = EngineLimits(8, 256)
DEPARTS = "step 7: waiting requests: 3 simulated, 2 by vLLM"


def doubted(**changed: Any) -> Profile:
    """Return a profile whose simulator was found to depart from vLLM."""
    return replace(a_profile(), agreement=Agreement("0.32.0", 6, DEPARTS), **changed)


def traffic(seed: int = 1, n: int = 40) -> Trace:
    return RandomTraffic(seed, n, 60.0, longest_prompt=150, longest_output=60).trace()


def asks_nobody(*given: object, **more: object) -> None:
    raise AssertionError(f"asked with {given} and {more}")


def test_without_a_doubt_vllm_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.shadow.predictor.ReferenceEngine", asks_nobody)
    agreed = replace(a_profile(), agreement=Agreement("0.32.0", 900))
    for profile in (a_profile(), agreed):
        predictor = Predictor(profile)
        assert predictor.doubt == predictor.info(LIMITS).remark == ""
        assert predictor.replay(traffic(), LIMITS, ReplayPlan()).timelines.completed.all()


def test_what_is_in_doubt_is_said_of_the_engine() -> None:
    info = Predictor(doubted()).info(LIMITS)
    assert info.remark == (
        f"vLLM 0.32.0 decides otherwise, {DEPARTS}: vLLM's own scheduler is asked, which "
        "takes longer"
    )
    assert (info.kind, info.ceiling, info.num_blocks) == ("shadow", LIMITS, 20_000)


def test_an_option_that_the_simulator_does_not_know_is_a_doubt() -> None:
    profile = a_profile()
    shape = replace(profile.shape, scheduler={"max_num_partial_prefills": 3})
    predictor = Predictor(replace(profile, shape=shape))
    assert predictor.doubt == "the simulator does not know max_num_partial_prefills: 3"
    assert predictor.info(LIMITS).remark.startswith(predictor.doubt)


def test_a_trace_too_large_for_memory_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = a_trace([float(i) for i in range(1000)])
    assert len(Predictor(a_profile()).replay(trace, LIMITS, ReplayPlan()).timelines) == 1000
    monkeypatch.setattr("tuner.shadow.simulator.free_bytes", lambda: 1e5)
    with pytest.raises(UsageError, match=r"1,000 requests takes 0.0 GB of memory") as refused:
        Predictor(a_profile()).replay(trace, LIMITS, ReplayPlan())
    assert "replay a part of the trace" in refused.value.hint


def test_prefixes_count_in_what_a_replay_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.shadow.simulator.free_bytes", lambda: 1e6)
    ids = HashIds.from_rows([tuple(range(50))] * 100, 16)
    plain = a_trace([float(i) for i in range(100)], 800)
    room = [room_for(t, a_profile().shape) for t in (plain, replace(plain, hashes=ids))]
    assert room[0] == 52  # 19 kB each
    cached = replace(a_profile().shape, prefix_caching=True)
    assert room_for(replace(plain, hashes=ids), cached) < room[1] == room[0]


@pytest.mark.engine
def test_a_doubt_cannot_be_settled_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise UsageError("vLLM is not installed")

    monkeypatch.setattr("tuner.engine.compat.scheduler.stand_in_config", missing)
    with pytest.raises(UsageError, match="vLLM is not installed"):
        Predictor(doubted()).replay(traffic(), LIMITS, ReplayPlan())


@pytest.mark.engine
def test_vllms_scheduler_is_asked_where_the_simulator_departs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = ReplayPlan(keep_steps=True, load=2.0)
    simulated = Predictor(a_profile()).replay(traffic(), LIMITS, plan)
    monkeypatch.setattr("tuner.shadow.predictor.simulate", asks_nobody)
    predictor = Predictor(doubted())
    assert_same_replay(predictor.replay(traffic(), LIMITS, plan), simulated)


@pytest.mark.engine
def test_a_scheduler_that_was_asked_before_answers_as_a_new_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    begin = SchedulerCore.__init__

    def counted(core: SchedulerCore, *given: Any) -> None:
        started.append(core)
        begin(core, *given)

    monkeypatch.setattr(SchedulerCore, "__init__", counted)
    predictor = Predictor(doubted(), ceiling=EngineLimits(16, 512))
    new = predictor.replay(traffic(), LIMITS, ReplayPlan())
    broken_off = ReplayPlan(cut=CutRule(max_clock_s=0.2))
    assert predictor.replay(traffic(), EngineLimits(16, 512), broken_off).cut_reason is not None
    assert_same_replay(predictor.replay(traffic(), LIMITS, ReplayPlan()), new)
    assert len(started) == 1


@pytest.mark.engine
def test_a_scheduler_that_could_not_go_on_is_not_asked_again() -> None:
    few = (KvStart(LIMITS, 5),)
    predictor = Predictor(doubted(kv_starts=few), ceiling=LIMITS)
    failed = predictor.measure([a_trace([0.0], 100, 4)], LIMITS, ReplayPlan())
    assert isinstance(failed, Failure)
    assert "without scheduling anything" in failed.cause
    fine = predictor.measure([a_trace([0.0], 20, 4)], LIMITS, ReplayPlan())
    assert isinstance(fine, Measurement)


def test_a_trace_that_no_setting_serves_is_a_failure_and_no_measurement() -> None:
    predictor = Predictor(replace(a_profile(), kv_starts=(KvStart(LIMITS, 5),)), ceiling=LIMITS)
    failed = predictor.measure([traffic(), a_trace([0.0], 100, 4)], LIMITS, ReplayPlan())
    assert isinstance(failed, Failure)
    assert "larger than the KV cache" in failed.cause


def test_windows_are_pooled() -> None:
    predictor, plan = Predictor(a_profile()), ReplayPlan()
    windows = [traffic(1, 30), traffic(2, 50)]
    found = predictor.measure(windows, LIMITS, plan)
    parts = [predictor.measure([window], LIMITS, plan) for window in windows]
    assert isinstance(found, Measurement)
    assert [one.completed for one in parts if isinstance(one, Measurement)] == [30, 50]
    assert found.completed == 80
    for name in ("steps", "busy_s", "clock_s"):
        assert getattr(found, name) == pytest.approx(sum(getattr(one, name) for one in parts))


def test_each_load_is_predicted_of_its_own_arrivals() -> None:
    """The traces are kept from call to call, at each load and in each way they arrive."""
    predictor, trace = Predictor(a_profile()), traffic()
    loads = [1.0, 3.0, 1.0, 3.0]
    logs = [predictor.replay(trace, LIMITS, ReplayPlan(load=load)) for load in loads]
    assert_same_replay(logs[2], logs[0])
    assert_same_replay(logs[3], logs[1])
    assert logs[1].timelines.e2e_s.mean() > logs[0].timelines.e2e_s.mean()
    other = predictor.replay(traffic(2), LIMITS, ReplayPlan())
    assert other.timelines.due_s.tolist() == traffic(2).due_s.tolist()
