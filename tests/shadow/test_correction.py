"""What production does sets the level of a profile, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from support.paths import ROOT
from support.run_parts import a_profile
from tuner.cli.commands import tune as command
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch
from tuner.engine.shape import Drafts
from tuner.engine.steps import StepColumns
from tuner.errors import ShadowError, TooFewSamplesError, UsageError
from tuner.replay.plan import ReplayPlan
from tuner.shadow.correction import LEVEL, Anchor, Anchored, by_anchor, by_steps
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile, read_profile, write_profile
from tuner.shadow.step_model import NO_HOST, Host
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import LoadModel, Trace

H200 = ROOT / "profiles" / "gpu" / "meta-llama-3.1-8b.1xh200_sxm.yaml"


@pytest.mark.parametrize(
    ("text", "anchor"),
    [
        ("itl=12.3ms@running=14", Anchor(0.0123, 14.0)),
        ("tpot=0.02s @ running=3.5, context=2500", Anchor(0.02, 3.5, 2500, of_tokens=True)),
        (
            "itl=9ms@running=8,prompt=900,output=300",
            Anchor(0.009000000000000001, 8.0, 1050, 900, 300),
        ),
    ],
)
def test_a_point_is_read_as_a_dashboard_says_it(text: str, anchor: Anchor) -> None:
    assert Anchor.parse(text) == anchor
    assert Anchor.parse(str(anchor)) == anchor


@pytest.mark.parametrize(
    "text",
    [
        *("12ms", "itl=12ms", "itl=-1ms@running=3", "itl=0ms@running=3", "itl=1ms@running=0"),
        *("itl=1ms@running=3,prompt=900", "itl=1ms@running=3,colour=900"),
        *("", "itl=1ms@running=1.2.3", "itl=1ms@running=."),
    ],
)
def test_what_is_no_point_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Anchor.parse(text)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("context=0", "context must be at least 1, got 0"),
        ("prompt=0,output=0", "prompt must be at least 1, got 0"),
        ("context=900,context=100", "names context twice"),
    ],
)
def test_what_is_wrong_of_a_point_is_named(more: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Anchor.parse(f"itl=7ms@running=3,{more}")


def test_what_the_prefix_cache_held_is_attended_to_and_not_computed() -> None:
    """A point is given back of prompts that share 8,000 tokens of theirs."""
    profile = read_profile(H200)
    limits, count, size = EngineLimits(256, 8192), 320, 16
    rng = np.random.default_rng(1)
    own, outputs = (rng.integers(n // 2, n * 3 // 2, count) for n in (400, 300))
    prompts = 8000 + own
    rows = [(*range(500), *range(1000 * n, 1000 * n + o // size)) for n, o in enumerate(own, 1)]
    hashes = HashIds.from_rows(rows, size)
    trace = Trace(np.zeros(count), prompts, outputs, hashes=hashes)
    closed = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=16)
    lines = Predictor(profile).replay(trace, limits, closed).timelines
    itl_s = float((lines.last_s - lines.first_s).sum() / (outputs - 1).sum())
    told = Anchor.parse(f"itl={itl_s}s@running=16,prompt=400,output=300,context=8550")
    assert by_anchor(profile, told, limits)[1].ratio == pytest.approx(1.0, abs=0.03)


def test_variants_are_corrected_with_what_they_are_compared_with() -> None:
    profile = a_profile()
    profile = replace(profile, variants={"other": profile})
    now, _ = by_anchor(profile, Anchor(0.02, 14.0), profile.current_limits)
    assert now.step_model != profile.step_model
    assert now.variants["other"].step_model == now.step_model


def at_own_limits(profile: Profile, anchor: Anchor) -> tuple[Profile, Anchored]:
    """Return what a point corrects that was measured at the profile's own limits."""
    return by_anchor(profile, anchor, profile.current_limits)


@pytest.mark.parametrize("times", [0.6, 1.0, 1.7])
def test_every_step_is_moved_by_what_the_point_was_off(times: float) -> None:
    profile = read_profile(H200)
    batch = Batch(14, 0, 0, 14 * 1000, 0, 0, 0)
    said_s = profile.step_model.step_s(batch)
    found, how = at_own_limits(profile, Anchor(times * said_s, 14.0))
    assert how.ratio == pytest.approx(times)
    assert found.step_model.step_s(batch) == pytest.approx(times * said_s)
    mixed = Batch(8, 512, 1, 8000, 131_000, 0, 0)
    assert found.step_model.step_s(mixed) == pytest.approx(
        times * profile.step_model.step_s(mixed)
    )
    # The level is known better from then on, how prefills compare no better.
    assert profile.uncertainty is not None
    assert found.uncertainty is not None
    before, now = profile.uncertainty.table, found.uncertainty.table
    assert np.allclose(now[0, :6], LEVEL, rtol=1e-3)
    assert (before[0, :6] > LEVEL).all()
    assert np.array_equal(before[1:], now[1:])
    assert str(how.anchor) in found.origin


