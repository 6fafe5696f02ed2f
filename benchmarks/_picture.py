"""Tables as bars in an SVG, which follows the reader's light or dark setting."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from benchmarks._measure import Table
from meshfeed._src.pictures.drawing import Box, Drawing, Line, Text, text_width

_WIDTH, _BAR, _GAP = 700.0, 18.0, 6.0


def draw(path: str, tables: Sequence[Table]) -> None:
    """One panel for each table that names its ``bars``, each with a linear axis from zero."""
    drawing = Drawing("Rates of loaders", [])
    shown = [table for table in tables if table.bars is not None]
    panels = [[row for row in table.rows if isinstance(row.get(table.bars), int | float)] for table in shown]
    left = max(text_width(_name(row), 13) for rows in panels for row in rows) + 12
    y = 0.0
    for table, rows in zip(shown, panels, strict=True):
        drawing.shapes.append(Text(0, y + 12, f"{table.title}: {table.bars}", size=14, bold=True))
        y += 24
        largest = max(float(row[table.bars]) for row in rows)
        room = _WIDTH - left - text_width("1,000,000", 13)  # behind the longest bar
        drawing.shapes.append(Line([(left, y - 2), (left, y + len(rows) * (_BAR + _GAP) - _GAP + 2)], "rule", 1))
        for row in rows:
            name, value = _name(row), float(row[table.bars])
            length = max(value / largest * room, 1.0)  # a bar of 0 is still visible
            drawing.shapes += [
                Text(left - 10, y + 14, name, anchor="end"),
                Box(left, y, length, _BAR, "accent" if name.startswith(table.ours) else "muted", 2),
                Text(left + length + 8, y + 14, f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"),
            ]
            y += _BAR + _GAP
        y += 22
    pathlib.Path(path).write_text(drawing.to_svg())


def _name(row: dict) -> str:
    return str(next(iter(row.values())))
