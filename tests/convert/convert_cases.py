"""Conversions drawn at random, and a model in plain Python of what each must write or refuse.

A case names a format, an encoding, workers, output files, a kill and a change of the input. ``play`` writes the input, runs
the conversion until it is complete, with the kill and the change on the way, and compares what is read back by the
array_record package, bit for bit, with the model. The model imports nothing of meshfeed.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import struct
import tarfile
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import meshfeed
from meshfeed._src.convert import destination as convert_destination
from meshfeed._src.convert import job as convert_job
from meshfeed._src.convert import run as convert_run
from meshfeed._src.convert import writers
from meshfeed._src.convert.run import Converted, convert

Case = dict[str, Any]
Row = dict[str, Any]

OPTIONS: dict[str, list[Any]] = {
    "format": ["text", "jsonl", "csv", "parquet", "tfrecord", "webdataset", "images"],
    "gzip": [False, True],
    "inputs": [1, 3],
    "rows": ["one", "few", "blocks", "late"],  # more than a block of 1 MiB; with a type that the last row changes
    "encoding": ["example", "bytes", "tokens"],
    "shards": [1, 3],
    "compression": ["zstd", "none"],
    "workers": [1, 2],
    "kill": ["none", "event", "timer"],
    "change": ["none", "edited", "truncated", "appended", "replaced", "tokenizer"],
    "when": ["between", "during"],  # runs, or in the middle of the first
}
_COLUMN = {"tfrecord": None, "webdataset": "txt", "images": "image"}  # the one for bytes and tokens; "text" of others
_VOCABULARY = {word: number for number, word in enumerate(["<eod>", "<unk>", "a", "b", "c", "d"])}
_OTHER_VOCABULARY = {word: number for number, word in enumerate(["<eod>", "<unk>", "b", "a", "d", "c"])}
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(  # or each process takes a second to import them
    [
        "array_record.python.array_record_module",
        "google_crc32c",
        "meshfeed._src.convert.run",
        "pyarrow.csv",
        "pyarrow.json",
        "pyarrow.parquet",
        "s3fs",
        "tokenizers",
    ]
)


def valid(case: Case) -> bool:
    """Whether a case, or the part of one, can be played."""
    kind, encoding = case.get("format"), case.get("encoding")
    return not (
        (case.get("gzip") and kind in ("parquet", "images"))
        or (case.get("inputs") == 3 and kind == "images")
        or (case.get("rows") == "late" and kind in ("text", "parquet", "tfrecord", "webdataset", "images"))
        or (encoding == "tokens" and kind in ("tfrecord", "images"))
        or (case.get("shards") == 3 and case.get("rows") == "one")
        or (case.get("when") == "during" and case.get("change") == "none")
        or (case.get("when") == "during" and case.get("kill") not in (None, "none"))
        or (case.get("when") == "during" and case.get("workers") == 2)
        or (case.get("workers") == 2 and case.get("kill") == "event")
    )


# ------------------------------------------------------------------------ the model


def varint(value: int) -> bytes:
    """A number of protobuf."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    """A field of protobuf with a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features: dict[str, Any]) -> bytes:
    """A tf.train.Example; None is no feature."""
    entries = []
    for name, value in sorted(features.items()):
        values = value if isinstance(value, list) else [value]
        if value is None:
            continue
        if values and isinstance(values[0], bytes):
            kind, body = 1, b"".join(field(1, one) for one in values)
        elif values and isinstance(values[0], float):
            kind, body = 2, field(1, struct.pack(f"<{len(values)}f", *values))
        else:
            kind, body = 3, field(1, b"".join(map(varint, values))) if values else b""
        entries.append(field(1, field(1, name.encode()) + field(2, field(kind, body))))
    return field(1, b"".join(entries))


def features_of(case: Case, rows: list[Row]) -> list[dict[str, Any]]:
    """The features of all rows: numbers of a column are floats if one of them is, and text in CSV if one is none."""
    kind = case["format"]
    if kind in ("text", "webdataset", "images"):
        return rows
    found = []
    is_float = any(isinstance(row["n"], float) for row in rows)
    for row in rows:
        one = {**row, "text": row["text"].encode(), "code": row["code"].encode()}
        if one["n"] is not None and is_float:
            one["n"] = float(one["n"])
        if kind == "csv":
            del one["tokens"]
        found.append(one)
    if kind == "csv" and all(row["code"] == str(int(row["code"])) for row in rows):
        found = [{**one, "code": int(one["code"])} for one in found]
    return found


