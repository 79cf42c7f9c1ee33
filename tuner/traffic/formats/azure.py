"""Azure's CSV of 2023, 2024 and 2025: a wall clock and two token counts, found by name.

Source: Azure/AzurePublicDataset, AzureLLMInferenceTrace_{code,conv}.csv, the week of 2024 and
the multimodal trace of 2025, whose images are not replayed: its token counts are of text.
"""

from __future__ import annotations

from pathlib import Path

from tuner.traffic.formats.columns import Columns, ReadOptions, TraceFormat, no_time_unit
from tuner.traffic.formats.csv_table import Kind, ThreeColumns, header_names
from tuner.traffic.traces import ClockOrigin

IMAGES = "NumImages"

_COLUMNS = ThreeColumns("TIMESTAMP", Kind.WALL_CLOCK, "ContextTokens", "GeneratedTokens")


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns, streamed and parsed in bulk.

    Raises: TraceError that names the first wrong line.
    """
    no_time_unit(path, options)
    with path.open("rb") as file:
        has_images = IMAGES in header_names(file.readline(1 << 16))
    table = _COLUMNS.read(path, options)
    message = "images (NumImages) are not replayed: the prompts are text of the recorded length"
    return Columns(
        arrived=table.whole["arrived"],
        ticks_per_s=1e9,
        prompt_tokens=table.whole["prompt"],
        output_tokens=table.whole["output"],
        origin=ClockOrigin.WALL,
        skipped=table.skipped,
        remarks=(message,) if has_images else (),
    )


AZURE = TraceFormat(name="azure", matches=_COLUMNS.stand_in, read=read)
