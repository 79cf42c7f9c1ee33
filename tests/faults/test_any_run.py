"""Whatever is asked of a run, it ends with an answer or with a sentence that says why not."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from support.any_run import run_asked
from support.fault_parts import Tally, how_many
from tuner.cli import run
from tuner.errors import TunerError
from tuner.run.result import read_result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(86_400)]


def test_a_run_of_anything_that_can_be_asked_ends_with_an_answer_or_a_reason(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    tally = Tally()
    for seed in range(how_many(request, 10, 0.1)):
        folder = tmp_path / f"run{seed}"
        with tally.fault("run: anything", f"seed {seed}"):
            ended = outcome(seed, folder)
            assert not ended.startswith("Traceback"), ended
            if ended == "answered":
                assert read_result(folder).recommendation is not None
                for command in (["report"], ["emit"], ["emit", "--format", "kubernetes"]):
                    assert run([*command, str(folder)]) == 0
                    assert "Traceback" not in capsys.readouterr().err
    tally.report(record_property)


def outcome(seed: int, folder: Path) -> str:
    """Return how a run ended: answered, a sentence, or a traceback."""
    try:
        run_asked(seed, folder)
    except TunerError as told:
        return told.message
    except Exception:  # noqa: BLE001 - whatever it is, it is told
        return traceback.format_exc()
    return "answered"
