"""The command `tune`: options in, exit codes out. Owns click and cloup.

Most is imported once an interrupt is heard: that is most of a short command's time.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import FrameType

    from tuner.errors import TunerError

_COMPLETE = "_TUNE_COMPLETE"
"""The variable by which a shell asks for completions, named as click's own scripts do."""


_FULL = {errno.ENOSPC, errno.EDQUOT}
_WIDEST = 96
"""Ours: columns of help, as of our own source lines."""
_NARROWEST = 20
"""Ours: columns that hold the longest words of the help beside its indent."""
_HELPS = {"-h", "--help", "--version"}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _leave(*_: object) -> NoReturn:
    """End at once: Ctrl-C while modules are imported, when there is nothing to keep or tell.

    An exception would surface wherever the import is, as a traceback or not at all.
    """
    os._exit(130)


def hear_endings() -> None:
    """Let Ctrl-C, SIGTERM and a terminal that is gone interrupt; the last not under nohup."""
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _hung_up)


def _hung_up(kind: int, frame: FrameType | None) -> None:
    """Interrupt, once: a shell that ends sends it again, while the best so far is written.

    What would still be said to nobody is dropped, as it would be an error.
    """
    signal.signal(kind, signal.SIG_IGN)
    for stream in (1, 2):
        told = select.poll()
        told.register(stream, 0)  # Only that it is gone is asked for, which always is told.
        if told.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    signal.default_int_handler(kind, frame)


def hear_no_more() -> None:
    """Ignore interrupts from here on: all is said, and only the interpreter has yet to end.

    That takes it some tenths of a second, in which an interrupt would show a traceback or
    exchange the exit code for that of a process that was killed.
    """
    for kind in _ENDING:
        signal.signal(kind, signal.SIG_IGN)


def _help_columns() -> int:
    """Return how wide help is: as the terminal, where words fit into it.

    In fewer columns they would be cut into letters, and in six nothing can be set at all.
    """
    from shutil import get_terminal_size

    return max(_NARROWEST, min(get_terminal_size().columns - 1, _WIDEST))


def run(arguments: list[str]) -> int:  # noqa: PLR0911 - one return per way to end
    """Run the command and return its exit code; every error ends here."""
    import click

    from tuner.cli.options import as_usage_error
    from tuner.errors import TunerError

    hear_endings()
    try:
        return _invoked(arguments)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.exceptions.NoArgsIsHelpError as asked:
        click.echo(asked.format_message())
        return 0
    except click.ClickException as complaint:
        return _reported(as_usage_error(complaint))
    except TunerError as error:
        return _reported(error)
    except (KeyboardInterrupt, click.Abort):
        hear_no_more()
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        _print_no_more()
        return 141
    except Exception as defect:  # noqa: BLE001 - the one place where one of ours may surface
        return _surfaced(defect)


def _invoked(arguments: list[str]) -> int:
    """Read the arguments, do what they say and return the exit code."""
    from contextlib import ExitStack

    from tuner.cli.commands import tune

    with ExitStack() as held:
        if not _HELPS.intersection(arguments):  # help needs no numpy
            from tuner.stats import one_thread

            held.enter_context(one_thread())
        context = tune.make_context("tune", list(arguments), terminal_width=_help_columns())
        held.enter_context(context)
        code = tune.invoke(context)
        sys.stdout.flush()
    return int(code or 0)


def _surfaced(defect: Exception) -> int:
    """Write what nobody has expected, a full disk or a defect of ours; return the exit code."""
    import traceback

    import click

    from tuner.errors import UsageError
    from tuner.redact import redacted_text

    if isinstance(defect, OSError) and defect.errno in _FULL:
        _print_no_more()
        where = "free space where the output goes, and for temporary files"
        return _reported(
            UsageError(f"what is told cannot be written: {defect.strerror}", where)
        )
    told = "".join(traceback.format_exception(defect))
    click.echo(redacted_text(told), err=True)
    click.echo("error: this is a defect of tune, not of your input", err=True)
    click.echo("hint:  report it together with the lines above", err=True)
    return 1


def _print_no_more() -> None:
    """Let what is still to be printed vanish: the interpreter would fail with it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reported(error: TunerError) -> int:
    from tuner.cli.console import say_error

    say_error(error)
    return error.exit_code


def _open_streams() -> None:
    """Open onto nothing what the shell has closed (`>&-`), in the order of their numbers.

    A file of the run would get that number, and take what libraries print.
    """
    from pathlib import Path

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nothing = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - stays open
            os.set_inheritable(nothing.fileno(), True)  # noqa: FBT003 - it takes no name
            setattr(sys, name, nothing)


def main() -> None:
    """Run `tune` on the process's own arguments, or complete them for a shell."""
    signal.signal(signal.SIGINT, _leave)
    _open_streams()
    from tuner.cli.commands import tune

    if instruction := os.environ.get(_COMPLETE):
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(tune, {}, "tune", _COMPLETE, instruction))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Whatever the locale: YAML, JSON and HTML are read as UTF-8.
        sys.stdout.reconfigure(encoding="utf-8")
    code = run(sys.argv[1:])
    hear_no_more()
    sys.exit(code)
