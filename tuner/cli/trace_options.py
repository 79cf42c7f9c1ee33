"""Options that say how recorded traffic is read, and the traces that they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tuner.errors import UsageError
from tuner.traffic.formats import ReadOptions, TimeUnit, read_traces
from tuner.traffic.traces import Aborted, Trace, ZeroOutput

Command = TypeVar("Command", bound=Callable[..., Any])


def read_options(options: Mapping[str, Any]) -> ReadOptions:
    """Return what the options say about rows. Raises: UsageError."""
    size = options["hash_block_size"]
    share = options["max_invalid"]
    if share is not None and not options["skip_invalid"]:
        raise UsageError(
            "--max-invalid says how many wrong rows may be skipped and needs --skip-invalid"
        )
    unit = options["time_unit"]
    usual = ReadOptions()
    return ReadOptions(
        zero_output=ZeroOutput(options["zero_output"]),
        only_model=options["only_model"],
        time_unit=TimeUnit(unit) if unit else None,
        hash_block_size=size,
        skip_invalid=options["skip_invalid"],
        max_invalid_ratio=usual.max_invalid_ratio if share is None else share / 100,
        seed=options["seed"],
        sample_s=options["sample"],
        aborted=Aborted(options["aborted"] or usual.aborted),
    )


def read_named(paths: Sequence[str], options: Mapping[str, Any]) -> Trace:
    """Return the trace in the named files together. Raises: TraceError, UsageError."""
    return read_traces(
        paths,
        options["trace_format"],
        read_options(options),
        spread_seed=options["seed"] if options["spread"] else None,
        sessions_over_s=options["sessions_over"],
    )
