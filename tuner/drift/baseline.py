"""What a run or a profile keeps of what it was tuned for, as a later check needs it.

Answers which configuration, objective, SLOs and traffic new traffic is held against.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.replay.slo import Slo
from tuner.run.directory import PROFILE_FILE, folder_of_run
from tuner.run.result import read_result
from tuner.search.objective import Objective
from tuner.shadow.profiles import Profile, read_profile
from tuner.traffic.sketch import TRAFFIC_FILE, TrafficSketch, read_sketch


@dataclass(frozen=True, slots=True)
class Baseline:
    """A profile and what was decided with it.

    `current` is what the run recommends, or what the profile was made with. `sketch` is None
    where nothing was kept of the traffic; `label` then names it, `sha256` identifies its
    file; both are empty where not even that is known. A `concurrency` is how many requests
    the run kept in flight, `request_timeout_s` after what time its clients left.

    Units: seconds.
    """

    profile: Profile
    current: EngineLimits
    objective: Objective
    slos: tuple[Slo, ...]
    sketch: TrafficSketch | None
    label: str = ""
    sha256: str = ""
    concurrency: int | None = None
    request_timeout_s: float | None = None

    def check_has_traffic(self, path: Path) -> TrafficSketch:
        """Return the sketch. Raises: UsageError if none was kept, with what to name instead."""
        if self.sketch is not None:
            return self.sketch
        of_it = f"; the run was tuned for {self.label}" if self.label else ""
        raise UsageError(
            f"{path} keeps nothing of the traffic that it was tuned for: {TRAFFIC_FILE} is "
            f"missing beside {PROFILE_FILE}{of_it}",
            f"name that traffic with --baseline-trace, or keep {TRAFFIC_FILE} of the run",
        )


def read_baseline(path: Path, profile_path: Path | None = None) -> Baseline:
    """Return what a run directory or a profile's file keeps.

    `profile_path` is in place of the run's own profile.

    Raises: UsageError if it is neither, or a file of it is missing or damaged.
    """
    folder = folder_of_run(path)
    if folder.is_dir():
        return _of_run(folder, profile_path)
    if not path.exists():
        raise UsageError(
            f"--baseline {path} does not exist", "name a run directory or a profile.yaml"
        )
    profile = read_profile(profile_path or path)
    sketch = _sketch_in(path.parent)
    return Baseline(profile, profile.current_limits, Objective.BALANCED, (), sketch)


def _of_run(path: Path, profile_path: Path | None) -> Baseline:
    result = read_result(path)
    profile_file = profile_path or path / PROFILE_FILE
    if not profile_file.exists():
        raise UsageError(
            f"{path} keeps no {PROFILE_FILE}: its engine cannot be replayed",
            "name a profile of that engine with --profile, from a run with a shadow",
        )
    trace = result.provenance.trace
    return Baseline(
        profile=read_profile(profile_file),
        current=result.deployed,
        objective=result.objective,
        slos=tuple(Slo.parse(text) for text in result.slos),
        sketch=_sketch_in(path),
        label=f"{trace.requests:,} requests of {trace.source} (sha256 {trace.sha256[:8]}…)",
        sha256=trace.sha256,
        concurrency=result.provenance.options.get("concurrency"),
        request_timeout_s=result.provenance.options.get("request_timeout_s"),
    )


def _sketch_in(folder: Path) -> TrafficSketch | None:
    path = folder / TRAFFIC_FILE
    return read_sketch(path) if path.exists() else None
