"""Variants of an engine: which can be compared, and that what is said of each is true.

The truth is that of a planted machine, on which a key of the configuration makes every step
shorter, longer, or the start fail.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from support.capacity_parts import REQUESTS, SLOS, a_trace, truly
from support.optional import not_none
from support.planted import PlantedEngine, PlantedSource
from support.planted_machine import MACHINES, MOODS, Machine
from support.run_parts import Heard
from support.toy_tune import write_trace
from support.virtual_time import on_virtual_time
from tuner.cli import run
from tuner.emit.sources import recommendation_of
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch, EngineFacts
from tuner.engine.shape import Graphs
from tuner.errors import EngineError, NoFeasibleConfigError, UsageError
from tuner.replay.metrics import Measurement
from tuner.replay.slo import Slo
from tuner.report.page import report_of
from tuner.run.options import Method, TuningOptions
from tuner.run.result import RunResult, read_result
from tuner.run.stored import read_record
from tuner.run.variants.records import (
    VariantComparison,
    VariantFinding,
    checked_variants,
    parse_variants,
)
from tuner.run.variants.runs import tune
from tuner.shadow.profiles import read_profile

MACHINE = MACHINES["gpu-8b"]
CURRENT = EngineLimits(8, 2048)
CONFIG = {"model": "planted", "max-num-seqs": 8, "max-num-batched-tokens": 2048}
VARIANTS: dict[str, dict[str, object]] = {
    "quick": {"planted-times": 0.6},
    "slow": {"planted-times": 1.3},
    "broken": {"planted-breaks": True},
}
PRICE = 2.5
BUDGET_S = 600.0


@dataclass(frozen=True, slots=True)
class Scaled:
    """A machine of which every step takes so many times as long."""

    machine: Machine
    times: float

    @property
    def graphs(self) -> Graphs | None:
        """What was captured."""
        return self.machine.graphs

    @property
    def tidy_s(self) -> float:
        """Seconds of a turn that completes no batch."""
        return self.times * self.machine.tidy_s

    def parts_s(self, batch: Batch, longest: int, graphs: Graphs) -> tuple[float, float]:
        """Return the seconds that every batch takes, and those that this one adds."""
        fixed_s, grows_s = self.machine.parts_s(batch, longest, graphs)
        return self.times * fixed_s, self.times * grows_s

    def launch_s(self, batch: Batch, graphs: Graphs) -> float:
        """Return the seconds of a host that launches ahead."""
        return self.times * self.machine.launch_s(batch, graphs)


@dataclass(frozen=True, slots=True, eq=False)
class VariedSource(PlantedSource):
    """A planted machine whose speed, and whether it starts, a configuration says."""

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Resolve a configuration. Raises: UsageError for a key that no engine has."""
        if "planted-unknown" in values:
            raise UsageError("vLLM has no option planted-unknown", "leave it out")
        facts = super(VariedSource, self).facts(values)
        return replace(facts, max_model_len=int(str(values.get("planted-len", 32768))))

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> PlantedEngine:
        """Start an engine of the speed. Raises: EngineError where it does not start."""
        if values.get("planted-breaks"):
            raise EngineError("the engine did not start: no kernel image for this device")
        own = self.as_fast(float(str(values.get("planted-times", 1.0))))
        return PlantedSource.start(own, values, ceiling)

    def as_fast(self, times: float) -> VariedSource:
        """Return the machine, every step so many times as long."""
        return replace(self, formula=Scaled(MACHINE, times))


def a_source(seed: int | None = 0) -> VariedSource:
    return VariedSource.of(MACHINE, CURRENT, 8000, MOODS["usual"], seed)


def options(run_dir: Path, **more: object) -> TuningOptions:
    given: dict[str, object] = {
        "trace": a_trace(),
        "config": CONFIG,
        "slos": SLOS,
        "budget_s": BUDGET_S,
        "ladder": (8, 32),
        "run_dir": run_dir,
        "method": Method.CALIBRATED,
        "variants": VARIANTS,
        "gpu_hour_price": PRICE,
    }
    return TuningOptions(**{**given, **more})  # type: ignore[arg-type]


