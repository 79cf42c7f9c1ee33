"""What the Engine protocol promises, asked of every engine: the toy, the reference, vLLM."""

# ruff: noqa: D102 - a test's name is its sentence, in a class too

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engine_contract import CEILING, ClosingContract, EngineContract, like_the_toys
from support.live_parts import start_live
from support.shadow_parts import a_reference, a_shape
from support.toy import ToySource
from tuner.engine.demo import demo_engine_args
from tuner.engine.protocol import Engine
from tuner.errors import EngineError


@pytest.fixture(scope="class")
def toy() -> Iterator[Engine]:
    """Start a toy, and see it closed."""
    yield from ended(ToySource().start({}, CEILING))


@pytest.fixture(scope="class")
def reference() -> Iterator[Engine]:
    """Ask vLLM's scheduler about every step, and see it closed."""
    yield from ended(a_reference(a_shape(), CEILING))


@pytest.fixture(scope="class")
def asynchronous_reference() -> Iterator[Engine]:
    """Ask the scheduler of an engine that schedules ahead, and see it closed."""
    yield from ended(a_reference(a_shape(asynchronous=True), CEILING))


@pytest.fixture(scope="class")
def live() -> Iterator[Engine]:
    """Start vLLM on the demo model in this process, and see it closed; takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield from ended(start_live(demo_engine_args(), CEILING))


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


class TestToyEngineCloses(ClosingContract):
    """The toy closes."""

    @pytest.fixture
    def engine(self, toy: Engine) -> Engine:
        """Return a toy of its own."""
        return toy


@pytest.mark.engine
class TestReferenceEngine(EngineContract):
    """vLLM's scheduler without a model keeps the contract."""

    @pytest.fixture
    def engine(self, reference: Engine) -> Engine:
        """Return the reference."""
        return reference

    def test_the_toy_makes_the_same_batches(self, engine: Engine) -> None:
        assert like_the_toys(engine)


@pytest.mark.engine
class TestAsynchronousReferenceEngine(EngineContract):
    """The scheduler of an engine that schedules ahead keeps the contract."""

    @pytest.fixture
    def engine(self, asynchronous_reference: Engine) -> Engine:
        """Return the reference."""
        return asynchronous_reference


@pytest.mark.engine
class TestReferenceEngineCloses(ClosingContract):
    """A reference closes."""

    @pytest.fixture
    def engine(self, reference: Engine) -> Engine:
        """Return a reference of its own."""
        return reference


@pytest.mark.engine
class TestAsynchronousReferenceEngineCloses(ClosingContract):
    """A reference closes with a batch in flight."""

    @pytest.fixture
    def engine(self, asynchronous_reference: Engine) -> Engine:
        """Return a reference of its own."""
        return asynchronous_reference


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
