"""The plan of a mesh as a table, as JSON, and as a drawing of rows, columns and hosts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.stores import write_output
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.pictures.drawing import Box, Drawing, Text, arrow, escape, host_color, page, text_width
from meshfeed._src.plan.topology import PlanTable, plan_table

_CELL_WIDTH, _CELL_HEIGHT, _GAP = 96.0, 42.0, 6.0
_BATCH_WIDTH, _TOP = 108.0, 66.0
_ARROW = 30.0


@public("meshfeed")
@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """Which rows and columns of a global batch each host reads and each device holds.

    ``print(plan)`` shows a table, a notebook shows the drawing, and :meth:`save` writes it.

    Attributes:
      mesh_axes: axis → size, slowest first.
      spec: axes that divide each dimension, rows first.
      global_shape: ``(global_batch_size, ...)``; only the rows if no columns are shown.
      table: the plan of all hosts.
      device_ids: id of the device at each mesh position, in row-major order.
    """

    mesh_axes: Mapping[str, int]
    spec: Sequence[tuple[str, ...]]
    global_shape: tuple[int, ...]
    table: PlanTable = dataclasses.field(repr=False)
    device_ids: Sequence[int] = dataclasses.field(repr=False)

    def to_json(self) -> dict[str, JsonValue]:
        """Returns ``{"hosts": [{"host": 0, "rows": [[start, stop], …]}, …]}``, with columns if they are shown."""
        columns = self.table.columns.tolist() if len(self.global_shape) > 1 else []
        return {
            "hosts": [
                {"host": host, "rows": rows, **({"columns": columns[host]} if columns else {})}
                for host, rows in enumerate(self.table.row_ranges())
            ]
        }

    def lines(self, *, show_all: bool = True, hint: str = "") -> list[str]:
        """Returns a table of hosts and rows as lines of text, and a summary.

        Args:
          show_all: whether hosts in the middle of a long table are shown.
          hint: how to see those that are left out.
        """
        table = self.table
        counts, ranges = table.num_rows(), table.row_ranges()

        def line(host: int) -> str:
            pairs = ranges[host]
            which = ", ".join(f"{start}..{stop - 1}" for start, stop in pairs[:4]) or "none"
            which += f", … ({len(pairs)} ranges)" if len(pairs) > 4 else ""
            if len(self.global_shape) > 1 and pairs:
                slices = ", ".join(f"{start}..{stop - 1}" for start, stop in table.columns[host].tolist())
                which += f"  ×  columns {slices}"
            return f"{host:>8}  {counts[host]:>10,}  {which}"

        shown = range(table.num_hosts) if show_all else _folded(table.num_hosts, 8, 8)
        more = f"{'…':>8}  {'':>10}  {table.num_hosts - 16:,} more hosts{hint}"
        lines = [more if host is None else line(host) for host in shown]
        return [f"{'host':>8}  {'rows':>10}  which", *lines, "", *self._summary()]

    def _summary(self) -> list[str]:
        counts = self.table.num_rows()
        reading = counts[counts > 0]
        each = f"{reading.min():,}" if reading.min() == reading.max() else f"{reading.min():,} to {reading.max():,}"
        widths = (self.table.columns[..., 1] - self.table.columns[..., 0]).prod(axis=1)
        times = float((counts * widths).sum() / math.prod(self.global_shape))
        lines = [f"{len(reading):,} of {self.table.num_hosts:,} hosts read, {each} rows each."]
        if times > 1:
            lines.append(f"Every value is read {times:g} times over all hosts; load='once' would read it once.")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines(show_all=False))

    def _repr_html_(self) -> str:
        return _MeshDrawing(self).drawing.to_html()

    def to_svg(self) -> str:
        """Returns the drawing as an SVG document."""
        return _MeshDrawing(self).drawing.to_svg()

    def to_html(self) -> str:
        """Returns the drawing and the table as one HTML page that needs no network."""
        title = _title(self)
        rows = "\n".join(self.lines(show_all=False)[:-1])
        shown, table = escape(title), escape(rows)
        body = f'<h1>{shown}</h1>\n{self._repr_html_()}\n<div class="wide"><pre>{table}</pre></div>'
        return page(f"meshfeed plan: {title}", body)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the drawing to a ``.svg``, ``.html`` or ``.png`` file; a PNG needs matplotlib.

        Args:
          path: a path, or the URL of an object.

        Raises:
          SettingsError: the name ends in something else, matplotlib is not installed, the store of a URL does not answer,
            or it refuses the credentials.
        """
        kinds = {".svg": self.to_svg, ".html": self.to_html, ".png": _MeshDrawing(self).drawing.to_png}
        suffix = os.path.splitext(path)[1]
        if suffix not in kinds:
            raise SettingsError(f"path={os.fspath(path)!r} must end in .svg, .html or .png.", setting="path")
        write_output("path", path, kinds[suffix]())


