"""The guard takes a file back when the server does worse than the old one was predicted to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.prometheus_fake import FakePrometheus, answered, listening, send
from support.traffic import replay_toy, steady
from support.watch_parts import EIGHT, FOUR, HOUR_S, MINUTE_S, UNCHANGED, World, a_world, pays
from tuner import stats
from tuner.drift.compare import MIN_REQUESTS
from tuner.drift.watch.guard import (
    MEAN,
    RATE,
    SETTLE_RATIO,
    TAIL,
    Guard,
    GuardDecision,
    GuardSample,
    GuardVerdict,
    bias_of,
    compared,
    longer_queue,
)
from tuner.drift.watch.policy import Act
from tuner.emit.sources import read_emitted
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.replay.metrics import Measurement, measure
from tuner.stats import Floats
from tuner.traffic.prometheus import Scraped
from tuner.traffic.prometheus.live import Live, live_between
from tuner.traffic.prometheus.readings import E2E

# vLLM's own. Source: build_buckets of request latencies in vllm/v1/metrics/loggers.py.
BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0, math.inf),
)
WRONG_RATIO = 0.05
LASTING_S = 30 * MINUTE_S
REQUESTS = steady(400, per_s=9.0)
LOGS = {limits: replay_toy(REQUESTS, limits) for limits in (EngineLimits(2, 2048), FOUR)}
PREDICTED = {limits: measure([log]) for limits, log in LOGS.items()}
SLOW, FAST = PREDICTED.values()
OVERLOADED = measure([replay_toy(REQUESTS, EngineLimits(1, 2048))])


def served(like: Measurement, times: float = 1.0, requests: int = 400, **more: object) -> Live:
    """Return a server that answers as predicted, with latencies so many times as long."""
    log = next(log for limits, log in LOGS.items() if PREDICTED[limits] is like)
    took_s = log.timelines.e2e_s
    e2e_s = took_s[np.arange(requests) * took_s.size // requests] * times
    return answering(e2e_s, requests / like.requests_per_s, **more)


def answering(e2e_s: Floats, lasting_s: float, **more: object) -> Live:
    """Return a server that took so long for each request."""
    values: dict[str, Any] = {"bounds_s": BOUNDS_S, "mean_e2e": stats.mean(e2e_s), **more}
    bounds_s = values["bounds_s"]
    counts = np.bincount(np.searchsorted(bounds_s, e2e_s), minlength=len(bounds_s))
    seen = {"counts": tuple(counts.tolist()), "covered_ratio": 1.0, "is_there": True}
    return Live(**{"lasting_s": lasting_s, **seen, **values})


def judged(live: Live, old: Measurement, new: Measurement, *, before: Live) -> GuardDecision:
    """Return what is made of a server that did like this before the change and does so now."""
    bias = bias_of(before, old, FOUR, WRONG_RATIO)
    assert bias.why_not == ""
    return compared(live, old, new, WRONG_RATIO, bias.times)


def test_the_toy_is_slower_at_a_cap_of_two_and_overloaded_at_one() -> None:
    assert SLOW.is_sustained
    assert FAST.is_sustained
    assert 1.2 * mean_s(FAST) < mean_s(SLOW) < 3 * mean_s(FAST)
    assert OVERLOADED.requests_per_s < 0.8 * FAST.requests_per_s


def mean_s(measured: Measurement) -> float:
    """Return a predicted mean."""
    found = measured.latency("e2e_s", "mean")
    assert found is not None
    return found


@given(st.floats(0.01, 1.0), st.floats(0.97, 1.03), st.integers(MIN_REQUESTS, 5000))
def test_what_is_no_slower_than_predicted_is_never_held_against_it(
    times: float, before: float, requests: int
) -> None:
    live = served(SLOW, times * before, requests)
    found = judged(live, SLOW, SLOW, before=served(SLOW, before, requests))
    assert found.verdict is GuardVerdict.AGREES


@given(st.floats(2.0, 50.0), st.floats(0.97, 1.03), st.integers(MIN_REQUESTS, 5000))
def test_what_is_twice_as_slow_as_the_old_one_never_passes(
    times: float, before: float, requests: int
) -> None:
    live = served(FAST, times * before, requests)
    found = judged(live, FAST, FAST, before=served(FAST, before, requests))
    assert found.verdict is GuardVerdict.WORSE
    assert "on the same" in found.why


def test_means_see_what_stays_within_the_buckets_of_the_tail() -> None:
    wide = (0.1, 0.3, 2.0, math.inf)
    slow = served(FAST, 2.0, bounds_s=wide)
    assert compared(slow, FAST, FAST, WRONG_RATIO, {}).why.startswith("e2e_mean is ")
    # Without a sum in the metrics only the tail is left, of which the bucket alone is certain.
    found = compared(replace(slow, mean_e2e=None), FAST, FAST, WRONG_RATIO, {})
    assert found.verdict is GuardVerdict.AGREES
    assert "e2e_mean" not in found.why
    far = served(FAST, 20.0, bounds_s=wide, mean_e2e=None)
    found = compared(far, FAST, FAST, WRONG_RATIO, {})
    assert found.verdict is GuardVerdict.WORSE
    assert found.why.startswith("e2e_p95 is ")


def test_fewer_finished_requests_than_predicted_are_worse() -> None:
    live = replace(served(FAST), lasting_s=400 / (0.6 * FAST.requests_per_s))
    found = compared(live, FAST, FAST, WRONG_RATIO, {})
    assert found.verdict is GuardVerdict.WORSE
    assert "requests/s finish, predicted were" in found.why


def test_what_the_new_one_gives_up_on_purpose_is_not_held_against_it() -> None:
    live = served(SLOW)
    assert compared(live, FAST, SLOW, WRONG_RATIO, {}).verdict is GuardVerdict.AGREES
    assert compared(live, FAST, FAST, WRONG_RATIO, {}).verdict is GuardVerdict.WORSE


def test_how_far_the_old_one_was_from_its_prediction_is_allowed_for_in_both_directions() -> (
    None
):
    wrong_ratio = 0.2
    slower, faster = (bias_of(served(FAST, t), FAST, FOUR, wrong_ratio) for t in (1.15, 0.87))
    assert slower.why_not == faster.why_not == ""
    assert [b.times[MEAN].value for b in (slower, faster)] == pytest.approx([1.15, 0.87])
    assert faster.times[TAIL].value < slower.times[TAIL].value
    assert slower.times[RATE].value == pytest.approx(1.0)
    # The same live server is fine after a slow past and bad after a fast one.
    live = served(FAST, 1.35)
    assert compared(live, FAST, FAST, wrong_ratio, slower.times).verdict is GuardVerdict.AGREES
    assert compared(live, FAST, FAST, wrong_ratio, faster.times).verdict is GuardVerdict.WORSE


@pytest.mark.parametrize("times", [3.0, 1 / 3])
def test_a_prediction_that_is_off_by_more_than_its_error_judges_nothing(times: float) -> None:
    bias = bias_of(served(FAST, times), FAST, FOUR, 0.2)
    assert bias.times == {}
    assert bias.why_not.startswith(
        "before the change 4/2048 was further from its prediction than the profile's error of "
        "20%: e2e_mean was "
    )
    assert "tune calibrate" in bias.why_not
    slow = replace(served(FAST), lasting_s=400 * times / FAST.requests_per_s)
    assert "requests/s finished, predicted were" in bias_of(slow, FAST, FOUR, 0.2).why_not


def test_a_quantile_is_interpolated_and_its_interval_holds_what_the_bucket_hides() -> None:
    e2e_s = np.random.default_rng(0).lognormal(1.5, 0.7, 3000)
    live = answering(e2e_s, 600.0)
    for q in (0.5, 0.9, 0.95, 0.99):
        found, true_s = live.e2e_quantile(q), float(np.quantile(e2e_s, q))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low <= true_s <= found.high
        assert {found.low, found.high} <= {0.0, *BOUNDS_S}
        assert found.value == pytest.approx(true_s, rel=0.1)
    assert replace(live, counts=(0.0,) * len(BOUNDS_S)).e2e_quantile(0.5) is None


def looking(
    live: Live, before: Live | None = None, **predicted: Measurement
) -> Callable[[], Guard]:
    """Return a guard that sees one server after the change and, by default, a good one before.

    Both are what was predicted for as long as nothing else is said.
    """
    by_limits = {"old": FOUR, "new": EIGHT}
    was = before or (served(predicted["old"]) if "old" in predicted else live)

    def sample(start_s: float, end_s: float, settings: Sequence[EngineLimits]) -> GuardSample:
        assert end_s - start_s == pytest.approx(LASTING_S)
        found = {by_limits[name]: m for name, m in predicted.items()}
        seen = live if EIGHT in settings else was
        return GuardSample(
            seen, {limits: found[limits] for limits in settings if limits in found}
        )

    return lambda: Guard(LASTING_S, sample, WRONG_RATIO)


def handed_over(world: World) -> None:
    """Change to eight."""
    world.path.write_text("model: toy\nmax-num-seqs: 4\nmax-num-batched-tokens: 2048\n")
    assert world.lasts(pays()) == [Act.CONFIRM, Act.CHANGE]
    world.clock.waits_s.clear()


def on_guard(world: World) -> bool:
    """Say whether the change is on probation."""
    return world.watcher.rollout.is_on_guard


def test_a_change_that_does_as_predicted_stands(tmp_path: Path) -> None:
    with a_world(tmp_path, guard=looking(served(FAST), old=SLOW, new=FAST)) as world:
        handed_over(world)
        assert on_guard(world)
        world.rounds(UNCHANGED, UNCHANGED, UNCHANGED)
        assert not on_guard(world)
        # It looks when its time is up, and not only when the next round is due.
        assert world.clock.waits_s[:2] == [900.0, 360.0]
        assert read_emitted(world.path).limits == EIGHT
        assert "guard: 8/2048 does as well as predicted: e2e_mean " in world.words


def test_a_clock_that_is_put_back_does_not_keep_a_change_on_probation(tmp_path: Path) -> None:
    with a_world(tmp_path, guard=looking(served(FAST), old=SLOW, new=FAST)) as world:
        handed_over(world)
        world.clock.set_by(-48 * HOUR_S)
        world.rounds(UNCHANGED, UNCHANGED, UNCHANGED, UNCHANGED)
        assert not on_guard(world)
        assert "guard: 8/2048 does as well as predicted: e2e_mean " in world.words


def test_a_change_that_makes_things_twice_as_slow_is_taken_back_and_not_tried_again(
    tmp_path: Path,
) -> None:
    before = "model: toy\nmax-num-seqs: 4\nmax-num-batched-tokens: 2048\n"
    guard = looking(served(FAST, 2.0), new=FAST, old=FAST)
    with a_world(tmp_path, guard=guard) as world:
        handed_over(world)
        # While it is on probation nothing else is tried; the guard looks when its time is up.
        assert world.rounds(pays(EngineLimits(32, 2048))) == [Act.CONFIRM]
        world.rounds(UNCHANGED, UNCHANGED)
        assert world.path.read_text() == before
        assert [event for event, _ in world.hook.seen] == ["change", "rollback"]
        assert world.hook.seen[-1][1] == before
        state = world.watcher.store.state
        assert (state.counts.changes, state.counts.rollbacks, state.handover) == (1, 1, None)
        assert "does worse than the old configuration would: e2e_mean is " in world.words
        assert world.watcher.current == FOUR
        # The same advice is not taken again, and the traffic is held against the first.
        world.clock.sleep(24 * HOUR_S)
        assert world.lasts(pays()) == [Act.BARRED, Act.BARRED]
        assert world.script.tuned_for[-2:] == [None, None]


def test_a_queue_that_is_new_takes_a_change_back_whatever_was_predicted(tmp_path: Path) -> None:
    """Metrics that others add to say that all is well; who waits for the server does not."""
    now, before = served(FAST, waiting=12.0), served(SLOW, waiting=0.1)
    guard = looking(now, before, old=SLOW, new=FAST)
    with a_world(tmp_path, guard=guard) as world:
        handed_over(world)
        world.rounds(UNCHANGED, UNCHANGED, UNCHANGED)
        assert world.watcher.store.state.counts.rollbacks == 1
        shown = "12 requests wait in the mean, 0.1 did before the change and"
        assert shown in world.words


@pytest.mark.parametrize(
    ("waiting", "before", "is_longer"),
    [(0.9, 0.0, False), (12.0, 7.0, False), (12.0, 5.0, True), (None, 1.0, False)],
)
def test_a_busier_hour_or_less_than_a_request_is_no_longer_queue(
    waiting: float | None, before: float, *, is_longer: bool
) -> None:
    assert bool(longer_queue(waiting, before, (FAST, FAST))) is is_longer
    # What the new configuration was predicted to queue, or the old one would, is no surprise.
    expected = OVERLOADED.queue_depth.mean
    assert expected > 10
    assert not longer_queue(expected, 0.0, (FAST, OVERLOADED))
    assert not longer_queue(expected, 0.0, (OVERLOADED, FAST))


@pytest.mark.parametrize(("times", "after"), [(3.0, 0.1), (1 / 3, 10.0)])
def test_where_the_old_prediction_was_off_by_three_a_change_neither_passes_nor_is_taken_back(
    tmp_path: Path, times: float, after: float
) -> None:
    guard = looking(served(FAST, after), served(FAST, times), old=FAST, new=FAST)
    with a_world(tmp_path, guard=guard) as world:
        handed_over(world)
        world.rounds(*[UNCHANGED] * 4)
        assert on_guard(world)
        shown = "guard: 8/2048 has no verdict: before the change 4/2048 was further from"
        assert shown in world.words
        assert "it looks again" in world.words
        world.rounds(*[UNCHANGED] * 8)
        assert not on_guard(world)
        assert "gave up without a verdict on 8/2048: before the change" in world.words
        assert world.watcher.current == EIGHT
        assert world.watcher.store.state.counts.rollbacks == 0


def test_how_the_old_one_did_is_asked_of_the_time_before_the_change(tmp_path: Path) -> None:
    asked: list[tuple[float, float, tuple[EngineLimits, ...]]] = []

    def sample(start_s: float, end_s: float, settings: Sequence[EngineLimits]) -> GuardSample:
        asked.append((start_s, end_s, tuple(settings)))
        return GuardSample(served(FAST), dict.fromkeys(settings, FAST))

    with a_world(tmp_path, guard=lambda: Guard(LASTING_S, sample, WRONG_RATIO)) as world:
        handed_over(world)
        # Nothing is asked before the file is written: it would be old by then.
        assert asked == []
        changed_s = world.clock.now_s() - 15 * MINUTE_S
        world.rounds(UNCHANGED, UNCHANGED, UNCHANGED)
        assert asked == [
            (changed_s + 360.0, changed_s + 360.0 + LASTING_S, (FOUR, EIGHT)),
            (changed_s - LASTING_S, changed_s, (FOUR,)),
        ]


def test_a_server_that_is_gone_since_the_change_brings_the_old_file_back(
    tmp_path: Path,
) -> None:
    gone = served(FAST, 1.0, 50, is_there=False)
    with a_world(tmp_path, guard=looking(gone)) as world:
        handed_over(world)
        world.rounds(*[UNCHANGED] * 4)
        assert world.watcher.current == FOUR
        assert "the server shows no metrics any more" in world.words


def test_the_queue_of_a_late_restart_is_not_held_against_the_new_one(tmp_path: Path) -> None:
    asked: list[tuple[float, float]] = []
    slow, well = served(FAST, 20.0), served(FAST)
    up_s: list[float] = []

    def sample(start_s: float, end_s: float, settings: Sequence[EngineLimits]) -> GuardSample:
        if EIGHT not in settings:
            return GuardSample(well, dict.fromkeys(settings, FAST))
        asked.append((start_s, end_s))
        # Up only ten minutes before the guard looks for the first time.
        up_s[:] = up_s or [end_s - 10 * MINUTE_S]
        live = replace(slow, restarted_s=up_s[0]) if start_s < up_s[0] else well
        return GuardSample(live, dict.fromkeys(settings, FAST))

    with a_world(tmp_path, guard=lambda: Guard(LASTING_S, sample, WRONG_RATIO)) as world:
        handed_over(world)
        world.rounds(*[UNCHANGED] * 8)
        assert asked[-1] == pytest.approx((up_s[0] + 360.0, up_s[0] + 360.0 + LASTING_S))
        assert len(asked) == 2
        assert "the server was up again only then; it looks again" in world.words
        assert "does as well as predicted" in world.words


def test_who_looks_again_looks_at_what_came_since(tmp_path: Path) -> None:
    """The first half hour was too quiet to tell; in the next it is twenty times as slow."""
    asked: list[tuple[float, float]] = []

    def sample(start_s: float, end_s: float, settings: Sequence[EngineLimits]) -> GuardSample:
        if EIGHT not in settings:
            return GuardSample(served(FAST), dict.fromkeys(settings, FAST))
        asked.append((start_s, end_s))
        quiet = len(asked) == 1
        live = served(FAST, 20.0, MIN_REQUESTS - 50) if quiet else served(FAST, 20.0)
        return GuardSample(live, dict.fromkeys(settings, FAST))

    with a_world(tmp_path, guard=lambda: Guard(LASTING_S, sample, WRONG_RATIO)) as world:
        handed_over(world)
        world.rounds(*[UNCHANGED] * 8)
        first, second = asked
        assert second[0] >= first[1]
        assert "requests finished, 200 are needed; it looks again" in world.words
        assert "rolling back to 4/2048" in world.words
        assert world.watcher.current == FOUR


Lives = Mapping[str, Sequence[tuple[float, float]]]
"""When each engine was up, in minutes since the change."""

LONG_AGO, FOREVER = -90.0, 240.0
WELL_BEFORE = (LONG_AGO, 0.5)
NOT_SCRAPED = (15.5, 16.5)


def cycles(from_minute: float, up_for: float, every: float) -> list[tuple[float, float]]:
    """Return when a server is up that dies so long after each start."""
    return [(at, at + up_for) for at in np.arange(from_minute, FOREVER, every).tolist()]


def counts_of(
    spans: Sequence[tuple[float, float]], minutes: Floats, per_minute: float
) -> Floats:
    """Return the requests that an engine counted, nan where it was not there.

    After the change it answers so many; before it, as many as anybody would.
    """
    counts = np.full(minutes.size, np.nan)
    for first, last in spans:
        is_up = (minutes >= first) & (minutes < last)
        rate = 540.0 if first < 0 else per_minute
        counts[is_up] = np.floor(rate * (minutes[is_up] - first))
    return counts


def prometheus_of(lives: Lives, changed_s: float, per_minute: float) -> FakePrometheus:
    """Return a Prometheus that scraped these engines."""
    minutes: Floats = np.arange(LONG_AGO, FOREVER, 0.25, dtype=np.float64)
    series = {}
    for instance, spans in lives.items():
        labels = {"__name__": f"{E2E}_bucket", "instance": instance, "le": "+Inf"}
        counts = counts_of(spans, minutes, per_minute)
        if instance == "flaky":
            counts[(minutes >= NOT_SCRAPED[0]) & (minutes < NOT_SCRAPED[1])] = np.nan
        series[tuple(sorted(labels.items()))] = (changed_s + MINUTE_S * minutes, counts)
    return FakePrometheus(series)


@contextmanager
def after_a_change(folder: Path, lives: Lives, per_minute: float = 540.0) -> Iterator[World]:
    """Yield a watch that has handed over, to engines that restart and else do as predicted."""
    past: list[FakePrometheus] = []

    def sample(start_s: float, end_s: float, settings: Sequence[EngineLimits]) -> GuardSample:
        if not past:
            changed_s = start_s - SETTLE_RATIO * LASTING_S
            past.append(prometheus_of(lives, changed_s, per_minute))
        seen = live_between(Scraped(url), start_s, end_s, 15)
        told = {
            name: getattr(seen, name)
            for name in ("covered_ratio", "is_there", "restarted_s", "anew")
        }
        return GuardSample(served(FAST, **told), dict.fromkeys(settings, FAST))

    with listening(lambda handler, asked: send(handler, answered(past[0], asked))) as url:
        guard = Guard(LASTING_S, sample, WRONG_RATIO)
        with a_world(folder, guard=lambda: guard) as world:
            handed_over(world)
            yield world


@pytest.mark.parametrize(
    ("loop", "per_minute"),
    [
        # Three minutes to load the model, and what is served for twelve is served well.
        (cycles(1.0, 12.0, 15.0), 540.0),
        # It ends before it has answered anything, so that no count ever falls.
        (cycles(1.0, 12.0, 15.0), 0.0),
        # So long to load that no window sees it both end and come back.
        (cycles(1.0, 5.0, 32.0), 540.0),
    ],
)
def test_a_server_that_keeps_restarting_since_the_change_brings_the_old_file_back(
    tmp_path: Path, loop: list[tuple[float, float]], per_minute: float
) -> None:
    with after_a_change(tmp_path, {"a": [WELL_BEFORE, *loop]}, per_minute) as world:
        world.rounds(*[UNCHANGED] * 16)
        assert world.words.count("the server was up again only then; it looks again") == 1
        shown = (
            "guard: 8/2048 does worse than the old configuration would: it keeps restarting, "
            "and did not before the change; rolling back to 4/2048"
        )
        assert shown in world.words
        assert [event for event, _ in world.hook.seen] == ["change", "rollback"]
        assert read_emitted(world.path).limits == world.watcher.current == FOUR
        assert world.watcher.store.state.memory.barred == (EIGHT,)


def test_which_engines_restarted_outlives_the_watch(tmp_path: Path) -> None:
    lives = {"a": [WELL_BEFORE, *cycles(1.0, 12.0, 15.0)]}
    with after_a_change(tmp_path, lives) as world:
        world.rounds(*[UNCHANGED] * 3)
        store = world.watcher.store
        assert store.state.handover is not None
        assert store.state.handover.restarted == ('instance="a"',)
        # As the next process finds it.
        store.state, message = store.load()
        assert message == ""
        world.rounds(*[UNCHANGED] * 4)
        assert world.watcher.current == FOUR
        assert store.state.handover is None


@pytest.mark.parametrize(
    "lives",
    [
        # In place, as under systemd and Compose: each falls once, in windows of their own.
        {"a": [(LONG_AGO, 20.0), (23.0, FOREVER)], "b": [(LONG_AGO, 50.0), (53.0, FOREVER)]},
        # A Deployment's pods have new names; the old ones go when those are up.
        {
            "a-old": [(LONG_AGO, 23.0)],
            "a-new": [(20.0, FOREVER)],
            "b-old": [(LONG_AGO, 53.0)],
            "b-new": [(50.0, FOREVER)],
        },
        # Up late, and not scraped just when the guard's next window begins.
        {"flaky": [(LONG_AGO, 7.0), (10.0, FOREVER)]},
    ],
)
def test_replicas_that_restart_once_each_are_no_server_that_keeps_restarting(
    tmp_path: Path, lives: Lives
) -> None:
    with after_a_change(tmp_path, lives) as world:
        world.rounds(*[UNCHANGED] * 16)
        assert "keeps restarting" not in world.words
        assert "guard: 8/2048 does as well as predicted" in world.words
        assert world.watcher.current == EIGHT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "words"),
    [
        (cycles(LONG_AGO, 12.0, 15.0)[:6], "it keeps restarting, as it did before the change"),
        ([], "it keeps restarting, and nobody knows whether it did before the change"),
    ],
)
def test_a_server_that_may_have_kept_restarting_before_the_change_is_left_alone(
    tmp_path: Path, before: list[tuple[float, float]], words: str
) -> None:
    lives = {"a": [*before, *cycles(1.0, 12.0, 15.0)]}
    with after_a_change(tmp_path, lives) as world:
        world.rounds(*[UNCHANGED] * 16)
        assert f"guard: 8/2048 has no verdict: {words}; it looks again" in world.words
        assert f"guard: gave up without a verdict on 8/2048: {words}" in world.words
        assert world.watcher.current == EIGHT
        assert world.watcher.store.state.counts.rollbacks == 0


@pytest.mark.parametrize(
    ("live", "words"),
    [
        (served(FAST, 20.0, covered_ratio=0.5), "Prometheus scraped 50% of the time only"),
        (served(FAST, covered_ratio=0.5, is_there=False), "scraped 50% of the time"),
        (served(FAST, 20.0, 150), "150 requests finished, 200 are needed"),
    ],
)
def test_without_enough_to_see_nothing_is_taken_back(
    tmp_path: Path, live: Live, words: str
) -> None:
    with a_world(tmp_path, guard=looking(live, old=FAST, new=FAST)) as world:
        handed_over(world)
        world.rounds(*[UNCHANGED] * 12)
        assert words in world.words
        assert "guard: gave up without a verdict on 8/2048" in world.words
        assert not on_guard(world)
        assert world.watcher.current == EIGHT


def test_a_file_that_somebody_else_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    slow = served(FAST, 20.0)
    with a_world(tmp_path, guard=looking(slow, new=FAST, old=FAST)) as world:
        handed_over(world)
        others = world.path.read_text() + "enforce-eager: true\n"
        world.path.write_text(others)
        world.rounds(*[UNCHANGED] * 4)
        assert world.path.read_text() == others
        assert "was changed by others since and is left alone" in world.words
        assert len(world.hook.seen) == 1


def test_a_prometheus_that_is_down_when_the_guard_looks_is_asked_later(tmp_path: Path) -> None:
    well, is_down = served(FAST), [False]

    def sample(_: float, __: float, settings: Sequence[EngineLimits]) -> GuardSample:
        if is_down[0]:
            raise UsageError("it is down")
        return GuardSample(well, dict.fromkeys(settings, FAST))

    with a_world(tmp_path, guard=lambda: Guard(LASTING_S, sample, WRONG_RATIO)) as world:
        handed_over(world)
        is_down[0] = True
        assert world.rounds(*[UNCHANGED] * 4)[-1] == "it is down"
        is_down[0] = False
        assert world.rounds(UNCHANGED) == [Act.NONE]
        assert "does as well as predicted" in world.words


def test_without_a_word_of_the_time_before_a_change_nothing_is_judged(tmp_path: Path) -> None:
    quiet = served(FAST, 1.0, 150)
    with a_world(
        tmp_path, guard=looking(served(FAST, 20.0), quiet, old=FAST, new=FAST)
    ) as world:
        handed_over(world)
        world.rounds(*[UNCHANGED] * 4)
        shown = (
            "4/2048 has no measure of the time before the change: 150 requests finished, 200"
        )
        assert shown in world.words
        assert world.watcher.current == EIGHT
