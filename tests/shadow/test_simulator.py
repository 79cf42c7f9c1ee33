"""The simulator replays as vLLM's own scheduler does, and as can be worked out by hand."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.same_replay import (
    assert_same_replay,
    assert_same_result,
    compare_with_the_reference,
    referenced_case,
    simulated_case,
)
from support.schedule_cases import Case, random_case
from support.shadow_parts import a_shape, simulated
from support.traffic import a_trace, kept, warm_session
from tuner.engine.compat.scheduler import SchedulerCore
from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError, ReplayError, ShadowError, TraceError
from tuner.gate import GateLimits
from tuner.replay.arrivals import Sessions, StaticBatches
from tuner.replay.loop import Progress, ReplayLog
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.timeline import Outcome
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.schedule.replay import advance, stop_all
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.simulator import simulate, tiny_replay
from tuner.shadow.step_model import StepModel
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import LoadModel, Turns

CASES_SETTING = "SIMULATOR_CASES"
# For several workers of pytest to share.
PARTS = 4
LIMITS = EngineLimits(8, 256)
# Sums of powers of two are exact: a decode takes 1.5 s alone, a prompt of four tokens 2 s.
STEPS = StepModel.linear(1.0, 0.5, 0.25)


def test_no_traffic_has_anything_compiled_but_what_the_warm_up_compiles() -> None:
    """One request alone once did: columns of one row are contiguous both ways."""
    simulate(*tiny_replay())
    for seed in range(20):
        case = random_case(seed)
        first = case.trace.between(0.0, case.trace.due_s[0] + 1e-9)
        for trace in (first, case.trace):
            simulated_case(replace(case, trace=trace))
    for function in (advance, stop_all):
        compiled: Any = function
        assert len(compiled.signatures) <= 1


@pytest.mark.engine
def test_random_replays_are_those_of_vllms_scheduler() -> None:
    logs = [compare_with_the_reference(seed) for seed in range(100)]
    done = [log for log in logs if isinstance(log, ReplayLog)]
    # Cases in which nothing happens would agree as well.
    assert len(done) > 90
    assert sum(log.steps.preempted > 0 for log in done) > 2
    assert sum(log.steps.cached_tokens > 0 for log in done) > 5
    assert sum(log.timelines.count(Outcome.TIMED_OUT) > 0 for log in done) > 2
    assert sum(log.cut_reason is not None for log in done) > 2
    assert sum(log.timelines.count(Outcome.TURNED_AWAY) > 0 for log in done) > 5
    assert sum(log.timelines.count(Outcome.TRUNCATED) > 0 for log in done) > 5


@pytest.mark.engine
def test_preempted_requests_are_told_alike_whichever_runner_is_to_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The V2 runner is told of one that is resumed as of a new one."""
    made = SchedulerCore.__init__

    def for_v2(core: Any, *args: Any) -> None:
        made(core, *args)
        core.scheduler.use_v2_model_runner = True

    monkeypatch.setattr(SchedulerCore, "__init__", for_v2)
    seen = 0
    for seed in range(300):
        case = random_case(seed)
        simulated = simulated_case(case)
        if isinstance(simulated, ReplayLog) and simulated.steps.preempted:
            assert_same_result(simulated, referenced_case(case))
            seen += 1
    assert seen > 10


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "part",
    [pytest.param(n, marks=pytest.mark.xdist_group(f"replays {n}")) for n in range(PARTS)],
)
def test_thousands_of_random_replays_are_those_of_vllms_scheduler(
    part: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = int(os.environ.get(CASES_SETTING, "6000")) // PARTS
    began_s, steps, first = time.monotonic(), 0, 1000 + part * cases
    for done, seed in enumerate(range(first, first + cases), 1):
        log = compare_with_the_reference(seed)
        steps += log.steps.steps if isinstance(log, ReplayLog) else 0
        if done % 500 == 0 or done == cases:
            took_s = time.monotonic() - began_s
            with capsys.disabled():
                sys.stderr.write(f"\n{done} of {cases} cases, {steps:,} steps, {took_s:.0f} s")


def test_one_request_takes_its_prompt_and_then_a_step_a_token() -> None:
    for asynchronous in (False, True):
        shape = a_shape(asynchronous=asynchronous)
        lines = simulated(a_trace([0.5], 4, 3), LIMITS, STEPS, shape=shape).timelines
        assert lines.sent_s.tolist() == [0.5]
        assert lines.first_s.tolist() == [2.5]
        assert lines.last_s.tolist() == [5.5]
        assert lines.gap_s.values.tolist() == pytest.approx([1.5])
        assert lines.gap_s.weights.tolist() == [2.0]


@pytest.mark.parametrize(
    ("asynchronous", "first_s", "last_s"),
    [
        # The prompt that arrives at 1 s shares the second batch, 2 s to 4.5 s.
        (False, [2.0, 4.5], [6.5, 6.5]),
        # That batch was scheduled at 0 s: it shares the third, 3.5 s to 6 s.
        (True, [2.0, 6.0], [6.0, 7.5]),
    ],
)
def test_a_request_waits_for_the_batches_that_were_scheduled_before_it_came(
    first_s: list[float], last_s: list[float], *, asynchronous: bool
) -> None:
    trace, shape = a_trace([0.0, 1.0], 4, [3, 2]), a_shape(asynchronous=asynchronous)
    lines = simulated(trace, LIMITS, STEPS, shape=shape).timelines
    assert lines.first_s.tolist() == first_s
    assert lines.last_s.tolist() == last_s


def test_a_client_whose_patience_ends_leaves_with_what_was_answered() -> None:
    plan = ReplayPlan(timeout_s=5.0)
    lines = simulated(a_trace([0.0, 0.0], 4, 10), EngineLimits(1, 256), STEPS, plan).timelines
    # Tokens at 2, 3.5, 5 and 6.5 s, the first instant after 5 s.
    assert lines.outcome.tolist() == [Outcome.TIMED_OUT] * 2
    assert lines.output_tokens.tolist() == [4, 0]
    assert lines.last_s[0] == 6.5
    assert np.isnan(lines.first_s[1])


def test_an_answer_that_ends_after_its_clients_patience_is_none() -> None:
    lines = simulated(a_trace([0.0], 4, 2), LIMITS, STEPS, ReplayPlan(timeout_s=3.0)).timelines
    assert lines.outcome.tolist() == [Outcome.TIMED_OUT]
    assert (lines.output_tokens.tolist(), lines.last_s.tolist()) == ([2], [3.5])


def test_a_gate_lets_in_so_many_and_keeps_the_rest_waiting_or_out() -> None:
    trace, gate = a_trace([0.0, 0.0, 0.0], 4, 3), GateLimits(1, max_queued=1)
    lines = simulated(trace, LIMITS, STEPS, ReplayPlan(gate=gate)).timelines
    # Each takes 5 s alone; who waits is let in when the first has ended.
    assert lines.outcome.tolist() == [0, 0, Outcome.TURNED_AWAY]
    assert lines.last_s.tolist()[:2] == [5.0, 10.0]
    hasty = replace(gate, queue_timeout_s=3.0, max_output_tokens=2)
    lines = simulated(trace, LIMITS, STEPS, ReplayPlan(gate=hasty)).timelines
    # Two tokens take 3.5 s: who waits is turned away then.
    assert lines.outcome.tolist() == [Outcome.TRUNCATED, *[Outcome.TURNED_AWAY] * 2]
    assert (lines.output_tokens.tolist(), lines.last_s[0]) == ([2, 0, 0], 3.5)


def test_a_closed_loop_sends_as_soon_as_there_is_room() -> None:
    plan = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=2)
    log = simulated(a_trace([0.0, 7.0, 8.0, 9.0], 4, 1), LIMITS, STEPS, plan)
    # Two prompts in one batch take 3 s.
    assert log.timelines.due_s.tolist() == [0.0, 0.0, 3.0, 3.0]
    assert log.timelines.last_s.tolist() == [3.0, 3.0, 6.0, 6.0]
    assert (log.clock_s, log.is_closed_loop) == (6.0, True)
    assert log.steps.peaks["running"] == 2


