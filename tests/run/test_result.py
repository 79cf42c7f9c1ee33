"""The result says what was decided, on what, and how far it may be trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.traffic import a_trace
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.errors import Caveat, UsageError
from tuner.run.result import RunProvenance, RunResult, comments, make_outcome, read_result
from tuner.search.objective import Objective, Score, Scoring, Tier
from tuner.search.race import Odds, RaceDecision, RaceVerdict
from tuner.search.trials import Phase, Trial
from tuner.stats import Estimate

DEMO_RUN = Path(__file__).parents[2] / "examples" / "demo" / "run"
WINNER, CURRENT = EngineLimits(8, 2048), EngineLimits(32, 4096)
GOAL = Scoring(Objective.BALANCED, (), "p99")
CHANGE = RaceDecision(
    RaceVerdict.CHANGE, WINNER, WINNER, (WINNER,), Estimate(0.8, 0.75, 0.85, 3), 3, "better"
)
INFO = EngineInfo(
    *("toy", "m", "cpu", "float32", "0.32.0", 100, 4096, 16, 64, CURRENT),
    can_change_limits=True,
    asynchronous=False,
)
AROUND = RunProvenance(
    trace=replace(a_trace([0.0, 1.0]), sha256="0123456789abcdef"),
    replayed_requests=1234,
    window="the whole trace, 9 s",
    info=INFO,
    current_source="configuration",
    model="m",
    options={},
    engine_starts=1,
    wall_s=9.0,
)


def a_record(limits: EngineLimits, tier: Tier = Tier.GOOD, round_: int = 0) -> Trial:
    measured = {
        "e2e_s": {"p50": 1.0, "p99": 2.0},
        "tpot_s": {"p50": 0.01, "p99": 0.02},
        "requests_per_s": 1.0,
        "gpu_cache_usage_perc": {"max": 0.3},
        "preemptions": 0,
        "running": {"mean": 2.0, "max": 8},
        "cut_reason": None,
    }
    phase = Phase.RACE if round_ else Phase.LADDER
    return Trial.of(0, limits, phase, round_, Score(tier, 2.0, "e2e_p99"), measured)


def made(
    decision: RaceDecision = CHANGE, tier: Tier = Tier.GOOD, state: str = "complete"
) -> RunResult:
    records = [a_record(limits, tier, n) for limits in (WINNER, CURRENT) for n in (0, 1, 2)]
    caveats = [Caveat.WINDOWED]
    return make_outcome(decision, CURRENT, GOAL, records, caveats, AROUND, state)


def test_a_change_is_quoted_with_its_gain_and_interval() -> None:
    advice = made().recommendation
    assert advice is not None
    assert (advice.limits, advice.shown) == (WINNER, WINNER)
    assert advice.is_change
    assert advice.gain_ratio == pytest.approx(-0.2)
    assert advice.gain_interval == pytest.approx((-0.25, -0.15))


def test_what_is_written_is_what_is_read() -> None:
    result = made()
    content = json.loads(msgspec.json.encode(result))
    assert msgspec.convert(content, RunResult) == result
    assert content["baseline"] == {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
        "source": "configuration",
    }
    assert content["caveats"] == [{"id": "windowed", "text": Caveat.WINDOWED.text}]
    assert content["provenance"]["engine"]["started_at_limits"]["max_num_seqs"] == 32


def test_nothing_is_recommended_when_every_configuration_breaks_an_slo() -> None:
    outcome = made(tier=Tier.BREAKS_SLO)
    assert not outcome.feasible
    assert outcome.recommendation is None
    assert outcome.shown == CURRENT
    assert made(tier=Tier.NOT_SUSTAINED).feasible


def test_a_gain_without_an_interval_is_told_without_one() -> None:
    decision = replace(CHANGE, gain=Estimate(0.9, None, None, 1))
    open_ended, none = made(decision).recommendation, made(replace(CHANGE, gain=None))
    assert open_ended is not None
    assert open_ended.gain_interval is None
    assert none.recommendation is not None
    assert none.recommendation.gain_ratio is None


def test_comments_carry_what_a_reader_needs_years_later() -> None:
    lines = comments(made(), "best.yaml", "runs/x")
    assert lines[0] == "vllm serve --config best.yaml"
    text = "\n".join(lines)
    for words in (
        "1,234 requests of toy.jsonl (sha256 01234567…), the whole trace, 9 s",
        "vLLM 0.32.0",
        "against the current max-num-seqs 32, max-num-batched-tokens 4096:",
        "limited by: ",
        f"caveat: {Caveat.WINDOWED.text}",
    ):
        assert words in text
    assert lines[-1] == "evidence: runs/x"


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            "e2e_p95",
            "decided by e2e_p95: -20.0% (90% interval -25.0% … -15.0% over this)",
        ),
        ("e2e_p99", ""),
        ("capacity", ""),
    ],
)
def test_what_decided_is_told_where_no_row_has_it(metric: str, said: str) -> None:
    """Of a window too small for the tail; and of no rate, which stands as its inverse."""
    odds = Odds(0.99, None, 1.0, 0.25, 0.98, basis="this")
    lines = comments(made(replace(CHANGE, metric=metric, odds=odds)), "best.yaml", "runs/x")
    assert [line for line in lines if line.startswith("decided by")] == [said] * bool(said)


def test_keeping_what_one_has_is_said_first_of_all() -> None:
    kept = RaceDecision(
        RaceVerdict.KEEP, CURRENT, WINNER, (), None, 3, "the gain is within noise"
    )
    text = "\n".join(comments(made(kept), "best.yaml", "runs/x"))
    assert "KEEP WHAT YOU HAVE: max-num-seqs 32" in text
    assert "the gain is within noise" in text
    assert "best that was found, 8/2048" in text


def test_a_winner_that_did_not_race_is_not_said_to_have_been_measured() -> None:
    raced = made()
    assert raced.how_raced == "3 rounds in turns"
    assert "measured live, 3 rounds in turns" in "\n".join(
        comments(raced, "best.yaml", "runs/x")
    )
    rows = tuple(replace(row, rounds=0, change_interval=None) for row in raced.evidence)
    told = "\n".join(comments(replace(raced, evidence=rows), "best.yaml", "runs/x"))
    assert "predicted, corrected by 3 rounds of others" in told
    assert "measured live" not in told


def test_an_unfinished_run_says_that_nothing_was_raced() -> None:
    text = "\n".join(comments(made(state="interrupted"), "best.yaml", "runs/x"))
    assert "interrupted: best so far, not raced against the current values" in text


def kept(folder: Path, content: dict[str, Any]) -> Path:
    """Return a run directory that holds this result."""
    (folder / "result.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def demo() -> dict[str, Any]:
    """Return the result of a run that is kept with the examples."""
    content: dict[str, Any] = json.loads((DEMO_RUN / "result.json").read_text())
    return content


def test_a_kept_run_is_read_whole(demo: dict[str, Any]) -> None:
    again = json.loads(msgspec.json.encode(read_result(DEMO_RUN)))
    # It was made before there were any.
    whole = {**demo, "knobs": None, "starting_points": [], "variants": None, "clients": None}
    whole["capacity"] = {**demo["capacity"], "interval": None}
    assert again == whole
    assert list(again) == list(whole)


@pytest.mark.parametrize(
    ("place", "value", "shown"),
    [
        (("schema",), 1, "schema must be 2, got 1"),
        (("baseline", "max_num_seqs"), 0, "is damaged: max_num_seqs must be at least 1"),
        (("recommendation", "verdict"), "maybe", "is damaged: Invalid enum value 'maybe'"),
        (("trials", 0, "tier"), "5 odd", "is damaged: Invalid enum value '5 odd'"),
    ],
)
def test_a_result_that_no_run_wrote_is_refused(
    demo: dict[str, Any], tmp_path: Path, place: tuple[Any, ...], value: object, shown: str
) -> None:
    where: Any = demo
    for key in place[:-1]:
        where = where[key]
    where[place[-1]] = value
    with pytest.raises(UsageError, match=shown) as refused:
        read_result(kept(tmp_path, demo))
    assert refused.value.hint
