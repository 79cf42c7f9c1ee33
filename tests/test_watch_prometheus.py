"""The whole circle over a real Prometheus: notice, re-tune, hand over, guard."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from prometheus_parts import backfill, need_prometheus, prometheus
from prometheus_past import END_S, PastEngine
from test_worker import a_profile, a_trace_file
from watch_parts import JumpingClock

from tuner.cli.watch_command import watch
from tuner.cli.watch_job import run_watch
from tuner.emit.sources import read_emitted
from tuner.engine.protocol import EngineLimits
from tuner.errors import UsageError
from tuner.formats import ReadOptions, read_traces
from tuner.profiles import write_profile
from tuner.prometheus.server import Series, Span
from tuner.sketch_file import TRAFFIC_FILE, write_sketch
from tuner.traffic_sketch import sketch_of
from tuner.watch.live import _restarted_s, live_between

MINUTE_S = 60.0
START_S = END_S - 25 * MINUTE_S
# When the watch first looks.
LOOKS_S = START_S + 4 * MINUTE_S
E2E_BOUNDS_S = (1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


@dataclass(frozen=True, slots=True, eq=False)
class TimedEngine(PastEngine):
    """A past with E2E latencies, which become `worse_s` from an instant on."""

    worse_from_s: float = math.inf
    worse_s: float = 0.0

    def lines(self) -> list[str]:
        """Return the history with the histogram of latencies, and that it was scraped."""
        own = f'instance="{self.instance}",model_name="{self.model}",engine="{self.engine}"'
        took_s = self.ends_s - self.arrived_s
        took_s = np.where(self.ends_s > self.worse_from_s, took_s + self.worse_s, took_s)
        found = PastEngine.lines(self)
        for at_s in self.scrapes_s.tolist():
            done_s = took_s[self.ends_s <= at_s]
            for bound in (*E2E_BOUNDS_S, math.inf):
                le = "+Inf" if bound == math.inf else f"{bound}"
                count = int((done_s <= bound).sum())
                name = "vllm:e2e_request_latency_seconds_bucket"
                found.append(f'{name}{{le="{le}",{own}}} {count} {at_s:.3f}')
            found.append(f'up{{instance="{self.instance}"}} 1 {at_s:.3f}')
        return found


def an_engine(model: str, **more: float) -> TimedEngine:
    """Return traffic at a rate that a cap of four does not bear."""
    rng = np.random.default_rng(7)
    n = rng.poisson(14.0 * (END_S - START_S))
    return TimedEngine(
        arrived_s=np.sort(rng.uniform(START_S, END_S, n)),
        prompt=np.rint(rng.uniform(100, 300, n)).astype(np.int64),
        output=np.rint(rng.uniform(40, 120, n)).astype(np.int64),
        scrapes_s=np.arange(START_S, END_S + 1, 15.0, dtype=np.float64),
        model=model,
        instance=f"{model}:8000",
        **more,  # type: ignore[arg-type]
    )


GOOD = an_engine("good")
BAD = an_engine("bad", worse_from_s=LOOKS_S, worse_s=10_000.0)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Prometheus that knows a server that does well and one that stops to."""
    need_prometheus()
    folder = tmp_path_factory.mktemp("prometheus")
    backfill(folder, [*GOOD.lines(), *BAD.lines()])
    with prometheus(folder) as found:
        yield found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder with a profile, the traffic it was made for, and a file in use."""
    write_profile(tmp_path / "profile.yaml", a_profile())
    path = a_trace_file(tmp_path / "before.jsonl", 2600, per_s=4.0)
    before = read_traces([str(path)], None, ReadOptions())
    write_sketch(tmp_path / TRAFFIC_FILE, sketch_of(before))
    served = "model: none\nmax-num-seqs: 4\nmax-num-batched-tokens: 512\n"
    (tmp_path / "best.yaml").write_text(served)
    return tmp_path


def once(home: Path, url: str, clock: JumpingClock, *more: str) -> int:
    """Run `tune watch --once` at the clock's time. Raises: TunerError."""
    copy = "import os, shutil; shutil.copy(os.environ['TUNE_FILE'], 'handed.yaml')"
    arguments = [
        *("--once", "--prometheus", url, "--profile", str(home / "profile.yaml")),
        *("--emit", str(home / "best.yaml"), "--state", str(home / "state")),
        *("--since", "3m", "--step", "15s", "--guard", "2m", "--budget", "20s"),
        *("--force-profile", "--max-num-seqs", "4,24", "--jobs", "1"),
        *("--hook", sys.executable, "--hook", "-c", "--hook", copy, *more),
    ]
    return run_watch(watch.make_context("watch", arguments).params, clock)


