"""Row counts of a streaming Hugging Face dataset's files, read once for all lanes."""

from __future__ import annotations

from collections.abc import Sequence

from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.huggingface.files import Files

# A lane whose only file is empty would end the stream for all lanes, so empty files are not assigned to lanes. With
# more files than this, every lane gets several, and checking each file would take too long.
_MAX_LOOKED_INTO = 4096


class Counts:
    """Cached row counts of files, since each count of a remote file is a round trip."""

    def __init__(self) -> None:
        self._group_rows: dict[int, Sequence[int] | None] = {}
        self._filled: list[int] | None = None

    def group_rows(self, files: Files, file_index: int) -> Sequence[int] | None:
        """Rows of each row group of a file, or None if they cannot be counted without reading the file."""
        if file_index not in self._group_rows:
            self._group_rows[file_index] = files.group_rows(file_index)
        return self._group_rows[file_index]

    def filled(self, files: Files) -> list[int]:
        """Indices of the files that are not known to be empty, ascending."""
        if self._filled is None:
            if files.count > _MAX_LOOKED_INTO:
                self._filled = list(range(files.count))
            else:
                empty = file_paths.in_threads(files.is_empty, range(files.count))
                self._filled = [index for index, is_empty in enumerate(empty) if not is_empty]
        return self._filled
