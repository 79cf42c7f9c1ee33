"""What a fit finds in the steps of an engine whose truth is known."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from support.step_parts import (
    CAPTURED,
    KNEE,
    LINEAR,
    Noise,
    batch,
    columns,
    lognormal,
    off_ratio,
    replays,
    uniform,
)
from tuner.errors import TooFewSamplesError, UsageError
from tuner.shadow.fit import MIN_STEPS, Fit, fit, non_negative
from tuner.shadow.step_model import Knots, StepModel


@cache
def found_again(truth: StepModel) -> Fit:
    """Return what is found under ten percent of noise and three percent of stalls."""
    return fit(replays(truth, lognormal(0.1), stalled=0.03))


@pytest.mark.parametrize("truth", [LINEAR, KNEE], ids=["linear", "knee"])
def test_predictions_are_found_again_under_noise_and_stalls(truth: StepModel) -> None:
    """99 of 100 batches within one percent."""
    found = found_again(truth)
    assert np.quantile(off_ratio(found.model, truth), 0.99) < 0.01
    assert found.error.distorted_ratio == pytest.approx(0.03, abs=0.005)
    assert found.error.steps == 4 * 3000
    assert found.error.step_mape_ratio == pytest.approx(0.0675, abs=0.006)
    assert found.error.heldout_steps_ratio < 0.01
    assert found.error.heldout_config_ratio is not None
    assert found.error.heldout_config_ratio < 0.02


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.tuples(*[st.floats(0.2, 5.0)] * 6),
    st.integers(0, 2**32 - 1),
)
def test_whatever_the_engines_speed_its_predictions_are_found_again(
    factors: tuple[float, ...], seed: int
) -> None:
    """Coefficients up to five times smaller or larger; the mean batch within one percent."""
    seq, token, base, prefill_base, decode_context, prefill_context = factors
    truth = replace(
        LINEAR,
        seq_s=1e-5 * seq,
        token_slopes_s=(2e-5 * token,),
        base_s=4e-3 * base,
        prefill_base_s=1e-3 * prefill_base,
        decode_context_s=1e-8 * decode_context,
        prefill_context_s=2e-10 * prefill_context,
    )
    found = fit(replays(truth, lognormal(0.1), seed=seed, stalled=0.03))
    assert off_ratio(found.model, truth).mean() < 0.01


@pytest.mark.parametrize("noise", [lognormal(0.3), uniform(0.52)], ids=["lognormal", "uniform"])
def test_thirty_percent_of_noise_does_not_bias_the_mean(noise: Noise) -> None:
    """Three standard errors of a sum of 40,000 steps are about 0.7 percent here."""
    measured = replays(KNEE, noise, steps=10_000)
    found = fit(measured)
    total_s = sum(found.model.predict_s(m).sum() for m in measured)
    truth_s = sum(KNEE.predict_s(m).sum() for m in measured)
    assert total_s == pytest.approx(truth_s, rel=0.01)
    assert found.error.distorted_ratio < 0.002


def test_twenty_percent_of_noise_is_not_mistaken_for_stalls() -> None:
    assert fit(replays(LINEAR, lognormal(0.2))).error.distorted_ratio < 0.001
    measured = replays(LINEAR, uniform(0.2))
    found = fit(measured)
    assert found.error.distorted_ratio == 0.0
    total_s = sum(found.model.predict_s(m).sum() for m in measured)
    assert total_s == pytest.approx(sum(m.duration_s.sum() for m in measured), rel=1e-9)


def test_stalls_fall_out_even_where_the_noise_is_large() -> None:
    measured = replays(LINEAR, lognormal(0.5))
    measured[0].duration_s[::20] = 6 * LINEAR.predict_s(measured[0])[::20]
    assert 0.012 < fit(measured).error.distorted_ratio < 0.018


def test_noisy_prefills_beside_quiet_decodes_are_neither_trimmed_nor_believed_less() -> None:
    """About 10,000 prefills: a standard error of their sum is about 0.6 percent."""
    measured, rng = [], np.random.default_rng(1)
    for plain in replays(LINEAR, lognormal(0.05), steps=6000):
        shaken = plain.duration_s * lognormal(0.4)(rng, len(plain))
        took_s = np.where(plain.is_decode_only, plain.duration_s, shaken)
        measured.append(replace(plain, duration_s=took_s))
    found = fit(measured).model
    for alone in (True, False):
        kinds = [m.is_decode_only == alone for m in measured]
        pairs = list(zip(measured, kinds, strict=True))
        total_s = sum(found.predict_s(m)[kind].sum() for m, kind in pairs)
        truth_s = sum(LINEAR.predict_s(m)[kind].sum() for m, kind in pairs)
        assert total_s == pytest.approx(truth_s, rel=0.02)


def test_slow_first_steps_and_rare_giants_do_not_move_the_model() -> None:
    measured = replays(LINEAR, lognormal(0.1))
    for replay in measured:
        replay.duration_s[:20] *= 100
    assert np.quantile(off_ratio(fit(measured).model, LINEAR), 0.99) < 0.01


def test_a_linear_truth_stays_linear_and_extrapolates_to_twice_the_batch() -> None:
    found = found_again(LINEAR).model
    assert found.token_knots == (0,)
    twice = columns(
        duration_s=np.ones(3),
        decode_seqs=[256, 256, 0],
        prefill_tokens=[0, 8192 - 256, 8192],
        decode_context_tokens=[256 * 800, 256 * 800, 0],
        prefill_context_tokens=[0, 8192**2 / 2, 8192**2 / 2],
    )
    assert found.predict_s(twice) == pytest.approx(LINEAR.predict_s(twice), rel=0.03)


def test_what_uneven_contexts_cost_beside_a_prompt_is_told_from_what_they_cost_alone() -> None:
    truth = replace(
        LINEAR,
        decode_context_s=5e-8,
        mixed_context_s=4e-8,
        spread_s=2.4e-7,
        mixed_spread_s=2.4e-7,
    )
    measured = replays(truth, lognormal(0.05), spread=2_500.0)
    found = fit(measured).model
    assert found.spread_s == pytest.approx(truth.spread_s, rel=0.1)
    assert found.mixed_spread_s == pytest.approx(truth.mixed_spread_s, rel=0.3)

    def off(model: StepModel) -> float:
        """Return how far off 19 of 20 batches with a prompt are at the most."""
        each = [np.abs(model.predict_s(m) / truth.predict_s(m) - 1) for m in measured]
        mixed = [e[~m.is_decode_only] for e, m in zip(each, measured, strict=True)]
        return float(np.quantile(np.concatenate(mixed), 0.95))

    assert off(found) < 0.03
    assert off(replace(found, mixed_spread_s=0.0)) > 0.2


def test_contexts_of_one_length_say_nothing_of_uneven_ones() -> None:
    even = [
        replace(m, decode_spread_tokens=np.zeros(len(m)))
        for m in replays(LINEAR, lognormal(0.1))
    ]
    found = fit(even).model
    assert (found.spread_s, found.mixed_spread_s) == (0.0, 0.0)
    assert found.decode_context_s > 0.0


def test_tokens_that_are_free_up_to_64_are_found() -> None:
    found = found_again(KNEE).model
    assert found.token_knots == (0, 64)
    flat_s, steep_s = found.token_slopes_s
    assert flat_s < 0.1 * steep_s
    assert steep_s == pytest.approx(3e-5, rel=0.03)


def test_steps_at_captured_sizes_are_found_and_are_missed_without_them() -> None:
    measured = replays(CAPTURED, lognormal(0.1))
    found = fit(measured, CAPTURED.graphs).model
    padded_s = found.step_s(batch(64, 0, 0, 0)) - 31 * found.seq_s
    assert found.step_s(batch(33, 0, 0, 0)) == pytest.approx(padded_s)
    assert found.eager_s == pytest.approx(CAPTURED.eager_s, rel=0.2)
    for seqs in (5, 33, 64, 65, 128, 200):
        asked = batch(seqs, 0, seqs * 400, 0)
        assert found.step_s(asked) == pytest.approx(CAPTURED.step_s(asked), rel=0.015)
    blind = fit(measured).model
    asked = batch(66, 0, 66 * 400, 0)
    assert blind.step_s(asked) < 0.9 * CAPTURED.step_s(asked)


def test_few_prompts_of_other_moments_bend_the_curve_of_tokens() -> None:
    """Three of a hundred steps hold long prompts, all of them in a tenth of the time."""
    decode = np.random.default_rng(0).integers(1, 33, 6000).astype(np.float64)
    prefill = np.where(np.arange(6000) >= 5400, 100.0 * (np.arange(6000) % 3 == 0), 0.0)
    prefill *= np.arange(6000) % 20 + 1
    steps = columns(duration_s=np.ones(6000), decode_seqs=decode, prefill_tokens=prefill)
    truth = StepModel.linear(9e-3, 0.0, 0.0)
    truth = replace(truth, token_knots=(0, 512), token_slopes_s=(0.0, 4e-5))
    noise = lognormal(0.03)(np.random.default_rng(1), 6000)
    found = fit([replace(steps, duration_s=truth.predict_s(steps) * noise)]).model
    for long in (400, 900, 1900):
        asked = batch(16, long, 0, 0)
        assert found.step_s(asked) == pytest.approx(truth.step_s(asked), rel=0.02)


def test_between_decodes_and_full_prompts_time_rises_as_it_does_beyond() -> None:
    """An overloaded server fills its budget of 2,048 in each step that has a prompt at all."""
    rng = np.random.default_rng(0)
    decode = rng.integers(1, 43, 2400).astype(np.float64)
    prefill = np.where(rng.random(2400) < 0.2, 2048.0 - decode, 0.0)
    context = decode * rng.integers(500, 3000, 2400)
    steps = columns(
        duration_s=np.ones(2400),
        decode_seqs=decode,
        prefill_tokens=prefill,
        decode_context_tokens=context,
    )
    truth = StepModel.linear(9e-3, 0.0, 0.0, decode_context_s=3e-8)
    truth = replace(truth, token_knots=(0, 128), token_slopes_s=(0.0, 4.2e-5))
    found = fit(
        [replace(steps, duration_s=truth.predict_s(steps) * lognormal(0.04)(rng, 2400))]
    )
    for tokens in (512, 1024, 2048):
        asked = batch(16, tokens - 16, 16 * 1500, 0)
        assert found.model.step_s(asked) == pytest.approx(truth.step_s(asked), rel=0.1)


def test_a_knot_wants_steps_on_both_sides_and_the_last_segment_many() -> None:
    """Above 64 tokens each costs tenfold, but only a few steps say so."""
    bent = replace(LINEAR, token_knots=(0, 64), token_slopes_s=(3e-5, 3e-4))
    rng = np.random.default_rng(0)

    def found_knots(beyond: int, largest: int = 160) -> Knots:
        further = rng.integers(65, largest, beyond)
        seqs = np.concatenate((rng.integers(1, 65, 3000), further))
        steps = columns(duration_s=np.ones(seqs.size), decode_seqs=rng.permutation(seqs))
        took_s = bent.predict_s(steps) * rng.lognormal(-0.005, 0.1, seqs.size)
        return fit([replace(steps, duration_s=took_s)]).model.token_knots

    assert 64 in found_knots(600)
    assert found_knots(40) == (0,)
    assert 64 not in found_knots(600, largest=72)


def test_a_configuration_under_another_law_shows_in_the_error() -> None:
    measured = replays(LINEAR, lognormal(0.1))
    alike = fit(measured).error.heldout_config_ratio
    measured[2] = replace(measured[2], duration_s=3.0 * measured[2].duration_s)
    odd = fit(measured).error
    assert alike is not None
    assert odd.heldout_config_ratio is not None
    assert alike < 0.02
    assert odd.heldout_config_ratio > 0.6
    assert odd.distorted_ratio < 0.01


def test_a_small_configuration_that_is_slow_throughout_is_not_set_aside_as_stalled() -> None:
    measured = replays(LINEAR, lognormal(0.1))
    slow = replays(LINEAR, lognormal(0.1), seed=1, steps=500)[2]
    found = fit([*measured, replace(slow, duration_s=3.0 * slow.duration_s)])
    assert found.error.distorted_ratio < 0.005
    assert found.error.heldout_config_ratio == pytest.approx(2 / 3, abs=0.03)


def test_one_configuration_cannot_be_predicted_from_others() -> None:
    found = fit(replays(LINEAR, lognormal(0.1))[:1])
    assert found.error.heldout_config_ratio is None


def test_turns_without_a_batch_give_the_tidying_time_and_nothing_else() -> None:
    measured = replays(LINEAR, lognormal(0.1))
    plain = fit(measured)
    tidy = columns(duration_s=[1e-5, 3e-5, 9.0])
    with_tidy = fit([*measured, tidy])
    assert plain.model.tidy_s == 0.0
    assert with_tidy.model.tidy_s == 3e-5
    assert replace(with_tidy.model, tidy_s=0.0) == plain.model
    assert with_tidy.error == plain.error


def test_the_same_steps_give_the_same_fit() -> None:
    measured = replays(KNEE, lognormal(0.1), steps=8000)
    assert fit(measured) == fit(measured)


def test_too_few_steps_are_refused_and_just_enough_are_not() -> None:
    whole = replays(LINEAR, lognormal(0.1), steps=MIN_STEPS)[1]
    short = whole.take(np.arange(1, len(whole)))
    idle = columns(duration_s=np.full(1000, 1e-4))
    with pytest.raises(TooFewSamplesError, match=f"{MIN_STEPS} steps .* got 199") as refused:
        fit([short, idle])
    assert "longer" in refused.value.hint
    with pytest.raises(TooFewSamplesError):
        fit([])
    assert fit([whole]).error.steps == MIN_STEPS


@pytest.mark.parametrize("wrong_s", [0.0, -1.0, math.nan, math.inf])
def test_a_duration_that_no_clock_measures_is_refused_with_its_place(wrong_s: float) -> None:
    measured = replays(LINEAR, lognormal(0.1), steps=300)
    measured[1].duration_s[7] = wrong_s
    with pytest.raises(UsageError, match="row 7 of calibration replay 1"):
        fit(measured)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seqs=st.lists(st.integers(0, 64), min_size=1, max_size=3),
    prefill=st.lists(st.integers(0, 2000), min_size=1, max_size=3),
    sigma=st.sampled_from([0.0, 0.1, 0.3]),
)
def test_steps_that_are_all_alike_still_give_a_model_with_their_mean(
    seqs: list[int], prefill: list[int], sigma: float
) -> None:
    """Few distinct batches leave coefficients open; their time must come out all the same."""
    rng = np.random.default_rng(0)
    decode, fresh = rng.choice(seqs, 800), rng.choice(prefill, 800)
    fresh = np.where((decode == 0) & (fresh == 0), 1, fresh)
    steps = columns(duration_s=np.ones(800), decode_seqs=decode, prefill_tokens=fresh)
    steps = replace(steps, duration_s=KNEE.predict_s(steps) * rng.lognormal(0, sigma, 800))
    found = fit([steps])
    assert found.error.distorted_ratio < 0.005
    total_s = found.model.predict_s(steps).sum()
    assert total_s == pytest.approx(steps.duration_s.sum(), rel=1e-6 + sigma / 50)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 40), st.integers(-6, 6))
def test_non_negative_least_squares_are_scipys(
    seed: int, n: int, rows: int, power: int
) -> None:
    """The same remainder to 1e-9 of what is wanted, with columns of zeros and near twins."""
    rng = np.random.default_rng(seed)
    columns = rng.normal(size=(rows, n))
    if seed % 2:
        columns = np.abs(columns)  # as a fit's are, most coefficients above 0
    if seed % 3 == 0:
        columns[:, 0] = columns[:, -1] * (1 + 1e-9)
    if seed % 5 == 0:
        columns[:, rng.integers(n)] = 0.0
    norms = np.linalg.norm(columns, axis=0)
    columns /= np.where(norms > 0, norms, 1.0)
    wanted = rng.normal(size=rows) if seed % 7 else columns @ np.abs(rng.normal(size=n))
    wanted = wanted * 10.0**power
    found = non_negative(columns, wanted)
    assert (found >= 0).all()
    _, remainder = nnls(columns, wanted, maxiter=100 * n)
    off = float(np.linalg.norm(columns @ found - wanted))
    assert off == pytest.approx(remainder, rel=1e-9, abs=1e-9 * float(np.linalg.norm(wanted)))
