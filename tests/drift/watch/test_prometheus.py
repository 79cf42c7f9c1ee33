"""The whole circle over a real Prometheus: notice, re-tune, hand over, guard."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from support.prometheus_parts import backfill, need_prometheus, prometheus, scraped
from support.prometheus_past import END_S, PastEngine
from support.shadow_files import a_profile, home
from support.watch_parts import JumpingClock
from tuner.cli.watch import WatchOptions, run_watch
from tuner.cli.watch_command import watch
from tuner.emit.sources import read_emitted
from tuner.engine.limits import EngineLimits
from tuner.replay.plan import ReplayPlan
from tuner.shadow.predictor import Predictor
from tuner.stats import Floats
from tuner.traffic.prometheus.client import Series, Span
from tuner.traffic.prometheus.live import _anew, _restarted_s, live_between
from tuner.traffic.traces import Trace

__all__ = ["home"]

MINUTE_S = 60.0
START_S = END_S - 25 * MINUTE_S
# When the watch first looks.
LOOKS_S = START_S + 10 * MINUTE_S
E2E = "vllm:e2e_request_latency_seconds"
# vLLM's own. Source: build_buckets of request latencies in vllm/v1/metrics/loggers.py.
E2E_BOUNDS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True, eq=False)
class TimedEngine(PastEngine):
    """A past in which it is known how long each request took.

    Shapes: took_s is [n].
    """

    took_s: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def ends_s(self) -> Floats:
        """When each request was answered."""
        return self.arrived_s + self.took_s

    def lines(self) -> list[str]:
        """Return the history with the histogram of latencies, and that it was scraped."""
        own = f'instance="{self.instance}",model_name="{self.model}",engine="{self.engine}"'
        found = [line for line in PastEngine.lines(self) if not line.startswith(E2E)]
        for at_s in self.scrapes_s.tolist():
            done_s = self.took_s[self.ends_s <= at_s]
            for bound in (*E2E_BOUNDS_S, math.inf):
                le = "+Inf" if bound == math.inf else f"{bound}"
                count = int((done_s <= bound).sum())
                found.append(f'{E2E}_bucket{{le="{le}",{own}}} {count} {at_s:.3f}')
            found.append(f"{E2E}_sum{{{own}}} {done_s.sum()} {at_s:.3f}")
            found.append(f"{E2E}_count{{{own}}} {len(done_s)} {at_s:.3f}")
            found.append(f"{E2E}_created{{{own}}} {START_S} {at_s:.3f}")
            found.append(f'up{{instance="{self.instance}"}} 1 {at_s:.3f}')
        return found


def traffic(seed: int = 7, per_s: float = 8.0) -> Trace:
    """Return traffic at a rate that a cap of four only just bears."""
    rng = np.random.default_rng(seed)
    n = rng.poisson(per_s * (END_S - START_S))
    return Trace(
        due_s=np.sort(rng.uniform(0, END_S - START_S, n)),
        prompt_tokens=np.rint(rng.uniform(100, 300, n)).astype(np.int64),
        output_tokens=np.rint(rng.uniform(40, 120, n)).astype(np.int64),
    )


def took_s(trace: Trace, limits: EngineLimits) -> Floats:
    """Return how long each request takes on a server that does as the profile predicts."""
    log = Predictor(a_profile()).replay(trace, limits, ReplayPlan())
    assert log.timelines.completed.all()
    return log.timelines.e2e_s


def an_engine(model: str, trace: Trace, took_s: Floats) -> TimedEngine:
    """Return the past of a server that took so long for the traffic."""
    return TimedEngine(
        arrived_s=trace.due_s + START_S,
        prompt=trace.prompt_tokens,
        output=trace.output_tokens,
        scrapes_s=np.arange(START_S, END_S + 1, 15.0, dtype=np.float64),
        model=model,
        instance=f"{model}:8000",
        hit_ratio=0.0,
        took_s=took_s,
    )


@pytest.fixture(scope="module")
def pasts() -> dict[str, TimedEngine]:
    """Return servers that did as predicted until the watch looked, and others since.

    `right` does as the new limits are predicted to, `wrong` makes all take twice as long as on
    the old ones, `other` was three times as slow as predicted all along.
    """
    trace = traffic()
    old_s, new_s = (took_s(trace, EngineLimits(cap, 512)) for cap in (4, 24))
    is_later = trace.due_s + START_S > LOOKS_S
    took = {
        "right": np.where(is_later, new_s, old_s),
        "wrong": np.where(is_later, 2 * old_s, old_s),
        "other": 3 * np.where(is_later, new_s, old_s),
    }
    return {model: an_engine(model, trace, each_s) for model, each_s in took.items()}


def a_fleet() -> list[TimedEngine]:
    """Return three replicas that did as predicted, one of them at the rate of `traffic`."""
    found = []
    for seed, per_s in ((8, 7.0), (7, 8.0), (9, 9.0)):
        trace = traffic(seed, per_s)
        old_s, new_s = (took_s(trace, EngineLimits(cap, 512)) for cap in (4, 24))
        is_later = trace.due_s + START_S > LOOKS_S
        one = an_engine("fleet", trace, np.where(is_later, new_s, old_s))
        found.append(replace(one, instance=f"fleet-{seed}:8000"))
    return found


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory, pasts: dict[str, TimedEngine]
) -> Iterator[str]:
    """Run a Prometheus that knows those servers."""
    need_prometheus()
    folder = tmp_path_factory.mktemp("prometheus")
    served = (*pasts.values(), *a_fleet())
    backfill(folder, [line for engine in served for line in engine.lines()])
    with prometheus(folder) as found:
        yield found


def once(home: Path, url: str, clock: JumpingClock, *more: str) -> int:
    """Run `tune watch --once` at the clock's time. Raises: TunerError."""
    copy = (
        "import os, pathlib, shutil; file = pathlib.Path(os.environ['TUNE_FILE']); "
        "shutil.copy(file, file.with_name('handed.yaml'))"
    )
    arguments = [
        *("--once", "--prometheus", url, "--profile", str(home / "profile.yaml")),
        *("--emit", str(home / "best.yaml"), "--state", str(home / "state")),
        *("--since", "5m", "--step", "15s", "--guard", "4m"),
        *("--force-profile", "--max-num-seqs", "4,24"),
        *("--hook", sys.executable, "--hook", "-c", "--hook", copy, *more),
    ]
    params = watch.make_context("watch", arguments).params
    return run_watch(WatchOptions.parse(params, ()), clock)


