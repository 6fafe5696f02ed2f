"""What the records of a conversion hold, for its report and the manifest."""

from __future__ import annotations

from typing import Any

from meshfeed._src.convert.columns import KIND_NAMES, feature_kinds
from meshfeed._src.convert.job import Conversion
from meshfeed._src.convert.writers import load_tokenizer, token_format
from meshfeed._src.sources.decode import BYTES, FLOAT, INT64, parse_example

_SAMPLE = 100


def describe_features(job: Conversion) -> dict[str, dict[str, Any]]:
    """Returns name → kind, and whether there may be several values, once the output files are written.

    With "bytes", the only entry is the column; with "tokens", its kind is the dtype of the tokens. The features of Examples
    that were copied are those of the first records.
    """
    settings, schema = job.settings, job.plan.schema
    if settings.encoding == "tokens":
        assert settings.tokenizer is not None  # run.py checks it
        _, _, dtype = token_format(load_tokenizer(settings.tokenizer))
        return {schema.names[0]: {"kind": dtype.name, "list": True}}
    if settings.encoding == "bytes":
        return {schema.names[0]: {"kind": "bytes", "list": False}}
    return _sample(job) if job.input.examples else feature_kinds(schema)


def _sample(job: Conversion) -> dict[str, dict[str, Any]]:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(job.shard_path(0)))
    found: dict[str, dict[str, Any]] = {}
    for record in reader.read(0, min(_SAMPLE, reader.num_records())):
        for name, values in parse_example(record).items():
            kind = BYTES if isinstance(values, list) else FLOAT if values.dtype.kind == "f" else INT64
            before = found.get(name, {"list": False})
            found[name] = {"kind": KIND_NAMES[kind], "list": before["list"] or len(values) != 1}
    return dict(sorted(found.items()))
