"""Where records of text files begin, and which line an error names."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import pathlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import meshfeed
from meshfeed._src.convert.lines import line_starts, record_starts, without_blank
from meshfeed._src.convert.run import convert, run_here
from meshfeed._src.convert.writers import Settings

COUNT = 70_000  # more than one block


@given(st.text('a,"\n', max_size=40))
@example('a","\na')  # Python 3.11.2 matches a possessive group again in the middle of what it has failed at
@example('a","')
def test_records_of_csv_begin_as_the_standard_library_reads_them(text: str) -> None:
    content = text.encode()
    lines = io.StringIO(text)
    wanted = []
    reader = csv.reader(iter(lines.readline, ""))
    start = 0
    while True:
        row = next(reader, None)
        if row is None:
            break
        wanted.append(start)
        start = lines.tell()
    starts, is_open = record_starts(content, b",")
    assert starts.tolist() == wanted
    assert is_open == (len(list(csv.reader(io.StringIO(text + "\nend")))) == len(wanted) > 0)


@given(st.text("{ \t\r\n", max_size=20))
def test_blank_lines(text: str) -> None:
    content = text.encode()
    lines = content.split(b"\n")
    wanted = [sum(len(line) + 1 for line in lines[:row]) for row, line in enumerate(lines) if line.strip()]
    assert without_blank(content, line_starts(content), b" \t\r").tolist() == wanted


def write_lines(path: pathlib.Path, lines: list[str]) -> None:
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"n": 1, "text": }', "JSON parse error: Invalid value, in the line '{line}'"),
        ('{"n": "many"}', "Column(/n) changed from number to string, in the line '{line}'"),
        ('{"n": 1} {"n": 2}', "2 records instead of one, in the line '{line}'"),
        (" null", "null in place of an object, in the line ' null'"),  # Arrow crashes if a block begins with it
        ('{"n": 1,\n"text": "a"}', "a record that continues on the next line, in the line '{{\"n\": 1,'"),
    ],
)
def test_a_bad_line_of_json_is_named(line: str, message: str, name: str, tmp_path: pathlib.Path) -> None:
    lines = [json.dumps({"n": i, "text": f"document {i}"}) for i in range(COUNT)]
    lines[10:10] = ["", " "]
    lines[COUNT - 3] = line
    write_lines(tmp_path / name, lines)
    with pytest.raises(meshfeed.CorruptDataError) as caught:
        convert([str(tmp_path / name)], str(tmp_path / "out"), Settings(), run_here)
    assert str(caught.value).startswith(f"{tmp_path / name}:{COUNT - 2}: ")
    assert message.format(line=line) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "line", "message"),
    [
        (
            "document",
            "1,2,3",
            "Expected 2 columns, got 3, in the line '{line}'. Expected a value for each column of the first line, the "
            "header.",
        ),
        ("document", '1"never closed', "Expected 2 columns, got 1, in the line '{line}'."),
        ('"two\nlines"', "1,2,3", "Expected 2 columns, got 3, in the line '{line}'."),
        ("document", '"never closed,2', "Expected 2 columns, got 1, in the line '{line}'."),
    ],
)
def test_a_bad_line_of_csv_is_named(value: str, line: str, message: str, tmp_path: pathlib.Path) -> None:
    lines = ["n,text", *[f"{i},{value}" for i in range(COUNT)]]
    lines[COUNT - 3] = line
    write_lines(tmp_path / "a.csv", lines)
    with pytest.raises(meshfeed.CorruptDataError) as caught:
        convert([str(tmp_path / "a.csv")], str(tmp_path / "out"), Settings(), run_here)
    number = "\n".join(lines).partition(line)[0].count("\n") + 1
    assert str(caught.value).startswith(f"{tmp_path / 'a.csv'}:{number}: CSV parse error: {message.format(line=line)}")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("a,b,a,c,b", "names the columns ['a', 'b'] more than once"),
        ("a,,c,", "has no name for column 2 of 4"),
        ("7,7", "names the columns ['7'] more than once"),
    ],
)
def test_a_header_that_cannot_name_the_columns(header: str, message: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1,2,3,4,5\n")
    with pytest.raises(meshfeed.SourceError) as caught:
        convert([str(tmp_path / "a.csv")], str(tmp_path / "out"), Settings(), run_here)
    assert str(caught.value).startswith(f"{tmp_path}/a.csv: the first line, which is the header, {message}. Expected ")
    assert str(caught.value).endswith("If it is a record, add a line with names before it.")


@pytest.mark.parametrize("content", ["a,b\r1,2\r", 'height 5",b\n1,2\n', 'a,"b\n' + f"{'1' * 50},2\n" * 10_000])
def test_a_header_that_is_not_csv(content: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.csv").write_text(content, newline="")
    with pytest.raises(meshfeed.CorruptDataError) as caught:
        convert([str(tmp_path / "a.csv")], str(tmp_path / "out"), Settings(), run_here)
    assert str(caught.value).startswith(f"{tmp_path}/a.csv: the first line, which is the header, cannot be read: ")


def test_the_extension_tsv_in_capitals_means_tabs_too(tmp_path: pathlib.Path) -> None:
    (tmp_path / "A.TSV").write_text("a\tb\n1\tx\n")
    result = convert([str(tmp_path / "A.TSV")], str(tmp_path / "out"), Settings(), run_here)
    assert list(result.features) == ["a", "b"]


def test_a_value_that_fits_no_type_is_named(tmp_path: pathlib.Path) -> None:
    """A line of the second file is not text in UTF-8, and the column is text."""
    (tmp_path / "a.csv").write_text("text\n" + "document\n" * COUNT)
    (tmp_path / "b.csv").write_bytes(b"text\n" + b"document\n" * COUNT + b"\xe9t\xe9\n")
    with pytest.raises(meshfeed.SourceError) as caught:
        convert([f"{tmp_path}/*.csv"], str(tmp_path / "out"), Settings(), run_here)
    assert f"{tmp_path / 'b.csv'}:{COUNT + 2}: " in str(caught.value)
    assert r"invalid UTF8 data, in the line '\xe9t\xe9'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.txt", "one\ntwo\n", b"one"),
        ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n', b"one"),
        ("a.csv", "text\none\n", b"one"),
    ],
)
def test_a_byte_order_mark_belongs_to_no_record(name: str, content: str, wanted: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / name).write_bytes(content.encode("utf-8-sig"))
    convert([str(tmp_path / name)], str(tmp_path / "out"), Settings(), run_here)
    source = meshfeed.sources.ArrayRecord(f"{tmp_path}/out/*.array_record", decode=meshfeed.sources.DecodeExample())
    assert source[0] == {"text": wanted}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "one\n".encode("utf-16"), "iconv -f utf-16 -t utf-8"),
        ("a.jsonl", '{"n": 1}\n'.encode("utf-16"), "iconv -f utf-16 -t utf-8"),
        (
            "a.jsonl",
            b"[1, 2]",
            "begins with one JSON array. Expected one JSON object per line. Convert it: jq -c '.[]' FILE",
        ),
        ("a.jsonl", b"key: 1", r"begins with b'key: 1'. Expected one JSON object per line. Correct the file"),
    ],
)
def test_what_is_no_text_of_lines_is_refused(name: str, content: bytes, message: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(meshfeed.SourceError) as caught:
        convert([str(tmp_path / name)], str(tmp_path / "out"), Settings(), run_here)
    assert str(caught.value).startswith(f"{tmp_path / name} begins with ")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.tfrecord"])
@pytest.mark.parametrize(
    ("compress", "found"),
    [(gzip.compress, r"gzip \(.gz\)"), (bz2.compress, r"bzip2 \(.bz2\)"), (lzma.compress, r"xz \(.xz\)")],
)
def test_a_compressed_file_whose_name_does_not_state_it(
    name: str, compress: Callable[[bytes], bytes], found: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / name).write_bytes(compress(b"one\ntwo\n"))
    with pytest.raises(meshfeed.SourceError, match=rf"{name} is compressed with {found}, .* Rename"):
        convert([str(tmp_path / name)], str(tmp_path / "out"), Settings(), run_here)
    (tmp_path / "b.txt").write_bytes(b"BZh is text")
    assert convert([str(tmp_path / "b.txt")], str(tmp_path / "out"), Settings(), run_here).num_records == 1


@pytest.mark.parametrize(("ending", "library"), [("gz", gzip), ("bz2", bz2), ("xz", lzma), ("zst", None)])
def test_damage_in_any_member_of_a_compressed_file(ending: str, library: Any, tmp_path: pathlib.Path) -> None:
    """The files of bz2 and lzma end without an error at a member that is damaged, unless it is the first one."""
    compress = library.compress if library else lambda content: pa.Codec("zstd").compress(content).to_pybytes()
    one, two = compress(b"%b\n" % (b"a" * 3_000_000)), compress(b"b\n")
    path = tmp_path / f"a.txt.{ending}"

    def converted(content: bytes) -> int:
        path.write_bytes(content)
        to = str(tmp_path / f"out{len(list(tmp_path.iterdir()))}")
        return convert([str(path)], to, Settings(encoding="bytes"), run_here).num_records

    assert converted(one + two + two) == 3
    if library:
        assert converted(one + two + bytes(512)) == 2  # padding
    for content in (one + b"?" + two[1:] + two, one + two + b"?", one + two[:3], b"", bytes(64)):
        with pytest.raises(meshfeed.CorruptDataError, match=rf"a\.txt\.{ending} cannot be decompressed"):
            converted(content)


def test_a_block_of_snappy_names_its_size(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.txt.snappy"

    def converted(content: bytes) -> int:
        path.write_bytes(content)
        to = str(tmp_path / f"out{len(list(tmp_path.iterdir()))}")
        return convert([str(path)], to, Settings(encoding="bytes"), run_here).num_records

    for lines in (1, 40, 100_000):
        assert converted(pa.Codec("snappy").compress(b"line\n" * lines).to_pybytes()) == lines
    for content in (b"", b"\xff" * 9, b"\x05"):
        with pytest.raises(meshfeed.CorruptDataError, match=r"a\.txt\.snappy cannot be decompressed"):
            converted(content)
    with pytest.raises(meshfeed.SourceError, match="framing format of snappy"):
        converted(b"\xff\x06\0\0sNaPpY")


def test_types_that_differ_between_blocks_name_the_line(tmp_path: pathlib.Path) -> None:
    lines = [json.dumps({"n": i, "pad": "p" * 1000}) for i in range(3000)]
    for row in range(2500, 3000):
        lines[row] = lines[row].replace('"n": ', '"n": [').replace(', "pad', '], "pad')
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(
        meshfeed.CorruptDataError, match=r"a\.jsonl:2501: .*, in the line '{\"n\": \[2500\], \"pad\": \"ppp"
    ):
        convert([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), Settings(), run_here)


@pytest.mark.slow
def test_a_value_that_cannot_be_written_is_named_by_its_line(tmp_path: pathlib.Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_bytes(b"a\n" * 5)
    (tmp_path / "b.csv").write_bytes(b"text\n" + b'"a\na"\n' * COUNT + b"\xe9\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"a\n" * COUNT * 10 + b"\xe9\n"))
    settings = Settings(encoding="tokens", tokenizer=str(tmp_path / "tokenizer.json"), shards=2)
    for data, place in ((["a.txt", "b.txt.gz"], f"b.txt.gz:{COUNT * 10 + 1}"), (["b.csv"], f"b.csv:{2 * COUNT + 2}")):
        with pytest.raises(meshfeed.SourceError) as caught:
            convert([str(tmp_path / name) for name in data], str(tmp_path / f"out-{data[0]}"), settings, run_here)
        assert str(caught.value).startswith(f"{tmp_path}/{place}: ")
        assert "UTF" in str(caught.value)
