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
from tuner.engine.shape import Graphs
from tuner.errors import UsageError
from tuner.shadow.step_model import Factors, StepModel
from tuner.stats import Floats


def test_the_seconds_of_a_batch_are_those_worked_out_by_hand() -> None:
    model = StepModel(
        token_knots=(0, 4),
        token_slopes_s=(1.0, 10.0),
        base_s=100.0,
        seq_s=2.0,
        eager_s=30.0,
        prefill_base_s=50.0,
        decode_context_s=0.1,
        mixed_context_s=0.2,
        spread_s=0.5,
        mixed_spread_s=0.25,
        prefill_context_s=0.01,
        tidy_s=7.0,
        graphs=Graphs((2, 6)),
    )
    assert model.step_s(batch(0, 0, 0, 0)) == 7.0
    assert model.step_s(batch(1, 0, 5, 0)) == pytest.approx(100 + 2 + 2 + 0.5)
    assert model.step_s(batch(3, 0, 9, 0, 6)) == pytest.approx(100 + 4 + 20 + 6 + 0.9 + 3)
    assert model.step_s(batch(7, 0, 0, 0)) == pytest.approx(100 + 4 + 30 + 14 + 30)
    assert model.step_s(batch(1, 3, 5, 20)) == pytest.approx(100 + 24 + 2 + 50 + 1.5 + 0.2)
    apart = batch(1, 3, 5, 20, 8)
    assert model.step_s(apart) == pytest.approx(100 + 24 + 2 + 50 + 1.5 + 6 + 0.2)
    assert model.step_s(batch(0, 9, 0, 0)) == pytest.approx(100 + 4 + 50 + 30 + 50)


def test_where_only_decodes_have_graphs_a_prompt_makes_a_batch_eager_and_unpadded() -> None:
    both = replace(LINEAR, eager_s=1e-3, graphs=Graphs((1, 64)))
    alone = replace(both, graphs=Graphs((1, 64), has_mixed=False))
    assert both.step_s(batch(2, 1, 0, 0)) == both.step_s(batch(2, 62, 0, 0))
    eager_s = LINEAR.step_s(batch(2, 1, 0, 0)) + 1e-3
    assert alone.step_s(batch(2, 1, 0, 0)) == pytest.approx(eager_s)
    assert alone.step_s(batch(2, 0, 0, 0)) == both.step_s(batch(2, 0, 0, 0))
    assert both.step_s(batch(65, 0, 0, 0)) == pytest.approx(
        LINEAR.step_s(batch(65, 0, 0, 0)) + 1e-3
    )


@given(models(), counts, counts)
def test_a_batch_that_holds_more_never_takes_less_and_none_takes_less_than_nothing(
    model: StepModel, few: tuple[int, ...], more: tuple[int, ...]
) -> None:
    # Where decodes alone have graphs a prompt may save their padding.
    model = replace(model, graphs=Graphs(model.graphs.sizes))
    smaller, larger = batch(*few), batch(*(a + b for a, b in zip(few, more, strict=True)))
    assert model.step_s(smaller) >= 0.0
    if smaller.tokens:
        assert model.step_s(larger) >= model.step_s(smaller) * (1 - 1e-12)


def test_factors_lie_between_those_of_the_powers_of_two_around_and_last() -> None:
    factors = Factors(((1.0, 2.0), (1.0, 4.0), (3.0, 8.0)))
    assert factors.at(0, 0) == 1.0
    assert factors.at(1, 1) == 4.0
    assert factors.at(2, 0) == 3.0
    assert Factors(tuple((f, f) for f in (1.0, 1.0, 1.0, 2.0, 4.0))).at(6, 0) == 3.0
    assert factors.at(1_000, 1_000) == 8.0
    model = replace(LINEAR, factors=factors)
    assert model.step_s(batch(2, 0, 9, 0)) == 3 * LINEAR.step_s(batch(2, 0, 9, 0))


