"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere.

And how a run ended. Owns rich.
"""

from __future__ import annotations

import time
from itertools import compress
from pathlib import Path
from typing import Final, Self

from rich.console import Console as RichConsole
from rich.console import Group, JustifyMethod
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tuner.cli.console import say, showable
from tuner.emit.comments import beside_gain, with_keys
from tuner.engine.limits import EngineLimits
from tuner.replay.loop import Progress
from tuner.report.points import value_of
from tuner.report.summary import gain_words
from tuner.run.listener import Listener, clock_text
from tuner.run.records import Advice
from tuner.run.result import RunResult
from tuner.search.objective import RATE, Tier, moved, named
from tuner.search.trials import Phase, Trial, decisive, leader, read_metric
from tuner.stats import short

_TIER_STYLES = {
    Tier.GOOD: "green",
    Tier.NOT_SUSTAINED: "yellow",
    Tier.BREAKS_SLO: "red",
    Tier.CUT: "dim",
    Tier.FAILED: "red",
}


def talk() -> RichConsole:
    """Return the console on standard error; rich itself minds NO_COLOR and dumb terminals.

    Texts are shown as they are: paths, vLLM's words and a user's names hold brackets and colons
    that are neither markup nor emoji.
    """
    return RichConsole(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


class RunDisplay(Listener):
    """Shows a run while it goes on, from its first trial as a table.

    `result` is the last that was put on disk.
    """

    def __init__(self, budget_s: float) -> None:
        self._console = talk()
        self._live: Live | None = None
        self._trials: list[Trial] = []
        self._current: EngineLimits | None = None
        self._now = ""
        self._began_s = time.monotonic()
        self._budget_s = budget_s
        self.result: RunResult | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def current_known(self, current: EngineLimits) -> None:
        """Take in what the best so far is compared with."""
        self._current = current

    def trial_recalled(self, trial: Trial) -> None:
        """Take in a trial of a run that is resumed, without announcing it."""
        if trial.phase is not Phase.CALIBRATE:
            self._trials.append(trial)

    def note(self, text: str) -> None:
        """Show a sentence."""
        if self._live is not None:
            self._live.console.print(showable(text))
        else:
            say(text)

    def trial_started(self, number: int, limits: EngineLimits, phase: Phase) -> None:
        """Show what begins."""
        if self._console.is_interactive and self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        self._now = f"trial {number} {phase} {limits}"
        self._refresh()

    def progress(self, progress: Progress) -> None:
        """Show how far the replay is."""
        left = clock_text(self._budget_s - (time.monotonic() - self._began_s))
        head = self._now.split(" · ", maxsplit=1)[0]
        share = f"{progress.ended}/{progress.offered} requests"
        self._now = f"{head} · {share} · at most {left} left"
        self._refresh()

    def trial_ended(self, trial: Trial, left_s: float) -> None:
        """Show what came out; blocks that calibrate are many, and told of together."""
        if trial.phase is Phase.CALIBRATE:
            return
        self._trials.append(trial)
        if self._live is None:
            cells = " ".join(_cells(trial))
            say(f"trial {cells}  {self._so_far()}, at most {clock_text(left_s)} left")
        self._refresh()

    def result_written(self, result: RunResult, run_dir: Path) -> None:  # noqa: ARG002
        """Keep the result, to be shown when the run has ended."""
        self.result = result

    def _so_far(self) -> str:
        """Name the best so far and what a single replay says it gains."""
        observations = [trial.observation for trial in decisive(self._trials)]
        best = leader(observations)
        if best is None:
            return "nothing works so far" if observations else "nothing to compare yet"
        current = next((o for o in observations if o.limits == self._current), None)
        gain = ""
        comparable = current is not None and current.score.metric == best.score.metric
        if current is not None and comparable and current.limits != best.limits:
            one = "replay" if best.phase.is_on_windows else "shadow"
            metric, ratio = best.score.metric, best.score.value / current.score.value
            gain = f" ({named(metric)} {moved(metric, ratio - 1):+.0%}, one {one})"
        return f"best so far {best.limits}{gain}"

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Group:
        """Return the newest trials and, below, what goes on: as many lines as are shown."""
        is_wide = self._console.width >= _WIDE
        shown = [is_wide or name not in _WIDE_ALONE for name, _ in _COLUMNS]
        table = Table(box=None, pad_edge=False)
        for name, justify in compress(_COLUMNS, shown):
            # What may give way to the width is the last alone, which keeps to its line below.
            table.add_column(name, justify=justify, no_wrap=name != _COLUMNS[-1][0])
        room = max(0, self._console.height - _OTHER_LINES)
        best = leader([trial.observation for trial in decisive(self._trials)])
        for trial in self._trials[-room:] if room else []:
            style = _TIER_STYLES[trial.tier]
            bold = " bold" if best is not None and trial.limits == best.limits else ""
            table.add_row(*map(_line, compress(_cells(trial), shown)), style=style + bold)
        below = (self._now, self._so_far())
        return Group(table, *map(_line, below))


class ProgressLine:
    """One line on a terminal that says how far something is; nothing elsewhere."""

    def __init__(self) -> None:
        self._live = Live(console=talk(), auto_refresh=False, transient=True)
        self._is_live = self._live.console.is_interactive

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def show(self, text: str) -> None:
        """Show a text in place of the last one."""
        if self._is_live:
            self._live.update(showable(text), refresh=True)


class ReplayDisplay(ProgressLine):
    """Shows on a terminal how far a single replay is."""

    def progress(self, progress: Progress) -> bool:
        """Show it and let the replay go on."""
        share = f"{progress.ended} of {progress.offered} requests"
        now = f"{share}, {progress.clock_s:.1f} s on the replay's clock"
        self.show(f"{now}, {progress.wall_s:.0f} s real")
        return True


_COLUMNS: Final[tuple[tuple[str, JustifyMethod], ...]] = (
    ("#", "right"),
    ("why", "left"),
    ("seqs/tokens", "right"),
    ("e2e p50", "right"),
    ("p95", "right"),
    ("tpot p50", "right"),
    ("req/s", "right"),
    ("kv", "right"),
    ("state", "left"),
)
# A terminal of fewer columns leaves some of them out: ours, what all take and a cause's begin.
_WIDE: Final = 100
_WIDE_ALONE: Final = ("p95", "tpot p50", "kv")
# Beside the trials: their heads, the two lines below them and the cursor's.
_OTHER_LINES: Final = 4


def _line(text: str) -> Text:
    """Return a text that is cut where its place ends, and never goes on below."""
    return Text(showable(text), no_wrap=True, overflow="ellipsis")


def _cells(trial: Trial) -> list[str]:
    """Return a trial as words of fixed width."""
    m = trial.measurement or {}
    p50, p95, tpot = (read_metric(m, name) for name in ("e2e_p50", "e2e_p95", "tpot_p50"))
    rate, usage = read_metric(m, RATE), value_of(m, "gpu_cache_usage_perc")
    state = trial.tier[2:]
    why = trial.cause or trial.cut_reason
    return [
        f"{trial.number:>3}",
        f"{trial.phase:<7}",
        f"{trial.limits!s:>10}",
        f"{_seconds(p50):>9}",
        f"{_seconds(p95):>9}",
        f"{_seconds(tpot):>8}",
        f"{short(rate):>6}/s" if rate is not None else "       -",
        f"{usage:.2f}" if usage is not None else "   -",
        f"{state}{': ' + why if why else ''}",
    ]


def _seconds(value: float | None) -> str:
    """Write seconds short: milliseconds below one second."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def show_outcome(outcome: RunResult, written_to: str) -> None:
    """Say the four things that end a run: config, gain, what limits it, caveats."""
    say("")
    if outcome.recommendation is not None:
        _show_advice(outcome, outcome.recommendation)
    for line in beside_gain(outcome):
        say(line)
    stages = outcome.provenance.stages_s
    if stages:
        say("time: " + ", ".join(f"{name} {took_s:.0f} s" for name, took_s in stages.items()))
    say(written_to)


def _show_advice(outcome: RunResult, advice: Advice) -> None:
    if outcome.turned is not None:
        say(outcome.turned.together)
        say("the limits alone:")
    if outcome.cut_off:
        say(outcome.cut_off)
    if advice.is_change:
        why = f": {advice.for_bounds}" if advice.for_bounds else ""
        current = with_keys(outcome.current)
        say(f"change to {with_keys(advice.limits)} (current: {current}){why}")
    else:
        say(f"keep what you have: {with_keys(advice.limits)} ({advice.why})")
    if advice.shown != outcome.current:
        how = outcome.how_raced + outcome.at_which_load
        say(f"{with_keys(advice.shown)} against the current configuration, {how}:")
        for row in outcome.evidence:
            say(f"  {row.text}")
    odds = "" if advice.odds is None else advice.odds.text
    if odds:
        say("; ".join(filter(None, [gain_words(advice), odds])))
    ties = [t for t in advice.tied if t not in (advice.limits, outcome.current)]
    if ties:
        say(f"as good within the noise: {', '.join(map(str, ties))} (seqs/tokens)")
