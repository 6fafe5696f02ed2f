"""The folder of a Checkpointer: what may be passed as one, and what its user should know about it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from etils import epath

from meshfeed._src.base.errors import CheckpointError, MeshfeedError, SettingsError
from meshfeed._src.checkpoint.options import short
from meshfeed._src.checkpoint.step import ARRAYS, find_steps


def as_directory(directory: epath.PathLike) -> epath.Path:
    """Returns the absolute path of the checkpoint folder.

    Raises:
      SettingsError: it is not a path, it is a file or below one, it is a URL that lost a slash, or Orbax cannot
        write to that kind of URL.
    """
    text, remedy = str(directory), "Pass the path of a folder, which is created if absent."

    def refused(problem: str, shown: str = repr(text)) -> SettingsError:
        return SettingsError(f"directory={shown}: {problem}", setting="directory")

    scheme, is_url, _ = text.partition("://")
    if is_url and scheme != "gs":
        raise refused(
            f"Orbax writes checkpoints only to folders and to gs://, and treats {scheme}:// as a relative path. Pass the "
            "path of a folder, such as the mount point of a bucket."
        )
    if re.match(r"(gs|s3):/[^/]", text):  # unchecked, a folder "gs:" would be created in the working directory
        raise refused("is a URL that has lost a slash, as in a pathlib.Path. Pass a str or an etils.epath.Path.")
    if not text or not isinstance(directory, str | os.PathLike):
        raise refused(f"is not a path. {remedy}", short(directory))
    if is_url:
        return epath.Path(directory)
    path = epath.Path(directory).expanduser().absolute()
    # The nearest existing ancestor must be a folder too: nothing can be created below a file.
    nearest = next((part for part in (path, *path.parents) if part.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise refused(f"{nearest} is a file. {remedy}")
    return path


def check_no_step(directory: epath.Path) -> None:
    """Rejects one of a Checkpointer's steps, which has no steps itself: training would start afresh inside it."""
    if directory.name.isdecimal() and (directory / ARRAYS).exists() and not find_steps(directory):
        raise SettingsError(
            f"directory={str(directory)!r}: is a step of the checkpoint in {directory.parent}. Pass that folder; "
            f"restore(…, step={int(directory.name)}) restores this step.",
            setting="directory",
        )


@contextlib.contextmanager
def opening(directory: epath.Path) -> Iterator[None]:
    """Turns errors of Orbax and of the store's library into a CheckpointError that names the folder."""
    try:
        yield
    except MeshfeedError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{directory}: cannot be opened: {type(error).__name__}: {error}. Check that this host may create and write "
            "the folder; for an object store, also check the bucket's name and the credentials."
        ) from error
