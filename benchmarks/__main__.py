"""Runs benchmarks one after another: ``scripts/bench`` all of them, ``scripts/bench order --json`` one, with its options.

Each is a script of its own in this folder and says in its first lines what it measures.
"""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("_")}


def _summary(path: pathlib.Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main(arguments: list[str]) -> int:
    """Returns the number of benchmarks that failed."""
    names = []
    while arguments and not arguments[0].startswith("-"):
        names.append(arguments.pop(0))
    unknown = [name for name in names if name not in SCRIPTS]
    if unknown or (not names and arguments):
        print("usage: scripts/bench [name ...] [options of a single one]\n")
        for name, path in SCRIPTS.items():
            print(f"  {name:20} {_summary(path)}")
        if unknown:
            print(f"\nno benchmark of the name {', '.join(unknown)}")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    if arguments and len(names) > 1:
        print(f"{arguments}: options go to one benchmark, and {len(names)} are named")
        return 2
    failed = 0
    for name in names or SCRIPTS:
        print(f"\n== {name}: {_summary(SCRIPTS[name])}", flush=True)
        failed += subprocess.run([sys.executable, str(SCRIPTS[name]), *arguments]).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