def test_a_closed_loop_ends_with_its_recording() -> None:
    trace = a_trace([0.0, 1.0, 1.5], 4, [1, 9, 9], e2e_s=[1.0, 1.0, 2.0])
    plan = ReplayPlan(load_model=LoadModel.CLOSED)
    lines = simulated(trace, LIMITS, STEPS, plan).timelines
    # Two are wanted from 1.5 s on, one from 2 s, none from 3.5 s. The first answer ends at 2 s;
    # the next request brings its first token at 4 s, when the recording is over.
    assert lines.outcome.tolist() == [0, Outcome.UNFINISHED, Outcome.UNFINISHED]
    assert lines.due_s.tolist() == [0.0, 2.0, 4.0]
    assert lines.output_tokens.tolist() == [1, 1, 0]


def test_static_batches_go_when_full_or_when_the_first_has_waited() -> None:
    plan = ReplayPlan(batches=StaticBatches(2, 1.0))
    lines = simulated(a_trace([0.0, 0.5, 0.75, 9.0], 4, 1), LIMITS, STEPS, plan).timelines
    # The third has waited long enough when the first batch ends; the fourth waits by itself.
    assert lines.sent_s.tolist() == [0.5, 0.5, 3.5, 10.0]
    assert lines.last_s.tolist() == [3.5, 3.5, 5.5, 12.0]
    assert lines.due_s.tolist() == [0.0, 0.5, 0.75, 9.0]


