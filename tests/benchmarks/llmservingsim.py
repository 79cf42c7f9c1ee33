"""Two recorded runs on GPUs beside what the simulator makes of layer tables of the same cards.

    python tests/benchmarks/llmservingsim.py FOLDER [-o results.json]

FOLDER holds one folder for each card as LLMServingSim publishes them; support/layer_tables.py
says what is in it and what is made of it.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.layer_tables import card, cards


def tell(name: str, found: Mapping[str, Any]) -> None:
    """Print what came of a card."""
    print(
        f"{name}: {found['requests']} requests, {found['preempted']} preempted, a step's "
        f"middle error {found['step_mape_ratio']:.1%}"
    )
    for metric, of in found["latencies"].items():
        print(
            f"  {metric:<9} {of['recorded_s']:9.4f} s recorded, {of['simulated_s']:9.4f} s "
            f"simulated, {of['off']:+.1%}"
        )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = {}
    for path in cards(args.folder):
        found[path.name] = card(path)
        tell(path.name, found[path.name])
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