@pytest.mark.parametrize(
    "rows", [(), ((),), ((1.0,),), ((1.0, 1.0), (1.0,)), ((1.0, 0.0),), ((1.0, math.nan),)]
)
def test_factors_that_cannot_be_are_refused(rows: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(UsageError, match="factors must"):
        Factors(rows)


SHAPES = array_shapes(min_dims=2, max_dims=2, min_side=2)
TABLES = arrays(np.float64, SHAPES, elements=st.floats(0.5, 2.0))


@given(models(), TABLES, st.lists(counts, min_size=1, max_size=20))
def test_a_row_predicts_what_its_batch_predicts(
    model: StepModel, table: Floats, rows: list[tuple[int, ...]]
) -> None:
    model = replace(model, factors=Factors(tuple(map(tuple, table.tolist()))))
    decode, prefill, decode_context, prefill_context, spread = np.array(rows, np.float64).T
    steps = columns(
        duration_s=np.ones(len(rows)),
        decode_seqs=decode,
        prefill_tokens=prefill,
        decode_context_tokens=decode_context,
        prefill_context_tokens=prefill_context,
        decode_spread_tokens=spread,
    )
    one_by_one = [model.step_s(batch_of(steps, row)) for row in range(len(rows))]
    assert model.predict_s(steps) == pytest.approx(one_by_one, rel=1e-12, abs=1e-12)


@given(models(), st.integers(1, 300), st.integers(1, 5000))
def test_tables_and_curve_are_what_steps_take_without_base_and_contexts(
    model: StepModel, seqs: int, tokens: int
) -> None:
    alone_s, mixed_s = model.tables(300)
    assert alone_s.size == 301
    assert model.base_s + alone_s[seqs] == pytest.approx(model.step_s(batch(seqs, 0, 0, 0)))
    knots, heights_s, slopes_s = model.token_curve()
    at = int(np.searchsorted(knots, seqs + tokens, "right")) - 1
    beyond_s = heights_s[at] + slopes_s[at] * (seqs + tokens - knots[at])
    beyond_s += model.eager_s if model.graphs.sizes else 0.0
    is_graph = mixed_s.size > 1 and seqs + tokens < mixed_s.size
    work_s = mixed_s[seqs + tokens] if is_graph else beyond_s
    work_s += model.base_s + model.seq_s * seqs + model.prefill_base_s
    assert work_s == pytest.approx(model.step_s(batch(seqs, tokens, 0, 0)))


def test_a_served_prompt_takes_its_ratio_and_every_batch_its_share_of_the_server() -> None:
    served = LINEAR.served(1e-3, 1.5)
    alone, mixed = batch(4, 0, 4000, 0, 50), batch(4, 100, 4000, 5050, 50)
    assert served.step_s(alone) == pytest.approx(LINEAR.step_s(alone) + 1e-3)
    assert served.step_s(mixed) == pytest.approx(1.5 * (LINEAR.step_s(mixed) + 1e-3))
    assert LINEAR.served(-1.0, 1.0).base_s == 0.0


@given(models())
def test_a_model_survives_being_copied_and_sent(model: StepModel) -> None:
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), replace(model)):  # noqa: S301 - our own bytes
        assert twin == model
        assert twin.step_s(batch(77, 99, 5, 5, 5)) == model.step_s(batch(77, 99, 5, 5, 5))


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"token_knots": (1,)}, "token_knots"),
        ({"token_knots": ()}, "token_knots"),
        ({"token_knots": (0, 8)}, "token_knots"),
        ({"token_knots": (0, 8, 8), "token_slopes_s": (0.0,) * 3}, "token_knots"),
        ({"token_slopes_s": (-1e-9,)}, "token_slopes_s"),
        ({"token_slopes_s": (math.nan,)}, "token_slopes_s"),
        ({"spread_s": -1e-9}, "spread_s"),
        ({"base_s": -1.0}, "base_s"),
        ({"tidy_s": math.inf}, "tidy_s"),
    ],
)
def test_a_model_that_could_shrink_or_go_astray_is_refused(
    broken: dict[str, tuple[int, ...]], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        replace(LINEAR, **broken)  # type: ignore[arg-type]  # wrong on purpose