def test_live_metrics_are_those_of_the_stretch(url: str) -> None:
    for engine, within_s in ((GOOD, (1.0, 2.5)), (BAD, (120.0, math.inf))):
        end_s = LOOKS_S + 10 * MINUTE_S
        live = live_between(url, LOOKS_S, end_s, 15, model=engine.model)
        done = (engine.ends_s > LOOKS_S) & (engine.ends_s <= end_s)
        assert live.requests == int(done.sum())
        assert live.requests_per_s == pytest.approx(done.sum() / (10 * MINUTE_S))
        assert live.e2e_within_s(0.95) == within_s
        assert (live.covered_ratio, live.is_there, live.restarted_s) == (1.0, True, None)
    # Before the first scrape there was no server: it is up anew, and its rate is that since.
    early = live_between(url, START_S - 600, START_S + 600, 15, model="good")
    done = GOOD.ends_s <= START_S + 600
    assert early.restarted_s == START_S
    assert early.requests_per_s == pytest.approx(done.sum() / 600)
    # A quarter of an hour after the last scrape nothing is known any more.
    late = live_between(url, END_S - 900, END_S + 900, 15, model="good")
    assert not late.is_there
    assert late.covered_ratio == pytest.approx(0.65, abs=0.02)


def test_one_replica_more_is_no_restart_and_most_of_them_anew_is() -> None:
    span = Span(0, 60, 15)

    def engine(name: str, *values: float) -> Series:
        return Series({"instance": name, "le": "+Inf"}, np.array(values))

    stays = [engine(name, 1, 2, 3, 4, 5) for name in "ab"]
    more = engine("c", math.nan, math.nan, 0, 1, 2)
    anew = [engine(name, 5, 6, 0, 1, 2) for name in "de"]
    assert _restarted_s([*stays, more], span) is None
    assert _restarted_s([more, *anew], span) == 30.0


@pytest.mark.engine
@pytest.mark.slow
def test_shifted_traffic_is_noticed_handed_over_and_taken_back_where_it_does_worse(
    url: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(home)
    served = (home / "best.yaml").read_text()
    clock = JumpingClock(LOOKS_S)
    options = ("--model", "bad", "--confirmations", "1", "--min-interval", "0s")
    assert once(home, url, clock, *options) == 0
    changed = read_emitted(home / "best.yaml")
    assert changed.limits.max_num_seqs > 4
    assert (home / "handed.yaml").read_text() == (home / "best.yaml").read_text()
    assert f"requests of Prometheus at {url.removeprefix('http://')}" in changed.comments[0]
    clock.sleep(3 * MINUTE_S)
    assert once(home, url, clock, *options) == 0
    told = capsys.readouterr().err
    assert f"guard: {changed.limits} does worse than the old configuration would" in told
    assert (home / "best.yaml").read_text() == served
    assert (home / "handed.yaml").read_text() == served
    assert "Traceback" not in told


def test_a_prometheus_that_is_down_changes_nothing(home: Path) -> None:
    before, clock = (home / "best.yaml").read_text(), JumpingClock()
    with pytest.raises(UsageError, match="cannot be reached"):
        once(home, "http://127.0.0.1:9", clock)
    assert clock.waits_s == [2.0, 8.0, 30.0]
    assert (home / "best.yaml").read_text() == before
    assert '"errors": 1' in (home / "state" / "state.json").read_text()


def test_a_gap_in_the_data_gives_no_verdict(
    url: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = JumpingClock(START_S + 2 * MINUTE_S)
    assert once(home, url, clock, "--model", "good", "--confirmations", "1") == 0
    told = capsys.readouterr().err
    assert "too little data: the present traffic is known in part only: there is data" in told
    assert read_emitted(home / "best.yaml").limits == EngineLimits(4, 512)