def expected(case: Case, files: list[list[Row]], vocabulary: dict[str, int]) -> list[bytes]:
    """The content of the records, or the tokens of all, little-endian, that are written."""
    rows = [row for file in files for row in file]
    if case["format"] == "tfrecord" or case["encoding"] == "example":
        records = [example(one) for one in features_of(case, rows)]
    else:
        column = _COLUMN.get(case["format"], "text")
        assert column is not None
        values = [row[column] for row in rows]
        records = [value.encode() if isinstance(value, str) else value for value in values]
    if case["encoding"] != "tokens":
        return records
    ids = [[vocabulary.get(word, 1) for word in record.decode().split()] + [0] for record in records]
    return [struct.pack(f"<{len(one)}H", *one) for one in ids]


# ------------------------------------------------------------------------ the input


def draw_rows(case: Case, rng: random.Random, first: int) -> list[Row]:
    """The rows of one file; ``first`` is the number of the first one."""
    kind = case["format"]
    count = {"one": 1, "few": rng.randint(3, 20), "blocks": 700, "late": 700}[case["rows"]]
    pad = 2500 if count == 700 and kind in ("text", "jsonl", "csv", "tfrecord") else 0
    rows = []
    for number in range(first, first + count):
        text = " ".join(rng.choices("abcdz", k=rng.randint(1, 8))) + " a" * (pad // 2)
        if kind == "text":
            rows.append({"text": text.encode()})
        elif kind == "webdataset":
            label = b"%d" % number if rng.random() < 0.5 else None
            rows.append({"__key__": b"%05d" % number, "txt": text.encode(), "cls": label})
        elif kind == "images":
            name = f"{'xy'[number % 2]}/{number:05}.png"
            rows.append({"filename": name.encode(), "image": text.encode(), "label": number % 2})
        else:
            large = rng.choice([number, -number, 2**62 + number])
            tokens = [rng.randint(0, 70_000) for _ in range(rng.randint(1, 4))]
            code = str(number + 1)
            weight = rng.choice([number / 4, -0.0])
            rows.append({"text": text, "n": large, "w": weight, "tokens": tokens, "code": code})
    if case["rows"] == "late":
        rows = [{**row, "n": number} for number, row in enumerate(rows)]
        rows[-1] |= {"n": 0.5, "code": "02139"}
    return sorted(rows, key=lambda row: row["filename"]) if kind == "images" else rows


def crc(content: bytes) -> bytes:
    """The masked checksum of TFRecord."""
    import google_crc32c

    value = google_crc32c.value(content)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def encode(case: Case, rows: list[Row]) -> bytes:
    """The content of a file of the format."""
    kind, out = case["format"], io.BytesIO()
    if kind == "text":
        out.write(b"".join(row["text"] + b"\n" for row in rows))
    elif kind == "jsonl":
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    elif kind == "csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, ["text", "n", "w", "code"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        out.write(text.getvalue().encode())
    elif kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=300)
    elif kind == "tfrecord":
        for record in map(example, features_of(case, rows)):
            size = struct.pack("<Q", len(record))
            out.write(size + crc(size) + record + crc(record))
    elif kind == "webdataset":
        with tarfile.open(fileobj=out, mode="w") as archive:
            for row in rows:
                for name in ("txt", "cls"):
                    if row[name] is not None:
                        info = tarfile.TarInfo(f"{row['__key__'].decode()}.{name}")
                        info.size = len(row[name])
                        archive.addfile(info, io.BytesIO(row[name]))
    return gzip.compress(out.getvalue(), 1) if case["gzip"] else out.getvalue()