def test_a_turn_of_a_session_waits_for_the_answer_before_it() -> None:
    turns = Turns(np.array([-1, 0]), np.array([0.0, 2.0]))
    trace = replace(a_trace([0.0, 1.0], 4, 1), turns=turns)
    waits = simulated(trace, LIMITS, STEPS).timelines
    assert (waits.due_s.tolist(), waits.last_s.tolist()) == ([0.0, 4.0], [2.0, 6.0])
    recorded = ReplayPlan(sessions=Sessions.RECORDED)
    goes = simulated(trace, LIMITS, STEPS, recorded).timelines
    assert (goes.due_s.tolist(), goes.last_s.tolist()) == ([0.0, 1.0], [2.0, 4.0])


@pytest.mark.parametrize("ids", [None, [(1, 2), (1, 2, 3, 4)]], ids=["lengths", "hashes"])
def test_a_next_turn_finds_the_answer_before_it_in_the_cache(
    ids: list[tuple[int, ...]] | None,
) -> None:
    trace = replace(
        a_trace([0.0, 1.0], [40, 72], [20, 5]),
        turns=Turns(np.array([-1, 0]), np.array([0.0, 2.0])),
        hashes=None if ids is None else HashIds.from_rows(ids, 16),
    )
    # Of 40 + 20 tokens three blocks of 16; of the prompt alone two.
    assert simulated(trace, LIMITS, STEPS).steps.cached_tokens == 48
    recorded = ReplayPlan(sessions=Sessions.RECORDED)
    apart = simulated(trace, LIMITS, STEPS, recorded)
    assert apart.steps.cached_tokens == (0 if ids is None else 32)


@pytest.mark.parametrize("allowed_late", [0, 1, 2])
def test_a_replay_is_cut_once_too_many_are_late(allowed_late: int) -> None:
    # Answers at 2, 4 and 6 s; at 4 s one is late and one is overdue.
    plan = ReplayPlan(cut=CutRule(late_s=3.0, allowed_late=allowed_late))
    log = simulated(a_trace([0.0] * 3, 4, 1), EngineLimits(1, 256), STEPS, plan)
    if allowed_late == 2:
        assert (log.cut_reason, log.clock_s) == (None, 6.0)
        return
    assert log.cut_reason == plan.cut.late_text
    assert log.clock_s == 4.0
    assert log.timelines.outcome.tolist() == [0, 0, Outcome.ABORTED]


