"""An exception as a JSON value: the form in which errors travel between hosts and processes.

Exceptions are never pickled for another host. A host that only reports another host's failure needs its kind, host and
message. A controller that raises the exception of a remote host in its place rebuilds it from ``details``
(:meth:`Failure.exact` and :meth:`Failure.exception`).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping

from meshfeed._src.base import errors
from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.base.types import JsonValue

LEFT = "left"
"""The kind of a leave notice, published by a host that leaves early. The message states what it did and at which step."""
_MAX_MESSAGE = 2000


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failure of one host, or of all hosts alike.

    Attributes:
      kind: name of the exception's type, such as ``OSError``, or :data:`LEFT`.
      message: the exception's message, without its kind.
      host: process index of the host that failed; None if the failure concerns all hosts.
      step: the first step that it prevents; None if it does not depend on the step.
      details: JSON from which :meth:`exception` rebuilds the exception.
    """

    kind: str
    message: str
    host: int | None = None
    step: int | None = None
    details: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict[str, JsonValue])

    @classmethod
    def of(cls, error: BaseException, host: int | None = None) -> Failure:
        """Describes ``error`` in at most 2,000 characters, including its notes."""
        notes = getattr(error, "__notes__", ())
        message = f"{error} ({'; '.join(notes)})" if notes else str(error)
        return cls(type(error).__name__, message[:_MAX_MESSAGE], host)

    @classmethod
    def exact(cls, error: BaseException, host: int | None = None) -> Failure:
        """Describes ``error`` in full: its text, and in ``details`` its types, arguments, attributes and notes."""
        details = {
            "types": [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__[:-1]],
            "args": [arg for arg in error.args if _is_json(arg)],
            "attributes": {key: value for key, value in vars(error).items() if _is_json(value)},
            "notes": list(getattr(error, "__notes__", ())),
        }
        return cls(type(error).__qualname__, str(error) or repr(error), host, details=details)

    @classmethod
    def left(cls, message: str, host: int) -> Failure:
        """Returns a leave notice."""
        return cls(LEFT, message[:_MAX_MESSAGE], host)

    def __str__(self) -> str:
        return self.message if self.kind == LEFT else f"{self.kind}: {self.message}"

    def to_json(self) -> JsonValue:
        """Returns a JSON object without the fields that have their default."""
        return {name: value for name, value in vars(self).items() if value not in (None, {})}

    @classmethod
    def from_json(cls, value: JsonValue) -> Failure:
        """The inverse of :meth:`to_json`."""
        return cls(**value)

    def exception(self) -> Exception:
        """Rebuilds the exception, with the same text.

        Returns:
          The same type if it is one of Python or meshfeed. Otherwise the nearest such base class, or MeshfeedError, with
          the type's name before the text.
        """
        types = self.details.get("types", [[errors.__name__, self.kind]])
        error = self._rebuild(_known(*types[0]))
        if error is None:
            near = next(filter(None, (_known(*where) for where in types[1:])), MeshfeedError)
            takes_text = issubclass(near, ValueError | RuntimeError | OSError | TypeError)
            error = near(str(self)) if takes_text else MeshfeedError(str(self))
            error = error if str(error) == str(self) else MeshfeedError(str(self))
        for note in self.details.get("notes", ()):
            error.add_note(note)
        return error

    def _rebuild(self, kind: type[Exception] | None) -> Exception | None:
        if kind is None:
            return None
        attributes = {key: value for key, value in self.details.get("attributes", {}).items() if key != "__notes__"}
        for args in (self.details.get("args", ()), (self.message,)):
            try:
                error = kind.__new__(kind, *args)
                error.args = tuple(args)
                error.__dict__.update(attributes)
            except Exception:  # a type whose __new__ takes different arguments
                continue
            if str(error) == self.message:
                return error
        return None


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _known(module: str, name: str) -> type[Exception] | None:
    """Returns an exception type of Python or meshfeed; None for other modules, which may be missing here."""
    if module == "builtins" or module.partition(".")[0] == "meshfeed":
        kind = getattr(importlib.import_module(module), name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            return kind
    return None