@pytest.mark.engine
def test_live_metrics_are_those_of_the_stretch(url: str, pasts: dict[str, TimedEngine]) -> None:
    for engine in pasts.values():
        end_s = LOOKS_S + 10 * MINUTE_S
        live = live_between(scraped(url, engine.model), LOOKS_S, end_s, 15)
        done = (engine.ends_s > LOOKS_S) & (engine.ends_s <= end_s)
        assert live.requests == int(done.sum())
        assert live.requests_per_s == pytest.approx(done.sum() / (10 * MINUTE_S))
        tail, mean = live.e2e_quantile(0.95), live.mean_e2e
        assert tail is not None
        assert tail.low is not None
        assert tail.high is not None
        assert tail.low <= np.quantile(engine.took_s[done], 0.95) <= tail.high
        assert mean is not None
        assert mean.low is not None
        assert mean.high is not None
        assert mean.value == pytest.approx(engine.took_s[done].mean())
        assert 0.8 * mean.value < mean.low < mean.value < mean.high < 1.2 * mean.value
        assert (live.covered_ratio, live.is_there, live.restarted_s) == (1.0, True, None)
    # Before the first scrape there was no server: it is up anew, and its rate is that since.
    right = pasts["right"]
    early = live_between(scraped(url, "right"), START_S - 600, START_S + 600, 15)
    done = right.ends_s <= START_S + 600
    assert early.restarted_s == START_S
    assert early.requests_per_s == pytest.approx(done.sum() / 600)
    # A quarter of an hour after the last scrape nothing is known any more.
    late = live_between(scraped(url, "right"), END_S - 900, END_S + 900, 15)
    assert not late.is_there
    assert late.covered_ratio == pytest.approx(0.65, abs=0.02)


def test_one_replica_more_is_no_restart_and_most_of_them_anew_is() -> None:
    span = Span(0, 60, 15)

    def engine(name: str, *values: float) -> Series:
        return Series({"instance": name, "le": "+Inf"}, np.array(values))

    stays = [engine(name, 1, 2, 3, 4, 5) for name in "ab"]
    more = engine("c", math.nan, math.nan, 0, 1, 2)
    anew = [engine(name, 5, 6, 0, 1, 2) for name in "de"]
    assert _restarted_s([*stays, more], span, {}) is None
    assert _restarted_s([more, *anew], span, {}) == 30.0
    assert _anew([*stays, more], span, {}) == ('instance="c"',)
    assert _anew([more, *anew], span, {}) == ('instance="c"', 'instance="d"', 'instance="e"')


