"""``meshfeed plan``: which rows each host reads, as a table, JSON or a picture; with ``--cache``, what it downloads."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import click

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.cli.downloads import ShardSet, cache_json, cache_lines, downloads_of_hosts
from meshfeed._src.cli.text import F, LocalPath, at_least, example, json_option, printable, show


def _mesh(text: str) -> dict[str, int]:
    """``data=8,model=4`` → ``{"data": 8, "model": 4}``."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if not axis or not size.strip().isdecimal() or int(size) < 1:
            raise click.BadParameter(f"{part!r} is not axis=size with a size of at least 1, as in data=8,model=4")
        if axis in axes:
            raise click.BadParameter(f"the axis {axis!r} is given twice")
        axes[axis] = int(size)
    return axes


def _spec(text: str) -> list[object]:
    """``data+fsdp,None,model`` → ``[("data", "fsdp"), None, "model"]``: one entry per dimension."""
    entries: list[object] = []
    for part in text.split(","):
        axes = [axis.strip() for axis in part.split("+")]
        if not all(axes):
            raise click.BadParameter(f"{part!r} is not an axis, several joined by +, or None")
        entries.append(None if axes == ["None"] else tuple(axes) if len(axes) > 1 else axes[0])
    return entries


def _shape(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of sizes of at least 1, as in 2048 or 224,224,3")
    return [int(part) for part in parts]


def _shuffle(text: str) -> bool | int | str:
    found = {"yes": True, "no": False, "shards": "shards"}.get(text)
    if found is None and not (text.isdecimal() and int(text) >= 1):
        raise click.BadParameter(f"{text!r} is not shards, yes, no or a number of records")
    return int(text) if found is None else found


def _picture(suffix: str, what: str) -> Callable[[F], F]:
    return click.option(
        f"--{suffix}", type=LocalPath(dir_okay=False, path_type=pathlib.Path), help=f"Draw the mesh as {what}."
    )


@click.command(
    epilog=example("plan --hosts 4 --devices-per-host 2 --mesh data=4,model=2 --spec data --global-batch-size 64")
)
@at_least(1, "--hosts", required=True, help="Number of hosts (JAX processes).")
@at_least(1, "--devices-per-host", required=True, help="Devices of each host.")
@click.option(
    "--mesh", type=_mesh, metavar="AXIS=SIZE,...", required=True, help="Axes and sizes, slowest first: data=8,model=4."
)
@click.option(
    "--spec",
    type=_spec,
    metavar="ENTRY,...",
    required=True,
    help="Axes per dimension, rows first: data or data+fsdp,None,model.",
)
@at_least(1, "--global-batch-size", required=True, help="Rows of the global batch.")
@click.option(
    "--shape", type=_shape, metavar="SIZE,...", help="Sizes of the dimensions after the rows: shows columns too."
)
@json_option("Print JSON, with all hosts.")
@click.option("--all", "show_all", is_flag=True, help="Print every host, not only the first and last.")
@at_least(1, "--cache", help="Bytes of each host's ShardCache: shows what hosts download per epoch instead.")
@at_least(1, "--shards", help="With --cache: number of shards.")
@at_least(1, "--shard-bytes", help="With --cache: bytes of each shard.")
@at_least(1, "--shard-records", help="With --cache: records of each shard.")
@click.option(
    "--shuffle",
    type=_shuffle,
    metavar="SHARDS|YES|NO|RECORDS",
    default="yes",
    help="With --cache: the feed's shuffle=; default: yes.",
)
@at_least(1, "--num-lanes", help="With --cache --shuffle shards: the feed's num_lanes=.")
@_picture("svg", "an SVG file")
@_picture("html", "an HTML page")
@_picture("png", "a PNG file (needs matplotlib)")
def plan(
    mesh: dict[str, int],
    spec: list[object],
    global_batch_size: int,
    shape: list[int] | None,
    as_json: bool,
    show_all: bool,
    cache: int | None,
    **options: Any,
) -> None:
    """Show which rows of the global batch each host reads.

    With --cache, show what each host downloads per epoch, in a simulation with shards of equal size.

    Needs neither devices nor other hosts. Devices fill the mesh host by host, as with jax.make_mesh on CPUs; a real
    mesh may order its devices differently, and the feed uses the real order (feed.plan()).
    """
    from meshfeed._src.pictures.plan import make_plan

    shards = [options.pop(name) for name in ("shards", "shard_bytes", "shard_records", "shuffle", "num_lanes")]
    pictures = [path for suffix in ("svg", "html", "png") if (path := _checked_picture(suffix, options.pop(suffix)))]
    global_shape = [global_batch_size, *(shape or ())]
    if cache is None and any(shards[:3]):
        raise SettingsError(
            "--shards, --shard-bytes and --shard-records need --cache. Add --cache BYTES.", setting="cache"
        )
    made = make_plan(mesh, _checked_spec(spec, len(global_shape)), global_shape, **options)
    for path in pictures:
        made.save(path)
        if not as_json:
            click.echo(f"wrote {path}", err=True)
    if cache is not None:
        if None in shards[:3]:
            raise SettingsError("--cache needs --shards, --shard-bytes and --shard-records.", setting="cache")
        dataset = ShardSet(*shards)
        found = downloads_of_hosts(dataset, made.table.row_ranges(), global_batch_size, cache)
        lines = cache_lines(found, dataset.num_shards * dataset.shard_bytes)
        show({"hosts": cache_json(found)}, lines, as_json=as_json)
        return
    if as_json:
        click.echo(json.dumps(made.to_json()))
    else:
        click.echo(printable("\n".join(made.lines(show_all=show_all, hint="; --all or --json shows them"))))


def _checked_spec(spec: list[object], dimensions: int) -> list[object]:
    """Returns the entries of an array's dimensions; raises SettingsError if others are divided."""
    if any(entry is not None for entry in spec[dimensions:]):
        raise SettingsError(
            f"--spec divides {len(spec)} dimensions, and the array has {dimensions}. Give the sizes of those after the "
            f"rows, as in --shape {','.join(['2048'] * (len(spec) - 1))}, or fewer entries.",
            setting="shape",
        )
    return spec[:dimensions]


def _checked_picture(suffix: str, path: pathlib.Path | None) -> pathlib.Path | None:
    if path is not None and path.suffix != f".{suffix}":
        raise SettingsError(f"--{suffix} {path} must end in .{suffix}.", setting=suffix)
    return path
