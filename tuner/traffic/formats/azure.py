"""Azure's CSV of 2023, 2024 and 2025: a wall clock and two token counts, found by name.

Source: Azure/AzurePublicDataset, AzureLLMInferenceTrace_{code,conv}.csv, the week of 2024 and
the multimodal trace of 2025, whose images are not replayed: its token counts are of text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tuner.traffic.formats.columns import Columns, ReadOptions, TraceFormat
from tuner.traffic.formats.csv_table import Kind, ThreeColumns, header_line, header_names

IMAGES = "NumImages"

_COLUMNS = ThreeColumns("TIMESTAMP", Kind.WALL_CLOCK, "ContextTokens", "GeneratedTokens")


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns. Raises: TraceError that names the first wrong line."""
    columns = _COLUMNS.columns(_COLUMNS.read(path, options), options)
    if IMAGES not in header_names(header_line(path)):
        return columns
    message = "images (NumImages) are not replayed: the prompts are text of the recorded length"
    return replace(columns, remarks=(message,))


AZURE = TraceFormat(name="azure", matches=_COLUMNS.stand_in, read=read)
