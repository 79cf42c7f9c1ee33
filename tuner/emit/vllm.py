"""Write a recommendation as the file that `vllm serve --config` takes.

Answers how the user's values and the two tuned limits become YAML that vLLM reads as they were
meant, and how the file gets onto the disk whole. What to recommend, and which evidence there
is, is decided above.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from tuner.errors import UsageError
from tuner.spelling import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, hyphenated, negated

LIVE_LIMIT_KEYS: Final = ("max-num-active-seqs", "max-num-scheduled-tokens")
"""Keys of vLLM 0.32 and later that cap admission and step budget below the two limits.

Source: SchedulerConfig in vLLM's vllm/config/scheduler.py.
"""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why these values: what stands above them in the file, as comments.

    >>> Evidence(tuned="tuned on 9 requests", limited_by="nothing in the trace").lines("b.yaml")
    ('vllm serve --config b.yaml', 'tuned on 9 requests', 'limited by: nothing in the trace')
    """

    tuned: str
    """When, on which requests, with which vLLM and device, live or shadow."""
    against: str = ""
    """The present configuration that the rows compare with."""
    rows: tuple[str, ...] = ()
    """One comparison each: metric, before -> after, gain with its interval."""
    limited_by: str = ""
    caveats: tuple[str, ...] = ()
    run_dir: str = ""

    def lines(self, file_name: str) -> tuple[str, ...]:
        """Return the comment lines, the command that takes the file first."""
        return (
            f"vllm serve --config {file_name}",
            self.tuned,
            *([f"against {self.against}:"] if self.against else []),
            *(f"  {row}" for row in self.rows),
            *([f"limited by: {self.limited_by}"] if self.limited_by else []),
            *(f"caveat: {caveat}" for caveat in self.caveats),
            *([f"evidence: {self.run_dir}"] if self.run_dir else []),
        )


class _PlainDumper(yaml.SafeDumper):
    """PyYAML's safe dumper without anchors: people edit the file."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML's own signature
        """Write a value out in full wherever it stands."""
        return True


def render(
    values: Mapping[str, object],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    comments: Sequence[str],
) -> str:
    """Return the file's text: comments, then the user's values with the two limits set.

    A false becomes `no-KEY: true`, because `vllm serve` drops a false in silence. Keys that
    would cap the limits from below are left out, and a comment says so.

    Raises: ValueError if a limit is no number of at least 1, the budget is below the cap, or a
        value is null.
    Source: vLLM vllm/utils/argparse_utils.py, FlexibleArgumentParser.load_config_file.

    >>> print(render({"model": "m", "enable-prefix-caching": False}, 16, 2048, ["why"]), end="")
    # why
    model: m
    no-enable-prefix-caching: true
    max-num-seqs: 16
    max-num-batched-tokens: 2048
    """
    if not 1 <= max_num_seqs <= max_num_batched_tokens:
        raise ValueError(
            "limits must be 1 <= max_num_seqs <= max_num_batched_tokens, got "
            f"{max_num_seqs} and {max_num_batched_tokens}"
        )
    spelled = {hyphenated(key): value for key, value in values.items()}
    dropped = [
        f"left out {key}: {spelled[key]}, which would cap the tuned limits"
        for key in LIVE_LIMIT_KEYS
        if key in spelled
    ]
    spelled |= {MAX_NUM_SEQS: max_num_seqs, MAX_NUM_BATCHED_TOKENS: max_num_batched_tokens}
    kept = {key: value for key, value in spelled.items() if key not in LIVE_LIMIT_KEYS}
    body = yaml.dump(
        _as_vllm_reads(kept),
        Dumper=_PlainDumper,
        sort_keys=False,
        default_flow_style=False,
        width=10_000,
    )
    return _commented([*comments, *dropped]) + body


def write_atomic(path: Path, text: str, *, secret: bool) -> None:
    """Write the file whole or not at all: what stood there before survives a full disk.

    With a secret inside, only the owner may read it (mode 0600), from the first byte on. A
    target that is no regular file, as /dev/stdout, is written to as it is.

    Raises: UsageError if the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            target = path.resolve()
            _replace(target, text, mode=0o600 if secret else _usual_mode(target))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="name another file after -o, or free space there",
        ) from error


def _replace(target: Path, text: str, mode: int) -> None:
    """Put a finished copy in the target's place, within its folder so that a rename does it."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as copy:
            copy.write(text)
            copy.flush()
            os.fchmod(copy.fileno(), mode)
            os.fsync(copy.fileno())
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _usual_mode(target: Path) -> int:
    """Return the mode the file has, or the one a new file gets."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _as_vllm_reads(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values with every false turned into the flag that says so."""
    shown: dict[str, object] = {}
    for key, value in values.items():
        if value is None:
            raise ValueError(f"{key} must have a value, got None")
        if value is not False:
            shown[key] = value
        elif (flag := negated(key)) is not None:
            shown[flag] = True
    return shown


def _commented(lines: Sequence[str]) -> str:
    """Return the lines as comments; a character YAML cannot hold becomes a question mark."""
    single = [part for line in lines for part in (line.splitlines() or [""])]
    shown = ["".join(c if c.isprintable() else "?" for c in line) for line in single]
    return "".join(f"# {line}".rstrip() + "\n" for line in shown)
