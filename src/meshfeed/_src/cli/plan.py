"""``meshfeed plan``: which rows each host reads, as a table, JSON or a picture."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click

from meshfeed._src.base.errors import SettingsError


class _Mesh(click.ParamType):
    """``data=8,model=4`` → ``{"data": 8, "model": 4}``."""

    name = "axis=size,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        axes: dict[str, int] = {}
        for part in str(value).split(","):
            axis, _, size = part.strip().partition("=")
            if not axis or not size.strip().isdecimal() or int(size) < 1:
                self.fail(f"{part!r} is not axis=size with a size of at least 1, as in data=8,model=4", param, ctx)
            if axis in axes:
                self.fail(f"the axis {axis!r} is given twice", param, ctx)
            axes[axis] = int(size)
        return axes


class _Spec(click.ParamType):
    """``data+fsdp,None,model`` → ``[("data", "fsdp"), None, "model"]``: one entry per dimension."""

    name = "entry,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[object]:
        entries: list[object] = []
        for part in str(value).split(","):
            axes = [axis.strip() for axis in part.split("+")]
            if not all(axes):
                self.fail(f"{part!r} is not an axis, several joined by +, or None", param, ctx)
            entries.append(None if axes == ["None"] else tuple(axes) if len(axes) > 1 else axes[0])
        return entries


class _Shape(click.ParamType):
    name = "size,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and int(part) >= 1 for part in parts):
            self.fail(f"{value!r} is not a list of sizes of at least 1, as in 2048 or 224,224,3", param, ctx)
        return [int(part) for part in parts]


def _picture(suffix: str, what: str) -> Any:
    return click.option(
        f"--{suffix}", type=click.Path(dir_okay=False, path_type=pathlib.Path), help=f"Draw the mesh as {what}."
    )


@click.command()
@click.option("--hosts", type=click.IntRange(min=1), required=True, help="Number of hosts (JAX processes).")
@click.option("--devices-per-host", type=click.IntRange(min=1), required=True, help="Devices of each host.")
@click.option("--mesh", type=_Mesh(), required=True, help="Axes and sizes, slowest first: data=8,model=4.")
@click.option(
    "--spec", type=_Spec(), required=True, help="Axes per dimension, rows first: data or data+fsdp,None,model."
)
@click.option("--global-batch-size", type=click.IntRange(min=1), required=True, help="Rows of the global batch.")
@click.option("--shape", type=_Shape(), default=None, help="Sizes of the dimensions after the rows: shows columns too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all hosts.")
@click.option("--all", "show_all", is_flag=True, help="Print every host, not only the first and last.")
@_picture("svg", "an SVG file")
@_picture("html", "an HTML page")
@_picture("png", "a PNG file (needs matplotlib)")
def plan(
    hosts: int,
    devices_per_host: int,
    mesh: dict[str, int],
    spec: list[Any],
    global_batch_size: int,
    shape: list[int] | None,
    as_json: bool,
    show_all: bool,
    **pictures: pathlib.Path | None,
) -> None:
    """Show which rows of the global batch each host reads.

    Needs neither devices nor other hosts. Devices fill the mesh host by host, as with jax.make_mesh on CPUs; a real
    mesh may order its devices differently, and the feed uses the real order (feed.plan()).
    """
    from meshfeed._src.pictures.plan import make_plan

    dimensions = 1 + len(shape or ())
    if any(entry is not None for entry in spec[dimensions:]):
        raise SettingsError(
            f"--spec divides {len(spec)} dimensions, and the array has {dimensions}. Give the sizes of those after the "
            f"rows, as in --shape {','.join(['2048'] * (len(spec) - 1))}, or fewer entries.",
            setting="shape",
        )
    for suffix, path in pictures.items():
        if path is not None and path.suffix != f".{suffix}":
            raise SettingsError(f"--{suffix} {path} must end in .{suffix}.", setting=suffix)
    global_shape = [global_batch_size, *(shape or ())]
    made = make_plan(mesh, spec[:dimensions], global_shape, hosts=hosts, devices_per_host=devices_per_host)
    wanted = [path for path in pictures.values() if path is not None]
    for path in wanted:
        made.save(path)
    if as_json:
        click.echo(json.dumps(made.to_json()))
    elif not wanted:
        click.echo("\n".join(made.lines(show_all=show_all)))