def truly_with(times: float, limits: EngineLimits) -> Measurement:
    """Return what is true at the limits on a machine of a speed, at the load that it bears."""
    return truly(a_source(None), limits, {"planted-times": times})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with a variant that pays, one that costs and one that breaks."""
    path = tmp_path_factory.mktemp("variants") / "run"
    source = a_source()
    with on_virtual_time(source.clock):
        tune(options(path), source=source)
    assert source.clock.now_s < 1.1 * BUDGET_S
    return path


def finding(result: RunResult, name: str) -> VariantFinding:
    return next(one for one in not_none(result.variants).others if one.name == name)


@pytest.mark.slow
def test_each_is_told_as_it_truly_is_at_its_own_best_limits(folder: Path) -> None:
    result = read_result(folder)
    for name, times in (("quick", 0.6), ("slow", 1.3)):
        found = finding(result, name)
        assert found.limits is not None
        e2e_s = truly_with(times, found.limits).latency("e2e_s", "p50")
        assert found.latencies_s["e2e_p50"] == pytest.approx(e2e_s, rel=0.06)
        true = truly_with(times, not_none(found.capacity_limits))
        assert true.capacity is not None
        assert true.capacity >= (truly_with(times, found.limits).capacity or 0.0)
        true_per_s = true.capacity * REQUESTS / a_trace().duration_s
        assert found.capacity_per_s == pytest.approx(true_per_s, rel=0.1)
        low, high = not_none(found.capacity_interval)
        assert low < true_per_s < high
        # Of five stretches of traffic alone, at whichever limits bear the most.
        assert high < 5 * low
        assert found.cost_per_1000 == pytest.approx(
            PRICE / 3.6 / (found.capacity_per_s or 0), rel=1e-9
        )
    quick, slow = finding(result, "quick"), finding(result, "slow")
    assert not_none(quick.gain_ratio) < -0.2
    assert not_none(quick.p_better) > 0.95
    assert not_none(slow.p_better) < 0.05


@pytest.mark.slow
def test_one_that_does_not_start_is_a_result_beside_the_others(folder: Path) -> None:
    result = read_result(folder)
    broken = finding(result, "broken")
    assert broken.limits is None
    assert "no kernel image" in broken.failure
    lines = not_none(result.variants).lines
    assert lines[2].startswith("variant broken (planted-breaks true): does not run: the engine")
    assert re.search(r"bears [\d.]+ requests/s, interval [\d.]+ … [\d.]+,? ?(at|\()", lines[0])
    assert "requests cost" in lines[0]
    assert "P(better)" in lines[0]
    page = report_of(folder)
    assert "no kernel image" in page
    assert "planted-times 0.6" in page


@pytest.mark.slow
def test_each_has_a_run_of_its_own_that_can_be_emitted(folder: Path) -> None:
    own = folder / "variants" / "quick"
    result, record = read_result(own), read_record(own)
    assert result.method == "calibrated"
    assert result.provenance.engine_starts == 1
    assert {trial.phase for trial in result.trials} == {"calibrate", "shadow"}
    values: dict[str, object] = {**CONFIG, **VARIANTS["quick"]}
    emitted = recommendation_of(result, values, own)
    assert emitted.limits == finding(read_result(folder), "quick").limits
    assert emitted.values["planted-times"] == 0.6
    assert record.options.variants == {}


@pytest.mark.slow
def test_the_profile_keeps_them_and_predicts_them_without_an_engine(
    folder: Path, tmp_path: Path
) -> None:
    profile = read_profile(folder / "profile.yaml")
    assert list(profile.variants) == ["quick", "slow"]
    predicted = tune(
        options(
            tmp_path / "shadow",
            method=Method.SHADOW,
            profile=profile,
            is_forced=True,
            variants={"quick": {}},
        )
    )
    found, before = finding(predicted, "quick"), finding(read_result(folder), "quick")
    assert found.settings == VARIANTS["quick"]
    assert found.limits == before.limits
    assert found.capacity_per_s == pytest.approx(before.capacity_per_s, rel=0.02)
    for keys, said in (
        ({"broken": VARIANTS["broken"]}, "variant broken: the profile has none of that name"),
        ({"quick": {"planted-times": 0.9}}, "variant quick: the profile has it with .*0.6"),
    ):
        asked = options(
            tmp_path / "no",
            method=Method.SHADOW,
            profile=profile,
            is_forced=True,
            variants=keys,
        )
        with pytest.raises(UsageError, match=said):
            tune(asked)


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_with_the_variants_that_are_left(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(folder, path)
    source, heard = a_source(), Heard()
    with on_virtual_time(source.clock):
        result = tune(options(path, is_resumed=True), heard, source=source)
    begun = [note for note in heard.notes if "a run of its own" in note]
    assert [note.split(":")[0] for note in begun] == ["variant broken"]
    assert finding(result, "quick") == finding(read_result(folder), "quick")
    assert finding(result, "broken").failure
    other = {**VARIANTS, "quick": {"planted-times": 0.7}}
    with pytest.raises(UsageError, match="variants cannot change when a run is resumed"):
        tune(options(path, is_resumed=True, variants=other))


@pytest.mark.slow
def test_one_that_the_time_does_not_hold_is_told_as_not_started_and_started_by_a_resume(
    tmp_path: Path,
) -> None:
    path, source, budget_s = tmp_path / "run", a_source(), 200.0
    two = {name: VARIANTS[name] for name in ("quick", "slow")}
    asked = options(path, budget_s=budget_s, variants=two)
    with on_virtual_time(source.clock):
        result = tune(asked, source=source)
    assert source.clock.now_s < 1.1 * budget_s
    assert finding(result, "quick").limits is not None
    assert finding(result, "slow").verdict == "not started"
    assert result.variants is not None
    assert "s of the time are left, a start and the shortest" in result.variants.lines[1]
    assert "not started" in report_of(path)
    with on_virtual_time(source.clock):
        result = tune(replace(asked, is_resumed=True), source=source)
    assert finding(result, "slow").limits is not None


@pytest.mark.slow
def test_knobs_are_looked_at_in_the_run_of_each(tmp_path: Path) -> None:
    path, source = tmp_path / "run", a_source()
    asked = options(path, variants={"quick": VARIANTS["quick"]}, knobs=("long-prefill",))
    with on_virtual_time(source.clock):
        tune(asked, source=source)
    for folder in (path, path / "variants" / "quick"):
        knobs = not_none(read_result(folder).knobs)
        assert [one.knob for one in knobs.findings] == ["long-prefill"]


@pytest.mark.slow
def test_where_nothing_meets_the_slos_as_it_is_those_that_do_are_named(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    asked = options(
        path,
        slos=(Slo.parse("tpot_p50=8ms"),),
        method=Method.SHADOW,
        profile=read_profile(folder / "profile.yaml"),
        is_forced=True,
        variants={"quick": {}, "slow": {}},
    )
    with pytest.raises(
        NoFeasibleConfigError, match=r"variants that meet them: quick$"
    ) as caught:
        tune(asked)
    own = path / "variants" / "quick"
    assert caught.value.hint == f"tune emit {own} writes its configuration"
    result = read_result(path)
    assert result.recommendation is None
    assert finding(result, "quick").limits is not None
    assert finding(result, "slow").limits is None


def test_what_no_engine_takes_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for values, said in (
        ({"planted-unknown": 1}, "variant odd: vLLM has no option planted-unknown"),
        ({"planted-len": 4096}, "variant odd takes requests of 4096 tokens"),
    ):
        source = a_source()
        with on_virtual_time(source.clock), pytest.raises(UsageError, match=said):
            tune(options(tmp_path / "run", variants={"odd": values}), source=source)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("small:model=other", "variant small sets model, with which the server gives other"),
        ("t:hf_overrides.x=1", "variant t sets hf-overrides.x, with which the server gives"),
        ("long:max-model-len=9000", "variant long sets max-model-len, with which the server"),
        ("wide:max-num-seqs=9", "variant wide sets max-num-seqs, which is searched for every"),
        ("key:api-key=abc", "variant key sets a secret, which no run keeps"),
        ("fp8", "variant fp8 sets nothing"),
        ("fp8:quantization", "--variant must be key=value, got 'quantization'"),
        (":a=1", "--variant must be NAME:KEY=VALUE, got ':a=1'"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.jsonl")
    where = ["--trace", str(trace), "--run-dir", str(tmp_path / "run")]
    assert run([*where, "--variant", words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_price_needs_something_to_compare() -> None:
    with pytest.raises(UsageError, match="compares the cost of variants, and there is none"):
        TuningOptions(trace="t.jsonl", gpu_hour_price=2.0)
    with pytest.raises(UsageError, match="--variant rests on predictions"):
        TuningOptions(trace="t.jsonl", variants={"a": {"b": 1}}, method=Method.LIVE)


def test_a_variant_may_set_several_keys() -> None:
    words = ["fp8:quantization=fp8", "tp2:tensor-parallel-size=2", "fp8:kv-cache-dtype=fp8"]
    parsed = parse_variants(words)
    assert parsed == {
        "fp8": {"quantization": "fp8", "kv-cache-dtype": "fp8"},
        "tp2": {"tensor-parallel-size": 2},
    }
    assert checked_variants({"a": {"block_size": 32}}) == {"a": {"block-size": 32}}


def test_what_is_doubtful_of_a_variant_alone_stands_in_its_line() -> None:
    limits, doubts = EngineLimits(8, 2048), ("random weights", "random text")
    base = VariantFinding(name="as it is", settings={}, limits=limits, doubts=doubts[:1])
    spec = VariantFinding(
        name="spec",
        settings={},
        limits=limits,
        metric="e2e_p99",
        gain_ratio=0.1,
        p_better=0.2,
        doubts=doubts,
    )
    (line,) = VariantComparison(as_it_is=base, others=(spec,)).lines
    assert line.endswith("; predicted; random text")
