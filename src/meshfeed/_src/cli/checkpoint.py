"""``meshfeed inspect | verify | diff | import-position``: checkpoint commands, with text or JSON output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from meshfeed._src.base.stores import is_url
from meshfeed._src.base.types import JsonValue
from meshfeed._src.cli.text import at_least, example, json_option, shortened, show, size_text

_step = at_least(0, "--step", help="One step only; default: all steps.")


@click.command(epilog=example("inspect checkpoints/", "inspect checkpoints/ --step 800"))
@click.argument("directory", type=click.Path())
@_step
@json_option()
def inspect(directory: str, step: int | None, as_json: bool) -> None:
    """Show the steps of a checkpoint, or the leaves of one.

    DIRECTORY is the folder or URL passed to Checkpointer, or one of its steps. Of one step, also shows the feed's state.
    Reads no array values.
    """
    from meshfeed._src.checkpoint import step as checkpoint_step

    found = checkpoint_step.inspect(directory, step)
    show(found, _inspect_lines(found), as_json=as_json)


def _inspect_lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{'step':>10}  {'position':>14}  {'feed step':>10}  {'bytes':>10}  leaves"
    for step in found["steps"]:
        if not step["intact"]:
            yield f"{step['step']:>10}  not intact: {step['problem']}"
            continue
        leaves = step["leaves"]
        count = leaves if isinstance(leaves, int) else len(leaves)
        position, feed_step = _number(step["position"]), _number(step["feed_step"])
        yield f"{step['step']:>10}  {position:>14}  {feed_step:>10}  {size_text(step['bytes']):>10}  {count:,}"
        if not isinstance(leaves, int):
            yield from ("", *map(_leaf_line, leaves), "")
            yield f"iterator: {json.dumps(step['iterator'])}" if step["iterator"] else "no iterator"


def _leaf_line(leaf: dict[str, Any]) -> str:
    if "value" in leaf:
        return f"{leaf['name']}: {leaf['kind']} {leaf['value']!r}"
    shape = ", ".join(map(str, leaf["shape"]))
    chunk = f", chunks of {leaf['chunk']}" if leaf["chunk"] else ""
    return f"{leaf['name']}: {leaf['kind']} {leaf['dtype']}[{shape}], {size_text(leaf['bytes'])}{chunk}"


@click.command(short_help="Read and check every stored byte of a checkpoint.", epilog=example("verify checkpoints/"))
@click.argument("directory", type=click.Path())
@_step
@json_option()
def verify(directory: str, step: int | None, as_json: bool) -> None:
    """Read and check every stored byte of a checkpoint. The exit status is 1 if anything is damaged.

    DIRECTORY is the folder or URL passed to Checkpointer, or one of its steps.
    """
    from meshfeed._src.checkpoint import step as checkpoint_step

    found = checkpoint_step.verify_as_json(directory, step)
    show(found, _verify_lines(found), as_json=as_json)
    if not found["intact"]:
        raise SystemExit(1)


def _verify_lines(found: dict[str, Any]) -> Iterator[str]:
    for row in found["steps"]:
        unchecked = f", {row['without_digest']} without a digest" if row["without_digest"] else ""
        leaves = f"{row['leaves']:,} {'leaf' if row['leaves'] == 1 else 'leaves'}"
        read = f"{leaves}, {size_text(row['bytes_read'])} in {row['seconds']:.1f} s{unchecked}"
        yield f"{row['path']}: {'intact' if row['intact'] else 'DAMAGED'}, {read}"
        yield from (f"  {problem}" for problem in row["problems"])


@click.command(epilog=example("diff checkpoints/800 checkpoints/900"))
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
@json_option()
def diff(first: str, second: str, as_json: bool) -> None:
    """Compare two steps, or two saved states. The exit status is 1 if they differ.

    FIRST and SECOND are folders of steps or of saved iterators, or JSON files with the result of feed.get_state().
    Leaves are compared by their digests, without reading values.
    """
    from meshfeed._src.checkpoint import step as checkpoint_step

    found = checkpoint_step.diff(first, second)
    show(found, _diff_lines(found), as_json=as_json)
    if not found["same"]:
        raise SystemExit(1)


def _diff_lines(found: dict[str, Any]) -> Iterator[str]:
    if found["same"]:
        yield "the same"
    for field, (one, two) in found["state"].items():
        yield f"state {field}: {_short(one)} | {_short(two)}"
    for name, (one, two) in found["leaves"].items():
        yield f"leaf {name}: {_leaf_difference(one, two)}"


def _leaf_difference(one: dict[str, Any] | None, two: dict[str, Any] | None) -> str:
    if one is None or two is None:
        return "only in the second" if one is None else "only in the first"
    fields = [field for field in ("kind", "dtype", "shape", "impl", "value") if one.get(field) != two.get(field)]
    if fields:
        return ", ".join(f"{field} {_short(one.get(field))} | {_short(two.get(field))}" for field in fields)
    if one.get("chunk") != two.get("chunk"):
        return f"stored in other chunks, {one.get('chunk')} | {two.get('chunk')}, so digests cannot be compared"
    pairs = zip(one.get("digests", ()), two.get("digests", ()), strict=False)
    return f"{sum(a != b for a, b in pairs)} of {len(one.get('digests', ()))} chunks differ"


@click.command(
    "import-position",
    short_help="Convert a position that MaxText or Grain saved.",
    epilog='\b\nIn the new run:\n  feed.set_state(json.load(open("OUTPUT/state.json"))["state"])',
)
@click.argument("directory", type=click.Path())
@click.argument("template", type=click.Path(exists=True, dir_okay=False))
@click.argument("output", type=click.Path())
@at_least(1, "--global-batch-size", required=True, help="Global batch size of the feed.")
@at_least(0, "--step", help="Batches delivered by the old run; required unless DIRECTORY holds process_0.json.")
@click.option("--unshuffled", is_flag=True, help="The old run did not shuffle; needed if num_epochs is not 1.")
@json_option()
def import_position(
    directory: str, template: str, output: str, global_batch_size: int, as_json: bool, **settings: Any
) -> None:
    """Convert an iterator position saved by MaxText or Grain to the state of a feed.

    DIRECTORY contains the files process_<i>-of-<n>.json or process_0.json of one step.

    TEMPLATE is a JSON file with feed.get_state() of a new feed, before its first batch, over the same records in the
    same order as the old run. For a Grain MapDataset, use the dataset itself, with its shuffle and repeat but without
    its batch.

    OUTPUT is the folder for state.json. The new run reads it as shown below, or with Orbax's
    Checkpointer(IteratorHandler()) and IteratorRestore(feed).

    Fails if the feed cannot resume exactly from the position.
    """
    from meshfeed._src.checkpoint import foreign

    state = foreign.import_position(directory, template, output, global_batch_size=global_batch_size, **settings)
    steps = state["position"] // global_batch_size
    path, position, kind = f"{output.removeprefix('file://')}/state.json", state["position"], state["kind"]
    opened = f"fsspec.open({path!r}).open()" if is_url(path) else f"open({path!r})"
    lines = (
        f"{output}: after step {steps:,}, position {position:,} ({kind})",
        "It is exact if the old run read the records in the order of the template. In the new run:",
        f"  feed.set_state(json.load({opened})['state'])",
    )
    show({"path": path, "step": steps, "position": position, "kind": kind}, lines, as_json=as_json)


def _number(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _short(value: JsonValue) -> str:
    return shortened(json.dumps(value), 100)


COMMANDS = (inspect, verify, diff, import_position)
