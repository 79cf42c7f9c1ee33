"""Figures of the tree itself: folders, floors, fan-out, public names, lines, words.

    python tests/benchmarks/structure.py [CHECKOUT ...]

Each checkout is one column; without any it is this one. Nothing is imported but import-linter's
graph, so older commits can be set beside the current one.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
GRAPH = """
import grimp, json
graph = grimp.build_graph("tuner", cache_dir=None)
found = {m: sorted(graph.find_modules_directly_imported_by(m)) for m in graph.modules}
print(json.dumps(found))
"""


def imports_of(root: Path) -> dict[str, list[str]]:
    """Return which module of the package imports which."""
    done = subprocess.run(
        [sys.executable, "-c", GRAPH], cwd=root, capture_output=True, text=True, check=True
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def floors(imports: dict[str, list[str]]) -> int:
    """Return the longest way down between entries of the second level; 0 where they cycle."""
    below: dict[str, set[str]] = {}
    for module, others in imports.items():
        entry = module.split(".")[1:2]
        for other in others:
            to = other.split(".")[1:2]
            if entry and to and entry != to:
                below.setdefault(entry[0], set()).add(to[0])
    heights: dict[str, int] = {}

    def height(entry: str, on_way: tuple[str, ...] = ()) -> int:
        if entry in on_way:
            raise ValueError(entry)
        if entry not in heights:
            under = (height(to, (*on_way, entry)) for to in below.get(entry, ()))
            heights[entry] = 1 + max(under, default=0)
        return heights[entry]

    return max(height(entry) for entry in list(below))


def figures(root: Path) -> dict[str, str]:
    """Return every figure of a checkout as text."""
    files = sorted((root / "tuner").rglob("*.py"))
    lines = [path.read_text(encoding="utf-8").count("\n") for path in files]
    folders = Counter(path.parent for path in files)
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    top = [node for tree in trees for node in tree.body]
    public = [
        n for n in top if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name[0] != "_"
    ]
    classes = Counter(n.name for n in public if isinstance(n, ast.ClassDef))
    kinds = sum(classes.values())
    imports = imports_of(root)
    out = [len(others) for others in imports.values()]
    entries = {m.split(".")[1] for m in imports if "." in m}
    words = (root / "README.md").read_text(encoding="utf-8")
    return {
        "entries on the second level": str(len(entries)),
        "floors between them": str(floors(imports)),
        "files, lines": f"{len(files)}, {sum(lines):,}",
        "files per folder, mean and most": (
            f"{mean(folders.values()):.1f}, {max(folders.values())}"
        ),
        "longest file": str(max(lines)),
        "fan-out, mean and most": f"{mean(out):.1f}, {max(out)}",
        "public classes and functions": f"{kinds}, {len(public) - kinds}",
        "class names used twice": str(sum(n > 1 for n in classes.values())),
        "README lines, words": f"{words.count(chr(10))}, {len(words.split()):,}",
    }


def main() -> None:
    """Print a table, a column for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], metavar="CHECKOUT")
    roots = parser.parse_args().checkouts
    columns = [figures(root) for root in roots]
    for name in columns[0]:
        row = " | ".join(column[name] for column in columns)
        sys.stdout.write(f"| {name} | {row} |\n")


if __name__ == "__main__":
    main()
