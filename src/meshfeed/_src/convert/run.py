"""Runs a conversion: prepares or continues the job, lets an engine run its tasks, and completes it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from meshfeed._src.base.errors import MeshfeedError, SettingsError, SourceError, missing_package
from meshfeed._src.convert.destination import FOLDER, JOB, Destination, destination_of, remove_unfinished
from meshfeed._src.convert.example import KIND_NAMES, feature_kinds
from meshfeed._src.convert.formats import FORMATS, recognize, remote_files
from meshfeed._src.convert.inputs import Input, TypesChanged
from meshfeed._src.convert.job import (
    TOKENIZER,
    Conversion,
    Phase,
    discard_plan,
    make_task,
    task_of,
    version_of_input,
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
      directory: the folder, or its URL.
      format: the format of the input.
      num_inputs: number of input files or folders.
      num_records: number of records of the input.
      num_tokens: number of tokens written, with the encoding "tokens"; else None.
      num_bytes: size of the output files in bytes.
      files: names of the output files.
      features: name → kind of what a record holds: its features; with "bytes", the column; with "tokens", the dtype.
      values: what the features hold in all records, or in a sample of Examples that were copied; empty with "tokens", and
        if an earlier version wrote the files.
      class_names: feature → names of the classes that its numbers stand for, in order; of those that declare them: labels
        of folders of images and of Hugging Face datasets. The manifest has them too.
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
    class_names: dict[str, list[str]]
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
      directory: the folder for the output files, or its URL: new, empty, or that of an unfinished conversion with the
        same arguments, which is continued.
      settings: what to write.
      engine: runs the tasks.
      named_format: the format of the input; None to recognize it.
      show: shows the progress.

    Raises:
      SettingsError: a setting is invalid, or the folder is in use or holds something else.
      SourceError: the input cannot be read, or does not fit the settings.
      OSError: a file cannot be read or written.
      MeshfeedError: the store of a URL does not answer, or refuses the credentials.
    """
    destination = destination_of(directory)
    directory = destination.name if directory.startswith("file:/") else directory
    tokenizer = _check(settings)
    kind, paths = recognize(data, named_format)
    around = [path for path in paths if kind == "huggingface" and destination.name.startswith(f"{path}/")]
    if around:  # all files in such a folder are part of the input
        raise SettingsError(
            f"--to {directory} is in the data set {around[0]}. Name a folder outside of it.", setting="to"
        )
    description = _describe(kind, paths, settings, tokenizer)
    finished = _finished(destination, directory, description)
    if finished is not None:
        return finished
    with destination.lock():
        finished = _finished(destination, directory, description)  # another process may have completed it since
        if finished is not None:
            return finished
        job = _prepare(destination, directory, description, tokenizer)
        try:
            _run(directory, engine, show)
            destination.check_owner()
            return _complete(destination, directory)
        except BaseException as error:
            _clean_up(destination, job, error)
            raise


def _clean_up(destination: Destination, job: Conversion, error: BaseException) -> None:
    """Removes what a failed run left unfinished, and the state if there is nothing to continue from."""
    try:
        destination.check_owner()  # an error of this run may come from another one that has taken over
        remove_unfinished(job.folder)
        if _is_empty(destination, job, error):
            destination.clear()
    except SettingsError as other:
        raise other from error
    except (MeshfeedError, OSError) as other:  # a store that is down
        _log.warning("what the conversion left in %s is not removed: %s", destination.name, other)


def _is_empty(destination: Destination, job: Conversion, error: BaseException) -> bool:
    """Whether there is nothing to continue from: no output file, and no download unless the job cannot succeed."""
    downloaded = any(map(is_url, job.paths)) and any((job.folder / "inputs").iterdir())
    kept = downloaded and not isinstance(error, MeshfeedError)
    return not kept and not any(name.startswith("data-") for name in destination.sizes())


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


def _finished(destination: Destination, directory: str, description: dict[str, Any]) -> Converted | None:
    """Returns the result of an earlier run; None if there is something to do.

    Raises:
      SettingsError: the folder holds something else.
    """
    sizes = destination.sizes()
    if not sizes:
        return None
    converted, wanted = _converted_from(destination) if NAME in sizes else None, _identity(description)
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
        _check_files(destination, sizes)
        destination.clear()  # the run may have been killed after it had written the manifest
        return _result(destination, directory, description, was_complete=True)
    if converted is None and FOLDER in sizes:
        return None
    what = f"{len(sizes):,} other file{'' if len(sizes) == 1 else 's'}"
    if converted is not None:
        what = f"the result of a conversion {_difference(converted, wanted)}"
    raise SettingsError(
        f"the folder {directory} holds {what}. Name a new folder, or remove what it holds.", setting="to"
    )


def _check_files(destination: Destination, sizes: Mapping[str, int | None]) -> None:
    """Raises SettingsError if a file of a finished conversion is missing or has a different size."""
    for file in read_manifest(destination.path(NAME)).files:
        size = sizes.get(os.path.basename(file.path))
        if size != file.num_bytes:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {file.num_bytes:,}"
            raise SettingsError(
                f"the conversion in {destination.name} was complete, but its file {file.path} {found}. Put it back, or "
                "remove what the folder holds and convert again.",
                setting="to",
            )


def _converted_from(destination: Destination) -> dict[str, Any] | None:
    try:
        return dict(read_manifest(destination.path(NAME)).made["from"])
    except (MeshfeedError, KeyError, IndexError, TypeError):
        return None


