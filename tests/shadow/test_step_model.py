"""What a step model says of a batch."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from support.step_parts import LINEAR, batch, batch_of, columns, counts, models
from tuner.arrays import Floats
from tuner.errors import UsageError
from tuner.shadow.step_model import Factors, StepModel


def test_the_seconds_of_a_batch_are_those_worked_out_by_hand() -> None:
    model = StepModel(
        (0, 4), (1.0, 10.0), (0, 8), (0.0, 2.0), 100.0, 50.0, 0.1, 0.01, 7.0, (2, 6)
    )
    assert model.step_s(batch(0, 0, 0, 0)) == 7.0
    assert model.step_s(batch(1, 0, 5, 0)) == pytest.approx(100 + 2 + 0.5)
    assert model.step_s(batch(3, 0, 0, 0)) == pytest.approx(100 + 4 + 20)
    assert model.step_s(batch(7, 0, 0, 0)) == pytest.approx(100 + 4 + 30)
    assert model.step_s(batch(3, 8, 0, 20)) == pytest.approx(100 + 3 + 50 + 0.2)
    assert model.step_s(batch(0, 9, 0, 0)) == pytest.approx(100 + 50 + 2)


def test_a_prefill_beside_padded_decodes_takes_no_less_than_the_decodes_alone() -> None:
    model = replace(LINEAR, prefill_base_s=0.0, prefill_slopes_s=(0.0,), captured_sizes=(1, 64))
    assert model.step_s(batch(2, 1, 0, 0)) == model.step_s(batch(2, 0, 0, 0))
    assert model.step_s(batch(2, 0, 0, 0)) == pytest.approx(4e-3 + 64 * 3e-5)


@given(models(), counts, counts)
def test_a_batch_that_holds_more_never_takes_less_and_none_takes_less_than_nothing(
    model: StepModel, few: tuple[int, ...], more: tuple[int, ...]
) -> None:
    smaller, larger = batch(*few), batch(*(a + b for a, b in zip(few, more, strict=True)))
    assert model.step_s(smaller) >= 0.0
    if smaller.tokens:
        assert model.step_s(larger) >= model.step_s(smaller) * (1 - 1e-12)


def test_factors_lie_between_those_of_the_powers_of_two_around_and_last() -> None:
    factors = Factors(((1.0, 2.0), (1.0, 4.0), (3.0, 8.0)))
    assert factors.at(0, 0) == 1.0
    assert factors.at(1, 1) == 4.0
    assert factors.at(2, 0) == 3.0
    assert Factors(((1.0,), (1.0,), (1.0,), (2.0,), (4.0,))).at(6, 0) == 3.0
    assert factors.at(1_000, 1_000) == 8.0
    model = replace(LINEAR, factors=factors)
    assert model.step_s(batch(2, 0, 9, 0)) == 3 * LINEAR.step_s(batch(2, 0, 9, 0))


@pytest.mark.parametrize("rows", [(), ((),), ((1.0,), (1.0, 1.0)), ((0.0,),), ((math.nan,),)])
def test_factors_that_cannot_be_are_refused(rows: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(UsageError, match="factors must"):
        Factors(rows)


TABLES = arrays(np.float64, array_shapes(min_dims=2, max_dims=2), elements=st.floats(0.5, 2.0))


@given(models(), TABLES, st.lists(counts, min_size=1, max_size=20))
def test_a_row_predicts_what_its_batch_predicts(
    model: StepModel, table: Floats, rows: list[tuple[int, ...]]
) -> None:
    model = replace(model, factors=Factors(tuple(map(tuple, table.tolist()))))
    decode, prefill, decode_context, prefill_context = np.array(rows, dtype=np.float64).T
    steps = columns(
        duration_s=np.ones(len(rows)),
        decode_seqs=decode,
        prefill_tokens=prefill,
        decode_context_tokens=decode_context,
        prefill_context_tokens=prefill_context,
    )
    one_by_one = [model.step_s(batch_of(steps, row)) for row in range(len(rows))]
    assert model.predict_s(steps) == pytest.approx(one_by_one, rel=1e-12, abs=1e-12)


@given(models(), st.integers(1, 300), st.integers(1, 5000))
def test_tables_and_curve_are_what_steps_take_without_base_and_contexts(
    model: StepModel, seqs: int, tokens: int
) -> None:
    alone_s, mixed_s = model.decode_tables(300)
    assert alone_s.size == mixed_s.size == 301
    assert alone_s[0] == mixed_s[0] == 0
    assert model.base_s + alone_s[seqs] == pytest.approx(model.step_s(batch(seqs, 0, 0, 0)))
    knots, heights_s, slopes_s = model.prefill_curve()
    at = int(np.searchsorted(knots, tokens, "right")) - 1
    prefill_s = model.prefill_base_s + heights_s[at] + slopes_s[at] * (tokens - knots[at])
    mixed_s = max(alone_s[seqs], mixed_s[seqs] + prefill_s)
    assert model.base_s + mixed_s == pytest.approx(model.step_s(batch(seqs, tokens, 0, 0)))


@given(models())
def test_a_model_survives_being_copied_and_sent(model: StepModel) -> None:
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), replace(model)):  # noqa: S301 - our own bytes
        assert twin == model
        assert twin.step_s(batch(77, 99, 5, 5)) == model.step_s(batch(77, 99, 5, 5))


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"decode_knots": (1,)}, "decode_knots"),
        ({"decode_knots": ()}, "decode_knots"),
        ({"prefill_knots": (0, 8)}, "prefill_knots"),
        ({"prefill_knots": (0, 8, 8), "prefill_slopes_s": (0.0,) * 3}, "prefill_knots"),
        ({"prefill_slopes_s": (-1e-9,)}, "prefill_slopes_s"),
        ({"decode_slopes_s": (math.nan,)}, "decode_slopes_s"),
        ({"base_s": -1.0}, "base_s"),
        ({"tidy_s": math.inf}, "tidy_s"),
        ({"captured_sizes": (4, 2)}, "captured_sizes"),
        ({"captured_sizes": (0, 2)}, "captured_sizes"),
    ],
)
def test_a_model_that_could_shrink_or_go_astray_is_refused(
    broken: dict[str, tuple[int, ...]], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        replace(LINEAR, **broken)  # type: ignore[arg-type]  # wrong on purpose
