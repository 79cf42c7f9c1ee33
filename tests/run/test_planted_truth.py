"""The machine whose truth is known: that it is what it says, and that a run on it is judged."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from support.optional import not_none
from support.planted import ACTIVATION_TIMES, NONE_TOLD, PlantedSource
from support.planted_cases import PlantedCase, Truth, drawn_case, recordings
from support.planted_judged import INFEASIBLE, judged_run
from support.planted_machine import MACHINES, MOODS, Modelled
from support.same_replay import assert_same_replay, simulated_case
from support.schedule_cases import Case, random_case
from support.virtual_time import PROCESS_S, PlantedProcess, on_virtual_time
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch
from tuner.engine.shape import Drafts, Graphs
from tuner.errors import Caveat
from tuner.replay.loop import Progress, ReplayLog, replay
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.run.directory import TRIALS_FILE
from tuner.run.listener import Listener
from tuner.run.options import Method, TuningOptions
from tuner.run.sessions.predicted import PredictedSearch
from tuner.run.tune import tune
from tuner.search.objective import Objective, Tier
from tuner.search.trials import Phase, Trial
from tuner.shadow.profiles import read_profile, write_profile
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import Trace

GPU = MACHINES["gpu-8b"]


def a_trace(n: int = 200, per_s: float = 4.0) -> Trace:
    """Return Poisson arrivals of mixed lengths."""
    rng = np.random.default_rng(5)
    due_s = np.cumsum(rng.exponential(1 / per_s, n))
    return Trace(due_s - due_s[0], rng.integers(50, 900, n), rng.integers(20, 200, n))


def a_source(seed: int | None) -> PlantedSource:
    """Return an engine's source in a rough mood, or at the mean of it."""
    return PlantedSource.of(GPU, EngineLimits(8, 2048), 4000, MOODS["rough"], seed)


def replayed(source: PlantedSource, plan: ReplayPlan | None = None) -> ReplayLog:
    """Replay a trace on a fresh engine of a source, on its clock."""
    trace = a_trace()
    with on_virtual_time(source.clock):
        engine = source.start({}, EngineLimits(32, 2048))
        return replay(engine, trace, PromptSource(trace, 1000), plan or ReplayPlan())


def plain(case: Case, *, asynchronous: bool) -> Case:
    """Return a case of the scheduler without what the planted engine does not have."""
    shape = replace(
        case.engine.shape,
        prefix_caching=False,
        asynchronous=asynchronous,
        scheduler={"policy": "fcfs", "enable_chunked_prefill": True},
    )
    return replace(case, engine=replace(case.engine, shape=shape))


def planted(case: Case) -> ReplayLog:
    """Return a case as the planted engine replays it, with the plain step model's times."""
    like = case.engine
    source = PlantedSource(
        Modelled(like.step_model.step_s, like.step_model.tidy_s, like.step_model.launch_s),
        case.limits,
        like.num_blocks,
        max_model_len=like.shape.max_model_len,
        block_size=like.shape.block_size,
        asynchronous=like.shape.asynchronous,
        # The simulator looks at no clock.
        says_late=False,
        accepted=like.accepted,
    )
    engine = source.start({}, like.ceiling)
    engine.set_limits(case.limits)
    return replay(engine, case.trace, PromptSource(case.trace, 1000), case.plan)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_planted_engine_schedules_as_the_simulator_step_for_step(
    asynchronous: bool,
) -> None:
    compared = preempted = 0
    for seed in range(125):
        case = plain(random_case(seed, has_windows=False), asynchronous=asynchronous)
        wanted = simulated_case(case)
        if not isinstance(wanted, ReplayLog):
            continue
        assert_same_replay(wanted, planted(case))
        compared += 1
        preempted += wanted.steps.preempted > 0
    assert compared > 100
    assert preempted > 5


@pytest.mark.slow
def test_the_planted_engine_verifies_drafts_as_the_simulator_does() -> None:
    """Of which always as many are accepted, so that both draw the same."""
    compared = preempted = 0
    for seed in range(125):
        case = plain(random_case(seed, has_drafts=True, has_windows=False), asynchronous=False)
        engine, tokens = case.engine, len(case.engine.accepted)
        shape = replace(engine.shape, drafts=Drafts("eagle", tokens))
        accepted = tuple(float(i <= seed % (tokens + 1)) for i in range(1, tokens + 1))
        case = replace(case, engine=replace(engine, shape=shape, accepted=accepted))
        # vLLM pads a prompt of one token, which no traffic of planted cases has.
        case = replace(case, trace=at_least_two(case.trace))
        wanted = simulated_case(case)
        if isinstance(wanted, ReplayLog):
            assert_same_replay(wanted, planted(case))
            compared += 1
            preempted += wanted.steps.preempted > 0
    assert compared > 100
    assert preempted > 2


