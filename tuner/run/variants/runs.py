"""A run and those of its variants, each started once, and what they come to beside each other.

The configuration as it is comes first and takes most of the time. Each variant then has a run
of its own in the folder of the same name below: its engine's steps are learnt, every setting is
predicted from them, and nothing is raced. So whatever reads a run reads a variant's too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tuner.engine.protocol import EngineSource
from tuner.engine.serve_config import changed
from tuner.errors import (
    NoFeasibleConfigError,
    ShadowError,
    StorageError,
    TunerError,
    UsageError,
)
from tuner.replay.loop import Progress
from tuner.run.context import TRACE, Workload
from tuner.run.directory import PROFILE_FILE, RESULT_FILE, RUN_FILE, RunDir
from tuner.run.inputs import fit_lengths
from tuner.run.listener import Listener, clock_text
from tuner.run.options import Method, TuningOptions
from tuner.run.result import RunResult, read_result
from tuner.run.start import PreparedRun, aim_of, check_same, prepare
from tuner.run.stored import RunRecord, read_record
from tuner.run.tune import WritePage, write_the_page
from tuner.run.tune import tune as tune_one
from tuner.run.variants.comparison import Comparing, Contender
from tuner.run.variants.records import AS_IT_IS, VARIANTS_DIR, VariantFinding
from tuner.search.budget import MIN_BUDGET_S, Budget
from tuner.shadow.profiles import Profile, read_profile, write_profile
from tuner.traffic.windows import whole

# How much time a variant gets of what the configuration as it is gets: ours, nothing is raced.
VARIANT_SHARE = 0.4
# What the shortest blocks take of it after the start: ours.
LEAST_BLOCKS_S = 5.0
COMPLETE = "complete"


def tune(
    options: TuningOptions | PreparedRun,
    listener: Listener | None = None,
    *,
    source: EngineSource | None = None,
    write_page: WritePage | None = None,
) -> RunResult:
    """Run the configuration as it is and each variant, and return the first with all compared.

    A variant that does not start, or meets the SLOs at no limits, is a result.

    Raises: as `tuner.run.tune.tune`, of the configuration as it is; UsageError for variants
        that cannot be compared.
    """
    listener = listener or Listener()
    prepared = options if isinstance(options, PreparedRun) else prepare(options)
    run_one = partial(tune_one, source=source, write_page=write_page)
    if not prepared.options.variants:
        return run_one(prepared, listener)
    values = _values_of(prepared)
    share = 1 / (1 + VARIANT_SHARE * len(values))
    Budget(prepared.options.budget_s * share * VARIANT_SHARE)  # refuses what holds no start
    run_dir = RunDir(prepared.run_path, resume=prepared.options.is_resumed)
    try:
        parts = (run_one, write_page, values, share)
        return _Runs(prepared, run_dir, listener, *parts).to_the_end()
    finally:
        run_dir.close()


def _values_of(prepared: PreparedRun) -> dict[str, dict[str, object]]:
    """Return the keys that each variant sets, by a profile's word where none are named.

    Raises: UsageError.
    """
    found = {}
    for name, asked in prepared.options.variants.items():
        known = _known_keys(prepared.profile, name)
        found[name] = dict(asked) or known or {}
        if not found[name]:
            raise UsageError(
                f"variant {name} sets nothing",
                f"name what it sets, as --variant {name}:quantization=fp8",
            )
        if prepared.options.method is Method.SHADOW and known != found[name]:
            has = "has none of that name" if known is None else f"has it with {known}"
            raise UsageError(
                f"no engine was calibrated for variant {name}: the profile {has}",
                "leave --method shadow out, so that it is started and measured",
            )
    return found


def _known_keys(profile: Profile | None, name: str) -> dict[str, object] | None:
    """Return the keys of a variant that a profile knows, None where it does not."""
    if profile is None or name not in profile.variants:
        return None
    before, after = profile.serve_values, profile.variants[name].serve_values
    return {key: value for key, value in after.items() if before.get(key) != value}


@dataclass(slots=True)
class _Runs:
    """The run of the configuration as it is, and those of its variants after it."""

    prepared: PreparedRun
    run_dir: RunDir
    listener: Listener
    run_one: Callable[..., RunResult]
    write_page: WritePage | None
    values: Mapping[str, Mapping[str, object]]
    share: float
    found: list[Contender | VariantFinding] = field(default_factory=list)
    _began_s: float = field(default=0.0, init=False)
    _start_s: float = field(default=0.0, init=False)

    def to_the_end(self) -> RunResult:
        """Run each in turn; what ended before Ctrl-C is compared all the same."""
        self._began_s = time.monotonic()
        base, unmet = self._as_it_is()
        self._start_s = base.provenance.stages_s.get("start", 0.0)
        try:
            for name in self.values:
                self.found.append(self._one(name))
        except KeyboardInterrupt:
            self._compared(base)
            raise
        result = self._compared(base)
        if unmet is not None:
            raise self._nothing_but(unmet)
        return result

    def _as_it_is(self) -> tuple[RunResult, NoFeasibleConfigError | None]:
        """Return the result of the configuration as it is, also where it meets no SLOs.

        Raises: TunerError.
        """
        path = self.run_dir.path
        if self.prepared.options.is_resumed and (path / RESULT_FILE).exists():
            result = read_result(path)
            if result.state == COMPLETE:
                check_same(self.prepared, self._record)
                unmet = NoFeasibleConfigError("no configuration meets the SLOs as it is")
                return result, None if result.feasible else unmet
        prepared = replace(self.prepared, budget_share=self.share, is_compared=True)
        try:
            return self.run_one(prepared, self.listener, run_dir=self.run_dir), None
        except NoFeasibleConfigError as unmet:
            if not (path / RESULT_FILE).exists():
                raise
            return read_result(path), unmet

    def _one(self, name: str) -> Contender | VariantFinding:
        path, values = self._path(name), self.values[name]
        result = read_result(path) if (path / RESULT_FILE).exists() else None
        if result is None or result.state != COMPLETE:
            prepared = self._prepared(name)
            if no_time := self._no_time(prepared):
                self.listener.note(f"variant {name}: not started: {no_time}")
                return VariantFinding(name=name, settings=dict(values), no_time=no_time)
            budget = clock_text(prepared.budget_s)
            self.listener.note(f"variant {name}: a run of its own, at most {budget}")
            try:
                result = self.run_one(prepared, _Named(self.listener, name))
            except StorageError:
                raise
            except TunerError as error:
                is_unmet = isinstance(error, NoFeasibleConfigError)
                if not is_unmet or not (path / RESULT_FILE).exists():
                    return VariantFinding(
                        name=name, settings=dict(values), failure=error.message
                    )
                result = read_result(path)
        self._keep_profile(name)
        return Contender(name, values, result, _profile_of(path, result))

    def _path(self, name: str) -> Path:
        return self.run_dir.path / VARIANTS_DIR / name

    def _prepared(self, name: str) -> PreparedRun:
        """Return the run of a variant: predicted by what the profile knows, or calibrated."""
        whole_run, path, values = self.prepared, self._path(name), self.values[name]
        given = None
        if whole_run.profile is not None and _known_keys(whole_run.profile, name) == values:
            given = whole_run.profile.variants[name]
        options = replace(
            whole_run.options,
            variants={},
            gpu_hour_price=None,
            engine_args={**whole_run.options.engine_args, **values},
            method=Method.CALIBRATED if given is None else Method.SHADOW,
            profile=given,
            storage=None,
            run_dir=path,
            notes={},
            is_resumed=(path / RUN_FILE).exists(),
        )
        return replace(
            whole_run,
            options=options,
            engine=replace(whole_run.engine, values=changed(whole_run.engine.values, values)),
            traffic=replace(whole_run.traffic, lines=()),
            run_path=path,
            profile=given,
            budget_share=self._left_s() / options.budget_s,
            windows=self._record.windows,
            is_compared=True,
        )

    def _left_s(self) -> float:
        """Return a variant's share of the time that is left, at least what a run takes."""
        return max(self._all_left_s() / (len(self.values) - len(self.found)), MIN_BUDGET_S)

    def _all_left_s(self) -> float:
        return self.prepared.options.budget_s - (time.monotonic() - self._began_s)

    def _no_time(self, variant: PreparedRun) -> str:
        """Say why there is no time for a variant, by what the engine as it is took to start.

        Empty where there is, and where it is predicted without an engine.
        """
        if variant.options.method is Method.SHADOW:
            return ""
        left_s, needed_s = self._all_left_s(), self._start_s + LEAST_BLOCKS_S
        if left_s >= needed_s:
            return ""
        return (
            f"{max(left_s, 0):.0f} s of the time are left, a start and the shortest "
            f"calibration take about {needed_s:.0f} s; --resume goes on with it"
        )

    @property
    def _record(self) -> RunRecord:
        return read_record(self.run_dir.path)

    def _keep_profile(self, name: str) -> None:
        """Put what was learnt of a variant into the profile of the configuration as it is."""
        path, other = self.run_dir.path / PROFILE_FILE, self._path(name) / PROFILE_FILE
        if path.exists() and other.exists():
            profile = read_profile(path)
            variants = {**profile.variants, name: read_profile(other)}
            write_profile(path, replace(profile, variants=variants))

    def _compared(self, base: RunResult) -> RunResult:
        path, options = self.run_dir.path, self.prepared.options
        contender = Contender(AS_IT_IS, {}, base, _profile_of(path, base))
        comparing = Comparing(
            self._workload(base), options.seed, options.confidence, options.gpu_hour_price
        )
        try:
            compared = comparing.compare(contender, self.found)
        except ShadowError as error:
            self.listener.note(f"variants are not compared: {error.message}")
            return base
        result = replace(base, variants=compared)
        self.run_dir.write_json(RESULT_FILE, result)
        write_the_page(self.write_page, path, self.listener)
        self.listener.result_written(result, path)
        return result

    def _workload(self, base: RunResult) -> Workload:
        """Return what the configuration as it is was predicted on. Raises: TunerError."""
        options, engine = self.prepared.options, base.provenance.engine
        trace = self.prepared.traffic.trace
        if engine is not None:
            trace, _ = fit_lengths(trace, engine.max_model_len, options.too_long)
        windows = self._record.predicted_windows or (whole(trace),)
        return Workload.of(TRACE, trace, windows, aim_of(options, trace))

    def _nothing_but(self, unmet: NoFeasibleConfigError) -> NoFeasibleConfigError:
        """Return that the configuration as it is meets no SLOs, and which variants do."""
        meets = [
            o.name for o in self.found if isinstance(o, Contender) and o.limits is not None
        ]
        if not meets:
            return unmet
        return NoFeasibleConfigError(
            f"{unmet.message}; variants that meet them: {', '.join(meets)}",
            f"tune emit {self._path(meets[0])} writes its configuration",
        )


def _profile_of(path: Path, result: RunResult) -> Profile | None:
    """Return what a run predicted with, None where it could not."""
    has_one = result.provenance.profile is not None and (path / PROFILE_FILE).exists()
    return read_profile(path / PROFILE_FILE) if has_one else None


class _Named(Listener):
    """Passes on what is said of a variant, under its name; its trials stay its own."""

    def __init__(self, listener: Listener, name: str) -> None:
        self._listener, self._name = listener, name

    def note(self, text: str) -> None:
        """Pass a sentence on."""
        self._listener.note(f"variant {self._name}: {text}")

    def progress(self, progress: Progress) -> None:
        """Pass on how far a replay is."""
        self._listener.progress(progress)
