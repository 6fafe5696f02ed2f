"""What is in each file of a source: from a manifest, from other hosts, or by looking at the file.

The hosts of a job divide the files of a store, look at each once, and exchange what they found. Sources are created on every
host, usually at about the same time, but nothing guarantees it: a host may be late, create other sources, or none. So a host
never depends on the others. It waits for them about as long as looking at their files itself would take, and then does that.

Host h of H looks at files h, h + H, h + 2H, …, and publishes what it found; the lowest of these hosts joins the parts and
publishes the whole. Files are exchanged in blocks, each a :class:`~meshfeed._src.base.reduction.Reduction`, which keeps
values below about 1 MB. The keys contain a digest of the names, and how often this process has looked at the same names.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import xxhash

from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import KeyValueStore
from meshfeed._src.base.errors import Failure, MeshfeedError, SourceError
from meshfeed._src.base.reduction import Reduction, leave
from meshfeed._src.base.stores import is_unreachable
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources.files import manifest as manifests
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import RemoteBytes, identify
from meshfeed._src.sources.files.manifest import DataManifest, FileEntry
from meshfeed._src.sources.files.open_files import Descriptor
from meshfeed._src.sources.files.paths import is_url, name_bytes
from meshfeed._src.sources.files.shard import Shard, check_cache, need_cache
from meshfeed._src.sources.files.shards import Shards

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

_log = logging.getLogger("meshfeed.sources.lookup")
S = TypeVar("S", bound=Shard)


@dataclasses.dataclass(frozen=True)
class FileFormat(Generic[S]):
    """How a source describes its files.

    Attributes:
      source: name of the source, such as "ArrayRecord".
      inspect: looks at a file, given its path or URL.
      rebuild: returns the same without looking, given what a manifest lists of the file, its version (see ``Shard``), and
        the path of the manifest.
      select: returns the files that hold records, of those that the user's paths expand to.
    """

    source: str
    inspect: Callable[[str], S]
    rebuild: Callable[[FileEntry, str, str], S]
    select: Callable[[Sequence[str]], list[str]] = list


def find_files(paths: file_paths.Paths, cache: ShardCache | None, form: FileFormat[S]) -> tuple[list[S], list[str]]:
    """Returns the files that ``paths`` expand to, with what is in each, and the paths of the manifests that list some.

    A path that ends in ``.json`` is a manifest, and represents the files that it lists. A manifest in the folder of the
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
    found = given or _beside(names, form.source)
    listed = {entry.path: (entry, one.path) for one in found for entry in one.files}
    if cache is not None:
        digests = {path: entry.digest for path, (entry, _) in listed.items() if entry.digest and is_url(path)}
        # The indexes of Megatron are read through the cache too.
        cache.renew([*names, *(f"{name[:-4]}.idx" for name in names if name.endswith(".bin"))], digests)
    return _find_each(names, listed, form, cache), [one.path for one in found]


def _find_each(
    names: Sequence[str], listed: Mapping[str, tuple[FileEntry, str]], form: FileFormat[S], cache: ShardCache | None
) -> list[S]:
    """Returns what is in each file, given those that manifests list, each with the path of its manifest."""

    def find(name: str) -> S:
        if name not in listed:
            return form.inspect(name)
        entry, manifest = listed[name]
        return form.rebuild(entry, _version(entry, manifest, form.source), manifest)

    # Local files are not divided among hosts: a look takes 0.1 ms, and each host may have its own disk.
    local = [name for name in names if not is_url(name)]
    remote = list(dict.fromkeys(name for name in names if is_url(name) and name not in listed))
    known = {**dict(zip(local, file_paths.in_threads(find, local), strict=True)), **_look(remote, form, cache)}
    # What remote files are listed with costs no request: 10,000 calls in threads would take 0.1 s.
    return [known[name] if name in known else find(name) for name in names]


def _look(names: Sequence[str], form: FileFormat[S], cache: ShardCache | None) -> dict[str, S]:
    """Looks at remote files, together with the other hosts of the job."""
    here: dict[str, S] = {}

    def inspect(name: str) -> S:
        try:
            return form.inspect(name)
        except (MeshfeedError, OSError) as error:
            if is_unreachable(error):
                raise
            file_paths.check_url(name, source=form.source)  # a missing file, or a folder, is named as such
            raise

    def look(numbers: Sequence[int]) -> list[JsonValue]:
        mine = [names[number] for number in numbers]
        found = file_paths.in_threads(inspect, mine)
        here.update(zip(mine, found, strict=True))
        stored = [cache and cache.looked_up(name) for name in mine]
        return [
            [file.num_bytes, file.num_records, file.version, one and list(one), file.details()]
            for file, one in zip(found, stored, strict=True)
        ]

    found = look_together(names, form.source, look) if names else []
    for name, (num_bytes, num_records, version, stored, details) in zip(names, found, strict=True):
        if name not in here:
            if cache is not None and stored is not None:
                cache.remember(name, file_paths.StoredFile(*stored))
            here[name] = form.rebuild(FileEntry(name, num_bytes, num_records, None, details), version, "")
    return here