def at_least_two(trace: Trace) -> Trace:
    """Return a trace without prompts of a single token."""
    return replace(trace, prompt_tokens=np.maximum(2, trace.prompt_tokens), hashes=None)


def test_a_step_pays_for_padding_for_eager_launches_and_for_uneven_contexts() -> None:
    graphs = Graphs((1, 2, 4, *range(8, 257, 8)))

    def took_s(seqs: int, prefill: int, each: tuple[int, ...] = ()) -> float:
        batch = Batch(seqs, prefill, 0, sum(each), 0, 0, 0)
        return sum(GPU.parts_s(batch, max(each, default=0), graphs))

    assert took_s(9, 0) == took_s(16, 0) < took_s(17, 0)
    assert took_s(257, 0) - took_s(256, 0) > GPU.eager_s
    assert took_s(4, 0, (100, 100, 100, 700)) > took_s(4, 0, (250, 250, 250, 250))
    # Memory bound below the knee, compute bound above it.
    assert took_s(9, 200) == took_s(0, 216)
    assert took_s(0, 20) == pytest.approx(took_s(0, 1), rel=0.01)
    assert took_s(0, 8000) / took_s(0, 4000) == pytest.approx(2, rel=0.1)


def test_the_same_seed_makes_the_same_steps_and_another_others() -> None:
    one, again, other = (replayed(a_source(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.timelines.last_s, again.timelines.last_s)
    assert one.clock_s != other.clock_s


@pytest.mark.slow
def test_the_truth_has_no_chance_and_lies_at_the_mean_of_the_moods() -> None:
    true = replayed(a_source(None)).steps.duration_s
    assert replayed(a_source(None)).steps.duration_s == true
    moody = [replayed(a_source(seed)).steps for seed in range(24)]
    each_s = [steps.duration_s / steps.steps for steps in moody]
    true_each_s = true / replayed(a_source(None)).steps.steps
    assert np.mean(each_s) == pytest.approx(true_each_s, rel=0.03)


def test_the_clock_moves_by_what_starts_and_steps_took() -> None:
    source = a_source(3)
    log = replayed(source)
    assert log.wall_s == pytest.approx(log.steps.duration_s)
    assert source.clock.now_s - log.wall_s == pytest.approx(GPU.start_s, rel=0.1)
    with on_virtual_time(source.clock):
        assert time.monotonic() == time.perf_counter() == source.clock.now_s


class _Looks(Listener):
    """Keeps who could be the best by the last prediction, and who was looked at."""

    def __init__(self) -> None:
        self.finalists: set[str] = set()
        self.looked: list[set[str]] = []

    def note(self, text: str) -> None:
        """Read what is said of the search."""
        _, found, settings = text.partition("could be the best: ")
        if found:
            self.finalists = set(settings.split(", "))
        _, found, settings = text.partition("holds no race: looking at ")
        if found:
            self.looked.append(set(settings.split(" for ")[0].split(", ")))


@pytest.mark.slow
def test_where_no_race_is_held_whoever_could_be_the_best_was_looked_at(tmp_path: Path) -> None:
    looked = [_looks_without_a_race(seed, tmp_path / str(seed)) for seed in (2, 5, 7)]
    # Whom the first look made a finalist the second one sees, and nobody else.
    assert max(looked) == 2


@pytest.mark.slow
def test_where_it_is_late_nobody_but_those_looked_at_is_predicted_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PredictedSearch, "_is_late", True)
    assert _looks_without_a_race(5, tmp_path) == 1
    lines = (tmp_path / TRIALS_FILE).read_text().splitlines()
    trials = [msgspec.json.decode(line) for line in lines]
    predicted = [one["prediction"] for one in trials if one["phase"] == Phase.SHADOW]
    # The whole space, and then those that were looked at beside the current one.
    assert 1 < predicted.count(max(predicted)) < predicted.count(min(predicted)) / 2


def _looks_without_a_race(seed: int, run_dir: Path) -> int:
    """Return how many looks a run took, each at whom the others had not seen."""
    rng, current = np.random.default_rng(1), EngineLimits(8, 2048)
    due_s = np.cumsum(rng.exponential(4.5, 120))
    trace = Trace(due_s - due_s[0], rng.integers(2000, 16000, 120), rng.integers(100, 600, 120))
    source = PlantedSource.of(MACHINES["gpu-70b"], current, 20_000, MOODS["usual"], seed)
    config = {"model": "planted", "max-num-seqs": 8, "max-num-batched-tokens": 2048}
    options = TuningOptions(
        trace=trace,
        config=config,
        budget_s=500.0,
        ladder=(8, 16, 32),
        run_dir=run_dir,
        seed=seed,
    )
    looks = _Looks()
    with on_virtual_time(source.clock):
        result = tune(options, looks, source=source)
        assert time.monotonic() < options.budget_s
    seen = set[str]().union(*looks.looked)
    assert len(seen) == sum(map(len, looks.looked))
    assert looks.finalists <= seen
    found = not_none(result.recommendation)
    assert found.verdict == "change"
    assert f"{found.max_num_seqs}/{found.max_num_batched_tokens}" in seen
    return len(looks.looked)


def test_a_replay_is_cut_by_virtual_time() -> None:
    log = replayed(a_source(4), ReplayPlan(cut=CutRule(max_wall_s=5.0)))
    assert log.cut_reason == "took longer than 5 s"
    assert log.wall_s == pytest.approx(5.0, abs=0.5)


def test_a_caller_stops_a_replay_and_the_next_one_goes_on(tmp_path: Path) -> None:
    source = a_source(4)
    limits, heard = EngineLimits(32, 2048), list[Progress]()

    def enough(progress: Progress) -> bool:
        heard.append(progress)
        return progress.wall_s < 2.0

    with on_virtual_time(source.clock), PlantedProcess(source, tmp_path / "log") as process:
        process.start({}, limits)
        assert process.first_answer_s == PROCESS_S
        process.load("window", a_trace(), 0)
        stopped = process.replay("window", limits, ReplayPlan(), enough)
        whole = process.replay("window", limits, ReplayPlan())
    assert stopped.cut_reason == "stopped by the caller"
    assert stopped.wall_s == pytest.approx(2.0, abs=0.5)
    assert len(heard) > 4
    assert whole.cut_reason is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_finds_the_gain_that_was_planted() -> None:
    """A cap of 2 leaves most of the machine idle, beyond every mood."""
    case = PlantedCase(
        name="planted",
        trace=a_trace(300, per_s=6.0),
        machine="gpu-8b",
        mood="usual",
        current=EngineLimits(2, 2048),
        num_blocks=8000,
        load=0.5,
        budget_s=600.0,
        slo_metric=None,
        slo_share=0.5,
    )
    truth = Truth.of(case, None)
    row = judged_run(truth, seed=0)
    assert row.ended == "complete"
    assert row.said.verdict == "change"
    assert row.true.is_ever_better
    assert row.true.tier is Tier.GOOD
    assert not_none(row.true.loss) < 0.1
    assert row.engine_s < 1.5 * case.budget_s
    again = judged_run(truth, seed=0)
    assert (again.said, again.engine_s) == (row.said, row.engine_s)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=pytest.mark.xdist_group(f"planted {n % 4}"))
        for n in range(1000, 1030)
    ],
)
def test_of_whole_runs_on_cases_that_no_rule_has_seen_none_is_far_off(
    number: int, tmp_path: Path
) -> None:
    """Of the traffic that lies here; how often which answer is right the benchmark tells."""
    traces, _ = recordings(tmp_path)
    check_run(Truth.of(drawn_case(number, traces), None))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [1030, 1031, 1032])
