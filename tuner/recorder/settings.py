"""A recording's settings from the environment: which file, how large, with which key."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tuner.recorder.faults import described, warn

FILE: Final = "TUNE_RECORD"
"""Names the file into which a server's traffic is recorded; recording is off without it."""

MAX_BYTES: Final = "TUNE_RECORD_MAX_BYTES"
"""Optional: the size at which a file is closed and the next one begun."""

MAX_TOTAL_BYTES: Final = "TUNE_RECORD_MAX_TOTAL_BYTES"
"""Optional: what all files of a recording may take, those of before too."""

DEFAULT_TOTAL_BYTES: Final = 10_000_000_000
"""Ours: some two days at 10 requests a second of 4,000 tokens in blocks of 16; a disk of a pod
that is filled ends the pod."""

STEPS: Final = "TUNE_RECORD_STEPS"
"""Optional: 1 records the engine's steps too, beside the requests."""

KEY: Final = "TUNE_RECORD_KEY_OF_THIS_RUN"
"""Written by `share_key` for the processes of one server; not meant for users."""

MIN_MAX_BYTES: Final = 4096
"""Ours: below it a file would hold little but its own header."""

KEY_BYTES: Final = 32


class UsageError(Exception):
    """A setting cannot be used: what is wrong, and as `hint` what to do.

    Of the recorder's own, which is installed without the rest of this package.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Where to record, when to begin the next file (None: never), and the key of the hashes.

    `has_steps` says whether the engine's steps are recorded too, `max_total_bytes` what all
    files may take.
    """

    path: Path
    max_bytes: int | None = None
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)
    has_steps: bool = False
    max_total_bytes: int = DEFAULT_TOTAL_BYTES

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RecordSettings | None:
        """Return the settings, or None where nothing is to be recorded.

        Raises: UsageError if TUNE_RECORD is a folder, a size is none, or TUNE_RECORD_STEPS
            neither 0 nor 1.

        >>> RecordSettings.from_environment({}) is None
        True
        """
        if not environment.get(FILE):
            return None
        path = Path(environment[FILE]).absolute()
        if path.is_dir():
            raise UsageError(
                f"{FILE} must name a file, got the folder {path}",
                f"set {FILE}={path}/prod.jsonl",
            )
        max_bytes = _size(environment, MAX_BYTES)
        total = _size(environment, MAX_TOTAL_BYTES)
        steps = environment.get(STEPS) or "0"
        if steps not in ("0", "1"):
            raise UsageError(f"{STEPS} must be 0 or 1, got {steps}", f"set {STEPS}=1")
        try:
            key = bytes.fromhex(environment.get(KEY, ""))
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            key = secrets.token_bytes(KEY_BYTES)
        return cls(
            path,
            max_bytes,
            key,
            has_steps=steps == "1",
            max_total_bytes=DEFAULT_TOTAL_BYTES if total is None else total,
        )


def _size(environment: Mapping[str, str], name: str) -> int | None:
    """Return a variable's size, None where it is not set. Raises: UsageError if it is none."""
    size = environment.get(name)
    if not size:
        return None
    if not (size.isdecimal() and int(size) >= MIN_MAX_BYTES):
        raise UsageError(
            f"{name} must be a size in bytes, at least {MIN_MAX_BYTES}, got {size}",
            f"for 1 GB set {name}=1000000000",
        )
    return int(size)


def share_key() -> None:
    """Hand the processes that this one will start a common random key.

    vLLM calls it as a plugin before it starts several API servers. Turns of one conversation
    reach any of them, and only hashes under one key show what the turns have in common. An
    environment variable reaches all of them and no disk.
    """
    try:
        if os.environ.get(FILE) and not os.environ.get(KEY):
            os.environ[KEY] = secrets.token_hex(KEY_BYTES)
    except Exception as cause:  # noqa: BLE001 - vLLM would not start
        warn(
            "hashes of several API servers cannot be compared, as they share no key: %s",
            described(cause),
        )
