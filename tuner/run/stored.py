"""What a run directory keeps so that others can go on with the run: `run.json`.

`--resume` and workers read it. It holds no secrets: who resumes a run that had some gives them
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.files import UNREADABLE
from tuner.redact import REDACTED, redacted
from tuner.replay.slo import Slo
from tuner.run.directory import PROFILE_FILE, RUN_FILE
from tuner.run.options import RunOptions, TuningOptions
from tuner.search.space import DEFAULT_LADDER
from tuner.shadow.profiles import Profile
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window, WindowChoice

SCHEMA: Final = 2

_MAY_DIFFER = {
    *("trace", "reading", "config", "profile", "budget_s", "storage", "notes"),
    *("start_timeout_s", "gpu_hour_price"),
}
"""What a run may go on with otherwise than it began. Its trace and its configuration may have
moved; that they are the same is checked by their hashes."""


@dataclass(frozen=True, slots=True)
class StoredOptions(RunOptions):
    """The options of a run as its directory keeps them: as data, without secrets.

    `trace` are the files of a trace, None where a program gave the trace itself. Secrets, also
    those in the login of a URL, are replaced by `REDACTED`.
    """

    trace: tuple[str, ...] | None
    config: str | dict[str, Any] | None = None
    slos: tuple[Slo, ...] = ()
    window: WindowChoice | None = None
    ladder: tuple[int, ...] = DEFAULT_LADDER
    knobs: tuple[str, ...] = ()
    profile: str | None = None

    @classmethod
    def of(cls, options: TuningOptions) -> Self:
        """Return the form that can be kept."""
        trace, config, profile = options.trace, options.config, options.profile
        changed: dict[str, object] = {
            "trace": None,
            "config": None if config is None else str(config),
            "engine_args": redacted(options.engine_args),
            "profile": None if profile is None else str(profile),
            "model": redacted({"": options.model})[""],
            "storage": redacted({"": options.storage})[""],
            "notes": dict(options.notes),
            "variants": {name: dict(keys) for name, keys in options.variants.items()},
        }
        if not isinstance(trace, Trace):
            named = [trace] if isinstance(trace, (str, Path)) else trace
            changed["trace"] = tuple(map(str, named))
        if isinstance(config, Mapping):
            changed["config"] = redacted(config)
        if isinstance(profile, Profile):
            changed["profile"] = PROFILE_FILE
        same = {field.name: getattr(options, field.name) for field in fields(cls)}
        return cls(**{**same, **changed})

    def restored(self, run_dir: Path, given: dict[str, Any]) -> TuningOptions:
        """Return the options that go on with the run, with those that are given anew.

        Raises: UsageError if the trace or a secret has to be given again.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)} | given
        if values["trace"] is None:
            raise UsageError(
                f"{run_dir} was begun by a Python program, which gave the trace itself",
                "name its file with --trace, or go on in the program with is_resumed=True",
            )
        values["engine_args"] = {**self.engine_args, **given.get("engine_args", {})}
        hidden = {f"--engine-arg {name}": text for name, text in values["engine_args"].items()}
        if isinstance(values["config"], dict):
            hidden["--config"] = values["config"]
        hidden |= {f"--{name}": values[name] for name in ("model", "storage")}
        for option, value in hidden.items():
            if REDACTED in str(value):
                raise UsageError(
                    f"{option} is a secret or holds one, which was not kept",
                    f"give it again: {option}{'=' if ' ' in option else ' '}…",
                )
        return TuningOptions(**values, run_dir=run_dir, is_resumed=True)

    def without_secrets(self) -> Self:
        """Return the options of a worker: its engine serves nobody and needs no api-key."""
        config = self.config
        return replace(
            self,
            engine_args=_shown(self.engine_args),
            variants={},
            gpu_hour_price=None,
            config=_shown(config) if isinstance(config, dict) else config,
            storage=None,
        )

    def check_goes_on(self, now: TuningOptions) -> None:
        """Refuse options that would mix measurements made under other conditions.

        Raises: UsageError.
        """
        before, here = msgspec.to_builtins(self), msgspec.to_builtins(StoredOptions.of(now))
        for name in before:
            if name not in _MAY_DIFFER and before[name] != here[name]:
                raise UsageError(
                    f"{name} cannot change when a run is resumed: "
                    f"it was {before[name]}, now {here[name]}",
                    "start a new run",
                )


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value != REDACTED}


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was begun with, and which windows it chose.

    `study` is its name in the Optuna storage. `windows` are those that are replayed live,
    `predicted_windows` those that were predicted; none before they are chosen.
    """

    schema: int = SCHEMA
    study: str
    options: StoredOptions
    trace_sha256: str
    config_sha256: str
    ceiling: EngineLimits
    vllm_version: str
    device: str
    windows: tuple[Window, ...] = ()
    predicted_windows: tuple[Window, ...] = ()


class _Version(msgspec.Struct):
    schema: int = 1


def read_record(folder: Path) -> RunRecord:
    """Return what a run keeps in its directory, also while it goes on.

    Raises: UsageError if it cannot be read, or another version wrote it.
    """
    path = folder / RUN_FILE
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content, type=_Version).schema
        if found == SCHEMA:
            return msgspec.json.decode(content, type=RunRecord)
    except FileNotFoundError:
        raise UsageError(
            f"{folder} holds no run: {RUN_FILE} is missing",
            "name the directory of a run that has begun, or start a new run",
        ) from None
    except (OSError, *UNREADABLE) as error:
        raise UsageError(
            f"{path} cannot be read: {error}",
            "name the directory of a run that has begun, or start a new run",
        ) from error
    raise UsageError(
        f"{path}: schema must be {SCHEMA}, got {found}",
        "another version of tune began this run; start a new one",
    )
