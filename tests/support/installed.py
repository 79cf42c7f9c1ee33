"""What is installed here, and environments that hold only a part of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.paths import ROOT

RECORDER = "max-num-seqs-recorder"
TUNER = "max-num-seqs-tuner"
SOURCES = {TUNER: ROOT, RECORDER: ROOT / "tuner" / "recorder"}


def needed_by(*names: str) -> set[str]:
    """Return the distributions that these and all they require are, as far as they are here."""
    found, left = set[str](), [(canonicalize_name(name), frozenset[str]()) for name in names]
    seen = set(left)
    while left:
        name, extras = left.pop()
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for one in map(Requirement, requirements):
            asked = one.marker is None or any(
                one.marker.evaluate({"extra": extra}) for extra in extras | {""}
            )
            more = (canonicalize_name(one.name), frozenset(one.extras))
            if asked and more not in seen:
                seen.add(more)
                left.append(more)
    return found


def wheel_of(name: str, folder: Path) -> Path:
    """Build the wheel of one of the checkout's distributions into a folder."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=SOURCES[name],
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


class Environment:
    """A virtual environment of its own, with what is put there and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # -I, or this process's PYTHONPATH would hold a sitecustomize of ours.
        command = [sys.executable, "-I", "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def link(self, distributions: Iterable[str]) -> None:
        """Take over what belongs to distributions that are installed here."""
        for name in distributions:
            found = metadata.distribution(name)
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                place = self.site / top
                if not place.is_symlink():
                    place.symlink_to(Path(str(found.locate_file(top))))

    def pip(self, *arguments: str) -> None:
        """Run pip on this environment, without a network."""
        offline = ["--isolated", "--disable-pip-version-check", "--python", str(self.python)]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *offline, *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, *wheels: Path) -> None:
        """Install wheels, and nothing that they ask for."""
        self.pip("install", "--no-index", "--no-deps", *map(str, wheels))

    def run(self, code: str) -> str:
        """Return what a program prints here, apart from this process's environment."""
        done = subprocess.run(
            [str(self.python), "-I", "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def size_bytes(self, name: str) -> int:
        """Return the bytes of an installed distribution's files."""
        listed = self.run(
            "from importlib.metadata import files\n"
            f"print(*(path.locate() for path in files({name!r})), sep='\\n')"
        )
        return sum(Path(line).stat().st_size for line in listed.splitlines())
