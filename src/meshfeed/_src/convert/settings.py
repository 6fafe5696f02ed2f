"""What the user can set for the output files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the content of the output files, with the input.

    Attributes:
      encoding: "example", "bytes" or "tokens".
      columns: the columns to write; None for all.
      column: the column to write with "bytes" and "tokens"; None for the only one that fits.
      tokenizer: path of the tokenizer for "tokens".
      eod: the token that ends a document.
      compression: of ArrayRecord, "zstd" or "none".
      shards: number of output files; None for one per 256 MiB of input.
    """

    encoding: str = "example"
    columns: Sequence[str] | None = None
    column: str | None = None
    tokenizer: str | None = None
    eod: str | None = None
    compression: str = "zstd"
    shards: int | None = None
