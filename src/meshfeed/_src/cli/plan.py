"""``meshfeed plan``: which rows each host reads, as a table, JSON or a picture; with ``--cache``, what it downloads."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import click
import numpy as np

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.settings import BatchSchedule
from meshfeed._src.base.types import RecordOrder
from meshfeed._src.cli.text import F, at_least, json_option
from meshfeed._src.order.cache import DownloadCounts, shards_of_steps, simulate_cache
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.shards import ShardOrder, default_num_lanes
from meshfeed._src.order.steps import StepSchedule

_MAX_HOSTS = 16  # with different rows that are simulated


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
        f"--{suffix}", type=click.Path(dir_okay=False, path_type=pathlib.Path), help=f"Draw the mesh as {what}."
    )


@click.command()
@at_least(1, "--hosts", required=True, help="Number of hosts (JAX processes).")
@at_least(1, "--devices-per-host", required=True, help="Devices of each host.")
@click.option(
    "--mesh",
    type=_mesh,
    metavar="AXIS=SIZE,...",
    required=True,
    help="Axes and sizes, slowest first: data=8,model=4.",
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
    spec: list[Any],
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
    pictures: dict[str, pathlib.Path | None] = {name: options.pop(name) for name in ("svg", "html", "png")}
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
    made = make_plan(mesh, spec[:dimensions], global_shape, **options)
    if cache is not None:
        if None in shards[:3]:
            raise SettingsError("--cache needs --shards, --shard-bytes and --shard-records.", setting="cache")
        dataset = ShardSet(*shards)
        found = downloads_of_hosts(dataset, made.table.row_ranges(), global_batch_size, cache)
        as_text = "\n".join(cache_lines(found, dataset.num_shards * dataset.shard_bytes))
        click.echo(json.dumps({"hosts": cache_json(found)}) if as_json else as_text)
        return
    wanted = [path for path in pictures.values() if path is not None]
    for path in wanted:
        made.save(path)
    if as_json:
        click.echo(json.dumps(made.to_json()))
    elif not wanted:
        click.echo("\n".join(made.lines(show_all=show_all, hint="; --all or --json shows them")))


@dataclasses.dataclass(frozen=True)
class ShardSet:
    """Shards of equal size, and how a feed reads them.

    Attributes:
      num_shards: number of shards.
      shard_bytes: size of each in bytes.
      shard_records: records of each.
      shuffle: as for the feed: ``"shards"``, True, False, or a number of records.
      num_lanes: as for the feed; None for its default.
    """

    num_shards: int
    shard_bytes: int
    shard_records: int
    shuffle: bool | int | str
    num_lanes: int | None

    def order(self, batch_size: int) -> RecordOrder:
        """Returns the order of two epochs, of the seed 0."""
        lengths = np.full(self.num_shards, self.shard_records)
        if self.shuffle != "shards":
            assert not isinstance(self.shuffle, str)
            return EpochOrder(int(lengths.sum()), shuffle=self.shuffle, seed=0, num_epochs=2)
        num_lanes = self.num_lanes or default_num_lanes(batch_size, self.num_shards)
        if batch_size % num_lanes:
            raise SettingsError(
                f"--num-lanes {num_lanes} does not divide --global-batch-size {batch_size}.", setting="num_lanes"
            )
        schedule = StepSchedule(BatchSchedule([(0, batch_size)]))
        return ShardOrder(lengths, num_lanes=num_lanes, seed=0, num_epochs=2, step_schedule=schedule)


def downloads_of_hosts(
    dataset: ShardSet, rows: Sequence[Sequence[tuple[int, int]]], batch_size: int, max_bytes: int
) -> dict[int, DownloadCounts]:
    """Returns what hosts download in the second of two epochs.

    Args:
      dataset: the shards.
      rows: the row ranges of each host.
      batch_size: rows of the global batch.
      max_bytes: bytes that each host's cache holds.

    Returns:
      host → its downloads; of hosts spread over all if more than 16 have different rows.
    """
    lengths = np.full(dataset.num_shards, dataset.shard_records)
    steps = int(lengths.sum()) // batch_size
    order, sizes = dataset.order(batch_size), np.full(dataset.num_shards, dataset.shard_bytes)
    reading = {tuple(ranges): host for host, ranges in reversed(list(enumerate(rows))) if ranges}
    chosen = sorted(reading.values())
    if len(chosen) > _MAX_HOSTS:
        chosen = [chosen[i] for i in np.linspace(0, len(chosen) - 1, _MAX_HOSTS).astype(int).tolist()]
    found: dict[tuple[tuple[int, int], ...], DownloadCounts] = {}
    for host in chosen:
        uses = shards_of_steps(order, lengths, batch_size=batch_size, rows=rows[host], steps=range(2 * steps))
        found[tuple(rows[host])] = simulate_cache(uses, sizes, max_bytes, skip=steps)
    return {host: found[tuple(ranges)] for host, ranges in enumerate(rows) if tuple(ranges) in found}


def cache_json(found: dict[int, DownloadCounts]) -> list[dict[str, object]]:
    """Returns one entry per simulated host."""
    return [
        {"host": host, "downloads": one.num_downloads, "bytes": one.num_bytes, "hit_rate": round(one.hit_rate, 4)}
        for host, one in found.items()
    ]


def cache_lines(found: dict[int, DownloadCounts], num_bytes: int) -> list[str]:
    """Returns a table of the simulated hosts and a summary."""
    table = [f"{'host':>8}  {'downloads':>10}  {'bytes per epoch':>18}  {'share of the set':>16}  {'hit rate':>8}"]
    shown = list(found.items())[:_MAX_HOSTS]
    table += [
        f"{host:>8}  {one.num_downloads:>10,}  {one.num_bytes:>18,}  {one.num_bytes / num_bytes:>16.3f}  "
        f"{one.hit_rate:>8.3f}"
        for host, one in shown
    ]
    if len(shown) < len(found):
        table.append(
            f"{'…':>8}  {'':>10}  {len(found) - len(shown):,} more hosts read the same rows; --json shows them"
        )
    return table
