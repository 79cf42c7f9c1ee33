"""A recording of requests in flight, with the lengths of another trace, as a closed-loop trace.

Answers what to replay when a monitor kept how many requests were in flight, but not which.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from tuner.describe import SECONDS_PER_OUTPUT_TOKEN
from tuner.formats.assemble import assemble
from tuner.formats.columns import Columns, ReadOptions
from tuner.formats.concurrency_csv import (
    FORMAT,
    check_count,
    count_remark,
    read_in_flight,
)
from tuner.formats.sources import plain_file
from tuner.sampling import as_changes, requests_in_flight, shuffled_rounds
from tuner.traces import Trace


def trace_from_concurrency(
    path: Path | str, lengths: Trace, seed: int = 0, options: ReadOptions | None = None
) -> Trace:
    """Return the recorded requests in flight with lengths drawn from another trace.

    Prompt and answer of a request stay together, and each request of that trace is taken as
    often as any other to within one. Its hash ids are left out: drawn rows would repeat whole
    prompts, which no recording says.

    Raises: TraceError if the recording cannot be read; UsageError if an option does not apply.
    """
    options = options if options is not None else ReadOptions()
    with plain_file(Path(path)) as source:
        found = read_in_flight(source.path, options)
        name, sha256 = source.name, source.sha256
    flow = found.flow
    lives_s = np.full(
        len(flow.times_s), lengths.output_tokens.mean() * SECONDS_PER_OUTPUT_TOKEN
    )
    check_count(Path(name), flow, lives_s)
    due_s, _ = requests_in_flight(flow, lives_s)
    rows = shuffled_rounds(len(lengths), len(due_s), np.random.default_rng(seed))
    told = (
        f"lengths are those of {lengths.source} in random order, without its prefix reuse",
        count_remark(),
    )
    columns = Columns(
        arrived=found.zero_s + due_s,
        ticks_per_s=1.0,
        prompt_tokens=lengths.prompt_tokens[rows],
        output_tokens=lengths.output_tokens[rows],
        concurrency=as_changes(flow),
        origin=found.origin,
        skipped=found.skipped,
        remarks=(*found.remarks, *told),
        sampled_from=f"{name} and the lengths of {lengths.source}",
    )
    both = hashlib.sha256(f"{sha256}{lengths.sha256}".encode()).hexdigest()
    return assemble(columns, options, source=name, format_name=FORMAT, sha256=both)
