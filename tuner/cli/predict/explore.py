"""`tune explore`: every setting at every load, predicted from a profile, on one page."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tuner.cli.console import json_text, say
from tuner.cli.inputs import check_output
from tuner.cli.predict.options import LoadsOptions
from tuner.files import write_atomic
from tuner.report.explore import Explored, explore_page

PAGE = "explore.html"


def run_explore(inputs: LoadsOptions, output: Path | None, *, as_json: bool) -> int:
    """Predict every setting at every load, write the page or the data.

    With `as_json` the data goes to stdout, and a page is written where one is named.
    Raises: TunerError.
    """
    check_output(output)
    began_s = time.monotonic()
    source = inputs.shadow.load()
    trace, surface = inputs.surface(source)
    took_s = time.monotonic() - began_s
    replays = len(surface.settings) * len(surface.loads)
    say(f"{replays} replays predicted, and what is best at each load, in {took_s:.1f} s")
    name, objective = str(inputs.shadow.profile), str(surface.workload.scoring.objective)
    explored = Explored(surface, source.profile, name, trace, objective, took_s)
    if as_json:
        sys.stdout.write(json_text(_content(explored)))
    if output or not as_json:
        target = output or Path(PAGE)
        write_atomic(target, explore_page(explored))
        say(f"page written to {target}")
    return 0


def _content(explored: Explored) -> dict[str, Any]:
    surface, profile, trace = explored.surface, explored.profile, explored.trace
    content = surface.as_json()
    for at, found in zip(surface.loads, content["loads"], strict=True):
        reached = (at.reached(limits) for limits in surface.settings)
        found["settings"] = [setting.as_json(surface.tail) for setting in reached]
    return {
        **content,
        "objective": explored.objective,
        "slos": [str(slo) for slo in surface.workload.slos],
        "profile": {
            "path": explored.profile_name,
            "made_at": profile.made_at,
            "model": profile.shape.model,
            "device": profile.shape.device,
            "vllm_version": profile.shape.vllm_version,
        },
        "trace": {
            "source": trace.source,
            "sha256": trace.sha256,
            "requests": explored.requests,
            "load": trace.load,
        },
        "took_s": explored.took_s,
    }
