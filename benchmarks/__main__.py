"""Runs benchmarks one after another, each in a process of its own.

``scripts/bench`` runs all of them, ``scripts/bench feed order --json FILE`` two; ``scripts/bench feed --rounds 9`` passes
options on to a single one (``scripts/bench feed --help`` lists them). ``--picture FILE`` draws the figures as an SVG,
and ``--draw FILE`` draws those of an earlier ``--json`` without measuring anything.

``scripts/bench --all`` measures every row of the page of measurements that its file, or ``--json FILE``, does not have yet
for this machine; ``--again NAME`` repeats one, ``--minutes N`` stops in time, ``--list`` shows the rows. ``--page`` makes the
page.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import subprocess
import sys
import tempfile

from benchmarks._measure import Table, describe_machine, machine, read_tables, write_json
from benchmarks._page import FIGURES, PAGE, PICTURE, write_page
from benchmarks._rows import ROWS, run_rows

FOLDER = pathlib.Path(__file__).parent
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("_")}


def _summary(path: pathlib.Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _draw(path: str, tables: dict[str, list[Table]]) -> None:
    from benchmarks._picture import draw

    draw(path, [table for group in tables.values() for table in group])
    print(f"wrote {path}")


def main(arguments: list[str]) -> int:
    """Returns the number of benchmarks that failed."""
    names = []
    while arguments and not arguments[0].startswith("-"):
        names.append(arguments.pop(0))
    parser = argparse.ArgumentParser(
        prog="scripts/bench [name ...]",
        description=__doc__,
        epilog="\n".join(["names:", *(f"  {name:20} {_summary(path)}" for name, path in SCRIPTS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=not names,
    )
    parser.add_argument("--all", action="store_true", help="measure the rows that the file does not have yet")
    parser.add_argument("--again", metavar="NAME", nargs="+", default=[], help="with --all: rows to measure again")
    parser.add_argument("--minutes", type=float, help="with --all: stop before this time is over")
    parser.add_argument("--list", action="store_true", help="show the rows of --all")
    parser.add_argument("--page", action="store_true", help="make the page of measurements from its file")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions and all figures")
    parser.add_argument("--picture", metavar="FILE", help="draw the figures as an SVG")
    parser.add_argument("--draw", metavar="FILE", help="only draw what an earlier --json wrote")
    options, rest = parser.parse_known_args(arguments)
    if unknown := [name for name in names if name not in SCRIPTS]:
        parser.error(f"no benchmark of the name {', '.join(unknown)}; there are {', '.join(SCRIPTS)}")
    if names and (options.all or options.page or options.list):
        parser.error(f"--all, --list and --page take no names, and {' '.join(names)} is given")
    if rest and len(names) != 1:
        parser.error(f"{' '.join(rest)}: options go to one benchmark, and {len(names) or 'none'} are named")
    if options.list:
        for row in ROWS:
            print(
                f"{row.name:18} {row.minutes:4.1f} min  {row.benchmark} {row.arguments}  {row.goal and '| ' + row.goal}"
            )
        print(f"{'all':18} {sum(row.minutes for row in ROWS):4.1f} min")
        return 0
    if unknown := set(options.again) - {row.name for row in ROWS}:
        parser.error(f"--again {' '.join(sorted(unknown))}: no such row; --list shows them")
    if options.all:
        failed = run_rows(options.json or FIGURES, again=options.again, minutes=options.minutes)
        print(f"failed: {', '.join(failed)}" if failed else "all rows that were run are in the file")
        return len(failed)
    if options.page:
        write_page()
        print(f"wrote {PAGE} and {PICTURE}")
        return 0
    if options.draw:
        _draw(options.picture or "benchmarks.svg", read_tables(options.draw))
        return 0
    found, tables, failed = machine(), {}, 0
    print(describe_machine(found))
    for name in names or SCRIPTS:
        print(f"\n## {name}: {_summary(SCRIPTS[name])}\n", flush=True)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", f"benchmarks.{name}", *rest, "--json", file.name]
            if subprocess.run(command, cwd=FOLDER.parent).returncode:
                failed += 1
            elif pathlib.Path(file.name).stat().st_size:
                tables.update(read_tables(file.name))
    if options.json:
        write_json(options.json, found, tables)
    if options.picture:
        _draw(options.picture, tables)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