@pytest.mark.parametrize(
    ("times", "wrong"), [(1.03, 0.04), (0.97, 0.04), (1.6, 0.1), (0.6, 0.1)]
)
def test_a_profile_that_was_off_by_more_than_it_said_is_not_said_to_be_right_again(
    times: float, wrong: float
) -> None:
    profile = replace(a_profile(), metric_error_ratio=0.04)
    said_s = at_own_limits(profile, Anchor(0.015, 14.0))[1].predicted_s
    found, _ = at_own_limits(profile, Anchor(times * said_s, 14.0))
    assert found.metric_error_ratio == pytest.approx(wrong)


@pytest.mark.parametrize(
    ("origin", "times", "wrong"),
    [("", 1.0, 0.3), ("", 1.1, 0.205), ("", 1.3, 0.1), ("published tables", 1.0, 0.1)],
)
def test_an_error_that_was_measured_is_less_by_what_a_point_moves(
    origin: str, times: float, wrong: float
) -> None:
    """A point that finds the level right says nothing of what else was off."""
    profile = replace(a_profile(), origin=origin, metric_error_ratio=0.3)
    said_s = at_own_limits(profile, Anchor(0.015, 14.0))[1].predicted_s
    found, _ = at_own_limits(profile, Anchor(times * said_s, 14.0))
    assert found.metric_error_ratio == pytest.approx(wrong, abs=0.001)


def test_between_two_numbers_of_requests_the_time_lies_between_theirs() -> None:
    profile = a_profile()
    (_, low), (_, middle), (_, high) = (
        at_own_limits(profile, Anchor(0.015, running)) for running in (14.0, 14.5, 15.0)
    )
    assert low.predicted_s < middle.predicted_s < high.predicted_s


@pytest.mark.parametrize("times", [0.4, 2.5])
def test_a_point_far_from_the_profile_is_refused(times: float) -> None:
    profile = read_profile(H200)
    said_s = profile.step_model.step_s(Batch(14, 0, 0, 14 * 1000, 0, 0, 0))
    with pytest.raises(ShadowError, match=r"times the .* ms that the profile says"):
        at_own_limits(profile, Anchor(times * said_s, 14.0))


def test_the_command_writes_the_corrected_profile(tmp_path: Path) -> None:
    output = tmp_path / "anchored.yaml"
    words = ["calibrate", "--profile", str(H200), "--anchor", "itl=8ms@running=14"]
    done = CliRunner().invoke(command, [*words, "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert "times as long as the profile said" in done.stdout
    assert "itl=8ms@running=14,context=1000" in read_profile(output).origin
    both = [*words, "--trace", "prod.jsonl", "-o", str(output)]
    refused = CliRunner().invoke(command, both)
    assert "three ways to correct" in str(refused.exception)


def calibrated(folder: Path, *words: str) -> Result:
    """Return how the command ends."""
    output = ("-o", str(folder / "corrected.yaml"))
    return CliRunner().invoke(command, ["calibrate", "--profile", str(H200), *words, *output])


@pytest.mark.parametrize(
    ("point", "limits", "words"),
    [
        ("itl=8ms@running=20", ("--max-num-seqs", "16"), "20 requests ran at once, more than"),
        ("itl=8ms@running=2000", (), "2000 requests ran at once, more than max_num_seqs 1024"),
        (
            "itl=8ms@running=200,context=9000",
            (),
            "200 requests of 9,000 tokens take 112,600 KV-cache blocks",
        ),
    ],
)
def test_a_point_that_no_such_engine_reaches_is_refused_with_the_figure(
    tmp_path: Path, point: str, limits: tuple[str, ...], words: str
) -> None:
    refused = calibrated(tmp_path, "--anchor", point, *limits)
    assert isinstance(refused.exception, ShadowError)
    assert words in refused.exception.message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), ("nothing is named", "--anchor", "--prometheus", "--trace", "--steps")),
        (("--anchor", ""), ("--anchor must be as itl=12.3ms@running=14",)),
        (("--prometheus", ""), ("the URL of Prometheus must start with http",)),
        (("--prometheus", "http://127.0.0.1:9"), ("cannot be reached", "--prometheus")),
    ],
)
def test_a_source_that_is_missing_or_wrong_is_named(
    tmp_path: Path, words: tuple[str, ...], said: tuple[str, ...]
) -> None:
    error = calibrated(tmp_path, *words).exception
    assert isinstance(error, UsageError)
    for word in said:
        assert word in f"{error.message} {error.hint}"


