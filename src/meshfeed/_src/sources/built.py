"""What sources that are built over other sources have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshfeed._src.base import hooks


class Built:
    """A source that is built over others, by default over ``_source``, and closes them."""

    _source: Any

    def _below(self) -> Iterable[Any]:
        """The sources that this one is built over."""
        return (self._source,)

    def close(self) -> None:
        """Closes the sources below."""
        for source in self._below():
            hooks.close(source)


class SameHooks(Built):
    """A source that leaves some hooks of ``_source`` as they are, and has them if that has them."""

    _same_hooks: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name not in self._same_hooks:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["_source"], name)


class BuiltRecords(Built):
    """Random-access records, or a mixture of streams, built over other sources."""

    @property
    def read_threads(self) -> int:
        """See :class:`meshfeed._src.base.hooks.ReadsInThreads`: as the source that asks for most."""
        return hooks.read_threads(*self._below())


class RecordsOfFiles(BuiltRecords):
    """Records made of those of all sources below, and so of the files of these."""

    def file_names(self) -> list[str]:
        """The files of the sources that are made of files."""
        named = (hooks.find(source, hooks.FileNames) for source in self._below())
        return [name for source in named if source is not None for name in source.file_names()]


class AllRecords(RecordsOfFiles):
    """Records in which those of all sources below occur as they are."""

    def check_records(self) -> None:
        """Checks the types of all sources' leaves; see :class:`meshfeed._src.base.hooks.ChecksRecords`."""
        for source in self._below():
            checks = hooks.find(source, hooks.ChecksRecords)
            if checks is not None:
                checks.check_records()
