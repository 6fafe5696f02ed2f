"""Every exception that meshfeed raises on purpose, its JSON form, and its traceback.

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

Exceptions travel between hosts as JSON (:class:`Failure`) and are never pickled for another host. A host that only
reports another host's failure needs its kind, host and message. A controller that raises the exception of a remote host
in its place rebuilds it from ``details`` (:meth:`Failure.exact` and :meth:`Failure.exception`).

A traceback shows the caller's line and, if the user's source or decoder raised, that code's frames
(:func:`hides_own_frames`). ``MESHFEED_FULL_TRACEBACK=1`` in the environment keeps every frame.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import dis
import functools
import importlib
import inspect
import json
import os
import pathlib
import re
from collections.abc import Callable, Generator, Mapping
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from meshfeed._src.base.other_loaders import KEYWORDS
from meshfeed._src.base.types import JsonValue, public

F = TypeVar("F", bound=Callable[..., Any])

DAMAGED_STATE = "The state was changed or damaged; use an earlier checkpoint."
"""The remedy of a StateMismatchError for a state that no version has saved."""
DRAWS = "A function that draws random numbers must take them from its parameter rng."
"""The remedy if the same records have a different content."""
LEFT = "left"
"""The kind of a leave notice, published by a host that leaves early. The message states what it did and at which step."""
_MAX_MESSAGE = 2000
_MAX_REASON = 200  # every state lists up to 256 reasons
VARIABLE = "MESHFEED_FULL_TRACEBACK"
_ROOT = str(pathlib.Path(__file__).resolve().parents[2]) + os.sep  # the package's folder
_EXAMPLES = os.path.join(_ROOT, "_examples") + os.sep  # user code, which the demo runs
_CARRIERS = ("concurrent.futures.", "contextlib.")
_MADE = ("<string>", "<dynamic-code>")  # by dataclasses, and by cloudpickle in a worker; in the module's namespace
_DELIBERATE = "meshfeed_deliberate"
_PASSWORD = re.compile(r"(?<=://)[^\s/@:'\"<>]*:[^\s/@'\"<>]*@")
_QUERY = re.compile(r"(https?://[^\s'\"<>?]*)\?[^\s'\"<>]*[^\s'\"<>.,:;)]")  # without what ends a sentence


@public("meshfeed")
class MeshfeedError(Exception):
    """Base of every exception that meshfeed raises on purpose.

    Its text has no signature of a URL: it is printed, logged, sent to other hosts and stored in states.
    """

    def __str__(self) -> str:
        return without_signatures(super().__str__())

    def __repr__(self) -> str:
        return without_signatures(super().__repr__())


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
      step: the step that cannot be saved or restored, or None.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


def install_hint(extra: str) -> str:
    """Returns the sentence with the command that installs an extra. meshfeed is not on PyPI."""
    return f"Run pip install '.[{extra}]' in a checkout."


def missing_package(user: str, error: ImportError, extra: str, *, setting: str | None = None) -> MeshfeedError:
    """Returns the error for a package that ``user`` needs and ``extra`` installs.

    It is a SettingsError if only the value of ``setting`` needs the package, otherwise a SourceError.
    """
    text = f"{user} needs {error.name or 'a package'}, which cannot be imported: {error}. {install_hint(extra)}"
    return SourceError(text) if setting is None else SettingsError(text, setting=setting)


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
        message = f"{text_of(error)} ({'; '.join(notes)})".lstrip() if notes else text_of(error)
        return cls(type(error).__name__, without_signatures(message)[:_MAX_MESSAGE], host)

    @classmethod
    def exact(cls, error: BaseException) -> Failure:
        """Describes ``error`` in full: its text, and in ``details`` its types, arguments, attributes and notes."""
        details = {
            "types": [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__[:-1]],
            "args": [arg for arg in error.args if _is_json(arg)],
            "attributes": {key: value for key, value in vars(error).items() if _is_json(value)},
            # JSON does not have them.
            "tuples": [key for key, value in vars(error).items() if isinstance(value, tuple)],
            "notes": list(getattr(error, "__notes__", ())),
        }
        return cls(type(error).__qualname__, text_of(error) or repr(error), details=details)

    @classmethod
    def left(cls, message: str, host: int) -> Failure:
        """Returns a leave notice."""
        return cls(LEFT, message[:_MAX_MESSAGE], host)

    def __str__(self) -> str:
        named = f"{self.kind}: {self.message}" if self.message else self.kind
        return self.message if self.kind == LEFT else named

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
        types = self.details.get("types", [[__name__, self.kind]])
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
        attributes |= {key: tuple(attributes[key]) for key in self.details.get("tuples", ()) if key in attributes}
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


@contextlib.contextmanager
def refuse_stop_iteration(what: str, where: str = "", **location: int) -> Generator[None]:
    """Turns a StopIteration of the user's code into a SourceError where it would pass for the end of the data.

    ``what`` names the object whose code is called, and ``where`` its methods, such as ``in close``.
    """
    try:
        yield
    except StopIteration as error:
        raise SourceError(
            f"{what} raised StopIteration{where and f' {where}'}, which does not end the data. Raise a different exception "
            "there.",
            **location,
        ) from error


def shorten(text: str, limit: int) -> str:
    """Returns ``text``, cut to ``limit`` characters with an ellipsis if it is longer."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def without_signatures(text: str) -> str:
    """Removes from URLs in text what grants access to the store: the query, which may be a signature, and a password."""
    return _QUERY.sub(r"\1?…", _PASSWORD.sub("…@", text))