def test_nor_is_any_in_a_closed_loop(number: int, tmp_path: Path) -> None:
    traces, _ = recordings(tmp_path)
    check_run(Truth.of(drawn_case(number, traces, is_closed=True), None))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "objective"),
    [(1033, Objective.LATENCY), (1034, Objective.THROUGHPUT), (1035, Objective.GOODPUT)],
)
def test_nor_is_any_by_another_objective(
    number: int, objective: Objective, tmp_path: Path
) -> None:
    traces, _ = recordings(tmp_path)
    check_run(Truth.of(drawn_case(number, traces, objective=objective), None))


def check_run(truth: Truth[PlantedCase]) -> None:
    """Tune once and see that the answer is not far off what is true."""
    row = judged_run(truth, seed=0)
    assert row.ended in ("complete", INFEASIBLE)
    assert row.said.limits is not None or row.true.best_tier is Tier.BREAKS_SLO
    # What is so at any speed within 2 % is no chance of one replay near overload.
    assert row.true.is_ever_better is not False
    assert not row.true.surely_breaks_slo
    assert (row.true.sure_loss or 0.0) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("activation_times", [NONE_TOLD, ACTIVATION_TIMES])
def test_where_the_kv_cache_binds_each_setting_is_judged_by_blocks_of_its_own(
    activation_times: float,
) -> None:
    """The largest token budget leaves a quarter of the blocks less than the current one does.

    On these requests wait and are preempted, as no engine would that is started with any other.
    Activations tell how many more the others have; without them a start has to show it.
    """
    rng = np.random.default_rng(7)
    due_s = np.cumsum(rng.exponential(1 / 5.0, 400))
    prompts = np.where(rng.random(400) < 0.01, 4000, rng.integers(50, 900, 400))
    case = PlantedCase(
        name="scarce",
        trace=Trace(due_s - due_s[0], prompts, rng.integers(20, 200, 400)),
        machine="gpu-8b",
        mood="calm",
        current=EngineLimits(256, 2048),
        num_blocks=900,
        load=0.5,
        budget_s=900.0,
        slo_metric=None,
        slo_share=0.5,
        activation_times=activation_times,
    )
    truth, heard = Truth.of(case, None), Heard()
    row = judged_run(truth, 0, heard)
    is_started = any("the KV cache binds" in line for line in heard.lines)
    assert is_started == (activation_times == NONE_TOLD)
    assert not_none(row.true.loss) < 0.02


