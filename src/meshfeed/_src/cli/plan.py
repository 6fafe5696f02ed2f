"""``meshfeed plan``: which rows each host reads, as a table, JSON or a picture; with ``--simulate``, how long it waits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.base.stores import write_output
from meshfeed._src.cli.text import F, OutputPath, at_least, example, json_option, printable, show

Shuffle = bool | int | str | ShardShuffle


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


def _shuffle(text: str) -> Shuffle:
    orders: dict[str, Shuffle] = {"yes": True, "no": False, "shards": "shards", "affinity": ShardShuffle(affinity=True)}
    found = orders.get(text)
    if found is None and not (text.isdecimal() and int(text) >= 1):
        raise click.BadParameter(f"{text!r} is not shards, affinity, yes, no or a number of records")
    return int(text) if found is None else found


def _weights(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of numbers, as in 0.7,0.3") from error


def _picture(suffix: str, what: str) -> Callable[[F], F]:
    return click.option(f"--{suffix}", type=OutputPath(), help=f"Draw the mesh as {what}.")


def _price(name: str, what: str) -> Callable[[F], F]:
    return click.option(name, type=click.FloatRange(min=0), default=0.0, help=f"With --simulate: price of {what}.")


@click.command(
    epilog=example(
        "plan --hosts 4 --devices-per-host 2 --mesh data=4,model=2 --spec data --global-batch-size 64",
        "plan --simulate s3://b/manifest.json --hosts 64 --bandwidth 1GB/s --step-seconds 0.5 --cache 500GB",
    )
)
@click.argument("manifests", nargs=-1)
@click.option("--simulate", is_flag=True, help="Show how long hosts wait for data and what they download.")
@at_least(1, "--hosts", required=True, help="Number of hosts (JAX processes).")
@at_least(1, "--devices-per-host", help="Devices of each host.")
@click.option("--mesh", type=_mesh, metavar="AXIS=SIZE,...", help="Axes and sizes, slowest first: data=8,model=4.")
@click.option(
    "--spec",
    type=_spec,
    metavar="ENTRY,...",
    help="Axes per dimension, rows first: data or data+fsdp,None,model.",
)
@at_least(1, "--global-batch-size", help="Rows of the global batch.")
@click.option(
    "--shape", type=_shape, metavar="SIZE,...", help="Sizes of the dimensions after the rows: shows columns too."
)
@json_option("Print JSON, with all hosts.")
@click.option("--all", "show_all", is_flag=True, help="Print every host, not only the first and last.")
@click.option(
    "--cache",
    metavar="BYTES",
    help="Size of each host's ShardCache, such as 500GB: without --simulate, shows what hosts download per epoch instead.",
)
@at_least(1, "--shards", help="Without manifests: number of shards.")
@at_least(1, "--shard-bytes", help="Without manifests: bytes of each shard.")
@at_least(1, "--shard-records", help="Without manifests: records of each shard.")
@click.option(
    "--shuffle",
    type=_shuffle,
    metavar="SHARDS|AFFINITY|YES|NO|RECORDS",
    help="The feed's shuffle=; by default, --simulate compares orders, and --cache alone takes yes.",
)
@at_least(1, "--num-lanes", "--lanes", help="With shards or affinity: the feed's num_lanes=.")
@click.option("--bandwidth", metavar="BYTES/S", help="With --simulate: what each host receives at most, as in 1GB/s.")
@click.option("--shared-bandwidth", metavar="BYTES/S", help="With --simulate: what all hosts together receive at most.")
@click.option("--step-seconds", type=float, help="With --simulate: seconds per training step.")
@click.option("--latency", type=float, default=0.05, show_default=True, help="With --simulate: seconds per request.")
@click.option(
    "--requests-per-second", type=float, help="With --simulate: requests of all hosts that the store answers."
)
@click.option(
    "--weights", type=_weights, metavar="WEIGHT,...", help="With --simulate: weights of a mixture of manifests."
)
@click.option("--ahead", metavar="BYTES", help="With --simulate: the cache's ahead_bytes=; default: half of the cache.")
@at_least(1, "--epochs", default=2, help="With --simulate: epochs.")
@_price("--request-price", "1,000 requests")
@_price("--egress-price", "10^9 bytes")
@_picture("svg", "an SVG file")
@_picture("html", "an HTML page; with --simulate, write its figures as one")
@_picture("png", "a PNG file (needs matplotlib)")
def plan(
    manifests: tuple[str, ...],
    simulate: bool,
    cache: str | None,
    as_json: bool,
    show_all: bool,
    **options: Any,
) -> None:
    """Show which rows of the global batch each host reads.

    With --simulate, show how long hosts wait for remote data and what they download, with the files of MANIFESTS or with
    shards of equal size; without --shuffle, compare orders and recommend one. With --cache alone, show what each host
    downloads per epoch.

    Needs neither devices nor other hosts. Devices fill the mesh host by host, as with jax.make_mesh on CPUs; a real
    mesh may order its devices differently, and the feed uses the real order (feed.plan()).
    """
    _check_options(manifests, simulate, cache, options)
    pictures = [path for suffix in ("svg", "html", "png") if (path := _checked_picture(suffix, options[suffix]))]
    page = options["html"] if simulate else None
    made = None
    if options["mesh"] is not None:
        from meshfeed._src.pictures.plan import make_plan

        global_shape = [options["global_batch_size"], *(options["shape"] or ())]
        spec = _checked_spec(options["spec"], len(global_shape))
        made = make_plan(
            options["mesh"], spec, global_shape, hosts=options["hosts"], devices_per_host=options["devices_per_host"]
        )
        for path in pictures:
            if path is not page:
                made.save(path)
                if not as_json:
                    click.echo(f"wrote {path}", err=True)
    rows = None if made is None else made.table.row_ranges()
    if simulate:
        from meshfeed._src.cli.simulation import simulated
        from meshfeed._src.simulation.page import simulation_lines, simulation_page

        found = simulated(manifests, cache, rows, options)
        if page is not None:
            write_output("html", page, simulation_page(found))
            if not as_json:
                click.echo(f"wrote {page}", err=True)
        show(found.to_json(), simulation_lines(found), as_json=as_json)
    elif cache is not None:
        from meshfeed._src.cli.simulation import cache_json, cache_lines, downloads_of_hosts

        downloads, num_bytes = downloads_of_hosts(rows or [], cache, options)
        show({"hosts": cache_json(downloads)}, cache_lines(downloads, num_bytes), as_json=as_json)
    elif made is None:
        raise AssertionError("--mesh is checked")
    elif as_json:
        click.echo(json.dumps(made.to_json()))
    else:
        lines = made.lines(show_all=show_all, hint="; --all or --json shows them")
        click.echo(printable("\n".join([*lines, *_left_out(options)])))


def _left_out(options: dict[str, Any]) -> Iterator[str]:
    """Yields a line about devices for which the mesh has no position."""
    devices, positions = options["hosts"] * options["devices_per_host"], math.prod(options["mesh"].values())
    if positions < devices:
        left = devices - positions
        yield f"The mesh has {positions:,} positions, so {left:,} of {devices:,} devices, the last, do nothing."


_MESH = ("devices_per_host", "mesh", "spec", "global_batch_size")
_SHARDS = ("shards", "shard_bytes", "shard_records")
_SIMULATED = ("bandwidth", "shared_bandwidth", "step_seconds", "requests_per_second", "weights", "ahead")


def _flags(names: Iterable[str]) -> str:
    return ", ".join(f"'--{name.replace('_', '-')}'" for name in names)


def _check_options(manifests: tuple[str, ...], simulate: bool, cache: str | None, options: dict[str, Any]) -> None:
    """Raises a UsageError or SettingsError for options that are missing, or that do not go together."""
    missing = [name for name in _MESH if options[name] is None]
    if missing and (not simulate or len(missing) < 3 + (options["global_batch_size"] is None)):
        raise click.UsageError(f"Missing option {_flags(missing)}.")
    listed = [name for name in _SHARDS if options[name] is not None]
    if not simulate:
        if manifests:
            raise click.UsageError(f"Got unexpected extra argument ({manifests[0]}). Manifests are for --simulate.")
        if cache is None and listed:
            raise SettingsError(
                "--shards, --shard-bytes and --shard-records need --cache. Add --cache BYTES.", setting="cache"
            )
        if cache is not None and len(listed) < 3:
            raise SettingsError("--cache needs --shards, --shard-bytes and --shard-records.", setting="cache")
        if unused := [name for name in _SIMULATED if options[name] is not None]:
            raise click.UsageError(
                f"{_flags(unused)} would have no effect without --simulate. Add it, or leave them out."
            )
        return
    if bool(manifests) == bool(listed) or 0 < len(listed) < 3:
        raise SettingsError(
            "--simulate needs manifests, or --shards, --shard-bytes and --shard-records in their place. `meshfeed manifest` "
            "writes manifests.",
            setting="simulate",
        )
    needed = {"cache": cache, **{name: options[name] for name in ("bandwidth", "step_seconds")}}
    if missing_here := [name for name, value in needed.items() if value is None]:
        raise click.UsageError(f"Missing option {_flags(missing_here)}, which --simulate needs.")
    if (options["svg"] or options["png"]) and options["mesh"] is None:
        raise click.UsageError("--svg and --png draw a mesh. Pass --mesh, or --html for a page about the simulation.")


def _checked_spec(spec: list[object], dimensions: int) -> list[object]:
    """Returns the entries of an array's dimensions; raises SettingsError if others are divided."""
    if any(entry is not None for entry in spec[dimensions:]):
        raise SettingsError(
            f"--spec divides {len(spec)} dimensions, and the array has {dimensions}. Give the sizes of those after the "
            f"rows, as in --shape {','.join(['2048'] * (len(spec) - 1))}, or fewer entries.",
            setting="shape",
        )
    return spec[:dimensions]


def _checked_picture(suffix: str, path: str | None) -> str | None:
    if path is not None and not path.endswith(f".{suffix}"):
        raise SettingsError(f"--{suffix} {path} must end in .{suffix}.", setting=suffix)
    return path
