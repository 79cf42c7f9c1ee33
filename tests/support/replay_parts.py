"""Any small trace, and any plan to replay it by."""

from __future__ import annotations

from hypothesis import strategies as st

from support.traffic import a_trace
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.traffic.traces import LoadModel, Trace


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(1, 25))
    column = st.lists(st.integers(1, 60), min_size=n, max_size=n)
    due_s = sorted(draw(st.lists(st.floats(0, 3), min_size=n, max_size=n)))
    e2e_s = draw(st.lists(st.floats(0.1, 2), min_size=n, max_size=n))
    return a_trace(due_s, draw(column), draw(column), e2e_s)


@st.composite
def plans(draw: st.DrawFn) -> ReplayPlan:
    model = draw(st.sampled_from(LoadModel))
    concurrency = draw(st.none() | st.integers(1, 9)) if model is LoadModel.CLOSED else None
    cut = CutRule(
        late_s=draw(st.none() | st.floats(0.01, 3)),
        allowed_late=draw(st.integers(0, 5)),
        max_clock_s=draw(st.none() | st.floats(0.01, 5)),
    )
    timeout_s = draw(st.none() | st.floats(0.01, 3))
    return ReplayPlan(load_model=model, concurrency=concurrency, timeout_s=timeout_s, cut=cut)
