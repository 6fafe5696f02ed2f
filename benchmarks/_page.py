"""Makes the page and the picture of the measurements from their file: no figure is written by hand.

The template, ``measurements.md`` beside this file, has the prose. A line ``<!-- row: lm -->`` in it becomes the tables of
that row, for each machine that measured it, with when, on what and with which versions.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

from benchmarks._measure import Table
from benchmarks._picture import draw
from benchmarks._rows import read_file

ROOT = pathlib.Path(__file__).parent.parent
TEMPLATE = ROOT / "benchmarks" / "measurements.md"
FIGURES = ROOT / "docs" / "explanation" / "measurements.json"
PAGE = ROOT / "docs" / "explanation" / "measurements.md"
PICTURE = ROOT / "docs" / "explanation" / "measurements.svg"
_ROW = re.compile(r"^<!-- row: ([\w-]+) -->$", re.M)
# The page is long: of each row, it shows what one machine measured, and the others when they are unfolded.
_FOLDED = '<details markdown="1">\n<summary>The same on {where}</summary>\n\n{text}\n\n</details>'
_PICTURED = ("lm", "million", "compressed", "in-order", "mixtures")


def make_page() -> str:
    """Returns the page.

    Raises:
      KeyError: the template names a row that no machine has measured.
    """
    machines = read_file(FIGURES)

    def tables_of(match: re.Match[str]) -> str:
        name = match[1]
        measured = {where: rows[name] for where, rows in machines.items() if name in rows}
        if not measured:
            raise KeyError(f"{TEMPLATE.name} has the row {name!r}, which {FIGURES.name} does not have")
        goals = dict.fromkeys(figures["goal"] for figures in measured.values() if figures["goal"])
        parts = [f"*Goal: {goal}.*" for goal in goals]
        several, shown = len(measured) > 1, max(measured, key=lambda where: len(machines[where]))
        for where, figures in sorted(measured.items(), key=lambda item: item[0] != shown):
            text = _describe(where, figures, several)
            parts.append(text if where == shown else _FOLDED.format(where=where, text=text))
        return "\n\n".join(parts)

    note = "<!-- Made by scripts/bench --page from measurements.json and benchmarks/measurements.md. Do not edit. -->"
    return f"{note}\n\n{_ROW.sub(tables_of, TEMPLATE.read_text())}"


def _describe(where: str, figures: dict[str, Any], several: bool) -> str:
    """Returns the tables of a row on one machine, which their headings name if several have measured it."""
    machine = figures["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    tables = [Table(**table) for table in figures["tables"]]
    titles = [f"{table.title} ({where})" if several else table.title for table in tables]
    # Not headings: the list of contents would name each table on each machine.
    lines = [
        dataclasses.replace(table, title=title).markdown().replace(f"### {title}\n", f"**{title}**\n", 1)
        for table, title in zip(tables, titles, strict=True)
    ]
    after = "" if figures["load after"] is None else f" and {figures['load after']} after"
    lines.append(
        f"<small>`{figures['command']}`, {machine['time']}, {where}, load {machine['load'][0]} before{after}, commit "
        f"{figures['revision'] or 'unknown'}, Python {machine['python']}, {versions}.</small>"
    )
    if figures["error"]:
        lines.append(f"\nThe run ended early: {figures['error'].splitlines()[0]}")
    return "\n".join(lines)


def pictured() -> list[Table]:
    """Returns the tables of the picture: those of the machine that has measured most."""
    rows = max(read_file(FIGURES).values(), key=len)
    tables = [Table(**table) for name in _PICTURED if name in rows for table in rows[name]["tables"]]
    return [table for table in tables if table.bars is not None]


def write_page() -> None:
    """Writes the page and the picture."""
    PAGE.write_text(make_page())
    draw(str(PICTURE), pictured())