def _prepare(
    destination: Destination, directory: str, description: dict[str, Any], tokenizer: bytes | None
) -> Conversion:
    """Starts a job, or continues the one in the folder."""
    job = Conversion(directory)
    content = json.dumps(description).encode()
    found = destination.read(JOB)  # empty after a power failure
    if found and (difference := _difference(json.loads(found), description)):
        raise SettingsError(
            f"the folder {directory} holds an unfinished conversion {difference}. Use the same to continue, name another "
            "folder, or remove this one.",
            setting="to",
        )
    destination.begin(found or content, is_new=not found)
    if not found:
        if tokenizer is not None:
            destination.write(TOKENIZER, tokenizer)
        destination.write(JOB, content)
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
            _ = job.plan
        except TypesChanged:
            discard_plan(job)  # first: a killed run must not leave scans of the first blocks as those of all
            job.ask_for_all_types()
            continue
        if not job.types_changed:
            job.begin_progress()
            with show(job, "write"):
                engine(directory, "write", job.missing_shards())
        if not job.types_changed:
            job.check_read()  # once: after each task would look at all files of a folder for each output file
            return
        discard_plan(job)


def _complete(destination: Destination, directory: str) -> Converted:
    """Writes the manifest and removes the state."""
    job = Conversion(directory)
    description, settings = job.description, job.settings
    features, values = describe_features(job)
    converted = {
        "from": _identity(description),
        "records": int(job.plan.bounds[-1]),
        "features": features,
        "values": values,
    }
    names = _class_names(job)
    converted["class_names"] = {place: names[place] for place in names if names[place] and place in features}
    source, details = manifest_details(settings)
    write_manifest(destination.path(NAME), source, job.entries(details), made=converted)
    destination.finish()
    return _result(destination, directory, description, was_complete=False)


def _class_names(job: Conversion) -> dict[str, list[str]]:
    """Returns the names of the classes that the numbers of a feature stand for, by feature, as the inputs declare them."""
    found: dict[str, list[str]] = {}
    for number in range(len(job.paths)):
        more = job.load_scan(number).more or {}
        named = [("label", more.get("classes", [])), *itertools.chain(*more.get("class_names", {}).values())]
        for place, names in named:  # files may declare a part of the classes: the first ones
            found[place] = max(found.get(place, []), names, key=len)
    return found


def _result(destination: Destination, directory: str, description: dict[str, Any], *, was_complete: bool) -> Converted:
    manifest = read_manifest(destination.path(NAME))
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
        class_names=dict(converted.get("class_names", {})),
        was_complete=was_complete,
    )


# ------------------------------------------------------------------------ on this machine


def run_here(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
    """An :data:`Engine`: one task after the other, in this process."""
    task = task_of(directory, phase)
    for number in numbers:
        task(number)


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
        for worker in pool.results(busy):
            if waiting:
                pool.submit(worker, waiting.pop())
            else:
                busy.remove(worker)


class RunInBeam:
    """An :data:`Engine`: each phase is one Apache Beam pipeline, on any of its runners.

    The workers must reach the input and the output folder under the same paths or URLs as this process, and have meshfeed
    installed.

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
        destination = destination_of(directory)
        destination.remove([f"failures/{name}" for name in destination.names("failures")])
        pipeline = beam.Pipeline(self._runner, self._options)
        tasks = pipeline | beam.Create(list(numbers), reshuffle=False) | beam.Reshuffle()
        _ = tasks | beam.Map(_run_task, directory=destination.name, phase=phase)
        try:
            pipeline.run().wait_until_finish()
        except Exception as error:  # Beam wraps the error of a task in text of its own
            found = sorted(destination.names("failures"))
            if not found:
                raise MeshfeedError(f"the Beam pipeline failed: {error}. See the log of {self._runner}.") from error
            raise SourceError(json.loads(destination.read(f"failures/{found[0]}") or b"")) from error


def _run_task(number: int, directory: str, phase: Phase) -> int:
    try:
        task_of(directory, phase)(number)
    except MeshfeedError as error:
        Conversion(directory).save(f"failures/{number:05}.json", str(error))
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
    bounds = job.plan.bounds
    chosen = np.unique(np.linspace(0, bounds[-1] - 1, _SAMPLE, dtype=np.int64))
    examples: list[dict[str, Any]] = []
    for shard in range(job.plan.num_shards):
        numbers = chosen[(chosen >= bounds[shard]) & (chosen < bounds[shard + 1])]
        if len(numbers):
            records = _read_records(job.destination.path(job.shard_name(shard)), (numbers - bounds[shard]).tolist())
            examples += [read_example(record, int(number)) for record, number in zip(records, numbers, strict=True)]
    found: dict[str, dict[str, Any]] = {}
    for features in examples:
        for name, values in features.items():
            kind = BYTES if isinstance(values, list) else FLOAT if values.dtype.kind == "f" else INT64
            before = found.get(name, {"list": False})
            found[name] = {"kind": KIND_NAMES[kind], "list": before["list"] or len(values) != 1}
    return dict(sorted(found.items())), measure_examples(examples)


def _read_records(path: str, numbers: list[int]) -> Sequence[bytes]:
    if is_url(path):
        from meshfeed._src.sources.array_record.source import ArrayRecord  # which only URLs need

        return ArrayRecord(path).__getitems__(numbers)
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader(path).read(numbers)
