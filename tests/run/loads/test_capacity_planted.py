"""A capacity is told as it truly is, though the recorded traffic never comes near it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.capacity_parts import CEILING, truly_borne, tuned_for_capacity
from support.optional import not_none


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_capacity_is_told_as_it_truly_is(tmp_path: Path, seed: int) -> None:
    """The recorded traffic has 15 in flight, what is borne at the edge more than 100."""
    result = tuned_for_capacity(tmp_path / "run", seed)
    true = truly_borne(not_none(result.recommendation).limits)
    assert true > 0.95 * truly_borne(CEILING)
    told = not_none(result.capacity)
    assert told.winner == pytest.approx(true, rel=0.1)
    low, high = not_none(told.interval)
    assert low < true < high
    assert high < 2.2 * low
