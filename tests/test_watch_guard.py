"""The guard takes a file back when the server does worse than the old one was foretold to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic import replay_toy, steady
from watch_parts import EIGHT, FOUR, HOUR_S, MINUTE_S, UNCHANGED, World, a_world, pays

from tuner.emit.sources import read_emitted
from tuner.engine.protocol import EngineLimits
from tuner.errors import UsageError
from tuner.metrics import Measurement, measure
from tuner.slo import QUANTILES
from tuner.watch.guard import LEAST_REQUESTS, MOST_BIAS, TAIL, Guard, Guarded, Look, compared
from tuner.watch.live import Live
from tuner.watch.policy import Act

BOUNDS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, math.inf)
WRONG_RATIO = 0.05
LASTING_S = 30 * MINUTE_S
REQUESTS = steady(400, per_s=20.0)
FORETOLD = {
    limits: measure([replay_toy(REQUESTS, limits)]) for limits in (EngineLimits(1, 2048), FOUR)
}
SLOW, FAST = FORETOLD.values()


def tail_s(measured: Measurement) -> float:
    """Return a foretold p95."""
    found = measured.latency("e2e_s", "p95")
    assert found is not None
    return found


def live_at(latency_s: float, per_s: float, requests: int = 400, **more: object) -> Live:
    """Return a server on which every request took so long."""
    counts = np.zeros(len(BOUNDS_S))
    counts[np.searchsorted(BOUNDS_S, latency_s)] = requests
    values = {"covered_ratio": 1.0, "is_there": True} | more
    return Live(requests / per_s, BOUNDS_S, tuple(counts.tolist()), **values)  # type: ignore[arg-type]


def test_the_toy_is_much_slower_at_a_cap_of_one() -> None:
    assert tail_s(SLOW) > 3 * tail_s(FAST)
    assert SLOW.requests_per_s < 0.8 * FAST.requests_per_s


@given(st.floats(0.01, 50.0), st.integers(LEAST_REQUESTS, 5000), st.floats(0, 0.5))
def test_a_latency_within_what_was_foretold_is_never_held_against_it(
    share: float, requests: int, wrong_ratio: float
) -> None:
    live = live_at(tail_s(SLOW) * min(share, 1.0), SLOW.requests_per_s, requests)
    judged = compared(live, SLOW, SLOW, wrong_ratio, {})
    assert judged.found is Guarded.AGREES


@given(st.floats(2.1, 50.0))
def test_a_latency_beyond_its_whole_range_always_is(times: float) -> None:
    # Bounds are a factor of two apart, so that the range lies above at twice the prediction.
    latency_s = tail_s(FAST) * 2 * times * (1 + WRONG_RATIO)
    judged = compared(live_at(latency_s, FAST.requests_per_s), FAST, FAST, WRONG_RATIO, {})
    assert judged.found is Guarded.WORSE
    assert "e2e_p95 is above" in judged.why


def test_fewer_finished_requests_than_foretold_are_worse() -> None:
    live = live_at(tail_s(FAST), FAST.requests_per_s * 0.6)
    judged = compared(live, FAST, FAST, WRONG_RATIO, {})
    assert judged.found is Guarded.WORSE
    assert "requests/s finish, foretold were at least" in judged.why


def test_what_the_new_one_gives_up_on_purpose_is_not_held_against_it() -> None:
    live = live_at(tail_s(SLOW), SLOW.requests_per_s)
    assert compared(live, FAST, SLOW, WRONG_RATIO, {}).found is Guarded.AGREES
    assert compared(live, FAST, FAST, WRONG_RATIO, {}).found is Guarded.WORSE


def test_what_was_off_before_may_be_off_after() -> None:
    live = live_at(tail_s(FAST) * 2.2, FAST.requests_per_s)
    within_s = live.e2e_within_s(QUANTILES["p95"])
    assert within_s is not None
    bias = 1.2 * within_s[0] / tail_s(FAST)
    assert compared(live, FAST, FAST, WRONG_RATIO, {TAIL: bias}).found is Guarded.AGREES


def looking(live: Live, **foretold: Measurement) -> Callable[[], Guard]:
    """Return a guard that always sees the same server, and the given predictions."""
    by_limits = {"old": FOUR, "new": EIGHT}

    def look(start_s: float, end_s: float, settings: Sequence[EngineLimits]) -> Look:
        assert end_s - start_s == pytest.approx(LASTING_S)
        found = {by_limits[name]: m for name, m in foretold.items()}
        return Look(live, {limits: found[limits] for limits in settings if limits in found})

    return lambda: Guard(LASTING_S, look, WRONG_RATIO)


def handed_over(world: World) -> None:
    """Change to eight."""
    world.path.write_text("model: toy\nmax-num-seqs: 4\nmax-num-batched-tokens: 2048\n")
    assert world.rounds(pays(), pays()) == [Act.CONFIRM, Act.CHANGE]


def on_guard(world: World) -> bool:
    """Say whether the change is on probation."""
    return world.watcher.handing.is_on_guard


def test_a_change_that_does_as_foretold_stands(tmp_path: Path) -> None:
    well = live_at(tail_s(FAST), FAST.requests_per_s)
    with a_world(tmp_path, guard=looking(well, old=SLOW, new=FAST)) as world:
        handed_over(world)
        assert on_guard(world)
        world.rounds(UNCHANGED, UNCHANGED, UNCHANGED)
        assert not on_guard(world)
        # It looks when its time is up, and not only when the next round is due.
        assert world.clock.waits_s[:4] == [900.0, 900.0, 900.0, 360.0]
        assert read_emitted(world.path).limits == EIGHT
        assert "guard: 8/2048 does as well as foretold: e2e_p95 within" in world.words


def test_a_change_that_does_worse_is_taken_back_and_not_tried_again(tmp_path: Path) -> None:
    slow = live_at(20.0, FAST.requests_per_s)
    before = "model: toy\nmax-num-seqs: 4\nmax-num-batched-tokens: 2048\n"
    with a_world(tmp_path, guard=looking(slow, new=FAST, old=FAST)) as world:
        handed_over(world)
        # While it is on probation nothing else is tried; the guard looks when its time is up.
        assert world.rounds(pays(EngineLimits(16, 2048))) == [Act.CONFIRM]
        assert world.rounds(pays(EngineLimits(16, 2048))) == [Act.GUARDED]
        world.rounds(UNCHANGED)
        assert world.path.read_text() == before
        assert [event for event, _ in world.hook.seen] == ["change", "rollback"]
        assert world.hook.seen[-1][1] == before
        state = world.watcher.book.state
        assert (state.counts.changes, state.counts.rollbacks, state.handover) == (1, 1, None)
        assert "does worse than the old configuration would: e2e_p95 is above" in world.words
        assert world.watcher.present == FOUR
        # The same advice is not taken again, and the traffic is held against the first.
        world.script.verdicts.clear()
        world.clock.sleep(24 * HOUR_S)
        assert world.rounds(pays(), pays()) == [Act.BARRED, Act.BARRED]
        assert world.script.tuned_for[-2:] == [None, None]


def test_a_server_that_is_gone_since_the_change_brings_the_old_file_back(
    tmp_path: Path,
) -> None:
    gone = live_at(1.0, 1.0, 50, is_there=False)
    with a_world(tmp_path, guard=looking(gone)) as world:
        handed_over(world)
        world.rounds(*[UNCHANGED] * 4)
        assert world.watcher.present == FOUR
        assert "the server shows no metrics any more" in world.words


def test_the_queue_of_a_late_restart_is_not_held_against_the_new_one(tmp_path: Path) -> None:
    asked: list[tuple[float, float]] = []
    slow, well = (live_at(t, FAST.requests_per_s) for t in (20.0, tail_s(FAST)))
    up_s: list[float] = []

    def look(start_s: float, end_s: float, settings: Sequence[EngineLimits]) -> Look:
        asked.append((start_s, end_s))
        # Up only ten minutes before the guard looks for the first time.
        up_s[:] = up_s or [end_s - 10 * MINUTE_S]
        live = replace(slow, restarted_s=up_s[0]) if start_s < up_s[0] else well
        return Look(live, dict.fromkeys(settings, FAST))

    with a_world(tmp_path, guard=lambda: Guard(LASTING_S, look, WRONG_RATIO)) as world:
        handed_over(world)
        asked.clear()
        up_s.clear()
        world.rounds(*[UNCHANGED] * 8)
        assert asked[-1] == pytest.approx((up_s[0] + 360.0, up_s[0] + 360.0 + LASTING_S))
        assert len(asked) == 2
        assert "the server was up again only then; it looks again" in world.words
        assert "does as well as foretold" in world.words


@pytest.mark.parametrize(
    ("live", "words"),
    [
        (live_at(20.0, 1.0, covered_ratio=0.5), "Prometheus looked at 50% of the time only"),
        (live_at(20.0, 1.0, covered_ratio=0.5, is_there=False), "looked at 50% of the time"),
        (live_at(20.0, 1.0, 150), "150 requests finished, 200 are needed"),
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
        assert world.watcher.present == EIGHT


def test_a_file_that_somebody_else_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    slow = live_at(20.0, FAST.requests_per_s)
    with a_world(tmp_path, guard=looking(slow, new=FAST, old=FAST)) as world:
        handed_over(world)
        others = world.path.read_text() + "enforce-eager: true\n"
        world.path.write_text(others)
        world.rounds(*[UNCHANGED] * 4)
        assert world.path.read_text() == others
        assert "was changed by others since and is left alone" in world.words
        assert len(world.hook.seen) == 1


def test_a_prometheus_that_is_down_when_the_guard_looks_is_asked_later(tmp_path: Path) -> None:
    well, is_down = live_at(tail_s(FAST), FAST.requests_per_s), [False]

    def look(_: float, __: float, settings: Sequence[EngineLimits]) -> Look:
        if is_down[0]:
            raise UsageError("it is down")
        return Look(well, dict.fromkeys(settings, FAST))

    with a_world(tmp_path, guard=lambda: Guard(LASTING_S, look, WRONG_RATIO)) as world:
        handed_over(world)
        is_down[0] = True
        assert world.rounds(*[UNCHANGED] * 4)[-1] == "it is down"
        is_down[0] = False
        world.script.verdicts.clear()
        assert world.rounds(UNCHANGED) == [Act.NONE]
        assert "does as well as foretold" in world.words


def test_a_server_that_was_slower_than_its_shadow_before_may_be_so_after(
    tmp_path: Path,
) -> None:
    bounds_s, per_s = (1.5 * tail_s(FAST), math.inf), FAST.requests_per_s
    live = Live(400 / per_s, bounds_s, (0.0, 400.0), 1.0, is_there=True)
    assert compared(live, FAST, FAST, WRONG_RATIO, {}).found is Guarded.WORSE
    with a_world(tmp_path, guard=looking(live, old=FAST, new=FAST)) as world:
        handed_over(world)
        world.rounds(UNCHANGED, UNCHANGED, UNCHANGED)
        assert "does as well as foretold" in world.words


def test_the_bias_is_known_from_before_and_bounded() -> None:
    def bias(live: Live) -> dict[str, float]:
        return looking(live, old=FAST)().bias_before(1e9, FOUR)

    as_foretold = bias(live_at(tail_s(FAST), FAST.requests_per_s))
    assert as_foretold == {TAIL: 1.0, "requests_per_s": pytest.approx(1.0)}
    assert bias(live_at(25.0, FAST.requests_per_s))[TAIL] == MOST_BIAS
    assert bias(replace(live_at(25.0, 1.0), covered_ratio=0.1)) == {}
