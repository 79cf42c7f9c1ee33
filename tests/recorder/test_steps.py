"""Steps are taken in where a server serves: cheaply, in hundreds, and never at its cost."""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.recorder_parts import NOW_S
from tuner.recorder.messages import Stepped
from tuner.recorder.recorder import Recorder
from tuner.recorder.settings import FILE, STEPS, RecordSettings, UsageError
from tuner.recorder.steps import (
    COLUMNS,
    LONG_US,
    MANY,
    StepTap,
    quiet_iterations,
    steps_header,
    steps_line,
)
from tuner.shadow.recorded import read_steps


@dataclass
class Iterated:
    """What vLLM says of an iteration."""

    iteration_timestamp: float = NOW_S
    inter_token_latencies_iter: list[float] = field(default_factory=lambda: [0.02, 0.02, 0.31])
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    num_preempted_reqs: int = 1


@dataclass
class Detailed:
    """What was in an iteration."""

    num_ctx_requests: int = 1
    num_ctx_tokens: int = 221
    num_generation_requests: int = 4
    num_generation_tokens: int = 13
    elapsed_ms: float = 24.5
    is_dummy: bool = False


@dataclass
class Drafted:
    """What became of the drafts of an iteration."""

    num_drafts: int = 4
    num_accepted_tokens_per_pos: list[int] = field(default_factory=lambda: [1, 1])


def taken(*iterations: tuple[Iterated | None, Detailed | None]) -> list[dict[str, int]]:
    """Return what a tap hands on of iterations."""
    found: list[Stepped] = []
    tap = StepTap(found.append)
    for iteration, details in iterations:
        tap.take(iteration, details, None, NOW_S + 1)
    tap.flush()
    numbers = [n for one in found for n in one.numbers]
    width = len(COLUMNS)
    rows = [numbers[i : i + width] for i in range(0, len(numbers), width)]
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def test_a_step_is_kept_with_what_was_in_it_and_what_lay_between_two_tokens() -> None:
    (row,) = taken((Iterated(), Detailed()))
    assert row == {
        "ended_us": int(NOW_S * 1e6),
        "generating": 4,
        "context_requests": 1,
        "context_tokens": 221,
        # Who was preempted waited for longer than the step took.
        "interval_us": 20_000,
        "elapsed_us": 24_500,
        "preempted": 1,
        "generation_tokens": 13,
    }


def test_a_step_that_brought_out_no_token_is_known_by_its_details_alone() -> None:
    (row,) = taken((None, Detailed(num_generation_requests=0)))
    assert (row["ended_us"], row["interval_us"]) == (int((NOW_S + 1) * 1e6), -1)
    assert (row["context_tokens"], row["elapsed_us"]) == (221, 24_500)
    assert taken((None, None)) == []
    assert taken((Iterated(), Detailed(is_dummy=True))) == []


def test_without_details_only_decoding_is_sure_to_be_that() -> None:
    decoding, first = taken(
        (Iterated(), None), (Iterated(time_to_first_tokens_iter=[0.5]), None)
    )
    assert (decoding["generating"], decoding["context_tokens"]) == (3, 0)
    assert (first["generating"], first["context_tokens"], first["elapsed_us"]) == (3, -1, -1)


def test_steps_are_handed_on_by_many_and_none_waits_for_long() -> None:
    found: list[Stepped] = []
    tap = StepTap(found.append)
    for _ in range(MANY - 1):
        tap.take(Iterated(), None, None, NOW_S)
    assert found == []
    tap.take(Iterated(), None, None, NOW_S)
    assert [len(one.numbers) for one in found] == [MANY * len(COLUMNS)]
    tap.take(Iterated(), None, None, NOW_S)
    tap.take(Iterated(NOW_S + LONG_US / 1e6), None, None, NOW_S)
    assert len(found) == 2


def test_steps_go_into_files_of_their_own_and_what_a_door_holds_is_not_lost(
    tmp_path: Path,
) -> None:
    recorder = Recorder(RecordSettings(tmp_path / "prod.jsonl", has_steps=True))
    recorder.source.server = {"model": "toy", "num_blocks": 7}
    tap = StepTap(recorder.offer)
    recorder.before_close.append(tap.flush)
    for n in range(MANY + 3):
        drafting = Drafted() if n % 2 else None
        tap.take(Iterated(NOW_S + n * 0.001), Detailed(), drafting, NOW_S)
    recorder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["prod.steps"]
    assert (tmp_path / "prod.steps").stat().st_mode & 0o777 == 0o600
    (found,) = read_steps([tmp_path / "prod.steps"])
    assert (len(found), found.server.num_blocks) == (MANY + 3, 7)
    assert found.ended_s[-1] == pytest.approx(NOW_S + (MANY + 2) * 0.001, abs=1e-5)
    # Every second step verified drafts of four requests: three brought a token, one three.
    assert found.brought == tuple(n * (MANY + 3 - 1) // 2 for n in (3, 0, 1))
    assert found.tokens_per_step == pytest.approx(1.5)


def test_a_step_takes_a_few_bytes() -> None:
    """Steps of a busy server: intervals that scatter, now and then a prompt."""
    numbers, at_us = array("q"), int(NOW_S * 1e6)
    for n in range(MANY):
        took_us = 20_000 + (n * 7919) % 997
        at_us += took_us + (n * 31) % 13
        prefilled = (1, 200 + n) if n % 10 == 0 else (0, 0)
        numbers.extend((at_us, 16, *prefilled, took_us, took_us - 900, 0, 16))
    assert len(steps_line(numbers)) < 12 * MANY
    assert len(steps_header("test", {})) < 100


@pytest.mark.parametrize(
    ("value", "has_steps"), [("1", True), ("0", False), ("", False), (None, False)]
)
def test_steps_are_recorded_where_they_are_asked_for(
    value: str | None, *, has_steps: bool
) -> None:
    environment = {FILE: "prod.jsonl"} | ({} if value is None else {STEPS: value})
    settings = RecordSettings.from_environment(environment)
    assert settings is not None
    assert settings.has_steps is has_steps


def test_another_value_is_refused() -> None:
    with pytest.raises(UsageError, match="TUNE_RECORD_STEPS must be 0 or 1, got yes"):
        RecordSettings.from_environment({FILE: "prod.jsonl", STEPS: "yes"})


def test_the_line_that_vllm_logs_of_each_iteration_is_left_out_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("vllm.v1.metrics.loggers")
    before = list(log.filters)
    try:
        quiet_iterations()
        with caplog.at_level(logging.INFO, logger=log.name):
            log.info("%sIteration(%d): %d context requests", "", 1, 2)
            log.info("Avg prompt throughput: %.1f tokens/s", 3.0)
    finally:
        log.filters[:] = before
    assert caplog.messages == ["Avg prompt throughput: 3.0 tokens/s"]
