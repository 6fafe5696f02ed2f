"""``meshfeed manifest``."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command(short_help="List the files of a data set, so that it opens with one request.")
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--output", type=click.Path(), default=None, help="Path or URL to write; default: manifest.json beside the files."
)
@click.option(
    "--source", default=None, help="Source that reads the files, such as ArrayRecord; default: by their names."
)
@click.option(
    "--lengths", default=None, metavar="KEY", help="Also list the length of this leaf per record, for Packed."
)
@click.option("--dtype", default=None, help="Integer dtype of tokens without a header: in files, records or bytes.")
@click.option("--eod", type=int, default=None, help="Token that ends a document: also list the documents' lengths.")
@click.option("--digests/--no-digests", default=True, show_default=True, help="Whether to read the files for digests.")
@click.option("--workers", type=click.IntRange(1), default=16, show_default=True, help="Files that are read at once.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def manifest(files: tuple[str, ...], output: str | None, as_json: bool, **settings: Any) -> None:
    """Write a manifest: files, records, sizes and digests of a data set in one small file.

    FILES are files, URLs or globs of ArrayRecord, Parquet, tar or token files. Sources find manifest.json beside the
    files by themselves, or take its path, and then look at no file before they read it.
    """
    from meshfeed._src.sources.manifest import make_manifest

    made = make_manifest(list(files), output, **settings)
    records, num_bytes = (sum(getattr(file, name) for file in made.files) for name in ("num_records", "num_bytes"))
    if as_json:
        click.echo(json.dumps({"path": made.path, "files": len(made.files), "records": records, "bytes": num_bytes}))
        return
    click.echo(f"{made.path}: {len(made.files):,} files, {records:,} records, {num_bytes:,} bytes")
