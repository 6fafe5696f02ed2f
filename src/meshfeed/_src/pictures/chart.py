"""Line and bar charts with linear axes, drawn to be readable from 340 to 640 pixels wide."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshfeed._src.pictures.drawing import Box, Drawing, Line, Text, text_width

_WIDTH, _HEIGHT = 430.0, 170.0
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
_LINE_COLORS = ("accent", "bad", "good", "muted")
MAX_LINES = len(_LINE_COLORS)


class Series(NamedTuple):
    """One line: its name, and y at equal distances of x, with NaN for gaps."""

    name: str
    values: Sequence[float]


class Bar(NamedTuple):
    """One bar, with a note behind its value."""

    name: str
    value: float
    note: str = ""


def line_chart(
    title: str, series: Sequence[Series], seconds: float, *, y_text: Callable[[float], str], least_top: float = 0.0
) -> Drawing:
    """Draws up to four lines from zero.

    Args:
      title: heading, with the unit.
      series: the lines; all have values at the same x.
      seconds: x of the last value; the first is at 0.
      y_text: formats a tick of the y axis.
      least_top: the y axis ends no lower.
    """
    known = [value for line in series for value in line.values if not math.isnan(value)]
    ticks = nice_ticks(max([*known, least_top, 1e-9]))
    left = max(text_width(y_text(tick), 12) for tick in ticks) + 10
    drawing = Drawing(title, [Text(0, 12, title, bold=True, size=14)])
    top, bottom = 48.0, 48.0 + _HEIGHT
    for tick in ticks:
        y = bottom - tick / ticks[-1] * _HEIGHT
        drawing.shapes.append(Line([(left, y), (_WIDTH, y)], "rule", 1))
        drawing.shapes.append(Text(left - 8, y + 4, y_text(tick), "muted", 12, "end"))
    for x, label in _time_ticks(seconds):
        x = left + x * (_WIDTH - left)
        drawing.shapes.append(Text(x, bottom + 18, label, "muted", 12, "middle"))
    at = 0.0
    for line, color in zip(series, _LINE_COLORS, strict=False):
        if len(series) > 1:
            drawing.shapes += [Box(at, 25, 14, 4, color, 2), Text(at + 19, 32, line.name, "ink", 12)]
            at += 19 + text_width(line.name, 12) + 16
        for part in _parts(line.values):
            points = [
                (left + x / max(len(line.values) - 1, 1) * (_WIDTH - left), bottom - y / ticks[-1] * (bottom - top))
                for x, y in part
            ]
            points += [(points[0][0] + 2, points[0][1])] if len(points) == 1 else []
            drawing.shapes.append(Line(points, color, 2))
    return drawing


def _time_ticks(seconds: float) -> list[tuple[float, str]]:
    """Fractions of a span of time at round numbers of its unit, with their labels."""
    size, unit = next((pair for pair in _UNITS if seconds >= 2 * pair[0]), _UNITS[-1])
    ticks = [tick for tick in nice_ticks(max(seconds / size, 1e-9)) if tick * size <= seconds]
    return [(tick * size / max(seconds, 1e-9), f"{tick:g} {unit}" if tick else "0") for tick in ticks]


def _parts(values: Sequence[float]) -> list[list[tuple[int, float]]]:
    """Runs of known values with their index."""
    groups = itertools.groupby(enumerate(values), key=lambda pair: math.isnan(pair[1]))
    return [list(part) for unknown, part in groups if not unknown]


def bar_chart(title: str, bars: Sequence[Bar], *, text: Callable[[float], str]) -> Drawing:
    """Draws horizontal bars of seconds from zero, with their values."""
    largest = max([bar.value for bar in bars] + [1e-9])
    unit = next((size for size, _ in _UNITS[:3] if largest >= 2 * size), 1.0)
    ticks = [tick * unit for tick in nice_ticks(largest / unit)]
    left = max(text_width(bar.name, 13) for bar in bars) + 12
    notes = [f"{text(bar.value)}{f' ({bar.note})' if bar.note else ''}" for bar in bars]
    width = _WIDTH - left - max(text_width(note, 12) for note in notes) - 8
    drawing = Drawing(title, [Text(0, 12, title, bold=True, size=14)])
    bottom = 32 + 30 * len(bars)
    drawing.shapes.append(Line([(left, bottom), (left + width, bottom)], "rule", 1))
    for tick in (0.0, ticks[-1] / 2, ticks[-1]):
        x = left + tick / ticks[-1] * width
        drawing.shapes.append(Line([(x, bottom), (x, bottom + 5)], "rule", 1))
        drawing.shapes.append(Text(x, bottom + 20, text(tick) if tick else "0", "muted", 12, "middle"))
    for number, (bar, note) in enumerate(zip(bars, notes, strict=True)):
        y, length = 34 + 30 * number, max(bar.value / ticks[-1] * width, 1.0)
        drawing.shapes += [
            Text(left - 10, y + 15, bar.name, "ink", 13, "end"),
            Box(left, y, length, 20, "accent", 2),
            Text(left + length + 8, y + 15, note, "muted", 12),
        ]
    return drawing


def nice_ticks(largest: float) -> list[float]:
    """Ticks from 0 to at least ``largest``, at most six, in steps of 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(largest / 5))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 5 >= largest * (1 - 1e-9))
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]
