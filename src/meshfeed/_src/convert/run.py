"""Runs a conversion: prepares or continues the job, lets an engine run its tasks, and completes it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import os
import pathlib
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from meshfeed._src.base.errors import MeshfeedError, SettingsError, SourceError, StalledError, missing_package
from meshfeed._src.convert.example import KIND_NAMES, feature_kinds
from meshfeed._src.convert.formats import FORMATS, recognize, remote_files
from meshfeed._src.convert.inputs import Input, TypesChanged
from meshfeed._src.convert.job import (
    FOLDER,
    TOKENIZER,
    Conversion,
    Phase,
    discard_plan,
    make_task,
    remove_unfinished,
    run_task,
    sync,
    unlink,
    version_of_input,
    write_json,
)
from meshfeed._src.convert.values import Measure, measure_examples
from meshfeed._src.convert.writers import (
    Settings,
    eod_id,
    load_tokenizer,
    manifest_details,
    read_example,
    token_format,
)
from meshfeed._src.reading.workers import WorkerPool
from meshfeed._src.sources.chat import tokenizer as tokenizer_files
from meshfeed._src.sources.decode import BYTES, FLOAT, INT64
from meshfeed._src.sources.files.manifest import NAME, digest_of, read_manifest, write_manifest
from meshfeed._src.sources.files.paths import identify_files, in_threads, is_url

_log = logging.getLogger("meshfeed.convert")
_POLL_SECONDS = 0.02  # a pool waits for one worker at a time
_TICK_SECONDS = 0.02  # of the clock that stamps files, at most
_SAMPLE = 100  # records, spread over all, that show the features of Examples that are copied
_VERSION = 2  # of job.json and of what the manifest keeps of a job


Engine: TypeAlias = Callable[[str, Phase, Sequence[int]], None]
"""Runs the tasks with the given numbers of a phase of the job in a folder, in any order and anywhere.

Returns when all tasks are done; raises the error of one that failed.
"""

Show: TypeAlias = Callable[[Conversion, Phase], contextlib.AbstractContextManager[object]]
"""Returns a context in which the progress of a phase is shown."""


@dataclasses.dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
      directory: the folder.
      format: the format of the input.
      num_inputs: number of input files or folders.
      num_records: number of records of the input.
      num_tokens: number of tokens written, with the encoding "tokens"; else None.
      num_bytes: size of the output files in bytes.
      files: names of the output files.
      features: name → kind of what a record holds: its features; with "bytes", the column; with "tokens", the dtype.
      values: what the features hold in all records, or in a sample of Examples that were copied; empty with "tokens", and
        if an earlier version wrote the files.
      was_complete: whether the folder held the result already.
    """

    directory: str
    format: str
    num_inputs: int
    num_records: int
    num_tokens: int | None
    num_bytes: int
    files: Sequence[str]
    features: dict[str, Any]
    values: dict[str, Measure]
    was_complete: bool


def hide_progress(_job: Conversion, _phase: Phase) -> contextlib.AbstractContextManager[object]:
    """A :data:`Show` without a display."""
    return contextlib.nullcontext()


def convert(
    data: Sequence[str],
    directory: str,
    settings: Settings,
    engine: Engine,
    *,
    named_format: str | None = None,
    show: Show = hide_progress,
) -> Converted:
    """Converts files to ArrayRecord or tokens.

    Args:
      data: paths, globs, folders and URLs.
      directory: the folder for the output files: new, empty, or that of an unfinished conversion with the same
        arguments, which is continued.
      settings: what to write.
      engine: runs the tasks.
      named_format: the format of the input; None to recognize it.
      show: shows the progress.

    Raises:
      SettingsError: a setting is invalid, or the folder is in use or holds something else.
      SourceError: the input cannot be read, or does not fit the settings.
      OSError: a file cannot be read or written.
    """
    if is_url(directory):
        raise SettingsError(
            f"--to {directory} is a URL, and convert writes to a local or shared disk. Name a folder there, and copy the "
            "result to the URL.",
            setting="to",
        )
    directory = directory.removeprefix("file://")
    tokenizer = _check(settings)
    kind, paths = recognize(data, named_format)
    description = _describe(kind, paths, settings, tokenizer)
    finished = _finished(directory, description)
    if finished is not None:
        return finished
    with _lock(directory):
        job = _prepare(directory, description, tokenizer)
        try:
            _run(directory, engine, show)
        except BaseException as error:
            remove_unfinished(job.folder)
            if _is_empty(job, error):
                shutil.rmtree(job.folder)
            raise
        return _complete(Conversion(directory))


