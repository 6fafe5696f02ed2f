"""A drawing: rectangles, lines and text in named colors, written as SVG, HTML or PNG; and line and bar charts.

Every color has a light and a dark variant, and an SVG follows the reader's setting. Hosts have the eight colors of
Okabe and Ito, which people with any common color blindness can tell apart; a host's number is always written, too,
because colors repeat.
"""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshfeed._src.base.errors import missing_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {  # name → light, dark
    "paper": ("#ffffff", "#15191f"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9aa4af"),
    "rule": ("#d5dae0", "#343b44"),
    "panel": ("#eef1f4", "#232a32"),
    "accent": ("#0b6bcb", "#58a6ff"),
    "good": ("#007a5a", "#3fb78f"),
    "bad": ("#c04a00", "#ff8a4c"),
    "black": ("#101418", "#101418"),
    "white": ("#ffffff", "#ffffff"),
}
HOST_COLORS = ("#56b4e9", "#e69f00", "#3fb78f", "#f0e442", "#cc79a7", "#0072b2", "#d55e00", "#b8bec6")
COLORS |= {f"host{number}": (color, color) for number, color in enumerate(HOST_COLORS)}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_MARGIN = 16.0
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_POINTS = 0.72  # per pixel, at 100 pixels per inch


def host_color(host: int) -> tuple[str, str]:
    """Returns the names of a host's color, and of the color of text on it."""
    number = host % len(HOST_COLORS)
    return f"host{number}", "white" if number == 5 else "black"


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle; ``title`` is shown on hover."""

    x: float
    y: float
    width: float
    height: float
    color: str
    radius: float = 4
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Line:
    """A polyline through ``points``."""

    points: Sequence[tuple[float, float]]
    color: str
    width: float = 1.5


@dataclasses.dataclass(frozen=True)
class Text:
    """One line of text; ``y`` is its baseline."""

    x: float
    y: float
    text: str
    color: str = "ink"
    size: float = 13
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


@dataclasses.dataclass
class Drawing:
    """Shapes in the order in which they are painted.

    Attributes:
      title: what the drawing shows, for readers who do not see it.
      shapes: in pixels, y downwards.
    """

    title: str
    shapes: list[Box | Line | Text] = dataclasses.field(default_factory=list[Box | Line | Text])

    def size(self) -> tuple[float, float]:
        """Returns width and height in pixels, with a margin; drawings start at (0, 0)."""
        corners = [corner for shape in self.shapes for corner in _corners(shape)]
        return max(x for x, _ in corners) + 2 * _MARGIN, max(y for _, y in corners) + 2 * _MARGIN

    def to_html(self) -> str:
        """Returns the SVG for a page, scaled down to a narrow window as far as its text stays readable."""
        width, _ = self.size()
        style = f"max-width:100%;height:auto;min-width:{min(width, max(320, 0.7 * width)):.0f}px"
        svg = self.to_svg().replace("<svg ", f'<svg style="{style}" ', 1)
        return f'<div style="overflow-x:auto">{svg}</div>'

    def to_svg(self) -> str:
        """Returns an SVG document with a background of its own, in the reader's light or dark setting."""
        width, height = self.size()
        used = sorted({shape.color for shape in self.shapes} | {"paper"})
        dark = "".join(f".mf-{name}{{{_paint(name, 1)}}}" for name in used if COLORS[name][0] != COLORS[name][1])
        # The names have a prefix because the rules of an SVG inside a page apply to the whole page.
        light = "".join(f".mf-{name}{{{_paint(name, 0)}}}" for name in used)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-_MARGIN:g} {-_MARGIN:g} {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(self.title)}" '
            f'font-family="{_FONT}">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{light}@media (prefers-color-scheme: dark){{{dark}}}</style>",
            f'<rect x="{-_MARGIN:g}" y="{-_MARGIN:g}" width="{width:g}" height="{height:g}" rx="10" class="mf-paper"/>',
            *map(_svg_shape, self.shapes),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def to_png(self) -> bytes:
        """Returns a PNG in light colors at twice the size; needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise missing_package("a PNG, unlike an SVG,", error, "pictures", setting="png") from None
        width, height = self.size()
        figure = Figure(figsize=(width / 100, height / 100), facecolor=COLORS["paper"][0])
        axes = figure.add_axes((0, 0, 1, 1), xlim=(-_MARGIN, width - _MARGIN), ylim=(height - _MARGIN, -_MARGIN))
        axes.set_axis_off()
        for shape in self.shapes:
            _paint_shape(axes, shape)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=200)
        return out.getvalue()


def page(title: str, body: str, style: str = "") -> str:
    """Returns a self-contained HTML page, light or dark, that loads nothing from a network."""
    variables = [
        "".join(f"--{name}:{COLORS[name][theme]};" for name in COLORS if not name.startswith("host"))
        for theme in (0, 1)
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>:root{{{variables[0]}}}@media (prefers-color-scheme: dark){{:root{{{variables[1]}}}}}\n"
        f"body{{margin:0 auto;padding:20px 16px 48px;max-width:1080px;background:var(--paper);color:var(--ink);"
        f"font:15px/1.5 {_FONT}}}h1{{font-size:22px;margin:8px 0}}h2{{font-size:17px;margin:32px 0 4px}}"
        "p{margin:4px 0 12px;max-width:75ch}.muted{color:var(--muted)}.wide{overflow-x:auto}"
        "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
        "th,td{padding:4px 14px 4px 0;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}"
        "th{font-weight:600}th:first-child,td:first-child{text-align:left}svg{display:block}"
        "@media (max-width:600px){pre,table{font-size:12px}}"
        f"{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """Returns a text as it stands in HTML, SVG and their attributes, without the characters that XML does not allow."""
    return html.escape(_NOT_IN_XML.sub("\ufffd", text))


def text_width(text: str, size: float = 13) -> float:
    """Estimates the width of a text in pixels."""
    return 0.56 * size * len(text)


def _paint(color: str, theme: int) -> str:
    value = COLORS[color][theme]
    return f"fill:{value};stroke:{value}"


def _corners(shape: Box | Line | Text) -> list[tuple[float, float]]:
    if isinstance(shape, Box):
        return [(shape.x + shape.width, shape.y + shape.height)]
    if isinstance(shape, Line):
        return list(shape.points)
    before = {"start": 1.0, "middle": 0.5, "end": 0.0}[shape.anchor]
    return [(shape.x + before * text_width(shape.text, shape.size), shape.y + 0.25 * shape.size)]


def arrow(left: float, right: float, y: float) -> list[Line]:
    """Returns a horizontal arrow that points to the right."""
    head = [(right - 6, y - 4.2), (right, y), (right - 6, y + 4.2)]
    return [Line([(left, y), (right, y)], "muted"), Line(head, "muted")]


def _svg_shape(shape: Box | Line | Text) -> str:
    if isinstance(shape, Box):
        title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
        return (
            f'<rect x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}" '
            f'rx="{shape.radius:g}" stroke-width="0" class="mf-{shape.color}">{title}</rect>'
        )
    if isinstance(shape, Text):
        weight = ' font-weight="600"' if shape.bold else ""
        return (
            f'<text x="{shape.x:g}" y="{shape.y:g}" font-size="{shape.size:g}" text-anchor="{shape.anchor}"{weight} '
            f'stroke-width="0" class="mf-{shape.color}">{escape(shape.text)}</text>'
        )
    # "none" is a style too, because the rule of the color's class, which fills, takes precedence over an attribute.
    path = "M" + " L".join(f"{x:.5g} {y:.5g}" for x, y in shape.points)
    return f'<path d="{path}" fill="none" style="fill:none" stroke-width="{shape.width:g}" class="mf-{shape.color}"/>'


def _paint_shape(axes: Axes, shape: Box | Line | Text) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyBboxPatch

    color = COLORS[shape.color][0]
    if isinstance(shape, Box):
        style = f"round,pad=0,rounding_size={min(shape.radius, shape.width / 2, shape.height / 2)}"
        box = FancyBboxPatch((shape.x, shape.y), shape.width, shape.height, boxstyle=style, facecolor=color, lw=0)
        axes.add_patch(box)
    elif isinstance(shape, Text):
        text = shape.text.replace("$", r"\$")  # which starts a formula in matplotlib
        weight = "bold" if shape.bold else "normal"
        size = shape.size * _POINTS * 0.94  # DejaVu is wider than a browser's font
        side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        axes.text(shape.x, shape.y, text, color=color, fontsize=size, ha=side, weight=weight)
    else:
        xs, ys = zip(*shape.points, strict=True)
        axes.add_line(Line2D(xs, ys, color=color, linewidth=shape.width * _POINTS))


_WIDTH, _HEIGHT = 430.0, 170.0  # of a chart, readable from 340 to 640 pixels wide
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
_LINE_COLORS = ("accent", "bad", "good", "muted")
MAX_LINES = len(_LINE_COLORS)


class Bar(NamedTuple):
    """One bar, with a note behind its value."""

    name: str
    value: float
    note: str = ""


def line_chart(
    title: str,
    series: Mapping[str, Sequence[float]],
    seconds: float,
    text: Callable[[float], str],
    least_top: float = 0,
) -> Drawing:
    """Draws up to four lines from zero.

    Args:
      title: heading, with the unit.
      series: name → y at equal distances of x, with NaN for gaps. All lines have values at the same x.
      seconds: x of the last value; the first is at 0.
      text: formats a tick of the y axis.
      least_top: the y axis ends no lower.
    """
    known = [value for line in series.values() for value in line if not math.isnan(value)]
    ticks = nice_ticks(max([*known, least_top, 1e-9]))
    left = max(text_width(text(tick), 12) for tick in ticks) + 10
    drawing = Drawing(title, [Text(0, 12, title, bold=True, size=14)])
    bottom = 48.0 + _HEIGHT

    def point(x: float, y: float) -> tuple[float, float]:
        """Places a fraction of the x axis, and a value."""
        return left + x * (_WIDTH - left), bottom - y / ticks[-1] * _HEIGHT

    for tick in ticks:
        _, y = point(0, tick)
        drawing.shapes.append(Line([(left, y), (_WIDTH, y)], "rule", 1))
        drawing.shapes.append(Text(left - 8, y + 4, text(tick), "muted", 12, "end"))
    for x, label in _time_ticks(seconds):
        drawing.shapes.append(Text(point(x, 0)[0], bottom + 18, label, "muted", 12, "middle"))
    at = 0.0
    for (name, line), color in zip(series.items(), _LINE_COLORS, strict=False):
        if len(series) > 1:
            drawing.shapes += [Box(at, 25, 14, 4, color, 2), Text(at + 19, 32, name, "ink", 12)]
            at += 19 + text_width(name, 12) + 16
        for part in _parts(line):
            points = [point(x / max(len(line) - 1, 1), y) for x, y in part]
            if len(points) == 1:  # a line of one point is invisible
                points.append((points[0][0] + 2, points[0][1]))
            drawing.shapes.append(Line(points, color, 2))
    return drawing


def _time_ticks(seconds: float) -> list[tuple[float, str]]:
    """Fractions of a span of time at round numbers of its unit, with their labels."""
    size, unit = next((pair for pair in _UNITS if seconds >= 2 * pair[0]), _UNITS[-1])
    ticks = [tick for tick in nice_ticks(max(seconds / size, 1e-9)) if tick * size <= seconds]
    return [(tick * size / max(seconds, 1e-9), f"{tick:g} {unit}" if tick else "0") for tick in ticks]


def _parts(values: Sequence[float]) -> list[list[tuple[int, float]]]:
    """Splits a line at its gaps: runs of known values with their indices."""
    groups = itertools.groupby(enumerate(values), key=lambda pair: math.isnan(pair[1]))
    return [list(part) for unknown, part in groups if not unknown]


def bar_chart(title: str, bars: Sequence[Bar], text: Callable[[float], str]) -> Drawing:
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
        y, length = 34 + 30 * number, max(bar.value / ticks[-1] * width, 1.0)  # a bar of 0 is still visible
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
