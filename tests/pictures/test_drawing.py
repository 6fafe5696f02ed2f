"""Where shapes stand, and that a PNG is in light colors."""

from __future__ import annotations

import io

import numpy as np
import pytest

from meshfeed._src.pictures import report
from meshfeed._src.pictures.drawing import COLORS, Bar, Drawing, Line, Text, bar_chart, nice_ticks


def test_ticks_of_a_bar_chart_are_zero_the_middle_and_the_end() -> None:
    chart = bar_chart("seconds", [Bar("read", 7.0), Bar("decode", 3.0, "half")], lambda value: f"{value:g} s")
    texts = [shape for shape in chart.shapes if isinstance(shape, Text)]
    last = nice_ticks(7.0)[-1]
    ticks = [text for text in texts if text.anchor == "middle"]
    assert [text.text for text in ticks] == ["0", f"{last / 2:g} s", f"{last:g} s"]
    middle = (ticks[0].x + ticks[2].x) / 2
    assert ticks[1].x == pytest.approx(middle)
    rule = next(shape for shape in chart.shapes if isinstance(shape, Line))
    assert [x for x, _ in rule.points] == pytest.approx([ticks[0].x, ticks[2].x])
    assert "3 s (half)" in [text.text for text in texts]


def test_a_text_takes_the_room_on_the_side_of_its_anchor() -> None:
    def width(anchor: str) -> float:
        return Drawing("", [Text(500, 10, "a long line of text", anchor=anchor)]).size()[0]  # type: ignore[arg-type]

    assert width("end") < width("middle") < width("start")
    assert width("middle") - width("end") == pytest.approx(width("start") - width("middle"), abs=1)


def test_a_png_is_in_light_colors_at_twice_the_size() -> None:
    matplotlib = pytest.importorskip("matplotlib.image")
    drawing = Drawing("", [Text(0, 12, "text")])
    pixels = matplotlib.imread(io.BytesIO(drawing.to_png()))
    width, height = drawing.size()
    assert pixels.shape[:2] == pytest.approx((2 * height, 2 * width), abs=2)
    paper = [int(COLORS["paper"][0][at : at + 2], 16) for at in (1, 3, 5)]
    np.testing.assert_array_equal(np.round(pixels[0, 0, :3] * 255), paper)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9_999_999, "9,999,999"),
        (10_000_000, "10.0 M"),
        (9_999_000_000, "9,999.0 M"),
        (10_000_000_000, "10.0 G"),
    ],
)
def test_large_counts_are_short(value: int, text: str) -> None:
    assert report._count(value) == text
