"""Every exception that meshfeed raises on purpose.

::

    MeshfeedError
    ├── SettingsError (ValueError)        a keyword's value; names the keyword and what it takes
    ├── PlanError (ValueError)            a batch and a mesh that do not fit; names the axis and sizes that do
    ├── SourceError                       a source or a record; names the record id or lane, and the leaf
    │   └── CorruptDataError              bytes that are not what was written; names the file and record
    ├── StateMismatchError (ValueError)   a state that cannot be continued here: field, saved, current, remedy
    ├── AgreementError                    hosts that differ in something that must be equal; names field and hosts
    ├── PeerError                         another host failed; carries its index and its message
    ├── StalledError (TimeoutError)       a host that did not arrive in time; names it and says how long
    └── CheckpointError                   a checkpoint that cannot be written or read; names step and path

A message says, in this order: what is wrong, what was received, what was expected, and what to do about it.
"""

from __future__ import annotations

from typing import Any

from meshfeed._src.base.names import public


@public("meshfeed")
class MeshfeedError(Exception):
    """Base of every exception that meshfeed raises on purpose."""


@public("meshfeed")
class SettingsError(MeshfeedError, ValueError):
    """A setting has a value that it cannot take.

    Attributes:
      setting: name of the keyword.
    """

    def __init__(self, message: str, *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting


@public("meshfeed")
class PlanError(MeshfeedError, ValueError):
    """A global batch cannot be laid out over the mesh as asked."""


@public("meshfeed")
class SourceError(MeshfeedError):
    """A source, or one of its records, cannot be read or batched.

    Attributes:
      record_id: the record's id, where there is one.
      lane_index: the lane, for streams.
    """

    def __init__(self, message: str, *, record_id: int | None = None, lane_index: int | None = None) -> None:
        super().__init__(message)
        self.record_id = record_id
        self.lane_index = lane_index


@public("meshfeed")
class CorruptDataError(SourceError):
    """Stored bytes are damaged: a file cut short, a checksum that fails, a flipped bit.

    Attributes:
      path: the damaged file, where it is known.
    """

    def __init__(
        self, message: str, *, path: str | None = None, record_id: int | None = None, lane_index: int | None = None
    ) -> None:
        super().__init__(message, record_id=record_id, lane_index=lane_index)
        self.path = path


@public("meshfeed")
class StateMismatchError(MeshfeedError, ValueError):
    """A saved state cannot be continued by this feed.

    Attributes:
      field: what differs, as a dotted path into the state, such as ``source.records``.
      saved: its value in the state.
      current: its value here.
      remedy: what to do.
    """

    def __init__(self, field: str, saved: Any, current: Any, remedy: str) -> None:
        self.field = field
        self.saved = saved
        self.current = current
        self.remedy = remedy
        super().__init__(f"state mismatch in {field!r}: saved {saved!r}, current {current!r}. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.saved, self.current, self.remedy)


@public("meshfeed")
class AgreementError(MeshfeedError):
    """Hosts differ in something that must be the same on all of them."""


@public("meshfeed")
class PeerError(MeshfeedError):
    """Another host failed, so that this one cannot go on.

    Attributes:
      host: process index of the host that failed.
      peer_message: what it reported.
    """

    def __init__(self, message: str, *, host: int | None = None, peer_message: str = "") -> None:
        super().__init__(message)
        self.host = host
        self.peer_message = peer_message


@public("meshfeed")
class StalledError(MeshfeedError, TimeoutError):
    """A wait ran past its deadline; the message says who is late and by how much.

    Attributes:
      hosts: process indices of the hosts that are late.
      waited_seconds: how long this host waited.
    """

    def __init__(self, message: str, *, hosts: tuple[int, ...] = (), waited_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.hosts = hosts
        self.waited_seconds = waited_seconds


@public("meshfeed")
class CheckpointError(MeshfeedError):
    """A checkpoint cannot be written or restored.

    Attributes:
      step: the step that was asked for, where there is one.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step