def _is_empty(job: Conversion, error: BaseException) -> bool:
    """Whether there is nothing to continue from: no output file, and no download unless the job cannot succeed."""
    downloaded = any(map(is_url, job.paths)) and any((job.folder / "inputs").iterdir())
    kept = downloaded and not isinstance(error, MeshfeedError)
    return not kept and not any(job.directory.glob("data-*"))


def _check(settings: Settings) -> bytes | None:
    """Checks the settings, and returns the content of the tokenizer if there is one."""
    tokens = settings.encoding == "tokens"
    if tokens and settings.tokenizer is None:
        raise SettingsError("--encoding tokens needs --tokenizer FILE, a tokenizer.json.", setting="tokenizer")
    for name, value in (("tokenizer", settings.tokenizer), ("eod", settings.eod)):
        if value is not None and not tokens:
            raise SettingsError(f"--{name} applies to --encoding tokens only. Add that, or leave it out.", setting=name)
    if settings.column is not None and settings.encoding == "example":
        raise SettingsError(
            "--column names the one column of --encoding bytes or tokens. For Examples, use --columns.",
            setting="column",
        )
    if settings.tokenizer is None:
        return None
    tokenizer = load_tokenizer(settings.tokenizer)
    if settings.eod is not None:
        eod_id(tokenizer, settings.eod)
    return tokenizer_files.read(settings.tokenizer)


# ------------------------------------------------------------------------ the folder


def _describe(kind: str, paths: Sequence[str], settings: Settings, tokenizer: bytes | None) -> dict[str, Any]:
    """Returns the job as JSON: what must be the same to continue it."""
    reader = FORMATS[kind](settings.columns)
    inputs = in_threads(lambda path: _input(reader, path), paths)
    made = dataclasses.asdict(settings) | {"columns": None if settings.columns is None else list(settings.columns)}
    return {
        "version": _VERSION,
        "format": kind,
        "inputs": inputs,
        "bytes": sum(size for _, size, _ in inputs),
        "tokenizer": None if tokenizer is None else digest_of(tokenizer),
        "settings": made,
    }


def _input(reader: Input, path: str) -> list[Any]:
    """Returns path, size and version of an input."""
    if is_url(path):
        num_bytes = sum(file.num_bytes for file in remote_files(path).values())
        return [path, num_bytes, version_of_input(reader, path)]
    latest = max((os.stat(name).st_mtime for name in reader.files(path)), default=0.0)
    if 0 <= time.time() - latest < _TICK_SECONDS:
        time.sleep(_TICK_SECONDS)  # a further write now could leave the time as it is
    return [path, reader.num_bytes(path), version_of_input(reader, path)]


