"""What is in each file of a source: from a manifest, from other hosts, or by looking at the file."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from meshfeed._src.base.errors import MeshfeedError, SourceError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources.files import manifest as manifests
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.manifest import DataManifest, FileEntry
from meshfeed._src.sources.files.paths import is_url
from meshfeed._src.sources.files.shards import Shard, Shards, check_cache, need_cache
from meshfeed._src.sources.files.shared_lookup import look_together

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

_log = logging.getLogger("meshfeed.sources.manifest")
F = TypeVar("F")
S = TypeVar("S", bound=Shard)


@dataclasses.dataclass(frozen=True)
class FileFormat(Generic[F]):
    """How a source describes its files.

    Attributes:
      source: name of the source, such as "ArrayRecord".
      inspect: looks at a file, given its path or URL.
      describe: returns what :meth:`inspect` found as a manifest lists it, and the version of the file.
      rebuild: returns the same without looking, given what a manifest lists of the file, its version (see ``Shard``), and
        the path of the manifest.
      select: returns the files that hold records, of those that the user's paths expand to.
    """

    source: str
    inspect: Callable[[str], F]
    describe: Callable[[F], tuple[FileEntry, str]]
    rebuild: Callable[[FileEntry, str, str], F]
    select: Callable[[Sequence[str]], list[str]] = list


@dataclasses.dataclass(frozen=True)
class FoundFiles(Generic[F]):
    """The files of a source.

    Attributes:
      files: what is in each.
      names: their paths and URLs.
      manifests: paths of the manifests that list some of them.
    """

    files: list[F]
    names: list[str]
    manifests: tuple[str, ...]


def find_files(paths: file_paths.Paths, cache: ShardCache | None, form: FileFormat[F]) -> FoundFiles[F]:
    """Expands ``paths`` to files, and finds out what is in each.

    A path that ends in ``.json`` is a manifest, and stands for the files that it lists. A manifest in the folder of the
    files is used too, for those that it lists. All other files are looked at.

    Raises:
      SettingsError: if ``cache`` is not a ShardCache, or there is a compressed file without a cache.
      SourceError: if there are no files, a file is missing, or a file has changed since the manifest was written; names
        the path or pattern.
      CorruptDataError: if a file or a manifest is damaged; names it.
    """
    check_cache(cache, source=form.source)
    names, given = _expand(paths, form)
    need_cache(names, cache, source=form.source)
    found = given or [one for one in file_paths.in_threads(_beside, _folders(names)) if one is not None]
    found = [one for one in found if one.source == form.source]
    listed = {entry.path: (entry, one.path) for one in found for entry in one.files}
    if cache is not None:
        cache.expect({path: entry.digest for path, (entry, _) in listed.items() if entry.digest and is_url(path)})

    def rebuild(name: str) -> F:
        entry, manifest = listed[name]
        return form.rebuild(entry, _version(entry, manifest, form.source), manifest)

    local = [name for name in names if not is_url(name)]
    remote = list(dict.fromkeys(name for name in names if is_url(name) and name not in listed))
    looked = file_paths.in_threads(lambda name: rebuild(name) if name in listed else form.inspect(name), local)
    known = {**dict(zip(local, looked, strict=True)), **_look(remote, form)}
    # What remote files are listed with costs no request: 10,000 calls in threads would take 0.1 s.
    files = [known[name] if name in known else rebuild(name) for name in names]
    return FoundFiles(files, names, tuple(one.path for one in found))


def _look(names: Sequence[str], form: FileFormat[F]) -> dict[str, F]:
    """Looks at remote files, together with the other hosts of the job."""
    here: dict[str, F] = {}

    def inspect(name: str) -> F:
        try:
            return form.inspect(name)
        except (MeshfeedError, OSError):
            file_paths.check_url(name, source=form.source)  # a missing file, or a folder, is named as such
            raise

    def look(numbers: Sequence[int]) -> list[JsonValue]:
        mine = [names[number] for number in numbers]
        found = file_paths.in_threads(inspect, mine)
        here.update(zip(mine, found, strict=True))
        described = [form.describe(file) for file in found]
        return [[entry.num_bytes, entry.num_records, version, dict(entry.details)] for entry, version in described]

    found = look_together(names, form.source, look) if names else []
    for name, (num_bytes, num_records, version, details) in zip(names, found, strict=True):
        if name not in here:
            here[name] = form.rebuild(FileEntry(name, num_bytes, num_records, None, details), version, "")
    return here


def find_shards(paths: file_paths.Paths, cache: ShardCache | None, form: FileFormat[S]) -> Shards[S]:
    """Returns the files of a source as :class:`Shards`; see :func:`find_files`."""
    found = find_files(paths, cache, form)
    return Shards(found.files, form.source, found.manifests)


def _expand(paths: file_paths.Paths, form: FileFormat[F]) -> tuple[list[str], list[DataManifest]]:
    """Returns the files, and the manifests that the user named."""
    items = [paths] if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable) else list(paths)
    if not any(_names_manifest(item) for item in items):
        return form.select(_without_manifests(file_paths.expand_paths(paths, source=form.source))), []
    names: list[str] = []
    given: list[DataManifest] = []
    for item in items:
        if not _names_manifest(item):
            names += form.select(file_paths.expand_paths(item, source=form.source))
            continue
        (path,) = file_paths.expand_paths(item, source=form.source) if not is_url(os.fspath(item)) else [str(item)]
        one = manifests.read_manifest(path)
        if one.source != form.source:
            raise SourceError(
                f"{form.source} got the manifest {path} of files for {one.source}. Pass it to meshfeed.sources.{one.source}."
            )
        given.append(one)
        names += [entry.path for entry in one.files]
    if not names:
        raise SourceError(f"the manifest {given[0].path} lists no files. Write it again with `meshfeed manifest`.")
    return names, given


def _names_manifest(item: object) -> bool:
    return isinstance(item, str | os.PathLike) and os.fspath(item).endswith(".json")


def _without_manifests(names: Sequence[str]) -> list[str]:
    """Returns the names that are not those of a manifest: a glob such as ``data/*`` matches it too."""
    return [name for name in names if not manifests.is_manifest(name)] or list(names)


def _folders(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(file_paths.split(name)[0] for name in names))


def _beside(folder: str) -> DataManifest | None:
    """Returns the manifest in a folder; None if there is none that meshfeed wrote."""
    path = folder + manifests.NAME
    if not is_url(path) and not os.path.isfile(path):
        return None
    try:
        content = file_paths.read_file(path, source="the manifest")
        if not manifests.is_meshfeeds(content):
            _log.debug("%s was not written by meshfeed and is not used", path)
            return None
    except (MeshfeedError, OSError) as error:  # stores without the right to list answer "forbidden"
        _log.debug("no manifest %s: %s", path, error)
        return None
    return manifests.parse_manifest(content, path)


def _version(entry: FileEntry, manifest: str, source: str) -> str:
    """Returns the version of a file, and checks that it has the size that the manifest lists.

    Makes no request: a remote file is checked when it is read.
    """
    if is_url(entry.path):
        return ""
    try:
        status = os.stat(entry.path)
    except FileNotFoundError as error:
        raise SourceError(
            f"{source}: there is no file {entry.path}, which the manifest {manifest} lists. Put it there, or write the "
            "manifest again with `meshfeed manifest`."
        ) from error
    if status.st_size != entry.num_bytes:
        raise SourceError(
            f"the {source} file {entry.path} has changed since the manifest {manifest} was written: {entry.num_bytes:,} "
            f"bytes then, {status.st_size:,} now. Write the manifest again with `meshfeed manifest`."
        )
    return str(status.st_mtime_ns)