def test_a_replay_is_cut_once_its_clock_has_run_for_too_long() -> None:
    plan = ReplayPlan(cut=CutRule(max_clock_s=3.0))
    log = simulated(a_trace([5.0, 5.0], 4, 1), EngineLimits(1, 256), STEPS, plan)
    assert log.cut_reason == "took longer than 3 s on the replay's clock"
    assert log.clock_s == 9.0
    assert log.timelines.count(Outcome.COMPLETED) == 2
    log = simulated(a_trace([5.0] * 3, 4, 1), EngineLimits(1, 256), STEPS, plan)
    assert log.timelines.outcome.tolist() == [0, 0, Outcome.ABORTED]


@pytest.mark.parametrize("cut", [CutRule(late_s=1.5, allowed_late=1), CutRule(max_clock_s=3.5)])
def test_a_turn_that_was_recorded_before_the_window_cuts_no_replay_of_it(cut: CutRule) -> None:
    log = simulated(warm_session(), EngineLimits(1, 256), STEPS, ReplayPlan(cut=cut))
    assert log.cut_reason is None
    # Sent at 6 s, behind the turn that was sent at 5 s: from 7 to 9 s, 5 s after the lead-in.
    assert (log.timelines.due_s.tolist(), log.timelines.last_s.tolist()) == ([2.0], [5.0])


def test_a_replay_is_cut_once_real_time_runs_out() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tuner.shadow.simulator._TURNS", 7)
        plan = ReplayPlan(cut=CutRule(max_wall_s=1e-9))
        log = simulated(a_trace([float(i) for i in range(100)]), LIMITS, STEPS, plan)
    assert log.cut_reason == plan.cut.wall_text
    assert 0 < log.timelines.count(Outcome.COMPLETED) < 100


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize(
    ("prompt", "output", "budget"),
    [(40, 8, 64), (16, 40, 64), (40, 8, 8), (8, 40, 8)],
    ids=["prompt", "answer", "prompt in pieces", "answer in small batches"],
)
def test_a_request_larger_than_the_kv_cache_is_an_error_and_not_a_replay_without_end(
    prompt: int, output: int, budget: int, *, caches: bool, asynchronous: bool
) -> None:
    # Two blocks of 16 tokens: vLLM keeps one of three for itself.
    shape = a_shape(prefix_caching=caches, asynchronous=asynchronous)
    plan = ReplayPlan(cut=CutRule(max_wall_s=10.0))
    trace = a_trace([0.0, 1.0], [prompt, 4], [output, 2])
    with pytest.raises(EngineError) as error:
        simulated(trace, EngineLimits(2, budget), STEPS, plan, shape=shape, num_blocks=3)
    assert "request 0 is larger than the KV cache" in str(error.value)


def test_a_request_longer_than_the_model_takes_is_refused_and_the_others_are_not() -> None:
    log = simulated(
        a_trace([0.0, 0.0], [4, 90], 10), LIMITS, STEPS, shape=a_shape(max_model_len=99)
    )
    assert log.timelines.outcome.tolist() == [Outcome.COMPLETED, Outcome.REFUSED]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_such_option", 1),
        ("policy", "shortest_first"),
        ("max_num_partial_prefills", 4),
    ],
)
def test_what_the_simulator_does_not_know_of_a_scheduler_is_named(
    name: str, value: int | str
) -> None:
    shape = replace(a_shape(), scheduler={"policy": "fcfs", name: value})
    with pytest.raises(ShadowError, match=f"does not know {name}: {value}$") as refused:
        SimulatedEngine(shape, 100, STEPS, LIMITS)
    assert "vLLM" in refused.value.hint


def test_a_kv_cache_of_another_kind_and_one_without_blocks_are_refused() -> None:
    with pytest.raises(ShadowError, match="does not know a KV cache of mamba"):
        SimulatedEngine(a_shape(kv_kind="mamba"), 100, STEPS, LIMITS)
    with pytest.raises(ShadowError, match="2 blocks or more, got 1"):
        SimulatedEngine(a_shape(), 1, STEPS, LIMITS)


def test_arrivals_that_were_not_recorded_are_refused() -> None:
    with pytest.raises(TraceError):
        PreparedTrace(a_trace([0.0]), ReplayPlan(load_model=LoadModel.CLOSED))


