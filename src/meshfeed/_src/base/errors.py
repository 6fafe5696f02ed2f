"""Every exception that meshfeed raises on purpose.

::

    MeshfeedError
    ├── SettingsError (ValueError)        a keyword has an invalid value; names the keyword and the valid values
    ├── PlanError (ValueError)            the global batch does not fit the mesh; names the axis and sizes that fit
    ├── SourceError                       a source or record is unreadable; names the record id or lane, and the leaf
    │   └── CorruptDataError              stored bytes are damaged; names the file and record
    ├── StateMismatchError (ValueError)   a saved state does not match this feed: field, saved, current, remedy
    ├── AgreementError                    hosts differ in something that must be equal; names field and hosts
    ├── PeerError                         another host failed; carries its index and its message
    ├── StalledError (TimeoutError)       a host did not arrive in time; names it and the time waited
    └── CheckpointError                   a checkpoint cannot be written or read; names step and path

A message states, in this order: what is wrong, what was received, what was expected, and how to fix it.
"""

from __future__ import annotations

from typing import Any

from meshfeed._src.base.types import public


@public("meshfeed")
class MeshfeedError(Exception):
    """Base of every exception that meshfeed raises on purpose."""


@public("meshfeed")
class SettingsError(MeshfeedError, ValueError):
    """A setting has an invalid value.

    Attributes:
      setting: name of the keyword, or None.
    """

    def __init__(self, message: str, *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting


@public("meshfeed")
class PlanError(MeshfeedError, ValueError):
    """A global batch cannot be laid out over the mesh with the given shardings."""


@public("meshfeed")
class SourceError(MeshfeedError):
    """A source, or one of its records, cannot be read or batched.

    Attributes:
      record_id: the record's id, or None if the error concerns no single record.
      lane_index: the lane, for streams.
    """

    def __init__(self, message: str, *, record_id: int | None = None, lane_index: int | None = None) -> None:
        super().__init__(message)
        self.record_id = record_id
        self.lane_index = lane_index


@public("meshfeed")
class CorruptDataError(SourceError):
    """Stored bytes are damaged: a truncated file, a checksum mismatch, a flipped bit.

    Attributes:
      path: the damaged file, or None if unknown.
    """

    def __init__(
        self, message: str, *, path: str | None = None, record_id: int | None = None, lane_index: int | None = None
    ) -> None:
        super().__init__(message, record_id=record_id, lane_index=lane_index)
        self.path = path


@public("meshfeed")
class StateMismatchError(MeshfeedError, ValueError):
    """This feed cannot resume from a saved state.

    Attributes:
      field: the field that differs, as a dotted path into the state, such as ``source.records``.
      saved: its value in the state.
      current: its value in this feed.
      remedy: how to fix it.
    """

    def __init__(self, field: str, saved: Any, current: Any, remedy: str) -> None:
        self.field = field
        self.saved = saved
        self.current = current
        self.remedy = remedy
        super().__init__(f"state mismatch in {field!r}: saved {saved!r}, current {current!r}. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, unpickling calls the class with the message as the only argument.
        return type(self), (self.field, self.saved, self.current, self.remedy)


@public("meshfeed")
class AgreementError(MeshfeedError):
    """Hosts differ in something that must be equal on all of them."""


@public("meshfeed")
class PeerError(MeshfeedError):
    """Another host failed, and this host cannot continue without it.

    Attributes:
      host: process index of the host that failed.
      peer_message: the message that it reported.
    """

    def __init__(self, message: str, *, host: int | None = None, peer_message: str = "") -> None:
        super().__init__(message)
        self.host = host
        self.peer_message = peer_message


@public("meshfeed")
class StalledError(MeshfeedError, TimeoutError):
    """A wait exceeded its deadline; the message names the late hosts and the time waited.

    Attributes:
      hosts: process indices of the late hosts.
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
      step: the requested step, or None if there was none.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step
