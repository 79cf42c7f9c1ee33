"""A served engine that drafts is learnt from its own steps, and so are its drafts' rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.recorded_parts import (
    LIMITS,
    METHOD,
    TRACE,
    a_config,
    a_server,
    left_early,
    recorded,
    served,
)
from support.traffic import steady
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import Drafts
from tuner.engine.steps import StepColumns
from tuner.errors import Caveat, ShadowError, TooFewSamplesError
from tuner.replay.plan import ReplayPlan
from tuner.shadow.correction import by_steps
from tuner.shadow.learnt import learn_profile
from tuner.shadow.predictor import Predictor
from tuner.shadow.rebuilt import Rebuilt, rebuild
from tuner.shadow.recorded import RecordedRequests, RecordedSteps, read_steps, steps_beside
from tuner.traffic.traces import Trace

RATES = (0.8, 0.5, 0.3)


def drafting_server(*, is_ahead: bool = False, **changed: Any) -> dict[str, Any]:
    """Return what a recorder says of a server that drafts; `changed` is of how."""
    scheduler = {**a_config()["scheduler_config"], "async_scheduling": is_ahead}
    kept = {**METHOD, **changed}
    return a_server(config=a_config(speculative_config=kept, scheduler_config=scheduler))


def read(
    folder: Path, steps: list[bytes], rows: list[bytes]
) -> tuple[RecordedSteps, RecordedRequests]:
    """Return what is read of the lines once they lie in files."""
    (folder / "prod.steps").write_bytes(b"".join(steps))
    (folder / "prod.jsonl").write_bytes(b"".join(rows))
    (found,) = read_steps(steps_beside([folder / "prod.jsonl"]))
    return found, RecordedRequests.read([folder / "prod.jsonl"])


Lines = tuple[StepColumns, list[bytes], list[bytes]]


def drafting(server: dict[str, Any], trace: Trace = TRACE, *, is_ahead: bool = False) -> Lines:
    """Return the true steps of an engine that drafts, and the lines that record them."""
    log = served(trace=trace, accepted=RATES, is_ahead=is_ahead)
    return recorded(log, server=server, trace=trace, accepted=RATES)


@pytest.fixture(scope="module")
def lines() -> Lines:
    """Return the steps of one that waits for each batch, and the lines that record them."""
    return drafting(drafting_server())


@pytest.fixture(scope="module")
def lines_ahead() -> Lines:
    """Return those of one that schedules a batch while it computes the one before."""
    return drafting(drafting_server(is_ahead=True), is_ahead=True)


def hold_together(true: StepColumns, rebuilt: Rebuilt, ended_s: Any) -> None:
    """Hold batches to the true ones."""
    assert len(rebuilt.steps) > 0.96 * len(true)
    at = np.searchsorted(ended_s, rebuilt.steps.end_s)
    for name in ("decode_seqs", "draft_tokens", "prefill_tokens"):
        assert getattr(rebuilt.steps, name) == pytest.approx(getattr(true, name)[at])
    # Of which answers drafts were accepted is known in the mean.
    for name in ("decode_context_tokens", "prefill_context_tokens"):
        ours, its = getattr(rebuilt.steps, name), getattr(true, name)[at]
        assert np.mean(np.abs(ours - its) <= 0.05 * its + 1) > 0.95
        assert ours.sum() == pytest.approx(its.sum(), rel=0.01)


def test_batches_come_back_with_what_they_verified(
    tmp_path: Path, lines: Lines, lines_ahead: Lines
) -> None:
    for true, steps, rows in (lines, lines_ahead):
        found, requests = read(tmp_path, steps, rows)
        rebuilt = rebuild(found, requests)
        assert rebuilt.requests == len(TRACE)
        hold_together(true, rebuilt, found.ended_s)


def test_so_they_do_where_most_clients_left_before_the_end(tmp_path: Path) -> None:
    trace = steady(300, per_s=6.0, prompt=100, output=60)
    true, steps, (source, *rows) = drafting(drafting_server(), trace)
    found, requests = read(tmp_path, steps, [source, *left_early(rows)])
    hold_together(true, rebuild(found, requests), found.ended_s)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_production_accepts_foretells_limits_that_it_never_had(
    tmp_path: Path, lines: Lines, lines_ahead: Lines, *, is_ahead: bool
) -> None:
    found, requests = read(tmp_path, *(lines_ahead if is_ahead else lines)[1:])
    profile, learnt = learn_profile([found], requests, {"model": "toy"})
    assert profile.shape.drafts == Drafts("eagle", 3)
    # Of real answers: nothing is doubtful about the text.
    assert profile.caveats == ()
    assert profile.accepted == learnt.accepted == pytest.approx(RATES, abs=0.02)
    assert "a step brings an answer 2.6" in "\n".join(learnt.lines())
    for limits in (EngineLimits(8, 256), EngineLimits(12, 512)):
        truth = served(limits, accepted=RATES, is_ahead=is_ahead).timelines
        log = Predictor(profile).replay(TRACE, limits, ReplayPlan())
        took_s, told_s = (
            float(np.median(times.last_s - times.due_s)) for times in (truth, log.timelines)
        )
        assert told_s == pytest.approx(took_s, rel=0.03)


def test_a_profile_takes_over_the_rates_of_recorded_steps_and_no_doubt_is_left(
    tmp_path: Path, lines: Lines
) -> None:
    found, requests = read(tmp_path, *lines[1:])
    profile, _ = learn_profile([found], requests, {"model": "toy"})
    of_random_text = replace(
        profile, accepted=(0.1, 0.0, 0.0), caveats=(Caveat.DRAFTS_ON_RANDOM_TEXT,)
    )
    stretches = [(LIMITS, part) for part in rebuild(found, requests).stretches()]
    corrected, said = by_steps(of_random_text, stretches, profile.accepted)
    assert (corrected.accepted, corrected.caveats) == (profile.accepted, ())
    assert "a step brings an answer 2.6" in next(said.lines())
    with pytest.raises(ShadowError, match="verifies 2 drafts a step, the profile's engine 3"):
        by_steps(of_random_text, stretches, (0.8, 0.5))


def test_a_recording_in_which_nothing_was_verified_says_so(
    tmp_path: Path, lines: Lines
) -> None:
    found, requests = read(tmp_path, *lines[1:])
    with pytest.raises(TooFewSamplesError, match="no recorded step verified a draft"):
        learn_profile([replace(found, brought=())], requests, {})


def test_starts_that_draft_otherwise_are_no_steps_of_one_engine(
    tmp_path: Path, lines: Lines
) -> None:
    found, requests = read(tmp_path, *lines[1:])
    assert found.server.shape is not None
    shape = replace(found.server.shape, drafts=None)
    before = replace(found, server=msgspec.structs.replace(found.server, shape=shape))
    with pytest.raises(ShadowError, match="drafts none, and last 3 a step by eagle"):
        learn_profile([before, found], requests, {})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"method": "ngram"}, "which drafts by what the text is"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, "as many tokens as fit"),
        ({"use_multi_module_mtp": True}, "by several modules"),
    ],
)
def test_a_server_whose_drafts_vary_cannot_be_learnt_and_is_told_why(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    _, steps, rows = drafting(drafting_server(**changed))
    found, requests = read(tmp_path, steps, rows)
    with pytest.raises(ShadowError, match=why):
        learn_profile([found], requests, {})


def test_a_step_that_computes_who_was_set_aside_again_teaches_nothing(
    tmp_path: Path, lines: Lines
) -> None:
    """It decodes, as vLLM counts, though it computes a prompt and an answer anew."""
    found, requests = read(tmp_path, *lines[1:])
    tokens = found.generation_tokens.copy()
    row = int(np.flatnonzero(found.generating > 2)[100])
    tokens[row] += 300
    rebuilt = rebuild(replace(found, generation_tokens=tokens), requests)
    assert rebuilt.left_out["with a request that was set aside and begins again"] == 1
    assert found.ended_s[row] not in rebuilt.steps.end_s