def test_a_point_is_predicted_at_the_limits_that_were_served(tmp_path: Path) -> None:
    """A small token budget holds a part of a prompt, so that more steps compute some."""
    config = tmp_path / "served.yaml"
    config.write_text("max-num-seqs: 64\nmax-num-batched-tokens: 256\n")
    point = ("--anchor", "itl=12ms@running=14,prompt=4000,output=100", "--json")
    told = [
        json.loads(calibrated(tmp_path, *point, *served).stdout)["predicted_itl_s"]
        for served in (
            (),
            ("--max-num-seqs", "64", "--max-num-batched-tokens", "256"),
            ("--config", str(config)),
        )
    ]
    assert told[0] != pytest.approx(told[1], rel=0.05)
    assert told[1] == told[2]


def test_steps_say_themselves_at_which_limits_they_were_served(tmp_path: Path) -> None:
    words = ("--trace", "prod.jsonl", "--steps", "prod.steps", "--max-num-seqs", "8")
    assert "--steps say themselves what was served" in str(
        calibrated(tmp_path, *words).exception
    )


def test_corrections_one_after_the_other_move_a_profile_no_further_than_one_may(
    tmp_path: Path,
) -> None:
    profile = read_profile(H200)
    said_s = Anchor(1.0, 14.0).predicted_s(profile, profile.current_limits)
    once, _ = at_own_limits(profile, Anchor(1.7 * said_s, 14.0))
    write_profile(tmp_path / "once.yaml", once)
    once = read_profile(tmp_path / "once.yaml")
    with pytest.raises(ShadowError, match=r"2\.04 times what it said before it was corrected"):
        at_own_limits(once, Anchor(2.04 * said_s, 14.0))
    back, _ = at_own_limits(once, Anchor(0.9 * said_s, 14.0))
    assert back.moved_ratio == pytest.approx(0.9)
    with pytest.raises(ShadowError, match=r"is 2\.02 times the"):
        at_own_limits(profile, Anchor(2.016 * said_s, 14.0))


SLOWER = 1.3


def served_slower(profile: Profile, trace: Trace) -> tuple[Anchor, StepColumns]:
    """Return what a dashboard shows of an engine that takes longer, and its steps."""
    slower = replace(profile, step_model=profile.step_model.scaled(SLOWER))
    plan = ReplayPlan(keep_steps=True)
    log = Predictor(slower).replay(trace, profile.current_limits, plan)
    lines, steps = log.timelines, log.kept_steps
    assert steps is not None
    tokens = lines.output_tokens - 1
    decode_s = float((lines.last_s - lines.first_s).sum())
    seqs, each = steps.decode_seqs, steps.repeats * steps.decode_seqs
    running = float((each * seqs).sum() / each.sum())
    prompt, output = trace.prompt_tokens.mean(), trace.output_tokens.mean()
    itl_s = decode_s / float(tokens.sum())
    return Anchor(
        itl_s, running, round(prompt + output / 2), round(prompt), round(output)
    ), steps


@pytest.mark.parametrize(("n", "more"), [(300, 1.1), (1500, 3.0)])
def test_a_point_of_mixed_batches_counts_their_prompts(n: int, more: float) -> None:
    """Beside long prompts a token takes far longer than its decoding alone."""
    profile = read_profile(H200)
    rng = np.random.default_rng(0)
    trace = Trace(
        due_s=np.sort(rng.uniform(0, 100, n)),
        prompt_tokens=rng.integers(1500, 4500, n),
        output_tokens=rng.integers(100, 300, n),
    )
    anchor, _ = served_slower(profile, trace)
    _, found = at_own_limits(profile, anchor)
    assert found.ratio == pytest.approx(SLOWER, rel=0.05)
    alone = Anchor(anchor.itl_s, anchor.running, anchor.context_tokens)
    assert anchor.itl_s / alone.predicted_s(profile, profile.current_limits) > more * SLOWER