def test_a_prefix_that_was_computed_before_is_found_unless_caching_is_off() -> None:
    hashes = HashIds.from_rows([(1, 2), (1, 3)], 16)
    trace = replace(a_trace([0.0, 100.0], 32, 2), hashes=hashes)
    for caches, found in ((True, 16), (False, 0)):
        shape = a_shape(prefix_caching=caches)
        steps = simulated(trace, LIMITS, STEPS, shape=shape).steps
        assert (steps.cached_tokens, steps.prefill_tokens) == (found, 64 - found)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_preempted_request_finds_the_blocks_that_nobody_took_meanwhile(
    *, asynchronous: bool
) -> None:
    # Five blocks of 16: both prompts take two, the third goes to the first request, which
    # comes to four. It takes one of the two blocks that the second had filled.
    trace, computed = a_trace([0.0, 0.0], 32, [20, 20]), {}
    for caches in (False, True):
        shape = a_shape(prefix_caching=caches, asynchronous=asynchronous)
        steps = simulated(trace, LIMITS, STEPS, shape=shape, num_blocks=6).steps
        assert steps.preempted == 1
        computed[caches] = steps.prefill_tokens
    assert computed[False] - computed[True] == 16


def test_kept_steps_add_up_to_the_summary() -> None:
    for seed in range(100):
        log = simulated_case(random_case(seed))
        if isinstance(log, ReplayError) and "lead-in" in str(log):
            continue
        assert isinstance(log, ReplayLog)
        rows, said = kept(log), log.steps
        assert rows.repeats.sum() == said.steps
        assert rows.duration_s.sum() == pytest.approx(said.duration_s)
        for name in ("prefill_tokens", "preempted", "cached_tokens"):
            assert getattr(rows, name).sum() == getattr(said, name), name
        tokens = rows.decode_seqs + rows.prefill_tokens
        assert tokens.max(initial=0) == said.max_step_tokens
        alone = rows.is_decode_only
        assert rows.repeats[alone].sum() == pytest.approx(said.decode_steps.total_weight)
        for name, level in said.levels.items():
            column = "kv_peak_ratio" if name == "kv_usage_ratio" else name
            assert getattr(rows, column).max(initial=0) == pytest.approx(said.peaks[name])
            held = float((getattr(rows, name) * rows.duration_s).sum())
            assert held == pytest.approx(float(level.values @ level.weights), abs=1e-9)
        assert rows.end_s.max(initial=0) <= log.clock_s + 1e-9
        assert (np.diff(rows.end_s) >= 0).all()


def test_every_token_of_an_answer_is_computed_once_without_preemption() -> None:
    log = simulated(a_trace([float(i) for i in range(20)], 10, 7), LIMITS, STEPS)
    assert log.steps.prefill_tokens == 20 * 10
    # The prompt's batch brings the first token.
    assert log.timelines.gap_s.total_weight == 20 * 6
    assert log.timelines.output_tokens.tolist() == [7] * 20


@pytest.mark.parametrize(
    ("asynchronous", "tokens", "clock_s"), [(False, 1, 2.0), (True, 0, 0.0)]
)
def test_the_caller_is_told_and_may_stop(
    monkeypatch: pytest.MonkeyPatch, tokens: int, clock_s: float, *, asynchronous: bool
) -> None:
    monkeypatch.setattr("tuner.shadow.simulator._TURNS", 1)
    monkeypatch.setattr("tuner.shadow.simulator.PROGRESS_EVERY_S", 0.0)
    shown: list[Progress] = []

    def listen(progress: Progress) -> bool:
        shown.append(progress)
        return False

    plan, trace = ReplayPlan(), a_trace([0.0, 0.0, 99.0], 4, 50)
    engine = SimulatedEngine(a_shape(asynchronous=asynchronous), 1000, STEPS, LIMITS)
    log = simulate(engine, PreparedTrace(trace, plan), EngineLimits(1, 256), plan, listen)
    assert [(one.sent, one.ended, one.offered) for one in shown] == [(2, 0, 3)]
    assert log.cut_reason == "stopped by the caller"
    assert log.clock_s == shown[0].clock_s == clock_s
    # Two were in flight, of which one ran; the third was not yet due.
    assert log.timelines.outcome.tolist() == [Outcome.ABORTED] * 3
    assert log.timelines.output_tokens.tolist() == [tokens, 0, 0]
    assert np.isnan(log.timelines.sent_s).tolist() == [False, False, True]