def text_of(error: BaseException) -> str:
    """Returns ``str(error)``, or what Python's tracebacks show if the user's class raises there."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def reason_of(error: Exception) -> str:
    """Returns why a record is bad, for the ledger, in at most 200 characters."""
    return without_signatures(f"{type(error).__name__}: {text_of(error)}")[:_MAX_REASON]


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


def hide_own_frames(error: BaseException) -> None:
    """Removes meshfeed's frames from the traceback of ``error`` and of its causes and contexts.

    An exception that Python or a library raised in meshfeed's own code keeps all frames, because it is probably a bug in
    meshfeed. One that a ``raise`` of meshfeed's raised, such as a decoder's ValueError, does not.
    Call this in an ``except`` clause that ends with a bare ``raise``, which adds no frame.
    """
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        return
    seen: set[int] = set()  # exceptions can share causes
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            _trim(one)
            todo += [one.__cause__, one.__context__]


def hides_own_frames(function: F) -> F:
    """Decorates a public function: applies :func:`hide_own_frames` to its exceptions.

    If it does not take the arguments, the TypeError suggests a keyword that it takes.
    """

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            unbound = isinstance(error, TypeError) and error.__traceback__ and error.__traceback__.tb_next is None
            if unbound and (text := _wrong_arguments(function, args, kwargs)):
                raise TypeError(text) from None
            hide_own_frames(error)
            raise

    return cast("F", call)


def _wrong_arguments(
    function: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str | None:
    """Returns what is wrong with the arguments of a call, or None if Python's own message says it."""
    every = inspect.signature(function).parameters
    parameters = [one for one in every.values() if one.name != "self"]
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        return None
    takes = [one.name for one in parameters]
    name = function.__qualname__.removesuffix(".__init__")
    if args and "self" in every and function.__name__ != "__init__":
        name = f"{type(args[0]).__name__}.{function.__name__}"  # not the base class that defines the method
    unknown = next((name for name in kwargs if name not in takes), None)
    if unknown is not None:
        words = set(unknown.split("_"))
        near = (
            [n for n in takes if words <= set(n.split("_"))]
            or difflib.get_close_matches(unknown, takes, n=1)
            or [n for n in takes if words & set(n.split("_"))]
        )
        remedy = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(takes)}."
        if "global_batch_size" in takes:
            remedy = KEYWORDS.get(unknown, remedy)
        return f"{name}() got an unexpected keyword argument {unknown!r}; {remedy}"
    by_place = [one.name for one in parameters if one.kind != one.KEYWORD_ONLY]
    given = len(args) - ("self" in every)
    if given > len(by_place) and (named := takes[len(by_place) :]):
        return (
            f"{name}() takes {len(by_place)} arguments by position ({', '.join(by_place)}), but {given} were given; pass the "
            f"others by name, such as {named[0]}=."
        )
    return None


def _trim(error: BaseException) -> None:
    kept: list[TracebackType] = []
    hidden, last, entry = False, None, error.__traceback__
    while entry is not None:
        last = entry
        hidden = _is_own(entry.tb_frame) or (hidden and _is_carrier(entry.tb_frame))
        if not hidden:
            kept.append(entry)
        entry = entry.tb_next
    if hidden and last is not None and not isinstance(error, MeshfeedError | StopIteration):
        if not _is_deliberate(error, last):
            return
        error.__dict__[_DELIBERATE] = True  # an inner call removes the frames that show it
    shown = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.with_traceback(shown)  # an assignment would fail for a frozen dataclass


def _is_deliberate(error: BaseException, last: TracebackType) -> bool:
    """Whether meshfeed raised ``error`` on purpose: it ended in one of its ``raise`` statements."""
    if _DELIBERATE in error.__dict__:
        return True
    code = last.tb_frame.f_code
    if code.co_filename == __file__:  # the decorators raise only the TypeError for wrong arguments
        return True
    raised = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and _is_own(last.tb_frame) and not isinstance(error, AssertionError)


def _is_own(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file in _MADE:
        return str(frame.f_globals.get("__name__", "")).startswith("meshfeed._src.")
    return file.startswith(_ROOT) and not file.startswith(_EXAMPLES)


def _is_carrier(frame: FrameType) -> bool:
    """Whether the frame belongs to a library that only forwards meshfeed's call, such as to a thread."""
    return f"{frame.f_globals.get('__name__', '')}.".startswith(_CARRIERS)
