"""`tune doctor`: what is installed and what is missing."""

from __future__ import annotations

import click

from tuner.cli.options import CONTEXT


@click.command("doctor", context_settings=CONTEXT)
def doctor() -> int:
    """Say what is installed, what is missing, and the command that mends it.

    \b
        tune doctor
    """  # noqa: D301 - click looks for the character that \b stands for
    from tuner.doctor import checks

    found = checks()
    for one in found:
        state = "ok" if one.ok else "MISSING" if one.is_required else "absent"
        click.echo(f"{state:<8} {one.name:<24} {one.found}")
        if not one.ok and one.fix:
            click.echo(f"{'':8} {'':24} {one.fix}")
    return 0 if all(one.ok for one in found if one.is_required) else 2
