"""Commands that write data sets: ``meshfeed convert`` and ``meshfeed manifest``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.base.machine import available_cpus
from meshfeed._src.cli.text import INTERRUPTED, at_least, counted, example, json_option, show, size_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshfeed._src.convert.job import Conversion, Phase
    from meshfeed._src.convert.run import Converted, Engine, Show
    from meshfeed._src.convert.values import Reading


# The keys of FORMATS in convert/formats.py, which takes too long to import for --help.
_FORMATS = ("csv", "huggingface", "images", "jsonl", "mds", "parquet", "text", "tfrecord", "webdataset")

_CLASSES = 10  # whose names are shown


def _names(_context: click.Context, _option: click.Parameter, value: str | None) -> list[str] | None:
    names = [name.strip() for name in (value or "").split(",") if name.strip()]
    if value is not None and not names:
        raise click.BadParameter("it names no column")
    return names or None


@click.command(
    short_help="Convert other formats to ArrayRecord or tokens.",
    epilog=example(
        "convert 'corpus/*.parquet' --to records",
        "convert corpus.jsonl --to tokens --encoding tokens --tokenizer tokenizer.json",
    ),
)
@click.argument("data", nargs=-1, required=True)
@click.option("--to", "directory", required=True, help="Folder or URL: new, empty, or of the same command.")
@at_least(1, "--shards", help="Number of output files; default: one per 256 MiB of input.")
@at_least(1, "--workers", help="Number of processes; default: one per CPU core.")
@click.option(
    "--encoding",
    type=click.Choice(["example", "bytes", "tokens"]),
    default="example",
    show_default=True,
    help="Write tf.train.Example, one column as it is, or token files.",
)
@click.option("--columns", metavar="NAMES", callback=_names, help="Columns to write, as in a,b; default: all.")
@click.option("--column", metavar="NAME", help="Column to write as bytes or tokens; default: the only one.")
@click.option("--tokenizer", type=click.Path(), help="A tokenizer.json of Hugging Face tokenizers.")
@click.option(
    "--eod", metavar="TOKEN", help="Token, or its number, to write after each record of tokens. Digits are a number."
)
@click.option(
    "--compression",
    type=click.Choice(["zstd", "none"]),
    default="zstd",
    show_default=True,
    help="Compression of ArrayRecord files.",
)
@click.option("--format", "named_format", type=click.Choice(_FORMATS), help="Format of DATA; default: by the names.")
@click.option("--runner", help="Run as an Apache Beam pipeline: DirectRunner, PrismRunner, FlinkRunner, …")
@click.option(
    "--runner-option",
    "options",
    multiple=True,
    metavar="OPTION",
    help="An option of the pipeline, such as direct_num_workers=4. Repeatable.",
)
@json_option()
def convert(
    data: tuple[str, ...],
    directory: str,
    workers: int | None,
    named_format: str | None,
    runner: str | None,
    options: tuple[str, ...],
    as_json: bool,
    **settings: object,
) -> None:
    """Convert files to ArrayRecord or token files.

    DATA are files, globs, folders or URLs of them: Parquet, JSON lines, CSV with a header, text, TFRecord, WebDataset,
    MDS, Hugging Face datasets on disk, or a folder of images with one subfolder per class.

    The output is the same for any number of workers. After a crash or Ctrl-C, the same command continues; once
    complete, it does nothing.
    """
    from meshfeed._src.convert import run
    from meshfeed._src.convert.writers import Settings

    start = time.monotonic()
    engine = _engine(workers, runner, options)
    progress = run.hide_progress if as_json or not sys.stderr.isatty() else _shown()
    chosen = Settings(**settings)  # type: ignore[arg-type]  # click has checked them
    try:
        result = run.convert(data, directory, chosen, engine, named_format=named_format, show=progress)
    except KeyboardInterrupt:
        click.echo("Interrupted. Run the same command again to continue.", err=True)
        raise SystemExit(INTERRUPTED) from None
    except OSError as error:
        raise MeshfeedError(f"{error}. After correcting this, run the same command again to continue.") from error
    if result.format == "csv" and (hint := _csv_hint(list(result.features))):
        click.echo(hint, err=True)
    lines = _summary(result, chosen.encoding, time.monotonic() - start)
    show(dataclasses.asdict(result), lines, as_json=as_json)


def _csv_hint(columns: list[str]) -> str:
    """Returns a hint if the columns look like those of a file without a header, or with a different delimiter."""
    if all(map(_is_number, columns)):
        return (
            f"All names of columns are numbers: {', '.join(columns)}. If the first line of the CSV input is a record, and "
            "not a header, it is missing in the output. Add a line with names before it, and convert to a new folder."
        )
    if len(columns) == 1 and any(mark in columns[0] for mark in ";|\t"):
        return (
            f"The only column is {columns[0]!r}. If it is several, separate the values with commas, or with tabs in a file "
            "that ends in .tsv, and convert to a new folder."
        )
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _engine(workers: int | None, runner: str | None, options: tuple[str, ...]) -> Engine:
    from meshfeed._src.convert.run import RunInBeam, run_in_workers

    if runner is not None:
        return RunInBeam(runner, [f"--{option.removeprefix('--')}" for option in options])
    return functools.partial(run_in_workers, num_workers=workers or available_cpus())


def _summary(result: Converted, encoding: str, seconds: float) -> Iterator[str]:
    from meshfeed._src.convert.values import describe  # takes too long to import for --help

    records, files = counted(result.num_records, "record"), counted(len(result.files), "file")
    if result.was_complete:
        yield f"{result.directory} is complete: {records} in {files}."
    else:
        tokens = "" if result.num_tokens is None else f", {counted(result.num_tokens, 'token')}"
        speed = f"{seconds:.1f} s ({result.num_records / max(seconds, 1e-3):,.0f} records/s)"
        yield f"{records}{tokens} of {counted(result.num_inputs, f'{result.format} input')} in {speed}"
        yield f"{result.directory}: {files}, {size_text(result.num_bytes)}, and manifest.json"
        for name, feature in result.features.items():
            yield f"  {name}: {describe(feature, result.values.get(name))}"
        for name, classes in result.class_names.items():
            more = f", … ({len(classes)} classes)" if len(classes) > _CLASSES else ""
            yield f"  {name} is {', '.join(f'{number} {which}' for number, which in enumerate(classes[:_CLASSES]))}{more}"
    reading = _reading(result, encoding)
    yield f"Read it with: {reading.expression}"
    yield from _notes(reading)


def _reading(result: Converted, encoding: str) -> Reading:
    """Returns how to read the output files."""
    from meshfeed._src.convert.values import reading_of_bytes, reading_of_examples, reading_of_tokens

    directory = glob.escape(result.directory.rstrip("/"))  # a store takes two slashes for a folder without a name
    if result.num_tokens is not None:
        return reading_of_tokens(f"{directory}/*.bin", result.num_tokens, len(result.files))
    pattern = f"{directory}/*.array_record"
    if encoding == "bytes":
        name = next(iter(result.features))
        return reading_of_bytes(pattern, name, result.values.get(name))
    return reading_of_examples(pattern, result.features, result.values, "image" if result.format == "images" else None)


def _notes(reading: Reading) -> Iterator[str]:
    if "numpy." in reading.expression:
        yield "  It needs numpy, and pads values with zeros to the longest. Replace the functions by your own decoders."
    if reading.left_out:
        yield f"  Left out: {', '.join(f'{name} ({why})' for name, why in reading.left_out.items())}."
    if not reading.fits:
        yield "  A feed batches arrays of one shape: give a decoder that makes them, such as a function for DecodeExample."
    elif reading.left_out:
        numpy = " with numpy imported" if "numpy." in reading.example else ""
        example = f", such as {{{reading.example}}}{numpy}" if reading.example else ""
        yield f"  To read them too, give DecodeExample a function of their values that returns arrays of one shape{example}."


def _shown() -> Show:
    """Returns a function that shows a progress bar on standard error; nothing if rich is not installed."""
    from meshfeed._src.convert.run import hide_progress

    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return hide_progress

    class Progress(progress.Progress):
        """Reads the count whenever it is drawn."""

        count: Callable[[], int]

        def get_renderables(self) -> Iterator[RenderableType]:
            for task in self.tasks:
                self.update(task.id, completed=self.count())
            yield from super().get_renderables()

    @contextlib.contextmanager
    def show(job: Conversion, phase: Phase) -> Iterator[None]:
        total, count = job.progress(phase)
        what = {"scan": "inputs scanned", "write": "records written"}[phase]
        columns = (progress.TextColumn(what), progress.BarColumn(), progress.MofNCompleteColumn())
        shown = Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        shown.count = count
        shown.add_task(what, total=total)
        with shown:
            yield

    return show


@click.command(
    short_help="List the files of a data set, to open it with one request.",
    epilog=example("manifest 'data/*.array_record'"),
)
@click.argument("files", nargs=-1, required=True)
@click.option("--to", "--output", "output", type=click.Path(), help="Path or URL to write; default: beside the files.")
@click.option("--source", help="Source that reads the files, such as ArrayRecord; default: by their names.")
@click.option("--lengths", metavar="KEY", help="Also list the length of this leaf of each record, for sources.Packed.")
@click.option("--dtype", help="Integer dtype of token files without a header, or of bytes that --lengths counts.")
@click.option("--eod", type=int, help="Number of the token that ends a document: also list the documents' lengths.")
@click.option("--digests/--no-digests", default=True, show_default=True, help="Whether to read the files for digests.")
@at_least(1, "--workers", default=16, help="Files that are read at once.")
@json_option()
def manifest(files: tuple[str, ...], output: str | None, as_json: bool, **settings: Any) -> None:
    """Write a manifest: files, records, sizes and digests of a data set in one small file.

    FILES are files, URLs or globs of ArrayRecord, Parquet, tar or token files. Sources find manifest.json beside the
    files, or take its path, and then open no other file before they read it.
    """
    from meshfeed._src.sources.manifest import make_manifest

    made = make_manifest(list(files), output, **settings)
    records, num_bytes = (sum(getattr(file, name) for file in made.files) for name in ("num_records", "num_bytes"))
    found = {"path": made.path, "files": len(made.files), "records": records, "bytes": num_bytes}
    line = f"{made.path}: {counted(len(made.files), 'file')}, {counted(records, 'record')}, {num_bytes:,} bytes"
    show(found, [line], as_json=as_json)
