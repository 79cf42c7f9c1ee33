"""Find the max_num_seqs and max_num_batched_tokens that suit a recorded workload.

`tune --trace prod.jsonl` replays the trace against vLLM in its own process and writes the
configuration that `vllm serve --config` takes. A Python program has the same from the names
below:

    result = tuner.tune(tuner.TuningOptions(trace=tuner.read_trace("prod.jsonl")))

The names are imported when they are first used, because a vLLM server imports this package for
its recorder and has no use for the rest. The version stands in the package's metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.drift.check import DriftVerdict
    from tuner.drift.retune import RetuneOptions
    from tuner.emit.names import Format
    from tuner.engine.limits import EngineLimits
    from tuner.engine.live import LiveEngine
    from tuner.errors import Caveat, TunerError
    from tuner.library import check_drift, read_trace, render_config, replay_trace, tune
    from tuner.replay.arrivals import ClockKind, Sessions
    from tuner.replay.metrics import Measurement, measure
    from tuner.replay.plan import ReplayPlan
    from tuner.replay.slo import Slo
    from tuner.run.listener import Listener
    from tuner.run.options import Method, TraceReading, TuningOptions
    from tuner.run.result import RunResult
    from tuner.search.objective import Objective
    from tuner.search.space import SearchSpace
    from tuner.search.trials import Trial
    from tuner.shadow.predictor import Predictor
    from tuner.shadow.profiles import Profile, read_profile
    from tuner.traffic.describe import describe
    from tuner.traffic.formats import ReadOptions
    from tuner.traffic.traces import LoadModel, TooLong, Trace
    from tuner.traffic.windows import Window

_HOMES = {
    "Caveat": "errors",
    "ClockKind": "replay.arrivals",
    "DriftVerdict": "drift.check",
    "EngineLimits": "engine.limits",
    "Format": "emit.names",
    "Listener": "run.listener",
    "LiveEngine": "engine.live",
    "LoadModel": "traffic.traces",
    "Measurement": "replay.metrics",
    "Method": "run.options",
    "Objective": "search.objective",
    "Predictor": "shadow.predictor",
    "Profile": "shadow.profiles",
    "ReadOptions": "traffic.formats",
    "ReplayPlan": "replay.plan",
    "RetuneOptions": "drift.retune",
    "RunResult": "run.result",
    "SearchSpace": "search.space",
    "Sessions": "replay.arrivals",
    "Slo": "replay.slo",
    "TooLong": "traffic.traces",
    "Trace": "traffic.traces",
    "TraceReading": "run.options",
    "Trial": "search.trials",
    "TunerError": "errors",
    "TuningOptions": "run.options",
    "Window": "traffic.windows",
    "check_drift": "library",
    "describe": "traffic.describe",
    "measure": "replay.metrics",
    "read_profile": "shadow.profiles",
    "read_trace": "library",
    "render_config": "library",
    "replay_trace": "library",
    "tune": "library",
}
"""The module of each name, below this package."""

__all__ = [
    "Caveat",
    "ClockKind",
    "DriftVerdict",
    "EngineLimits",
    "Format",
    "Listener",
    "LiveEngine",
    "LoadModel",
    "Measurement",
    "Method",
    "Objective",
    "Predictor",
    "Profile",
    "ReadOptions",
    "ReplayPlan",
    "RetuneOptions",
    "RunResult",
    "SearchSpace",
    "Sessions",
    "Slo",
    "TooLong",
    "Trace",
    "TraceReading",
    "Trial",
    "TunerError",
    "TuningOptions",
    "Window",
    "check_drift",
    "describe",
    "measure",
    "read_profile",
    "read_trace",
    "render_config",
    "replay_trace",
    "tune",
]


if not TYPE_CHECKING:  # a type checker has the names from above, and no others

    def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the names above
        """Return a name from its module. Raises: AttributeError."""
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