def make_plan(
    mesh_axes: Mapping[str, int],
    spec: Sequence[Any],
    global_shape: Sequence[int],
    *,
    hosts: int,
    devices_per_host: int,
    process_of: np.ndarray[Any, Any] | None = None,
    device_ids: Sequence[int] | None = None,
) -> MeshPlan:
    """Plans a mesh. Arguments and errors are those of :func:`meshfeed._src.plan.topology.plan_table`.

    ``device_ids`` is the id of the device at each mesh position; default: its index.
    """
    table = plan_table(mesh_axes, spec, process_of, hosts, devices_per_host, global_shape)
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    ids = range(len(table.process)) if device_ids is None else device_ids
    return MeshPlan(dict(mesh_axes), entries, tuple(global_shape), table, ids)


def plan_of_batch(element_spec: PyTree) -> MeshPlan:
    """Plans the leaf of a batch that is divided in the most dimensions, over its real devices.

    Args:
      element_spec: pytree of ``jax.ShapeDtypeStruct`` with NamedShardings.
    """
    leaves = jax.tree.leaves(element_spec)
    leaf = max(leaves, key=lambda leaf: sum(axes is not None for axes in leaf.sharding.spec))
    last = max((number for number, axes in enumerate(leaf.sharding.spec) if axes is not None), default=0)
    devices = leaf.sharding.mesh.devices.reshape(-1)
    process_of = np.array([device.process_index for device in devices], np.int64)
    return make_plan(
        leaf.sharding.mesh.shape,
        tuple(leaf.sharding.spec)[: last + 1],
        leaf.shape[: last + 1],
        hosts=int(process_of.max()) + 1,
        devices_per_host=1,
        process_of=process_of,
        device_ids=[device.id for device in devices],
    )


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Mesh positions in bands: each band holds consecutive rows of the batch.

    Attributes:
      positions: int64[bands, columns].
      band_names, column_names: axes and coordinates of each band, and of each column; empty if they have none.
      rows_in_cells: whether the cells of one band hold different rows.
    """

    positions: np.ndarray[Any, np.dtype[np.int64]]
    band_names: Sequence[str]
    column_names: Sequence[str]
    rows_in_cells: bool


def _grid(plan: MeshPlan) -> _Grid:
    """Makes a band of each block of rows or, if no two devices share rows and each host's are adjacent, of each host."""
    table = plan.table
    row_block = table.blocks[:, 0]
    order = np.argsort(row_block, kind="stable")
    num_blocks = int(row_block.max()) + 1
    positions = order.reshape(num_blocks, -1)
    per_host = int((table.process == table.process[order[0]]).sum())
    if positions.shape[1] == 1 and per_host > 1 and len(order) % per_host == 0:
        by_host = order.reshape(-1, per_host)
        process = table.process[by_host]
        if (process == process[:, :1]).all():
            return _Grid(by_host, [], [], True)
    row_axes = plan.spec[0] if plan.spec else ()
    other_axes = [axis for axis in plan.mesh_axes if axis not in row_axes]
    bands, columns = _coordinates(plan, row_axes, positions[:, 0]), _coordinates(plan, other_axes, positions[0])
    return _Grid(positions, bands, columns, False)


def _coordinates(plan: MeshPlan, axes: Sequence[str], positions: np.ndarray[Any, Any]) -> list[str]:
    """Returns text such as ``data 0`` for each position; an empty list if no axis has more than one coordinate."""
    where = dict(zip(plan.mesh_axes, np.unravel_index(positions, tuple(plan.mesh_axes.values())), strict=True))
    axes = [axis for axis in axes if plan.mesh_axes[axis] > 1]
    return [" ".join(f"{axis} {where[axis][i]}" for axis in axes) for i in range(len(positions))] if axes else []


def _folded(count: int, first: int, last: int) -> list[int | None]:
    """Indices below ``count``; if they are many, only the first and the last ones, with None for the gap."""
    if count <= first + last + 1:  # a gap of one takes as much space
        return list(range(count))
    return [*range(first), None, *range(count - last, count)]


def _mesh_text(plan: MeshPlan) -> str:
    return " × ".join(f"{axis} {size:,}" for axis, size in plan.mesh_axes.items())


def _title(plan: MeshPlan) -> str:
    hosts = len(np.unique(plan.table.process))
    return f"{plan.global_shape[0]:,} rows on mesh {_mesh_text(plan)}, {hosts:,} host{'s' if hosts > 1 else ''}"