def look_at(
    name: str, cache: ShardCache | None, *, source: str, part: slice | None = None
) -> tuple[Descriptor | RemoteBytes, str]:
    """Returns a file from which its header or footer can be read, without fetching the rest of a remote one, and its version.

    ``part``, the header or the footer, is that of :func:`meshfeed._src.sources.files.direct.identify`.
    """
    if is_url(name):
        return identify(name, cache, source=source, part=part)
    try:
        opened = Descriptor(name)
    except FileNotFoundError as error:
        raise SourceError(f"{source}: there is no file {name}. Check the path.") from error
    return opened, str(opened.status.st_mtime_ns)


def find_shards(paths: file_paths.Paths, cache: ShardCache | None, form: FileFormat[S]) -> Shards[S]:
    """Returns the files of a source as :class:`Shards`; see :func:`find_files`."""
    files, found = find_files(paths, cache, form)
    return Shards(files, form.source, found)


def _expand(paths: file_paths.Paths, form: FileFormat[S]) -> tuple[list[str], list[DataManifest]]:
    """Returns the files, and the manifests that the user named."""
    items = file_paths.as_list(paths)
    if not any(_names_manifest(item) for item in items):
        found = file_paths.expand_paths(items, source=form.source)  # `paths` may be an exhausted iterator
        # A glob such as ``data/*`` matches a manifest too.
        return form.select([name for name in found if not manifests.is_manifest(name)] or found), []
    names: list[str] = []
    given: list[DataManifest] = []
    for item in items:
        if not _names_manifest(item):
            names += form.select(file_paths.expand_paths(item, source=form.source))
            continue
        for path in file_paths.expand_paths(item, source=form.source):
            one = manifests.read_manifest(path)
            if one.source != form.source:
                raise SourceError(
                    f"{form.source} got the manifest {path} of files for {one.source}. Pass it to "
                    f"meshfeed.sources.{one.source}."
                )
            given.append(one)
            names += [entry.path for entry in one.files]
    if not names:
        raise SourceError(f"the manifest {given[0].path} lists no files. Write it again with `meshfeed manifest`.")
    return names, given


def _names_manifest(item: object) -> bool:
    return isinstance(item, str | os.PathLike) and os.fspath(item).endswith(".json")


def _beside(names: Sequence[str], source: str) -> list[DataManifest]:
    """Returns the manifests of a source in the folders of files."""
    folders = dict[str, bool]()
    for folder, name in map(file_paths.split, names):
        folders[folder] = folders.get(folder, False) or name.startswith("data-")
    found = file_paths.in_threads(lambda one: _manifest_in(*one, source), list(folders.items()))
    return [one for one in found if one is not None and one.source == source]


_CONVERTS = ".convert/job.json"  # of meshfeed convert, until all files are there


def _manifest_in(folder: str, is_converted: bool, source: str) -> DataManifest | None:
    """Returns the manifest in a folder; None if there is none that meshfeed wrote.

    ``is_converted`` is whether its files are named as those that ``meshfeed convert`` writes, the manifest last.
    """
    content = _content(folder + manifests.NAME, source)
    if content is None:
        job = _content(folder + _CONVERTS, source) if is_converted else None
        if job is not None and job.startswith(b"{"):  # some servers answer with a page for any name
            _log.warning(
                "%s: the conversion to %s is not complete, so records may be missing. Run the same `meshfeed convert` "
                "command again, to its end",
                *(source, folder),
            )
        return None
    if not manifests.is_meshfeeds(content):
        _log.debug("%s was not written by meshfeed and is not used", folder + manifests.NAME)
        return None
    return manifests.parse_manifest(content, folder + manifests.NAME)


def _content(path: str, source: str) -> bytes | None:
    if not is_url(path) and not os.path.isfile(path):
        return None
    try:
        return file_paths.read_file(path, source=source)
    except (MeshfeedError, OSError) as error:  # stores without the right to list answer "forbidden"
        if is_unreachable(error):  # the files are in the same store, which would be tried as long again
            raise
        _log.debug("no %s: %s", path, error)
        return None


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
    # Not the modification time, which is not listed: it changes when a data set is copied.
    if status.st_size != entry.num_bytes:
        change = f"{entry.num_bytes:,} bytes then, {status.st_size:,} now"
        raise file_paths.changed(f"the {source} file {entry.path}", change, manifest)
    return str(status.st_mtime_ns)


_BLOCK_FILES = 8192
_MIN_WAIT_SECONDS, _MAX_WAIT_SECONDS = 10.0, 60.0

Look = Callable[[Sequence[int]], list[JsonValue]]
"""Looks at files, given their numbers; returns what is in each as JSON. Raises for the first that cannot be read."""


class _Job(NamedTuple):
    """The hosts that look, and the prefix of the keys in their key-value store."""

    store: KeyValueStore
    prefix: str
    host: int
    num_hosts: int

    def looking_at(self, block: range) -> list[int]:
        """The hosts that look at files of a block; with thousands of hosts, a source may have fewer files."""
        return sorted({number % self.num_hosts for number in block})