class World:
    """A case with its files in a folder, and what must come of them."""

    def __init__(self, case: Case, folder: pathlib.Path) -> None:
        self.case, self.folder, self.out = case, folder, folder / "out"
        self.rng = random.Random(case["seed"])
        ends = {"text": "txt", "webdataset": "tar"}
        ending = ends.get(case["format"], case["format"]) + (".gz" if case["gzip"] else "")
        self.paths = [folder / "data" / f"{number}.{ending}" for number in range(case["inputs"])]
        self.files: list[list[Row]] = []
        for _ in self.paths:
            self.files.append(draw_rows(case, self.rng, sum(map(len, self.files))))
        self.vocabulary = _VOCABULARY
        (folder / "data").mkdir(parents=True)
        for number in range(len(self.paths)):
            self.write(number)
        self.save_tokenizer()
        self.is_damaged = False
        self.has_changed = False

    def write(self, number: int, *, in_place: bool = True) -> None:
        """Writes a file of the input."""
        if self.case["format"] == "images":
            for row in self.files[0]:
                path = self.folder / "data" / row["filename"].decode()
                path.parent.mkdir(exist_ok=True)
                if not path.exists() or path.read_bytes() != row["image"]:
                    path.write_bytes(row["image"])
            return
        content, path = encode(self.case, self.files[number]), self.paths[number]
        if in_place:
            path.write_bytes(content)
        else:
            part = self.folder / "replacement"
            part.write_bytes(content)
            part.rename(path)

    def save_tokenizer(self) -> None:
        """Writes the tokenizer."""
        import tokenizers

        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(self.vocabulary, unk_token="<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        made.save(str(self.folder / "tokenizer.json"))

    def change(self) -> None:
        """Changes the input, or the tokenizer, as the case says."""
        change, number = self.case["change"], self.rng.randrange(len(self.paths))
        rows = self.files[number]
        column = _COLUMN.get(self.case["format"], "text") or "text"
        if change == "tokenizer":
            self.vocabulary = _OTHER_VOCABULARY
            self.save_tokenizer()
            self.has_changed = self.case["encoding"] == "tokens"
            return
        self.has_changed = True
        binary = self.case["gzip"] or self.case["format"] in ("parquet", "tfrecord", "webdataset")
        if change == "truncated" and binary:
            content = pathlib.Path(self.paths[number]).read_bytes()
            os.truncate(self.paths[number], len(content.rstrip(b"\0")) // 2)  # a tar ends with zeros that nothing needs
            self.is_damaged = True
            return
        if change in ("edited", "replaced"):
            at = self.rng.randrange(len(rows))
            value = rows[at][column]
            other = b"b" if value[:1] in (b"a", "a") else b"a"
            changed = (other if isinstance(value, bytes) else other.decode()) + value[1:]
            self.files[number] = [*rows[:at], {**rows[at], column: changed}, *rows[at + 1 :]]
        elif change == "truncated":
            self.files[number] = rows[: max(1, len(rows) // 2)] if self.case["format"] != "images" else self.cut(rows)
        else:
            more = draw_rows({**self.case, "rows": "one"}, self.rng, 90_000)
            more = [{**row, "filename": b"y/90000.png", "label": 1} if "filename" in row else row for row in more]
            self.files[number] = rows + more
            if self.case["format"] == "images":
                self.relabel()
        self.write(number, in_place=change != "replaced")

    def cut(self, rows: list[Row]) -> list[Row]:
        """Images of which the first is cut."""
        return [{**rows[0], "image": rows[0]["image"][:-1]}, *rows[1:]]

    def relabel(self) -> None:
        """Numbers the classes of images again."""
        names = sorted({row["filename"][:1] for row in self.files[0]})
        self.files[0] = [{**row, "label": names.index(row["filename"][:1])} for row in self.files[0]]

    def expected(self) -> list[bytes]:
        """What must be written."""
        if self.case["format"] == "images":
            self.relabel()
        return expected(self.case, self.files, self.vocabulary)

    # -------------------------------------------------------------------- running

    def arguments(self) -> dict[str, Any]:
        """The arguments of :func:`run`."""
        case, tokens = self.case, self.case["encoding"] == "tokens"
        column = None if case["encoding"] == "example" else _COLUMN.get(case["format"], "text")
        settings = {
            "encoding": case["encoding"],
            "column": column,
            "shards": case["shards"],
            "compression": case["compression"],
            "tokenizer": str(self.folder / "tokenizer.json") if tokens else None,
            "eod": "<eod>" if tokens else None,
        }
        is_images = case["format"] == "images"
        data = [str(self.folder / "data")] if is_images else [str(path) for path in self.paths]
        return {"data": data, "out": str(self.out), "settings": settings, "workers": case["workers"]}

    def has_begun(self) -> bool:
        """Whether the folder holds a conversion, begun or complete."""
        return (self.out / ".convert" / "job.json").exists() or (self.out / "manifest.json").exists()

    def check(self, wanted: list[bytes]) -> None:
        """Raises AssertionError unless the files hold what is expected."""
        case, shards = self.case, self.case["shards"]
        bounds = [len(wanted) * shard // shards for shard in range(shards + 1)]
        ending = "bin" if case["encoding"] == "tokens" else "array_record"
        names = [f"data-{shard:05}-of-{shards:05}.{ending}" for shard in range(shards)]
        assert sorted(path.name for path in self.out.iterdir()) == [*names, "manifest.json"]
        for shard, name in enumerate(names):
            records = wanted[bounds[shard] : bounds[shard + 1]]
            if ending == "bin":
                stored = (self.out / name).read_bytes()
                tokens = b"".join(records)
                assert struct.unpack("<3i", stored[:12]) == (20240520, 1, len(tokens) // 2), name
                assert stored[1024:] == tokens, f"{name} holds other tokens"
            else:
                assert read_back(self.out / name) == records, f"{name} holds other records"


def read_back(path: pathlib.Path) -> list[bytes]:
    """The records of a file."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(path))
    try:
        return reader.read(0, reader.num_records())
    finally:
        reader.close()


def run(data: list[str], out: str, settings: dict[str, Any], workers: int) -> Converted:
    """Runs the conversion in this process, and workers of it."""
    import functools

    engine = functools.partial(convert_run.run_in_workers, num_workers=workers)
    return convert(data, out, writers.Settings(**settings), engine)


@contextlib.contextmanager
def at_event(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Calls ``act`` at an event: before or after a result gets its name, pieces are written, or the job is removed."""
    count = 0

    def event() -> None:
        nonlocal count
        count += 1
        if count == number:
            act()

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (os, "replace"),
            (writers.ArrayRecordFile, "write"),
            (writers.TokenWriter, "write"),
            (convert_destination.Disk, "clear"),
            (convert_job.Conversion, "_check_read"),
        ):
            before = getattr(owner, name)

            def patched(*args: Any, _before: Callable[..., Any] = before, **kwargs: Any) -> Any:
                event()
                found = _before(*args, **kwargs)
                event()
                return found

            setattr(owner, name, patched)
            stack.callback(setattr, owner, name, before)
        yield


def child(arguments: dict[str, Any], event: int, seconds: float, report: str) -> None:
    """Runs a conversion that is killed at an event, or after some seconds; writes its error, if it ends before."""
    os.setpgid(0, 0)

    def kill() -> None:
        os.killpg(0, signal.SIGKILL)

    if seconds:
        threading.Timer(seconds, kill).start()
    try:
        with at_event(event, kill):
            run(**arguments)
    except meshfeed.MeshfeedError:
        pass
    except BaseException:
        pathlib.Path(report).write_text(traceback.format_exc())
    os._exit(0)


def kill_one(world: World) -> bool:
    """Runs the conversion in a process that is killed; returns whether it was."""
    case = world.case
    event = world.rng.randint(1, 40) if case["kill"] == "event" else 0
    seconds = world.rng.uniform(0.001, 0.4) if case["kill"] == "timer" else 0.0
    report = world.folder / "report"
    process = _CONTEXT.Process(target=child, args=(world.arguments(), event, seconds, str(report)))
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL), f"the process ended with {process.exitcode}"
    assert not report.exists(), report.read_text()
    return process.exitcode != 0


def play(case: Case, folder: pathlib.Path) -> dict[str, int]:
    """Plays a case, and returns what happened.

    Raises:
      AssertionError: the conversion did something else than the model.
    """
    figures = {"kills": 0, "refused": 0, "changed_in_time": 0, "records": 0}
    world = World(case, folder)
    wanted = world.expected()
    if case["kill"] != "none":
        figures["kills"] = sum(kill_one(world) for _ in range(2))
    if case["when"] == "during":
        try:
            with at_event(world.rng.randint(1, 20), world.change):
                run(**world.arguments())
        except meshfeed.SourceError:
            assert world.has_changed, "an error without a change"
            figures["refused"] += 1
        else:  # the change came after the last read, or the tokenizer had been copied
            world.check(wanted)
            figures["changed_in_time"] += 1
    elif case["change"] != "none":
        if case["kill"] == "none" and world.rng.random() < 0.5:
            run(**world.arguments())
        world.change()
    if world.has_changed:
        figures["refused"] += check_refused(world)
        shutil.rmtree(world.out, ignore_errors=True)
    if world.is_damaged:
        try:
            run(**world.arguments())
        except meshfeed.SourceError as error:
            assert any(str(path) in str(error) for path in world.paths), error  # noqa: PT017
        else:
            raise AssertionError("a file that was cut was accepted")
        return figures
    wanted = world.expected()
    run(**world.arguments())
    world.check(wanted)
    assert run(**world.arguments()).was_complete
    world.check(wanted)
    figures["records"] = len(wanted)
    return figures


def check_refused(world: World) -> int:
    """Checks that a folder of the former input is refused, if there is one."""
    if not world.has_begun():
        return 0
    try:
        run(**world.arguments())
    except meshfeed.SettingsError as error:
        assert "have changed" in str(error) or "has changed" in str(error), error  # noqa: PT017
        return 1
    raise AssertionError("a conversion of another input was continued")


def script(case: Case) -> str:
    """A script that plays a case again."""
    return (
        "import pathlib, sys, tempfile\n"
        'sys.path.append("tests/convert")\n'
        "import convert_cases\n"
        'if __name__ == "__main__":\n'
        f"    case = {case!r}\n"
        "    print(convert_cases.play(case, pathlib.Path(tempfile.mkdtemp())))\n"
    )


def draw(seed: int) -> Case:
    """A case at random."""
    rng = random.Random(seed)
    while True:
        case = {name: rng.choice(values) for name, values in OPTIONS.items()}
        if valid(case):
            return {**case, "seed": seed}