def test_a_point_is_met_where_the_host_is_the_slower_one_too() -> None:
    profile = read_profile(H200)
    bound = replace(profile.step_model, host=Host(full_s=0.05, eager_s=0.05))
    profile = replace(profile, step_model=bound)
    anchor = Anchor(itl_s=0.06, running=14, context_tokens=1000)
    found, told = at_own_limits(profile, anchor)
    assert told.ratio == pytest.approx(1.2)
    assert anchor.predicted_s(found, found.current_limits) == pytest.approx(anchor.itl_s)


def test_recorded_steps_move_every_step_and_say_how_far_others_are_off() -> None:
    profile = read_profile(H200)
    # What the host notices late the simulator does not mark.
    profile = replace(profile, step_model=replace(profile.step_model, host=NO_HOST))
    rng = np.random.default_rng(1)
    n = 400
    trace = Trace(
        due_s=np.sort(rng.uniform(0, 60, n)),
        prompt_tokens=rng.integers(100, 900, n),
        output_tokens=rng.integers(20, 200, n),
    )
    _, steps = served_slower(profile, trace)
    single = steps.has_batch & (steps.repeats == 1)
    mine = steps.take(single)
    noisy = replace(mine, duration_s=mine.duration_s * rng.lognormal(0, 0.05, len(mine)))
    corrected, found = by_steps(profile, [(profile.current_limits, noisy)])
    assert found.ratio == pytest.approx(SLOWER, rel=0.02)
    assert found.off_before == pytest.approx(1 / SLOWER - 1, abs=0.02)
    assert abs(found.off_now) < 0.02
    assert corrected.step_model.base_s == pytest.approx(found.ratio * profile.step_model.base_s)
    few = noisy.take(np.arange(50))
    with pytest.raises(TooFewSamplesError, match="at least 200"):
        by_steps(profile, [(profile.current_limits, few)])
    far = replace(noisy, duration_s=3 * noisy.duration_s)
    with pytest.raises(ShadowError, match="times as long as those that the profile says"):
        by_steps(profile, [(profile.current_limits, far)])


@pytest.mark.parametrize(("start", "kept"), [(0.02, 0.02), (0.2, LEVEL)])
def test_a_point_says_of_other_times_no_more_than_how_well_it_knows_the_level(
    start: float, kept: float
) -> None:
    profile = read_profile(H200)
    assert profile.uncertainty is not None
    learnt = replace(profile, uncertainty=replace(profile.uncertainty, start=start))
    found, _ = at_own_limits(
        learnt, Anchor(Anchor(1.0, 14.0).predicted_s(learnt, learnt.current_limits), 14.0)
    )
    assert found.uncertainty is not None
    assert found.uncertainty.start == kept


@pytest.mark.parametrize(("prompt", "output", "running"), [(900, 300, 48), (6000, 150, 24)])
def test_what_a_closed_loop_shows_of_a_profile_is_what_it_predicts(
    prompt: int, output: int, running: int
) -> None:
    """Also where half of the time goes to prompts beside the decodes."""
    profile = read_profile(H200)
    rng = np.random.default_rng(1)
    prompts, outputs = (rng.geometric(1 / mean, 600) for mean in (prompt, output))
    trace = Trace(np.zeros(600), prompts, outputs + 1)
    plan = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=running)
    at = EngineLimits(64, 8192)
    lines = Predictor(profile).replay(trace, at, plan).timelines
    itl_s = float((lines.last_s - lines.first_s).sum()) / float(outputs.sum())
    anchor = Anchor(itl_s, running, prompt + output // 2, prompt, output)
    _, found = by_anchor(profile, anchor, at)
    assert found.ratio == pytest.approx(1.0, abs=0.04)


@pytest.mark.parametrize("lengths", ["", ",prompt=900,output=300"])
def test_of_an_engine_that_drafts_a_step_brings_more_than_a_token(lengths: str) -> None:
    """As dashboards have it: the time between outputs is of steps, tpot is of tokens."""
    profile = read_profile(H200)
    shape = replace(profile.shape, drafts=Drafts("eagle3", 2), asynchronous=False)
    profile, at = replace(profile, shape=shape, accepted=(0.75, 0.25)), EngineLimits(64, 8192)
    step_s, token_s = (
        Anchor.parse(f"{name}=9ms@running=8{lengths}").predicted_s(profile, at)
        for name in ("itl", "tpot")
    )
    assert step_s == pytest.approx(2 * token_s)
    # Drafts are verified beside each token, which takes a step a little longer.
    plain = Anchor.parse(f"itl=9ms@running=8{lengths}").predicted_s(read_profile(H200), at)
    assert plain <= step_s < 1.2 * plain