def look_together(names: Sequence[str], source: str, look: Look) -> list[JsonValue]:
    """Returns what is in each file, as JSON; looks at about ``len(names) / num_hosts`` of them here.

    ``names`` are URLs, in the same order on all hosts.

    Raises:
      Exception: if a file cannot be read, the same on all hosts: that of the lowest host that met one.
    """
    job = _job(names, source)
    if job is None:
        return look(range(len(names)))
    try:
        blocks = _exchange(job, len(names), look)
    except Exception as error:  # of the key-value store; failures of files are values
        _log.warning("hosts cannot exchange what they found in files (%s); looking at all %d here", error, len(names))
        return look(range(len(names)))
    finally:
        leave(job.store, job.prefix, job.num_hosts, wait=False)
    return [file for block in blocks for file in _unpack(block)]


def _job(names: Sequence[str], source: str) -> _Job | None:
    """Returns the job if there is something to divide among its hosts."""
    # Not jax.process_count(), which initializes the backend and so waits for all hosts.
    found, store = coordination.place_in_job(), coordination.key_value_store()
    if (
        found is None
        or store is None
        or found[1] < 2
        or len(names) < 2
        or os.environ.get(coordination.SHARED_LOOKUP) == "0"
    ):
        return None
    digest = xxhash.xxh3_128_hexdigest(name_bytes("\n".join([source, *names])))
    return _Job(store, f"meshfeed/files/{digest}/{coordination.next_use(f'files/{digest}')}", *found)


def _exchange(job: _Job, num_files: int, look: Look) -> list[JsonValue]:
    """Returns the files of each block, or a failure, for :func:`_unpack`."""
    started = time.monotonic()
    found, failure = _try_to_look(look, range(job.host, num_files, job.num_hosts))
    # A program may create a source on some hosts only. Waiting for the others must not take longer than looking at all files.
    alone = (time.monotonic() - started) * job.num_hosts
    wait_seconds = min(max(alone, _MIN_WAIT_SECONDS), _MAX_WAIT_SECONDS)

    blocks = [range(first, min(first + _BLOCK_FILES, num_files)) for first in range(0, num_files, _BLOCK_FILES)]
    rounds = [
        (Reduction(job.store, f"{job.prefix}/{number}", job.looking_at(block), job.host), block)
        for number, block in enumerate(blocks)
    ]
    for reduction, block in rounds:  # a failure is part of every block: the first one ends it all
        if job.host in job.looking_at(block):
            reduction.publish(failure or _pack([found[number] for number in block if number in found]))
    deadline = time.monotonic() + wait_seconds
    return [_join(job, reduction, block, look, deadline, wait_seconds) for reduction, block in rounds]


def _try_to_look(look: Look, numbers: Sequence[int]) -> tuple[dict[int, JsonValue], JsonValue]:
    """Returns what is in each file, by its number, and the failure or None."""
    try:
        return dict(zip(numbers, look(numbers), strict=True)) if numbers else {}, None
    except Exception as error:
        return {}, {"failure": Failure.exact(error).to_json()}


def _join(job: _Job, reduction: Reduction, block: range, look: Look, deadline: float, wait_seconds: float) -> JsonValue:
    """Returns the files of one block, or the failure of a host that looked at some of them."""
    if reduction.is_reducer:
        return reduction.announce(_complete(job, reduction, block, look, deadline))["result"]
    # The reducer may have to look at the files of late hosts first.
    announcement = reduction.wait(deadline + wait_seconds)
    return announcement["result"] if announcement is not None else _complete(job, reduction, block, look, 0.0)


def _complete(job: _Job, reduction: Reduction, block: range, look: Look, deadline: float) -> JsonValue:
    """Joins what the hosts publish until a deadline, and looks at the files of those that do not."""
    values = reduction.collect(deadline)
    failures = [(host, value["failure"]) for host, value in values.items() if "failure" in value]
    if failures:
        return {"failure": min(failures)[1]}
    late = [host for host in job.looking_at(block) if host not in values]
    missing = [number for number in block if number % job.num_hosts in late]
    if missing:
        _log.warning(
            "%s did not look at their part of %d files in time; looking at them here. Create the source on all hosts, or "
            "set %s=0",
            coordination.format_hosts(late), len(block), coordination.SHARED_LOOKUP,
        )  # fmt: skip
    found, failure = _try_to_look(look, missing)
    if failure is not None:
        return failure
    for host, value in values.items():
        numbers = [number for number in block if number % job.num_hosts == host]
        found |= zip(numbers, _unpack(value), strict=True)
    return _pack([found[number] for number in block])


def _pack(files: Sequence[JsonValue]) -> JsonValue:
    """Returns files as JSON; the last item of most is the same and is stored once."""
    details: dict[str, int] = {}
    rows = [[*file[:-1], details.setdefault(json.dumps(file[-1]), len(details))] for file in files]
    return {"rows": rows, "details": [json.loads(text) for text in details]}


def _unpack(value: JsonValue) -> list[JsonValue]:
    if "failure" in value:
        raise Failure.from_json(value["failure"]).exception()
    return [[*row[:-1], value["details"][row[-1]]] for row in value["rows"]]
