"""A simulation as text, and as one HTML page with a table and charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshfeed._src.pictures.drawing import MAX_LINES, Drawing, escape, line_chart, page
from meshfeed._src.pictures.report import REPORT_STYLE, bytes_text, duration_text
from meshfeed._src.simulation.simulate import SimulatedOrder, Simulation

_NOTES = (
    "Bytes of all hosts, by the epoch whose batches need them. Disk: most bytes that a host's copies take, with evicted "
    "files that are still open. Distance: how far apart in the epoch neighbors in the files are, on average, over that of a "
    "uniform shuffle. Files per batch: files from which a global batch has records."
)
_EXTRAPOLATED = "* A part of each epoch was simulated, and the rest extrapolated."


def simulation_lines(found: Simulation) -> Iterator[str]:
    """Yields a table of the orders, and what is recommended."""
    yield _headline(found)
    yield ""
    rows = _table(found)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join((first.ljust(widths[0]), *padded)).rstrip()
    if any(order.extrapolated for order in found.orders):
        yield _EXTRAPOLATED
    yield ""
    yield f"{'Recommended' if len(found.orders) > 1 else 'Result'}: {found.reason}"


def simulation_page(found: Simulation) -> str:
    """Returns an HTML page without external resources."""
    head, *rows = _table(found)
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    table = [f"<tr>{cells}</tr>"]
    table += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    note = f" {_EXTRAPOLATED}" if any(order.extrapolated for order in found.orders) else ""
    charts = "".join(f"<div>{chart.to_svg()}</div>" for chart in _charts(found))
    body = (
        f'<h1>{escape(found.name)}</h1>\n<p class="muted">{escape(_headline(found))}</p>\n'
        f'<p class="verdict">{escape(found.reason)}</p>\n<div class="wide"><table>{"".join(table)}</table></div>\n'
        f'<p class="muted">{escape(_NOTES + note)}</p>\n<div class="charts">{charts}</div>'
    )
    return page("meshfeed simulation", body, REPORT_STYLE)


def _headline(found: Simulation) -> str:
    settings = found.settings
    hosts = settings["hosts"]
    return (
        f"{settings['files']:,} files, {bytes_text(found.total_bytes)}, {settings['records']:,} records; "
        f"{hosts:,} host{'s' * (hosts > 1)}, batches of {settings['global_batch_size']:,}, "
        f"{duration_text(settings['step_seconds'])} per step; a cache of {bytes_text(settings['cache'])} and "
        f"{bytes_text(settings['bandwidth'])}/s per host"
    )


def _table(found: Simulation) -> list[list[str]]:
    epochs = range(1, found.settings["num_epochs"] + 1)
    costs = any(sum(order.cost) for order in found.orders)
    head = ["order", "first batch", "stall", *(f"bytes, epoch {epoch}" for epoch in epochs), "requests"]
    head += [*(["cost"] if costs else []), "disk", "distance", "files per batch"]
    return [head, *(_row(found, order, costs) for order in found.orders)]


def _row(found: Simulation, order: SimulatedOrder, costs: bool) -> list[str]:
    chosen = len(found.orders) > 1 and order is found.recommended
    return [
        f"{order.name}{'*' * order.extrapolated}{' (recommended)' * chosen}",
        duration_text(order.first_batch_seconds),
        f"{order.total_stall_fraction:.1%}",
        *map(bytes_text, order.bytes_per_epoch),
        f"{sum(order.requests):,}",
        *([f"{sum(order.cost):,.2f}"] if costs else []),
        bytes_text(order.disk_bytes),
        f"{order.quality.mean_distance:.2f}",
        f"{order.quality.shards_per_batch:.0f}",
    ]


def _charts(found: Simulation) -> Iterator[Drawing]:
    shown: Sequence[SimulatedOrder] = found.orders[:MAX_LINES]
    seconds = found.settings["num_epochs"] * found.settings["steps_per_epoch"] * found.settings["step_seconds"]
    for title, figure, text, top in (
        ("Time that the loop waits for data", "stall_fraction", "{:.0%}".format, 0.1),
        ("Bytes that a host has downloaded, on average", "host_bytes", bytes_text, 0.0),
    ):
        lines = {order.name: order.over_time[figure] for order in shown}
        yield line_chart(title, lines, seconds, text, top)