class _MeshDrawing:
    """Draws a plan: the rows of the global batch on the left, the devices of the mesh beside them."""

    def __init__(self, plan: MeshPlan) -> None:
        self._plan, self._grid = plan, _grid(plan)
        self.drawing = Drawing(_title(plan))
        num_bands, num_columns = self._grid.positions.shape
        bands, columns = _folded(num_bands, 9, 2), _folded(num_columns, 5, 2)
        names = [self._grid.band_names[band] for band in bands if band is not None] if self._grid.band_names else []
        self._batch = max((text_width(name, 11) + 10 for name in names), default=0.0)  # left edge of the batch
        self._start = self._batch + _BATCH_WIDTH + _ARROW  # and of the devices
        self._columns = list(zip(columns, _offsets(columns, self._start, _CELL_WIDTH + _GAP), strict=True))
        tops = _offsets(bands, _TOP, _CELL_HEIGHT + _GAP)
        self._headings()
        for band, top in zip(bands, tops, strict=True):
            if band is None:
                what = "hosts" if self._grid.rows_in_cells else "blocks of rows"
                self._text(self._start, top + 13, f"⋮  {num_bands - len(bands) + 1:,} more {what}", "muted", 12)
            else:
                self._band(band, top)
        self._state(tops[-1] + _CELL_HEIGHT + 30)

    def _text(self, x: float, y: float, text: str, *style: Any, **more: Any) -> None:
        self.drawing.shapes.append(Text(x, y, text, *style, **more))

    def _headings(self) -> None:
        plan, grid = self._plan, self._grid
        self._text(self._batch, 12, "Global batch", bold=True, size=14)
        self._text(self._batch, 29, f"{plan.global_shape[0]:,} rows", "muted", 12)
        self._text(self._start, 12, "Devices of the mesh", bold=True, size=14)
        self._text(self._start, 29, _mesh_text(plan), "muted", 12)
        for column, left in self._columns:
            if column is None:
                continue
            lines = [grid.column_names[column]] if grid.column_names else []
            # Columns are divided the same way in every band, so the heading takes them from the first.
            if plan.table.blocks.shape[1] > 1 and plan.table.blocks[:, 1:].any():
                lines.append(_column_text(plan, int(grid.positions[0, column])))
            for number, line in enumerate(reversed(lines)):
                self._text(left + _CELL_WIDTH / 2, _TOP - 6 - 14 * number, line, "muted", 11, "middle")

    def _band(self, band: int, top: float) -> None:
        blocks = self._plan.table.blocks[self._grid.positions[band], 0]
        left, right, middle = self._batch, self._batch + _BATCH_WIDTH, top + _CELL_HEIGHT / 2
        if self._grid.band_names:
            self._text(left - 10, middle + 4, self._grid.band_names[band], "muted", 11, "end")
        text = _row_text(self._plan, int(blocks.min()), int(blocks.max()))
        size = min(12.0, 12 * 100 / text_width(text, 12))
        self.drawing.shapes.append(Box(left, top, _BATCH_WIDTH, _CELL_HEIGHT, "panel"))
        self._text(left + _BATCH_WIDTH / 2, middle + 4, text, size=size, anchor="middle")
        self.drawing.shapes += arrow(right + 6, right + _ARROW - 6, middle)
        for column, cell_left in self._columns:
            if column is None:
                self._text(cell_left + 9, middle + 4, "…", "muted", 15, "middle")
            else:
                self._cell(int(self._grid.positions[band, column]), cell_left, top)

    def _cell(self, position: int, left: float, top: float) -> None:
        plan = self._plan
        host, block = int(plan.table.process[position]), int(plan.table.blocks[position, 0])
        fill, ink = host_color(host)
        rows, device = _row_text(plan, block, block), f"device {plan.device_ids[position]:,}"
        columns = f", {_column_text(plan, position)}" if plan.table.blocks.shape[1] > 1 else ""
        middle, title = left + _CELL_WIDTH / 2, f"{device} of host {host:,}: {rows}{columns}"
        self.drawing.shapes.append(Box(left, top, _CELL_WIDTH, _CELL_HEIGHT, fill, title=title))
        self._text(middle, top + 18, f"host {host:,}", ink, 12, "middle", bold=True)
        text, width = rows if self._grid.rows_in_cells else device, _CELL_WIDTH - 6
        if text_width(text, 11) > width:  # drop "rows" or "device"; if that is not enough, a smaller font below
            text = text.partition(" ")[2]
        self._text(middle, top + 33, text, ink, min(11, 11 * width / text_width(text, 11)), "middle")

    def _state(self, top: float) -> None:
        """Draws the state, below the mesh."""
        self._text(0, top, "State", bold=True, size=14)
        self.drawing.shapes.append(Box(0, top + 10, 168, 30, "panel"))
        self._text(84, top + 29, f"position = step × {self._plan.global_shape[0]:,}", size=12, anchor="middle")
        self.drawing.shapes += arrow(178, 208, top + 25)
        self._text(216, top + 22, "in every checkpoint, equal on all hosts;", "muted", 12)
        self._text(216, top + 37, "resumes on any number of hosts", "muted", 12)


def _offsets(entries: Sequence[int | None], start: float, pitch: float) -> list[float]:
    steps = (24 if entry is None else pitch for entry in entries[:-1])
    return list(itertools.accumulate(steps, initial=start))


def _column_text(plan: MeshPlan, position: int) -> str:
    pairs = zip(plan.table.blocks[position, 1:].tolist(), plan.table.block_shape[1:], strict=True)
    return "col " + " × ".join(_span(block * size, size) for block, size in pairs)


def _row_text(plan: MeshPlan, first: int, last: int) -> str:
    size = plan.table.block_shape[0]
    count = (last + 1 - first) * size
    return f"row{'s' * (count > 1)} {_span(first * size, count)}"


def _span(start: int, count: int) -> str:
    return f"{start:,}" if count == 1 else f"{start:,}–{start + count - 1:,}"
