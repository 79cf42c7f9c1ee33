"""What the Engine protocol promises, asked of every engine: the toys, the shadows, vLLM."""

# ruff: noqa: D102 - a test's name is its sentence, in a class too

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engine_contract import (
    CEILING,
    ClosingContract,
    EngineContract,
    like_the_toys,
    prompt,
    turns,
)
from support.leaping import LeapingSource
from support.shadow_parts import a_shadow, a_shape
from support.toy import ToySource
from tuner.engine.demo import demo_engine_args
from tuner.engine.live import LiveSource
from tuner.engine.protocol import Engine, EngineSource
from tuner.errors import EngineError


@pytest.fixture(scope="class")
def toy() -> Iterator[Engine]:
    """Start a toy, and see it closed."""
    yield from started(ToySource())


@pytest.fixture(scope="class")
def leaping() -> Iterator[Engine]:
    """Start a toy that takes like steps at once, and see it closed."""
    yield from started(LeapingSource())


@pytest.fixture(scope="class")
def shadow() -> Iterator[Engine]:
    """Make a shadow that takes like steps at once, and see it closed."""
    yield from ended(a_shadow(a_shape(), CEILING))


@pytest.fixture(scope="class")
def plain_shadow() -> Iterator[Engine]:
    """Make a shadow that asks vLLM about every step, and see it closed."""
    yield from ended(a_shadow(a_shape(), CEILING, fast=False))


@pytest.fixture(scope="class")
def asynchronous_shadow() -> Iterator[Engine]:
    """Make the shadow of an engine that schedules ahead, and see it closed."""
    yield from ended(a_shadow(a_shape(asynchronous=True), CEILING))


@pytest.fixture(scope="class")
def live() -> Iterator[Engine]:
    """Start vLLM on the demo model in this process, and see it closed; takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield from started(LiveSource())


def started(source: EngineSource) -> Iterator[Engine]:
    """Yield an engine at CEILING and close it."""
    yield from ended(source.start(demo_engine_args(), CEILING))


def ended(engine: Engine) -> Iterator[Engine]:
    """Yield an engine and close it."""
    yield engine
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.has_work()


class TestToyEngine(EngineContract):
    """The toy keeps the contract, so what holds on it can hold on vLLM."""

    @pytest.fixture
    def engine(self, toy: Engine) -> Engine:
        """Return the toy."""
        return toy


class TestLeapingEngine(EngineContract):
    """A toy that takes like steps at once keeps the same contract."""

    @pytest.fixture
    def engine(self, leaping: Engine) -> Engine:
        """Return the leaping toy."""
        return leaping

    def test_it_does_take_like_steps_at_once(self, engine: Engine) -> None:
        engine.add(0, prompt(0), 60)
        assert [turn.like_steps for turn in turns(engine)] == [1, 59]

    def test_it_takes_as_many_as_begin_before_the_horizon(self, engine: Engine) -> None:
        engine.add(0, prompt(0), 60)
        # A decode takes 10.5 ms: the fourth begins at 31.5 ms.
        counts = [turn.like_steps for turn in turns(engine, 0.032)]
        assert counts == [1, *[4] * 14, 3]


class TestToyEngineCloses(ClosingContract):
    """The toy closes."""

    @pytest.fixture
    def engine(self, toy: Engine) -> Engine:
        """Return a toy of its own."""
        return toy


@pytest.mark.engine
class TestShadowEngine(EngineContract):
    """The shadow keeps the contract while it takes like steps at once."""

    @pytest.fixture
    def engine(self, shadow: Engine) -> Engine:
        """Return the shadow."""
        return shadow

    def test_it_does_take_like_steps_at_once(self, engine: Engine) -> None:
        engine.add(0, prompt(0), 60)
        assert [turn.like_steps for turn in turns(engine) if turn.batch] == [1, 59]

    def test_the_toy_makes_the_same_batches(self, engine: Engine) -> None:
        assert like_the_toys(engine)


@pytest.mark.engine
class TestPlainShadowEngine(EngineContract):
    """The shadow keeps the contract while it asks vLLM about every step."""

    @pytest.fixture
    def engine(self, plain_shadow: Engine) -> Engine:
        """Return the plain shadow."""
        return plain_shadow

    def test_it_takes_every_step_by_itself(self, engine: Engine) -> None:
        engine.add(0, prompt(0), 60)
        assert [turn.like_steps for turn in turns(engine) if turn.batch] == [1] * 60

    def test_the_toy_makes_the_same_batches(self, engine: Engine) -> None:
        assert like_the_toys(engine)


@pytest.mark.engine
class TestAsynchronousShadowEngine(EngineContract):
    """The shadow of an engine that schedules ahead keeps the contract."""

    @pytest.fixture
    def engine(self, asynchronous_shadow: Engine) -> Engine:
        """Return the shadow."""
        return asynchronous_shadow


@pytest.mark.engine
class TestShadowEngineCloses(ClosingContract):
    """A shadow closes."""

    @pytest.fixture
    def engine(self, shadow: Engine) -> Engine:
        """Return a shadow of its own."""
        return shadow


@pytest.mark.engine
class TestAsynchronousShadowEngineCloses(ClosingContract):
    """A shadow closes with a batch in flight."""

    @pytest.fixture
    def engine(self, asynchronous_shadow: Engine) -> Engine:
        """Return a shadow of its own."""
        return asynchronous_shadow


@pytest.mark.engine
@pytest.mark.model
class TestLiveEngine(EngineContract):
    """vLLM keeps the contract."""

    @pytest.fixture
    def engine(self, live: Engine) -> Engine:
        """Return vLLM on the demo model."""
        return live

    def test_the_toy_makes_the_same_batches(self, engine: Engine) -> None:
        assert like_the_toys(engine)


@pytest.mark.engine
@pytest.mark.model
class TestLiveEngineCloses(ClosingContract):
    """vLLM closes, and starts again in a process where one was closed before."""

    @pytest.fixture
    def engine(self, live: Engine) -> Engine:
        """Return a vLLM of its own."""
        return live
