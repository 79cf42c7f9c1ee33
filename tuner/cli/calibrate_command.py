"""`tune calibrate`: a profile corrected by a recording of the engine as it is served."""

from __future__ import annotations

from typing import Any

import click

from tuner.cli.options import CONTEXT, shadow_options, traffic_options


@click.command("calibrate", context_settings=CONTEXT)
@traffic_options
@shadow_options
@click.option(
    "--config",
    metavar="FILE",
    help="Configuration that was served (YAML); default: the profile's.",
)
@click.option("--max-num-seqs", type=click.IntRange(1), metavar="N", help="The served cap.")
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1), metavar="N", help="The served budget."
)
@click.option("-o", "--output", metavar="FILE", help="Where the corrected profile goes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(**options: Any) -> int:
    """Correct a profile by a recording of the engine as it is served.

    \b
        tune calibrate --profile runs/…/profile.yaml --trace prod.jsonl -o served.profile.yaml

    Steps take longer behind an API server than in process. The profile's shadow replays the
    recording; what is missing in its steps goes into the new profile, which says how far it is
    off on requests that taught nothing. Needs a recording with first-token and end times, as
    this tool's recorder writes, of one server at known limits.
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.cli.calibrate_job import run_calibrate

    return run_calibrate(options)
