"""Raw columns of any format into a checked Trace: unwanted rows, order, zero of time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tuner.arrays import Bools
from tuner.errors import TraceError, UsageError
from tuner.formats.aborted import drawn_lengths
from tuner.formats.columns import Columns, ReadOptions, shown
from tuner.read_notes import ReadNotes
from tuner.traces import Aborted, Trace, ZeroOutput

ZERO_PROMPT = "prompt of 0 tokens"
ZERO_OUTPUT = "output of 0 tokens"
FAILED = "failed request"
ABORTED = "aborted request"


def assemble(
    columns: Columns, options: ReadOptions, *, source: str, format_name: str, sha256: str
) -> Trace:
    """Return the trace of a file's columns: unwanted rows left out, sorted, starting at 0.

    Under REFUSE the readers raise at the line, so no empty request arrives here.

    Raises: TraceError if no request is left; UsageError if the one model wanted is not there.
    """
    rows = len(columns.prompt_tokens) + sum(columns.skipped.values())
    notes = ReadNotes(rows=rows, remarks=columns.remarks, sampled_from=columns.sampled_from)
    for reason, count in columns.skipped.items():
        notes = notes.with_dropped(f"invalid: {reason}", count)
    columns, notes = _of_one_model(columns, options, notes, source)
    columns, notes = _with_aborted(columns, options, notes)
    columns, notes = _without_empty(columns, options.zero_output, notes)
    if not len(columns.prompt_tokens):
        why = ", ".join(f"{count} {reason}" for reason, count in notes.dropped.items())
        raise TraceError(
            f"{source}: none of the {rows} requests can be replayed ({why})",
            "pass --zero-output one to keep empty answers",
        )
    columns, moved = _in_order(columns)
    zero = columns.arrived[0]
    return Trace(
        due_s=(columns.arrived - zero) / columns.ticks_per_s,
        prompt_tokens=columns.prompt_tokens,
        output_tokens=columns.output_tokens,
        hashes=columns.hashes,
        e2e_s=columns.e2e_s,
        ttft_s=columns.ttft_s,
        turns=columns.turns if columns.turns is not None and columns.turns.waiting else None,
        concurrency=columns.concurrency,
        request_ids=columns.request_ids,
        source=source,
        format=format_name,
        sha256=sha256,
        notes=replace(notes, moved=moved),
        origin=columns.origin,
        zero_s=float(zero) / columns.ticks_per_s,
        hash_scope=sha256 if columns.local_hashes else columns.hash_scope,
    )


def _of_one_model(
    columns: Columns, options: ReadOptions, notes: ReadNotes, source: str
) -> tuple[Columns, ReadNotes]:
    """Keep the rows of --only-model; a mixture without it is remarked on."""
    models, wanted = columns.models, options.only_model
    if wanted is None:
        if models is None or len(models.names) < 2:
            return columns, notes
        counts = np.bincount(models.codes[models.codes >= 0], minlength=len(models.names))
        named = ", ".join(
            f"{shown(name)} {count:,}" for name, count in zip(models.names, counts, strict=True)
        )
        told = f"the file mixes {len(models.names)} models ({named}): --only-model picks one"
        return columns, notes.with_remark(told)
    if models is None or wanted not in models.names:
        known = ", ".join(models.names) if models is not None else "no model names"
        raise UsageError(f"{source} holds no request of model {shown(wanted)}; it has {known}")
    is_other = models.codes != models.names.index(wanted)
    notes = notes.with_dropped(f"not of model {wanted}", int(is_other.sum()))
    return columns.take(np.flatnonzero(~is_other)), notes


def _with_aborted(
    columns: Columns, options: ReadOptions, notes: ReadNotes
) -> tuple[Columns, ReadNotes]:
    """Treat answers that were cut short, and say so."""
    notes = replace(notes, aborted=columns.aborted_before)
    if columns.aborted is None or not columns.aborted.any():
        return columns, notes
    count, rows = int(columns.aborted.sum()), len(columns.aborted)
    if options.aborted is Aborted.DROP:
        left = columns.take(np.flatnonzero(~columns.aborted))
        return left, notes.with_dropped(ABORTED, count)
    told = f"{count:,} of {rows:,} answers ({count / rows:.1%}) were cut short: clients left; "
    if options.aborted is Aborted.KEEP:
        told += "they are replayed as short as they were cut (--aborted keep)"
    else:
        output = drawn_lengths(
            columns.prompt_tokens, columns.output_tokens, columns.aborted, options.seed
        )
        columns = replace(columns, output_tokens=output)
        told += "the rest of their length is drawn from answers that went on (--aborted draw)"
    return columns, replace(notes.with_remark(told), aborted=notes.aborted + count)


def _without_empty(
    columns: Columns, zero_output: ZeroOutput, notes: ReadNotes
) -> tuple[Columns, ReadNotes]:
    """Leave out failed and empty requests, or give empty answers one token."""
    failed: Bools = np.zeros(len(columns.prompt_tokens), dtype=np.bool_)
    if columns.failed is not None:
        failed = columns.failed
    if zero_output is ZeroOutput.ONE:
        columns = replace(columns, output_tokens=np.maximum(columns.output_tokens, 1))
    no_prompt = (columns.prompt_tokens < 1) & ~failed
    no_output = (columns.output_tokens < 1) & ~no_prompt & ~failed
    notes = notes.with_dropped(FAILED, int(failed.sum()))
    notes = notes.with_dropped(ZERO_PROMPT, int(no_prompt.sum()))
    notes = notes.with_dropped(ZERO_OUTPUT, int(no_output.sum()))
    unwanted = failed | no_prompt | no_output
    if unwanted.any():
        columns = columns.take(np.flatnonzero(~unwanted))
    return columns, notes


def _in_order(columns: Columns) -> tuple[Columns, int]:
    """Sort stably by arrival; count the rows that arrived before one that stands above them."""
    arrived = columns.arrived
    is_late: Bools = arrived < np.maximum.accumulate(arrived)
    if not is_late.any():
        return columns, 0
    return columns.take(np.argsort(arrived, kind="stable")), int(is_late.sum())
