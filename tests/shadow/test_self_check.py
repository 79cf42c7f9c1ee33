"""A vLLM that decides otherwise than foreseen is found out, and then asked about every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from support.run_parts import a_profile
from support.shadow_parts import Workload, a_shape
from tuner.engine.compat import serve
from tuner.engine.limits import EngineLimits
from tuner.replay.loop import replay
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Timelines
from tuner.shadow import self_check as foresight
from tuner.shadow.fast_forward import HiddenDecodes
from tuner.shadow.self_check import departure
from tuner.shadow.source import ShadowSource
from tuner.traffic.prompts import PromptSource

pytestmark = pytest.mark.engine
LIMITS = EngineLimits(8, 512)
TRACE = Workload(seed=4, n=30, per_s=20.0, longest_prompt=90, longest_output=40).trace()


@pytest.fixture(autouse=True)
def untried() -> Iterator[None]:
    serve.prepare_environment()
    foresight._tried.clear()
    yield
    foresight._tried.clear()


@pytest.fixture
def another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an answer end a step later than foreseen, as if vLLM counted otherwise."""
    to_end = HiddenDecodes.steps_to_next_end
    monkeypatch.setattr(HiddenDecodes, "steps_to_next_end", lambda self: to_end(self) + 1)


def replayed(source: ShadowSource) -> tuple[Timelines, str]:
    engine = source.start({}, LIMITS)
    engine.set_limits(LIMITS)
    log = replay(engine, TRACE, PromptSource(TRACE, 1000, 0), ReplayPlan())
    return log.timelines, engine.info.remark


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("block_size", [4, 16, 128])
def test_this_vllm_decides_as_foreseen(
    block_size: int, *, asynchronous: bool, prefix_caching: bool
) -> None:
    shape = a_shape(
        block_size=block_size, asynchronous=asynchronous, prefix_caching=prefix_caching
    )
    assert departure(shape) == ""


def test_prompts_in_one_piece_are_tried_as_well() -> None:
    assert departure(a_shape(scheduler={"enable_chunked_prefill": False})) == ""


@pytest.mark.usefixtures("another_vllm")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_another_vllm_is_found_out(*, asynchronous: bool) -> None:
    assert "foreseen was" in departure(a_shape(asynchronous=asynchronous))


def test_an_account_that_breaks_is_a_departure_and_no_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HiddenDecodes, "is_short_for", lambda _self, _room: False)
    told = departure(a_shape(prefix_caching=False))
    assert told.startswith("foreseeing it ends in EngineError")


def test_a_shadow_of_another_vllm_asks_and_says_so(request: pytest.FixtureRequest) -> None:
    profile = replace(a_profile(), shape=a_shape())
    wanted, silent = replayed(ShadowSource(profile, is_forced=True))
    assert silent == ""
    request.getfixturevalue("another_vllm")
    foresight._tried.clear()
    found, told = replayed(ShadowSource(profile, is_forced=True))
    assert "does not decide as foreseen" in told
    np.testing.assert_allclose(found.last_s, wanted.last_s, rtol=1e-9)
