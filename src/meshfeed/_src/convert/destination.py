"""Where a conversion puts its output files and keeps its state: a folder on a disk, or a URL of an object store.

The state is a set of small files below :data:`FOLDER`, in the destination itself, so that any process that reaches it can run
tasks, and a killed job continues on any machine. Copies of the input and output files that are being written are in
:attr:`Disk.work`, a local folder: for a URL, one below the machine's temporary folder.

An object is there whole or not at all, but a store has neither renaming nor locks that end with a process. Hence:

- An output file is written to a local file and uploaded under its final name. The version that the store then reports is
  part of the entry of that file, and a file whose object has another size or version is written again.
- The run that started last owns the job. Its mark is checked before the state is removed and before the manifest is
  written; an earlier run that is still alive stops with an error. A kernel's lock keeps two runs on one machine apart.
- Uploads in parts that were killed are invisible objects that are billed. S3 lists them; they are aborted before a job
  continues and when it is complete. Google Cloud Storage and Azure drop them by themselves after a week.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from meshfeed._src.base.errors import MeshfeedError, SettingsError
from meshfeed._src.base.settings import local_path
from meshfeed._src.base.stores import abort_uploads, ask, find_objects, is_url, open_store
from meshfeed._src.base.writer import new_note, who
from meshfeed._src.sources.files.manifest import NAME, digest_of
from meshfeed._src.sources.files.paths import absolute, in_threads, version_of

_log = logging.getLogger("meshfeed.convert")

FOLDER = ".convert"
JOB = "job.json"
_OWNER = "owner.json"
_PART_BYTES = 32 << 20  # of an upload to S3; a file of two parts or more is uploaded in parts
_LIST_SECONDS = 5.0  # between two listings for a progress bar
_READ_ONLY = ("http", "https", "hf")

Destination: TypeAlias = "Disk | Bucket"


def destination_of(directory: str | os.PathLike[str]) -> Destination:
    """Returns the destination with a path or URL.

    Raises:
      SettingsError: nothing can be written to such a URL.
    """
    text = os.fspath(directory)
    scheme, is_any_url, _ = text.partition("://")
    if is_url(text) or (is_any_url and "::" in scheme):  # chained file systems of fsspec
        return Bucket(text)
    return Disk(str(local_path("to", text.removeprefix("file://"))))  # refuses what pathlib leaves of a URL


# ------------------------------------------------------------------------ a folder on a disk


class Disk:
    """A folder on a local or shared disk.

    Names of output files are relative to the destination, those of the state to :data:`FOLDER` in it.

    Attributes:
      name: the absolute path, or the URL of a :class:`Bucket`, for messages and paths.
    """

    def __init__(self, directory: str) -> None:
        # Without "..", as manifests and sources name files: names relative to the manifest are what can be moved.
        self._directory = pathlib.Path(absolute(directory))
        self.name = str(self._directory)

    def path(self, name: str) -> str:
        """Returns the path or URL of an output file."""
        return f"{self.name}/{name}"

    @property
    def work(self) -> pathlib.Path:
        """The local folder for what processes on other machines do not need."""
        return self._directory / FOLDER

    def sizes(self) -> dict[str, int | None]:
        """Returns the names of what is in the destination and their sizes in bytes; of a folder, such as the state, None.

        Raises:
          SettingsError: the destination is a file.
        """
        if not self._directory.exists():
            return {}
        if not self._directory.is_dir():
            raise SettingsError(f"--to {self.name} is a file. Name a new or empty folder.", setting="to")
        return {
            path.name: path.stat().st_size if path.is_file() else None
            for path in self._directory.iterdir()
            if path.exists()
        }

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes on this machine from converting to the same destination; removes folders that stay empty.

        Raises:
          SettingsError: one does.
        """
        is_new = not self._directory.exists()
        try:
            with _locked(self.work, self.name):
                yield
        finally:
            if is_new:
                with contextlib.suppress(OSError):
                    os.rmdir(self._directory)  # fails if there is anything in it

    def begin(self, job: bytes, *, is_new: bool) -> None:
        """Makes this run the owner, and removes what killed runs left unfinished.

        Args:
          job: the content of :data:`JOB`.
          is_new: whether the destination has none yet. All of the state then belongs to another job, whose removal was
            interrupted, and is removed. The caller writes :data:`JOB`, last of what it writes.
        """
        remove_unfinished(self.work)
        for left in self._directory.glob(f"{NAME}.*.part"):  # of a run that was killed while it wrote the manifest
            unlink(left)
        if is_new:
            for left in self.work.iterdir():
                unlink(left)
        _make_folders(self.work)

    def check_owner(self) -> None:
        """Raises SettingsError if another process has started to convert to the same URL; to a folder, the lock lets none."""

    def read(self, name: str) -> bytes | None:
        """Returns a file of the state; None if there is none."""
        try:
            return (self.work / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file of the state, in place of an earlier one, at once. See :func:`remove_unfinished`."""
        path = self.work / name
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(content)

    def names(self, folder: str) -> set[str]:
        """Returns the names of the files in a folder of the state."""
        with contextlib.suppress(FileNotFoundError):
            return set(os.listdir(self.work / folder))
        return set()

    def counter(self, folder: str) -> Callable[[], int]:
        """Returns a function that counts the JSON files in a folder of the state; cheap enough for a progress bar."""
        return lambda: _count(self.names(folder))

    def remove(self, names: Iterable[str]) -> None:
        """Removes files of the state, unless they are gone."""
        for name in names:
            (self.work / name).unlink(missing_ok=True)

    def put(self, part: pathlib.Path, name: str, entry: str, row: dict[str, Any]) -> None:
        """Makes a complete local file an output file, and writes ``row`` to the file ``entry`` of the state."""
        self.write(entry, json.dumps(row).encode())
        os.replace(part, self.path(name))

    def has(self, name: str, row: Mapping[str, Any]) -> bool:
        """Whether an output file is there as it was put with ``row``."""
        return os.path.exists(self.path(name))

    def remove_outputs(self, names: Iterable[str]) -> None:
        """Removes output files, unless they are gone."""
        for name in names:
            pathlib.Path(self.path(name)).unlink(missing_ok=True)

    def finish(self) -> None:
        """Makes the manifest, which has been written, durable, and removes the state."""
        sync(pathlib.Path(self.path(NAME)))
        self.clear()

    def clear(self) -> None:
        """Removes the state."""
        for _ in range(10):  # a worker of a killed run may create a last file in it
            shutil.rmtree(self.work, ignore_errors=True)
            if not self.work.exists():
                return
            time.sleep(0.1)
        shutil.rmtree(self.work)


@contextlib.contextmanager
def _locked(folder: pathlib.Path, name: str) -> Iterator[None]:
    """Locks a folder, which is created, and removed if it stays empty."""
    folder.mkdir(parents=True, exist_ok=True)
    number = os.open(folder, os.O_RDONLY)
    try:
        try:  # a lock of the kernel, because it ends with the process, even after SIGKILL
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(number), os.stat(folder)):
                raise BlockingIOError  # of a folder that the other process has removed since
        except (BlockingIOError, FileNotFoundError):
            raise SettingsError(
                f"another process is converting to {name}. Wait for it, or name another folder.", setting="to"
            ) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # fails if there is anything in it
    finally:
        os.close(number)


def _make_folders(work: pathlib.Path) -> None:
    for name in ("scans", "inputs", "parts", "entries"):
        (work / name).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def replacing(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path, and renames the file there to ``target`` unless there is an error."""
    with temporary(target.parent, target.name) as part:
        yield part
        os.replace(part, target)


@contextlib.contextmanager
def temporary(folder: pathlib.Path, name: str) -> Iterator[pathlib.Path]:
    """Yields a path in a folder, and removes the file after an error."""
    part = folder / f"{name}.{secrets.token_hex(4)}.part"
    try:
        yield part
    except BaseException:
        unlink(part)
        raise


def unlink(path: pathlib.Path) -> None:
    """Removes a file or a folder, unless it is gone."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: pathlib.Path) -> None:
    """Waits until the content of a file is on the disk; a power failure could otherwise leave it empty."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def remove_unfinished(folder: pathlib.Path) -> None:
    """Removes what killed tasks left, and JSON files that a power failure left empty; nothing in a copy of a folder."""
    for path in [*folder.glob("*.part"), *folder.glob("*/*.part")]:
        unlink(path)
    for path in [*folder.glob("*.json"), *folder.glob("*/*.json")]:
        if not path.stat().st_size:
            path.unlink()


# ------------------------------------------------------------------------ a URL


class Bucket:
    """A folder of an object store, by its URL; has the methods of :class:`Disk`.

    Raises:
      SettingsError: nothing can be written to such a URL.
    """

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")
        protocol = url.partition("://")[0]
        if protocol in _READ_ONLY or "::" in url:
            raise SettingsError(
                f"--to {url} is a URL that convert cannot write to. Expected a folder on a disk, or one in an object store, "
                "such as s3://bucket/records or gs://bucket/records. Name such a folder, and copy the result.",
                setting="to",
            )
        self._is_s3 = hasattr(open_store(self.name, MeshfeedError)[0], "list_multipart_uploads")
        self._owner = ""
        self._job: bytes | None = None

    def path(self, name: str) -> str:
        """See :class:`Disk`."""
        return f"{self.name}/{name}"

    @property
    def work(self) -> pathlib.Path:
        """See :class:`Disk`. Named after the job, or a copy of an older input could be taken for that of this one."""
        job = self.read(JOB)
        if job is None:
            raise MeshfeedError(
                f"there is no conversion in {self.name}: its state was removed, maybe by another process that converted to "
                "the same URL. Run the command again."
            )
        work = self._local() / digest_of(job).rpartition(":")[2]
        _make_folders(work)
        return work

    def _local(self) -> pathlib.Path:
        """Returns a folder of this user for this URL, on this machine."""
        folder = pathlib.Path(tempfile.gettempdir(), f"meshfeed-convert-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or folder.is_symlink():  # anybody may create names in /tmp
            raise SettingsError(
                f"{folder} belongs to another user. Set TMPDIR to a folder of yours, with room for the input.",
                setting="to",
            )
        mine = folder / digest_of(self.name.encode()).rpartition(":")[2]
        mine.mkdir(exist_ok=True)
        return mine

    def _ask(self, name: str, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Makes a request about an object below the URL; see :func:`meshfeed._src.base.stores.ask`."""
        return ask(self.path(name), method, *arguments, error=MeshfeedError, **keywords)

    def _find(self) -> dict[str, dict[str, Any]]:
        """Returns what the store reports of all objects below the URL, by their names relative to it."""
        return find_objects(self.name, MeshfeedError)

    # ------------------------------------------------------------------ see Disk

    def sizes(self) -> dict[str, int | None]:
        """See :class:`Disk`."""
        found: dict[str, int | None] = {}
        for name, info in self._find().items():
            if not name:
                raise SettingsError(f"--to {self.name} is a file. Name a new or empty folder.", setting="to")
            first, slash, _ = name.partition("/")
            found[first] = None if slash else int(info.get("size") or 0)
        return found

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """See :class:`Disk`."""
        with _locked(self._local(), self.name):
            yield

    def begin(self, job: bytes, *, is_new: bool) -> None:
        """See :class:`Disk`."""
        if is_new:
            self._clear_state()
        self._abort_uploads()
        self._owner = new_note()
        self.write(_OWNER, self._owner.encode())
        self._job = job
        remove_unfinished(self.work)
        _make_folders(self.work)

    def check_owner(self) -> None:
        """See :class:`Disk`."""
        if not self._owner:
            return
        found = (self.read(_OWNER) or b"").decode()
        if found == self._owner:
            return
        raise SettingsError(
            f"{who(found)} has started to convert to {self.name} since this process did. Wait for it: its result is the "
            "same.",
            setting="to",
        )

    def read(self, name: str) -> bytes | None:
        """See :class:`Disk`."""
        if name == JOB and self._job is not None:
            return self._job
        try:
            content = self._ask(f"{FOLDER}/{name}", "cat_file")
        except FileNotFoundError:
            return None
        if name == JOB:
            self._job = content
        return content

    def write(self, name: str, content: bytes) -> None:
        """See :class:`Disk`."""
        self._store(f"{FOLDER}/{name}", "pipe_file", content)

    def _store(self, name: str, method: str, content: object, **keywords: Any) -> None:
        try:
            self._ask(name, method, content, **keywords)
        except FileNotFoundError as error:
            raise SettingsError(
                f"--to {self.name} cannot be written: {error}. Create the bucket, or name another URL.", setting="to"
            ) from error

    def names(self, folder: str) -> set[str]:
        """See :class:`Disk`."""
        start = f"{FOLDER}/{folder}/"
        return {name.removeprefix(start) for name in self._find() if name.startswith(start)}

    def counter(self, folder: str) -> Callable[[], int]:
        """See :class:`Disk`. Lists the state once in some seconds."""
        last, listed = 0, -_LIST_SECONDS

        def count() -> int:
            nonlocal last, listed
            if time.monotonic() > listed + _LIST_SECONDS:
                last, listed = _count(self.names(folder)), time.monotonic()
            return last

        return count

    def remove(self, names: Iterable[str]) -> None:
        """See :class:`Disk`."""
        self.remove_outputs([f"{FOLDER}/{name}" for name in names])

    def remove_outputs(self, names: Iterable[str]) -> None:
        """See :class:`Disk`."""
        in_threads(self._remove, list(names))

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask(name, "rm_file")

    def put(self, part: pathlib.Path, name: str, entry: str, row: dict[str, Any]) -> None:
        """See :class:`Disk`."""
        num_bytes = part.stat().st_size
        settings = {"chunksize": _PART_BYTES} if self._is_s3 else {}
        self._store(name, "put_file", str(part), num_bytes=num_bytes, **settings)
        info = self._info(name)
        if info is None or info.get("size") != num_bytes:
            found = "is missing" if info is None else f"has {info.get('size')} bytes"
            raise OSError(f"{self.path(name)} {found} after an upload of {num_bytes:,} bytes")
        self.write(entry, json.dumps(row | {"version": version_of(info)}).encode())
        unlink(part)

    def _info(self, name: str) -> dict[str, Any] | None:
        try:
            return self._ask(name, "info")
        except FileNotFoundError:
            return None

    def has(self, name: str, row: Mapping[str, Any]) -> bool:
        """See :class:`Disk`."""
        info = self._info(name)
        return info is not None and (info.get("size"), version_of(info)) == (row["num_bytes"], row.get("version"))

    def finish(self) -> None:
        """See :class:`Disk`."""
        self._abort_uploads()
        self.clear()

    def clear(self) -> None:
        """See :class:`Disk`. Not that of a process that has started since."""
        if self._owner:
            self.check_owner()
        self._clear_state()
        shutil.rmtree(self._local(), ignore_errors=True)

    def _clear_state(self) -> None:
        for _ in range(10):  # a request of a killed run may arrive late
            # The job last: what is left without it belongs to no job.
            names = [name for name in self._find() if name.startswith(f"{FOLDER}/")]
            if not names:
                return
            self.remove_outputs([name for name in names if not _is_job(name)])
            self.remove_outputs([name for name in names if _is_job(name)])

    def _abort_uploads(self) -> None:
        try:
            abort_uploads(self.name, MeshfeedError)
        except FileNotFoundError:
            return  # the first write says so
        except (OSError, MeshfeedError) as error:
            _log.warning(
                "uploads that earlier runs left unfinished cannot be listed: %s Without the right to list them, let a rule "
                "of the bucket's life cycle abort them.",
                error,
            )


def _count(names: Iterable[str]) -> int:
    return sum(name.endswith(".json") for name in names)


def _is_job(name: str) -> bool:
    return name == f"{FOLDER}/{JOB}"