@pytest.mark.slow
def test_who_may_be_the_best_by_blocks_of_its_own_races_before_it_is_recommended(
    tmp_path: Path,
) -> None:
    """By the blocks of the engine that raced it was not among those that could be the best."""
    case = replace(drawn_case(2001, recordings(tmp_path)[0]), activation_times=NONE_TOLD)
    truth = Truth.of(case, None)
    heard = Heard()
    row = judged_run(truth, 0, heard)
    said = next(n for n, line in enumerate(heard.lines) if "the KV cache binds" in line)
    assert row.said.verdict == "change"
    assert f"race {row.said.limits}" in heard.lines[said:]
    assert f"race {row.said.limits}" not in heard.lines[:said]
    assert not_none(row.true.loss) < 0.02


class Heard(Listener):
    """Keeps what a run says of itself, and who was replayed live."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        """Keep a sentence."""
        self.lines.append(text)

    def trial_ended(self, trial: Trial, left_s: float) -> None:
        """Keep of which phase it was, and at which limits."""
        del left_s
        self.lines.append(f"{trial.phase} {trial.limits}")


@pytest.mark.slow
def test_drafts_of_other_text_than_is_predicted_are_told_with_their_rates(
    tmp_path: Path,
) -> None:
    """As where a profile has the rates of production, and a race has random text."""
    source = replace(a_source(1), accepted=(0.4,))
    options = TuningOptions(
        trace=a_trace(),
        config={"model": "planted", "max-num-seqs": 8, "max-num-batched-tokens": 2048},
        budget_s=600.0,
        ladder=(8, 16, 32),
    )
    with on_virtual_time(source.clock):
        first = replace(options, method=Method.CALIBRATED, run_dir=tmp_path / "first")
        tune(first, source=source)
        learnt = read_profile(tmp_path / "first" / "profile.yaml")
        assert learnt.accepted == pytest.approx((0.4,), abs=0.04)
        write_profile(tmp_path / "mine.yaml", replace(learnt, accepted=(0.9,)))
        again = replace(options, profile=tmp_path / "mine.yaml", is_forced=True)
        found = tune(replace(again, run_dir=tmp_path / "again"), source=source)
    told = {caveat.id: caveat.text for caveat in found.caveats}
    assert "1.90 tokens, its drafts accepted at 90%" in told["drafts_on_random_text"]
    assert "and here a step brings an answer 1.4" in told["drafts_on_random_text"]
    kept = read_profile(tmp_path / "again" / "profile.yaml")
    assert Caveat.DRAFTS_ON_RANDOM_TEXT in kept.caveats
