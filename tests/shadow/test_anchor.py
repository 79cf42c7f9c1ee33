"""One point of production's own metrics sets the level of a profile, or is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from support.paths import ROOT
from support.run_parts import a_profile
from tuner.cli.commands import tune as command
from tuner.engine.protocol import Batch
from tuner.errors import ShadowError, UsageError
from tuner.shadow.anchor import LEVEL, Anchor, anchored
from tuner.shadow.profiles import read_profile
from tuner.shadow.step_model import TERMS

H200 = ROOT / "profiles" / "gpu" / "meta-llama-3.1-8b.1xh200_sxm.yaml"


@pytest.mark.parametrize(
    ("text", "anchor"),
    [
        ("itl=12.3ms@running=14", Anchor(0.0123, 14.0)),
        ("tpot=0.02s @ running=3.5, context=2500", Anchor(0.02, 3.5, 2500)),
    ],
)
def test_a_point_is_read_as_a_dashboard_says_it(text: str, anchor: Anchor) -> None:
    assert Anchor.parse(text) == anchor
    assert Anchor.parse(str(anchor)) == anchor


@pytest.mark.parametrize(
    "text", ["12ms", "itl=12ms", "itl=-1ms@running=3", "itl=0ms@running=3", "itl=1ms@running=0"]
)
def test_what_is_no_point_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Anchor.parse(text)


@pytest.mark.parametrize("times", [0.6, 1.0, 1.7])
def test_every_step_is_moved_by_what_the_point_was_off(times: float) -> None:
    profile = read_profile(H200)
    batch = Batch(14, 0, 0, 14 * 1000, 0, 0, 0)
    said_s = profile.step_model.step_s(batch)
    found, how = anchored(profile, Anchor(times * said_s, 14.0))
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
    assert np.allclose(now[0, : len(TERMS)], LEVEL, rtol=1e-3)
    assert (before[0, : len(TERMS)] > LEVEL).all()
    assert np.array_equal(before[1:], now[1:])
    assert str(how.anchor) in found.origin


def test_between_two_numbers_of_requests_the_time_lies_between_theirs() -> None:
    profile = a_profile()
    (_, low), (_, middle), (_, high) = (
        anchored(profile, Anchor(0.015, running)) for running in (14.0, 14.5, 15.0)
    )
    assert low.predicted_s < middle.predicted_s < high.predicted_s


@pytest.mark.parametrize("times", [0.4, 2.5])
def test_a_point_far_from_the_profile_is_refused(times: float) -> None:
    profile = read_profile(H200)
    said_s = profile.step_model.step_s(Batch(14, 0, 0, 14 * 1000, 0, 0, 0))
    with pytest.raises(ShadowError, match=r"times the .* ms that the profile says"):
        anchored(profile, Anchor(times * said_s, 14.0))


def test_the_command_writes_the_corrected_profile(tmp_path: Path) -> None:
    output = tmp_path / "anchored.yaml"
    words = ["calibrate", "--profile", str(H200), "--anchor", "itl=8ms@running=14"]
    done = CliRunner().invoke(command, [*words, "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert "times as long as the profile said" in done.stdout
    assert "itl=8ms@running=14,context=1000" in read_profile(output).origin
    both = [*words, "--trace", "prod.jsonl", "-o", str(output)]
    refused = CliRunner().invoke(command, both)
    assert "two ways to correct" in str(refused.exception)