def test_an_idle_engine_that_was_not_scraped_for_a_while_has_not_restarted() -> None:
    span, gap = Span(600, 660, 15), np.array([0.0, 0.0, math.nan, math.nan, 0.0])
    idle = Series({"instance": "a", "le": "+Inf"}, gap)
    hidden = Series({"instance": "a", "le": "+Inf"}, np.array([math.nan, 0.0, 0.0, 0.0, 0.0]))
    # As long as nobody says when its counters were made, it may have.
    assert _restarted_s([idle], span, {}) == 660.0
    made = {'instance="a"': np.full(5, 30.0)}
    for series in (idle, hidden):
        assert _restarted_s([series], span, made) is None
        assert _anew([series], span, made) == ()
    # One that ends again and again before it answers anything counts no further either.
    again = {'instance="a"': np.array([30.0, 30.0, math.nan, math.nan, 655.0])}
    assert _restarted_s([idle], span, again) == 660.0
    assert _anew([idle], span, again) == ('instance="a"',)
    later = {'instance="a"': np.full(5, 610.0)}
    assert _restarted_s([hidden], span, later) == 615.0
    assert _anew([hidden], span, later) == ('instance="a"',)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words", "stands"),
    [
        ("right", "does as well as predicted: e2e_mean is ", True),
        ("fleet", "does as well as predicted: e2e_mean is ", True),
        ("wrong", "does worse than the old configuration would: ", False),
        ("other", "has no verdict: before the change 4/512 was further from its", True),
    ],
)
def test_shifted_traffic_is_noticed_handed_over_and_judged_by_what_was_predicted(
    url: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    words: str,
    *,
    stands: bool,
) -> None:
    monkeypatch.chdir(home)
    served = (home / "best.yaml").read_text()
    clock = JumpingClock(LOOKS_S)
    options = ("--model", model, "--confirmations", "1", "--min-interval", "1h")
    assert once(home, url, clock, *options) == 0
    changed = read_emitted(home / "best.yaml")
    assert changed.limits.max_num_seqs > 4
    assert (home / "handed.yaml").read_text() == (home / "best.yaml").read_text()
    assert f"requests of Prometheus at {url.removeprefix('http://')}" in changed.comments[0]
    clock.sleep(6 * MINUTE_S)
    assert once(home, url, clock, *options) == 0
    shown = capsys.readouterr().err
    assert f"guard: {changed.limits} {words}" in shown
    now = home / "best.yaml", home / "handed.yaml"
    assert [read_emitted(path).limits == changed.limits for path in now] == [stands] * 2
    assert stands or (home / "best.yaml").read_text() == served
    assert "Traceback" not in shown


@pytest.mark.engine
@pytest.mark.slow
def test_a_change_rests_on_what_came_after_the_verdict_alone(
    url: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, clock = (home / "best.yaml").read_text(), JumpingClock(LOOKS_S)
    options = ("--model", "right", "--confirmations", "2")
    assert once(home, url, clock, *options) == 0
    # Later traffic begins a sixth of five minutes after it: there is not yet a minute of it.
    clock.sleep(1.5 * MINUTE_S)
    assert once(home, url, clock, *options) == 0
    assert "waiting for the same verdict on later traffic" in capsys.readouterr().err
    assert (home / "best.yaml").read_text() == served
    clock.sleep(5 * MINUTE_S)
    assert once(home, url, clock, *options) == 0
    shown = capsys.readouterr().err
    assert "the later traffic alone is shifted, re-tune pays" in shown
    changed = read_emitted(home / "best.yaml")
    assert changed.limits.max_num_seqs > 4
    # The evidence is that of the later traffic: five minutes of it, as no check looks further.
    count = int(changed.comments[0].split(" on ")[1].split()[0].replace(",", ""))
    assert count == pytest.approx(8 * 5 * MINUTE_S, rel=0.1)


@pytest.mark.engine
def test_a_gap_in_the_data_gives_no_verdict(
    url: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = JumpingClock(START_S + 3 * MINUTE_S)
    assert once(home, url, clock, "--model", "right", "--confirmations", "1") == 0
    shown = capsys.readouterr().err
    assert "too little data: the current traffic is known in part only: there is data" in shown
    assert read_emitted(home / "best.yaml").limits == EngineLimits(4, 512)