def _identity(description: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of the job that the manifest of the output files keeps."""
    inputs = description["inputs"]
    files = identify_files([path for path, _, _ in inputs], [size for _, size, _ in inputs])
    versions = digest_of(json.dumps([version for _, _, version in inputs]).encode())
    kept = {name: description[name] for name in ("version", "format", "tokenizer", "settings")}
    return kept | {"inputs": files, "versions": versions}


def _finished(directory: str, description: dict[str, Any]) -> Converted | None:
    """Returns the result of an earlier run; None if there is something to do.

    Raises:
      SettingsError: the folder holds something else.
    """
    path = pathlib.Path(directory)
    if path.exists() and not path.is_dir():
        raise SettingsError(f"--to {directory} is a file. Name a new or empty folder.", setting="to")
    if not path.exists() or not any(path.iterdir()):
        return None
    converted, wanted = _converted_from(path), _identity(description)
    if (
        converted is not None and converted.get("version") == 1
    ):  # it kept neither versions nor a digest of the tokenizer
        wanted = {name: wanted[name] for name in ("format", "inputs", "settings")} | {"version": 1}
        if converted == wanted:
            _log.warning(
                "%s was converted by an earlier version, which did not store versions of the input and the tokenizer: "
                "only names, sizes and settings were compared. If one was edited, convert to a new folder.",
                directory,
            )
    if converted == wanted:
        _check_files(path)
        _remove(path / FOLDER)  # exists if the run was killed after it had written the manifest
        return _result(directory, description, was_complete=True)
    if converted is None and (path / FOLDER).exists():
        return None
    count = len(list(path.iterdir()))
    what = f"{count:,} other file{'' if count == 1 else 's'}"
    if converted is not None:
        what = f"the result of a conversion {_difference(converted, wanted)}"
    raise SettingsError(
        f"the folder {directory} holds {what}. Name a new folder, or remove what it holds.", setting="to"
    )


def _check_files(directory: pathlib.Path) -> None:
    """Raises SettingsError if a file of a finished conversion is missing or has a different size."""
    for file in read_manifest(str(directory / NAME)).files:
        size = os.path.getsize(file.path) if os.path.exists(file.path) else None
        if size != file.num_bytes:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {file.num_bytes:,}"
            raise SettingsError(
                f"the conversion in {directory} was complete, but its file {file.path} {found}. Put it back, or remove what "
                "the folder holds and convert again.",
                setting="to",
            )


def _converted_from(directory: pathlib.Path) -> dict[str, Any] | None:
    path = directory / NAME
    if not path.exists():
        return None
    try:
        return dict(read_manifest(str(path)).made["from"])
    except (MeshfeedError, KeyError, IndexError, TypeError):
        return None


@contextlib.contextmanager
def _lock(directory: str) -> Iterator[None]:
    """Keeps other processes from converting to the same folder, and removes folders that stay empty."""
    folder = pathlib.Path(directory) / FOLDER
    is_new = not pathlib.Path(directory).exists()
    folder.mkdir(parents=True, exist_ok=True)
    number = os.open(folder, os.O_RDONLY)
    try:
        try:  # a lock of the kernel, because it ends with the process, even after SIGKILL
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"another process is converting to {directory}. Wait for it, or name another folder.", setting="to"
            ) from None
        yield
    finally:
        os.close(number)
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(directory)  # fails if there is anything in it


def _prepare(directory: str, description: dict[str, Any], tokenizer: bytes | None) -> Conversion:
    """Starts a job, or continues the one in the folder."""
    job = Conversion(directory)
    path = job.folder / "job.json"
    remove_unfinished(job.folder)
    for left in job.directory.glob(f"{NAME}.*.part"):  # of a run that was killed while it wrote the manifest
        unlink(left)
    is_new = not path.exists()
    if is_new:  # anything else in it belongs to another job, whose removal was interrupted
        for left in job.folder.iterdir():
            unlink(left)
    for name in ("scans", "inputs", "parts", "entries"):
        (job.folder / name).mkdir(exist_ok=True)
    if is_new:
        if tokenizer is not None:
            (job.folder / TOKENIZER).write_bytes(tokenizer)
        write_json(path, description)
    elif difference := _difference(job.description, description):
        raise SettingsError(
            f"the folder {directory} holds an unfinished conversion {difference}. Use the same to continue, name another "
            "folder, or remove this one.",
            setting="to",
        )
    return job


def _difference(found: dict[str, Any], given: dict[str, Any]) -> str:
    """Returns what distinguishes the conversion in the folder from the given one; nothing if they are the same."""
    for name, what in (
        ("version", "version of meshfeed"),
        ("format", "format"),
        ("inputs", "input, or of files that have changed"),
        ("versions", "input, or of files that have changed"),
        ("tokenizer", "tokenizer, or of one that has changed"),
    ):
        if found.get(name) != given.get(name):
            return f"of another {what}"
    before, now = found.get("settings", {}), given["settings"]
    names = [name for name, value in now.items() if before.get(name) != value]
    there, here = (", ".join(_option(name, settings.get(name)) for name in names) for settings in (before, now))
    return f"{there}, and this one is {here}" if names else ""


def _option(name: str, value: object) -> str:
    text = ",".join(value) if isinstance(value, list) else value
    return f"without --{name}" if value is None else f"with --{name} {text}"


def _run(directory: str, engine: Engine, show: Show) -> None:
    """Runs the tasks that are missing; twice if the types of the first blocks were not enough."""
    while True:
        job = Conversion(directory)
        with show(job, "scan"):
            engine(directory, "scan", job.missing_scans())
        try:
            num_shards = job.plan.num_shards
        except TypesChanged:
            discard_plan(job)  # first: a killed run must not leave scans of the first blocks as those of all
            job.ask_for_all_types()
            continue
        if not job.types_changed:
            np.zeros(num_shards, np.int64).tofile(job.folder / "progress")
            with show(job, "write"):
                engine(directory, "write", job.missing_shards())
        if not job.types_changed:
            job.check_read()  # once: after each task would look at all files of a folder for each output file
            return
        discard_plan(job)


def _complete(job: Conversion) -> Converted:
    """Writes the manifest and removes the job's folder."""
    description, settings = job.description, job.settings
    features, values = describe_features(job)
    classes = [(job.load_scan(number).more or {}).get("classes") for number in range(len(job.paths))]
    converted = {
        "from": _identity(description),
        "records": int(job.plan.bounds[-1]),
        "features": features,
        "values": values,
    }
    converted |= {"classes": classes[0]} if classes[0] else {}
    source, details = manifest_details(settings)
    manifest = job.directory / NAME
    write_manifest(str(manifest), source, job.entries(details), made=converted)
    sync(manifest)
    _remove(job.folder)
    return _result(str(job.directory), description, was_complete=False)


def _remove(folder: pathlib.Path) -> None:
    for _ in range(10):  # a worker of a killed run may create a last file in it
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    shutil.rmtree(folder)


def _result(directory: str, description: dict[str, Any], *, was_complete: bool) -> Converted:
    manifest = read_manifest(str(pathlib.Path(directory) / NAME))
    converted = manifest.made
    return Converted(
        directory=directory,
        format=description["format"],
        num_inputs=len(description["inputs"]),
        num_records=converted["records"],
        num_tokens=None if manifest.source == "ArrayRecord" else sum(file.num_records for file in manifest.files),
        num_bytes=sum(file.num_bytes for file in manifest.files),
        files=[os.path.basename(file.path) for file in manifest.files],
        features=dict(converted["features"]),
        values=dict(converted.get("values", {})),
        was_complete=was_complete,
    )


# ------------------------------------------------------------------------ on this machine


def run_here(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
    """An :data:`Engine`: one task after the other, in this process."""
    for number in numbers:
        run_task(directory, phase, number)


def run_in_workers(directory: str, phase: Phase, numbers: Sequence[int], *, num_workers: int) -> None:
    """An :data:`Engine` once ``num_workers`` is set: tasks in worker processes of this machine; 1 for this process."""
    num_workers = min(num_workers, len(numbers))
    if num_workers <= 1:
        run_here(directory, phase, numbers)
        return
    task = pickle.dumps(functools.partial(make_task, directory, phase))
    pool: WorkerPool[int, None] = WorkerPool(num_workers, task, name="convert", gc_every=0)
    try:
        _work(pool, list(reversed(numbers)))
    finally:
        pool.close()


def _work(pool: WorkerPool[int, None], waiting: list[int]) -> None:
    """Gives each worker the next number when it is done with one."""
    busy = set(range(pool.num_workers))
    for worker in busy:
        pool.submit(worker, waiting.pop())
    while busy:
        for worker in sorted(busy):
            with contextlib.suppress(StalledError):
                pool.result(worker, _POLL_SECONDS)
                if waiting:
                    pool.submit(worker, waiting.pop())
                else:
                    busy.remove(worker)


class RunInBeam:
    """An :data:`Engine`: each phase is one Apache Beam pipeline, on any of its runners.

    The workers must see the input and the output folder under the same paths as this process, as on a shared file system,
    and have meshfeed installed.

    Args:
      runner: name of the runner, such as DirectRunner, PrismRunner, FlinkRunner or DataflowRunner.
      options: further pipeline options, such as ``--direct_num_workers=4``.

    Raises:
      SettingsError: Apache Beam is not installed, or there is no such runner.
    """

    def __init__(self, runner: str, options: Sequence[str] = ()) -> None:
        try:
            from apache_beam.options.pipeline_options import PipelineOptions
            from apache_beam.runners.runner import create_runner
        except ImportError as error:
            raise missing_package("--runner", error, "beam", setting="runner") from error
        try:
            create_runner(runner)
        except (ValueError, ImportError) as error:
            raise SettingsError(
                f"--runner {runner}: {error} Name one that Apache Beam has, such as DirectRunner.", setting="runner"
            ) from error
        self._runner = runner
        self._options = PipelineOptions(list(options))

    def __call__(self, directory: str, phase: Phase, numbers: Sequence[int]) -> None:
        """See :data:`Engine`."""
        import apache_beam as beam

        if not numbers:
            return
        failures = Conversion(directory).folder / "failures"
        failures.mkdir(exist_ok=True)
        for path in failures.iterdir():
            path.unlink()
        pipeline = beam.Pipeline(self._runner, self._options)
        tasks = pipeline | beam.Create(list(numbers), reshuffle=False) | beam.Reshuffle()
        _ = tasks | beam.Map(_run_task, directory=str(pathlib.Path(directory).absolute()), phase=phase)
        try:
            pipeline.run().wait_until_finish()
        except Exception as error:  # Beam wraps the error of a task in text of its own
            found = sorted(failures.iterdir())
            if not found:
                raise MeshfeedError(f"the Beam pipeline failed: {error}. See the log of {self._runner}.") from error
            raise SourceError(json.loads(found[0].read_text())) from error


def _run_task(number: int, directory: str, phase: Phase) -> int:
    try:
        run_task(directory, phase, number)
    except MeshfeedError as error:
        write_json(Conversion(directory).folder / "failures" / f"{number:05}.json", str(error))
        raise
    return number


def describe_features(job: Conversion) -> tuple[dict[str, dict[str, Any]], dict[str, Measure]]:
    """Returns name → kind, and whether there may be several values, once the output files are written; and what they hold.

    With "bytes", the only entry is the column; with "tokens", its kind is the dtype of the tokens. The features of Examples
    that were copied are those of a sample.
    """
    settings, schema = job.settings, job.plan.schema
    if settings.encoding == "tokens":
        assert settings.tokenizer is not None  # run.py checks it
        _, _, dtype = token_format(load_tokenizer(settings.tokenizer))
        return {schema.names[0]: {"kind": dtype.name, "list": True}}, {}
    if settings.encoding == "bytes":
        return {schema.names[0]: {"kind": "bytes", "list": False}}, job.values()
    return _sample(job) if job.input.examples else (feature_kinds(schema), job.values())


def _sample(job: Conversion) -> tuple[dict[str, dict[str, Any]], dict[str, Measure]]:
    from array_record.python.array_record_module import ArrayRecordReader

    bounds = job.plan.bounds
    chosen = np.unique(np.linspace(0, bounds[-1] - 1, _SAMPLE, dtype=np.int64))
    examples: list[dict[str, Any]] = []
    for shard in range(job.plan.num_shards):
        numbers = chosen[(chosen >= bounds[shard]) & (chosen < bounds[shard + 1])]
        if len(numbers):
            reader = ArrayRecordReader(str(job.shard_path(shard)))
            records = reader.read((numbers - bounds[shard]).tolist())
            examples += [read_example(record, int(number)) for record, number in zip(records, numbers, strict=True)]
    found: dict[str, dict[str, Any]] = {}
    for features in examples:
        for name, values in features.items():
            kind = BYTES if isinstance(values, list) else FLOAT if values.dtype.kind == "f" else INT64
            before = found.get(name, {"list": False})
            found[name] = {"kind": KIND_NAMES[kind], "list": before["list"] or len(values) != 1}
    return dict(sorted(found.items())), measure_examples(examples)
