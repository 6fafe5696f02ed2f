"""ArrayRecord files as one random-access source, read in batches.

The reads of a step are in ``rows.py``; what creates and decodes is here.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SettingsError, hides_own_frames
from meshfeed._src.base.ownership import own_batch, own_record
from meshfeed._src.base.types import Decode, DecodeBatch, JsonValue, Record, public
from meshfeed._src.reading.identity import digest_raw
from meshfeed._src.sources.array_record.readers import ShardFile, inspect
from meshfeed._src.sources.array_record.rows import RecordFiles
from meshfeed._src.sources.decode import refuse_as_decode
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.lookup import FileFormat, find_shards
from meshfeed._src.sources.files.shards import Shards

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache


@public("meshfeed.sources")
class ArrayRecord(RecordFiles):
    """Random-access source over the records of ArrayRecord files, concatenated in file order.

    Files are opened on first use, and a bounded number stays open. A source can be pickled, without its open files. Safe
    to read from several threads.

    Args:
      paths: a path, a glob (expanded in order of name), a URL supported by fsspec, or a list of these. The order of the
        files determines the record ids.
      decode: converts the bytes of one record to a pytree of arrays. May take ``rng=``.
      decode_batch: converts a list of n records (bytes) to a pytree of arrays ``[n, ...]``. May take ``rng=``. For
        records of one size, ``numpy.frombuffer(b"".join(records), dtype).reshape(len(records), -1)`` is far faster
        than decoding one by one. Arrays returned by either function are copied before its next call, so it may reuse
        them; views of ``bytes``, as in this example, are not copied.
      cache: cache on a local disk; required for compressed files (``.gz``). Without it, remote records are read as byte
        ranges, from files of one record per chunk.

    Raises:
      SettingsError: if both decoders are given, or without a cache a URL of a file of several records per chunk.
      SourceError: if there are no files, a file is missing, or all files are empty; names the path or pattern.
      CorruptDataError: if a file is empty, truncated or in a different format; names the file.

    Examples:
      >>> import numpy as np
      >>> from array_record.python.array_record_module import ArrayRecordWriter
      >>> from meshfeed.sources import ArrayRecord, DecodeRaw
      >>> writer = ArrayRecordWriter("a.array_record", "group_size:1")
      >>> for n in range(6):
      ...     _ = writer.write(np.full(4, n, np.int32).tobytes())
      >>> writer.close()
      >>> source = ArrayRecord("*.array_record", decode_batch=DecodeRaw("int32", 4, key="tokens"))
      >>> source[5]["tokens"].tolist()
      [5, 5, 5, 5]
    """

    @hides_own_frames
    def __init__(
        self,
        paths: file_paths.Paths,
        decode: Decode | None = None,
        decode_batch: DecodeBatch | None = None,
        *,
        cache: ShardCache | None = None,
    ) -> None:
        if decode is not None and decode_batch is not None:
            raise SettingsError(
                "ArrayRecord got both decode and decode_batch. Expected one of them: decode for one record's bytes, "
                "decode_batch for a list of them.",
                setting="decode_batch",
            )
        refuse_as_decode(decode, "ArrayRecord")
        if decode is not None:
            hooks.check_function(decode, "record", "one record (bytes)", "ArrayRecord", "decode")
        if decode_batch is not None:
            hooks.check_function(decode_batch, "records", "a list of records (bytes)", "ArrayRecord", "decode_batch")
        self.decode = decode
        self.decode_batch = decode_batch
        form = FileFormat("ArrayRecord", lambda name: inspect(name, cache), ShardFile.from_entry)
        super().__init__(find_shards(paths, cache, form), cache)

    def concatenate(self, others: Sequence[object]) -> ArrayRecord | None:
        """Returns one source over the records of this source followed by those of ``others``.

        A read of the result costs one call for all of them. None if they do not read and decode alike.
        """
        decoders = (self.decode, self.decode_batch)
        alike = all(
            isinstance(other, ArrayRecord) and (other.decode, other.decode_batch) == decoders for other in others
        )
        return self._joined(others) if alike else None

    def concatenate_raw(self, others: Sequence[object]) -> ArrayRecord | None:
        """As :meth:`concatenate`, without a decoder, and for sources with any decoders."""
        joined = self._joined(others)
        if joined is not None:
            joined.decode = joined.decode_batch = None
        return joined

    def _joined(self, others: Sequence[object]) -> ArrayRecord | None:
        sources = [self]
        for other in others:
            if type(other) is not type(self) or other.__dict__.keys() != self.__dict__.keys():
                return None  # a subclass, or a method replaced on the instance, may read differently
            if (other._cache, other._is_direct) != (self._cache, self._is_direct):
                return None
            sources.append(other)
        joined = copy.copy(self)
        files = [file for source in sources for file in source._shards.files]
        manifests = dict.fromkeys(path for source in sources for path in source._shards.manifests)
        RecordFiles.__init__(joined, Shards(files, "ArrayRecord", tuple(manifests)), self._cache)
        return joined

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """Returns record ``record_id``, decoded; its bytes if the source has no decoder."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[Record]:
        """Returns several decoded records, in the order of ``record_ids``."""
        raw = self.read_raw(np.asarray(record_ids, np.int64))
        if self.decode is not None:
            return [own_record(self.decode(record)) for record in raw]
        if self.decode_batch is not None and raw:
            batch = own_batch(self.decode_batch(raw), self.decode_batch, "__call__")
            return [trees.map_leaves(lambda leaf, row=row: leaf[row], batch) for row in range(len(raw))]
        return list(raw)

    def fingerprint(self) -> JsonValue:
        """Returns the identity: files, number of records, and a digest of 4 records spread over the source."""
        identity = {"kind": "array_record", "files": self._identity_of_files(), "records": len(self)}
        return self._with_content(identity, lambda ids: digest_raw(self._by_range(ids).read_raw(ids)))
