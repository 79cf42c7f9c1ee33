"""A watch that changes its file again and again, to be killed at any instant.

It is a real one but for the verdicts, which are told, and for the clock, on which waiting takes
no time: its file, its state, its locks and its hook are what they are in production.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from support.watch_parts import EIGHT, FOUR, HOUR_S, World, a_world, pays
from tuner.drift.watch.handover import HookEnd, run_hook

HAND_OVER = (
    'cp "$TUNE_FILE" handed.new && sleep 0.00$((RANDOM % 9)) && mv handed.new handed.yaml'
)
"""What production is: a copy of the file, put there whole by the hook."""


def hand_over(folder: Path, environment: Mapping[str, str]) -> HookEnd:
    """Run the hook, a shell, in the folder."""
    command = ["bash", "-c", f'cd "{folder}" && {HAND_OVER}']
    return run_hook(command, environment, 30.0)


def change(world: World) -> None:
    """Have the file changed once, unless something stands in the way."""
    other = EIGHT if world.watcher.current == FOUR else FOUR
    world.lasts(pays(other))
    world.clock.sleep(6 * HOUR_S)


def restless(folder: Path) -> None:
    """Change the file until the process is killed."""
    with a_world(folder, run_hook=partial(hand_over, folder)) as world:
        while True:
            change(world)