def test_a_caller_who_lets_it_go_on_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, trace = ReplayPlan(keep_steps=True), a_trace([0.7 * i for i in range(50)])
    engine, prepared = (
        SimulatedEngine(a_shape(), 1000, STEPS, LIMITS),
        PreparedTrace(trace, plan),
    )
    alone = simulate(engine, prepared, LIMITS, plan)
    monkeypatch.setattr("tuner.shadow.simulator._TURNS", 7)
    monkeypatch.setattr("tuner.shadow.simulator.PROGRESS_EVERY_S", 0.0)
    shown: list[float] = []

    def listen(progress: Progress) -> bool:
        shown.append(progress.clock_s)
        return True

    assert_same_replay(simulate(engine, prepared, LIMITS, plan, listen), alone)
    assert len(shown) > 2
    assert shown == sorted(shown)


@example(25990)  # steps that are read out one by one
@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_replay_does_not_depend_on_how_it_is_cut_into_slices_or_on_what_is_kept(
    seed: int,
) -> None:
    case = random_case(seed)
    whole = simulated_case(case)
    unkept: Case = replace(case, plan=replace(case.plan, keep_steps=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tuner.shadow.simulator._TURNS", 7)
        # Room for a few steps only, so that they are read out often.
        patch.setattr("tuner.shadow.simulator._LOG_ROWS", 8)
        for sliced in (simulated_case(case), simulated_case(unkept)):
            assert_same_result(sliced, whole)


def of_version(case: Case, version: str) -> ReplayLog:
    """Return the replay as another vLLM decides, with no gate to keep requests from it."""
    shape = replace(case.engine.shape, vllm_version=version)
    engine, plan = replace(case.engine, shape=shape), replace(case.plan, gate=None)
    log = simulated_case(replace(case, engine=engine, plan=plan))
    assert isinstance(log, ReplayLog)
    return log


def test_each_vllm_is_replayed_as_it_decides() -> None:
    """Seeds for which the releases were seen to differ: tests/benchmarks/vllm_versions.py."""
    plain = partial(random_case, has_windows=False)
    alone = [kept(of_version(plain(1), v)).prefill_tokens[0] for v in ("0.30.0", "0.31.0")]
    assert alone == [7, 67]
    scarce = [of_version(plain(15), v).steps.cached_tokens for v in ("0.23.0", "0.24.0")]
    assert scarce[0] < scarce[1]
    for seed, older, newer, preempted in (
        (5297, "0.27.1", "0.28.0", [8, 7]),
        (69, "0.32.0", "0.33.0", [12, 10]),
    ):
        logs = [of_version(plain(seed, is_by_priority=True), v) for v in (older, newer)]
        assert [log.steps.preempted for log in logs] == preempted
    newest = [of_version(plain(15), v).steps for v in ("0.31.0", "0.99.1", "1.0.0", "")]
    assert len({(s.steps, s.cached_tokens) for s in newest}) == 1


@pytest.mark.parametrize(
    ("version", "first_s"),
    [
        # The second prompt shares the second batch.
        ("0.32.0", [2.0, 4.5]),
        # Two batches of 1.5 s go between the prompts.
        ("0.33.0", [2.0, 7.5]),
    ],
)
def test_an_interval_between_prompts_holds_for_an_engine_alone_from_0_33_on(
    version: str, first_s: list[float]
) -> None:
    shape = replace(a_shape(), vllm_version=version, scheduler={"prefill_schedule_interval": 3})
    lines = simulated(a_trace([0.0, 1.0], 4, [6, 2]), LIMITS, STEPS, shape=shape).timelines
    assert lines.first_s.tolist() == first_s


def test_a_workload_is_the_same_whenever_it_is_replayed() -> None:
    case = random_case(11)
    prepared = PreparedTrace(case.trace, case.plan)
    logs = [simulate(case.engine, prepared, case.limits, case.plan) for _ in range(2)]
    assert_same_replay(*logs)
