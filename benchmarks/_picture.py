"""Tables as bars in a PNG; needs matplotlib and no display."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks._measure import Table

_OURS, _OTHERS = "#1b6ca8", "#b8bec6"


def draw(path: str, tables: Sequence[Table]) -> None:
    """One panel for each table that names its ``bars``, with a linear axis from zero."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import StrMethodFormatter

    shown = [table for table in tables if table.bars is not None]
    heights = [1.0 + 0.27 * len(table.rows) for table in shown]
    figure, panels = pyplot.subplots(
        len(shown), 1, figsize=(9, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for panel, table in zip(panels[:, 0], shown, strict=True):
        rows = [row for row in reversed(table.rows) if isinstance(row.get(table.bars), int | float)]
        names = [str(next(iter(row.values()))) for row in rows]
        values = [float(row[table.bars]) for row in rows]
        colors = [_OURS if name.startswith(table.ours) else _OTHERS for name in names]
        bars = panel.barh(names, values, color=colors)
        panel.bar_label(
            bars, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values], padding=3, fontsize=8
        )
        panel.set_xlim(0, max(values) * 1.14)  # room for the labels behind the longest bar
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        panel.xaxis.grid(True, color="#e3e6e9", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.set_title(f"{table.title}: {table.bars}", fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
