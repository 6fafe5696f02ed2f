"""Workers on the machines of a Ray cluster: the interface of :class:`WorkerPool` over Ray actors.

An actor answers requests as a child process does, with the same
:class:`~meshfeed._src.base.serving.TaskServer`. A lost actor is replaced, and the new one first gets the request that
:func:`~meshfeed._src.reading.workers.open_pool` calls ``resume``, and then those that the old one has not answered.
Answers travel through Ray's object store and are copied out of it, so the store holds only answers that have not been
collected, and no array of a batch depends on Ray. Imported only for ``engine="ray"``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, ObjectLostError, RayActorError, RayError

from meshfeed._src.base import frames, serving
from meshfeed._src.base.errors import MeshfeedError, SettingsError, SourceError, StalledError, shorten
from meshfeed._src.base.fork import finalize
from meshfeed._src.base.progress import PROGRESS
from meshfeed._src.base.settings import Workers
from meshfeed._src.base.stats import CACHES

_SLICE_SECONDS = 0.5  # between looks at the progress of a worker that has not answered
_CONNECT_SECONDS = 60.0
_PLACE_SECONDS = 5.0
_MAX_LOSSES = 5  # in a row, without an answer
_SHOWN_CHARACTERS = 200  # of a request in a message
_CLOSED = "the worker pool is closed"
_SHOWN_CAUSE = 500  # characters of Ray's description of a loss
_LOST = (RayActorError, ObjectLostError)
_CONTROL = "control"
_OWN_LINES = ("class_name:", "actor_id:", "namespace:", "name:")  # of Ray's messages
_log = logging.getLogger("meshfeed.workers")

Request = TypeVar("Request")
Answer = TypeVar("Answer")
_Sent: TypeAlias = list[tuple[int, bytes, list[np.ndarray]]]
"""Messages as Ray carries them: it pickles numpy arrays without a copy, but no memoryview."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an actor runs, and its version of meshfeed."""

    host: str
    node_id: str
    pid: int
    version: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, Ray node {self.node_id[:12]}"


def _version() -> str:
    return importlib.metadata.version("meshfeed")


class MeshfeedWorker:
    """The actor. Its requests run in one thread; another one answers where it is and how far it is."""

    def __init__(self) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        self._server: serving.TaskServer | None = None
        self._progress = ""
        PROGRESS.tell = functools.partial(setattr, self, "_progress")

    def set_up(self, make_task: bytes, gc_every: int) -> _Sent:
        """See :meth:`TaskServer.set_up`."""
        self._server = serving.TaskServer(gc_every)
        return _sent(self._server.set_up(make_task))

    def answer(self, request: object) -> _Sent:
        """See :meth:`TaskServer.answer`."""
        assert self._server is not None
        self._server.collect()
        return _sent(self._server.answer(request))

    @ray.method(concurrency_group=_CONTROL)
    def where(self) -> _Place:
        """Returns where the actor runs."""
        host = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
        return _Place(host, ray.get_runtime_context().get_node_id(), os.getpid(), _version())

    @ray.method(concurrency_group=_CONTROL)
    def progress(self) -> str:
        """Returns the progress of a resume since the last call, or an empty string."""
        progress, self._progress = self._progress, ""
        return progress


def _sent(messages: list[serving.Message]) -> _Sent:
    return [(kind, pickled, [np.frombuffer(b, np.uint8) for b in buffers]) for kind, (pickled, buffers) in messages]


class _Attempt(threading.Thread):
    """Connects this process to the running Ray cluster.

    In a thread, because Ray tries an address at which nothing answers for minutes, and because in the main thread,
    ``ray.init`` would replace the handler of SIGTERM, by which jobs are told to save and leave.
    """

    def __init__(self) -> None:
        super().__init__(name="meshfeed-ray", daemon=True)
        self.error: Exception | None = None

    def run(self) -> None:
        logger = logging.getLogger("ray._private.worker")
        logger.addFilter(_is_not_about_sigterm)
        try:
            ray.init(address="auto", configure_logging=False)
        except Exception as error:
            self.error = error
        finally:
            logger.removeFilter(_is_not_about_sigterm)


_connecting = threading.Lock()
_attempts: list[_Attempt] = []  # at most one, while it runs


def connect() -> None:
    """Connects this process to the running Ray cluster, unless it is connected.

    Raises:
      SettingsError: there is no cluster, or it cannot be used.
    """
    with _connecting:
        if ray.is_initialized():
            return
        if not _attempts:
            _attempts.append(_Attempt())
            _attempts[0].start()
        attempt = _attempts[0]
        attempt.join(_CONNECT_SECONDS)
        if not attempt.is_alive():
            _attempts.clear()
            if attempt.error is None:
                return
    address = os.environ.get("RAY_ADDRESS")
    where = f"at RAY_ADDRESS={address}" if address else "that runs on this machine; RAY_ADDRESS is not set"
    reason = str(attempt.error or "").rstrip(".") or f"no answer within {_CONNECT_SECONDS:.0f} s"
    raise SettingsError(
        f"num_workers=Workers(engine='ray') could not connect to the Ray cluster {where}: {reason}. Start one with "
        "`ray start --head` on one machine and `ray start --address=<head>:6379` on the others, also on this one (with "
        "`--num-cpus=0` if it is not to run workers), or call ray.init() before the first batch.",
        setting="num_workers",
    ) from attempt.error


def _check_connected() -> None:
    """Raises unless this process is connected. Otherwise any call of Ray would start a new cluster on this machine."""
    if not ray.is_initialized():
        raise MeshfeedError("Ray was shut down while a feed uses it. Call ray.shutdown() after closing the feed.")


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM" not in record.getMessage()


class RayPool(Generic[Request, Answer]):
    """Ray actors that each handle requests in the order of submission; see ``WorkerPool`` for its methods.

    A request that was lost with its actor is answered by another actor, so a task that depends on earlier requests needs
    ``resume``. A worker that is lost again after 5 replacements in a row, without an answer in between, is an error. Tasks
    are not closed.

    Raises:
      SettingsError: there is no cluster, or ``ray_options`` has a value that Ray does not take.
    """

    def __init__(
        self,
        workers: Workers,
        make_task: bytes,
        *,
        name: str,
        describe: Callable[[Any], str] = repr,
        resume: Callable[[Request, Answer], Request] | None = None,
    ) -> None:
        connect()
        own = {"max_restarts": 0, "max_task_retries": 0}  # replaced here, because lanes have to be resumed
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **workers.ray_options, **own}
        task = ray.put(make_task)  # once for all actors; freed with the last worker

        remote: Any = ray.remote  # its annotations leave this keyword out

        def start() -> tuple[Any, Any]:
            actor = remote(concurrency_groups={_CONTROL: 1})(MeshfeedWorker).options(**options).remote()
            return actor, actor.set_up.remote(task, workers.gc_every)

        self._workers: list[_RayWorker[Request, Answer]] = []
        # Also runs at exit and on garbage collection. The list is filled below, so it covers a partial failure.
        self._finalizer = finalize(self, _close_workers, self._workers)
        try:
            for worker_index in range(workers):
                label = f"worker {worker_index} of {int(workers)} of {name}"
                self._workers.append(_RayWorker(label, start, options, describe, resume))
        except (TypeError, ValueError) as error:  # from Ray's check of the options
            self.close()
            raise SettingsError(
                f"num_workers.ray_options={dict(workers.ray_options)!r}: {error}. They are the options of Ray's "
                "actor.options().",
                setting="num_workers",
            ) from error
        except BaseException:
            self.close()
            raise

    def submit(self, worker_index: int, request: Request) -> None:
        """Queues a request and returns immediately."""
        self._worker(worker_index).submit(request)

    def result(self, worker_index: int, timeout: float | None) -> Answer:
        """Waits for and returns the result of a worker's oldest pending request, or for ``timeout`` seconds for one actor.

        Safe to call again after a StalledError.

        Raises:
          StalledError: the result did not arrive in time, or Ray has not started the actor.
          SourceError: the worker was lost too often, or raised an exception that cannot be unpickled.
          MeshfeedError: the pool is closed, no request is pending, or Ray was shut down.
          Exception: the exception of the task, with the same type and the worker's traceback as a note.
        """
        return self._worker(worker_index).result(timeout, self._check_all)

    def _check_all(self) -> None:
        """Replaces all actors that are known to be lost: those of a node are lost together, and start together."""
        for worker in self._workers:
            worker.check()

    def _worker(self, worker_index: int) -> _RayWorker[Request, Answer]:
        if not self._finalizer.alive:
            raise MeshfeedError(_CLOSED)
        _check_connected()
        return self._workers[worker_index]

    @property
    def killed(self) -> bool:
        """False: lost actors are replaced."""
        return False

    def is_ready(self) -> bool:
        """True: the actors are made with the pool."""
        return True

    def stop(self) -> None:
        """Wakes a thread in :meth:`result` within a second. Thread-safe."""
        for worker in list(self._workers):
            worker.stop()

    def close(self) -> None:
        """Kills the actors, even during a request. Safe to call again."""
        self._finalizer()


@dataclasses.dataclass(frozen=True, eq=False)
class _Call(Generic[Request]):
    """A call of an actor: a request of the caller, or one of those that begin an actor's life."""

    answer: Any  # a ray.ObjectRef
    request: Request | None
    opens: bool = False


class _RayWorker(Generic[Request, Answer]):
    """One worker: its current actor, and its pending requests."""

    def __init__(
        self,
        label: str,
        start: Callable[[], tuple[Any, Any]],
        options: dict[str, Any],
        describe: Callable[[Any], str],
        resume: Callable[[Request, Answer], Request] | None,
    ) -> None:
        self.label = label
        self._start, self._options, self._describe, self._resume = start, options, describe, resume
        self._first: list[Request] = []  # the request that a new actor gets first, if any
        self._calls: collections.deque[_Call[Request]] = collections.deque()
        self._lock = threading.Lock()  # guards the calls while an actor is replaced
        self._losses = 0
        self._resuming = ""
        self._death: Exception | None = None
        self._begin([])

    def _begin(self, requests: list[Request]) -> None:
        """Starts an actor, and submits ``requests`` to it."""
        self.actor, ready = self._start()
        self._ready = False
        self._place: _Place | None = None
        self._where = self.actor.where.remote()
        self._asked: Any = None
        calls = [_Call[Request](ready, None, opens=True)]
        calls += [_Call(self.actor.answer.remote(request), request, opens=True) for request in self._first]
        calls += [_Call(self.actor.answer.remote(request), request) for request in requests]
        self._calls = collections.deque(calls)

    def submit(self, request: Request) -> None:
        with self._lock:
            self._calls.append(_Call(self.actor.answer.remote(request), request))

    def stop(self) -> None:
        self._death = MeshfeedError(_CLOSED)

    def check(self) -> None:
        """Replaces the actor if it is known to be lost."""
        with self._lock:
            call = self._calls[-1] if self._calls and self._death is None else None
        if call is not None and ray.wait([call.answer], timeout=0)[0]:
            try:
                ray.get(call.answer)
            except _LOST as error:
                with contextlib.suppress(SourceError):  # raised by the next result, like other errors
                    self._replace(error, call)
            except RayError:
                pass

    def result(self, timeout: float | None, on_loss: Callable[[], None]) -> Answer:
        if all(call.opens for call in self._calls):
            raise MeshfeedError(f"{self.label} has no pending request to return a result for")
        try:
            return self._next_answer(timeout, on_loss)
        finally:
            PROGRESS.ended(self._resuming)
            self._resuming = ""

    def _next_answer(self, timeout: float | None, on_loss: Callable[[], None]) -> Answer:
        start = time.monotonic()
        while True:
            if self._death is not None:
                raise self._death.with_traceback(None)  # raised repeatedly; tracebacks would accumulate
            _check_connected()  # Ray disconnects at exit, when a read-ahead thread may still wait
            waited = time.monotonic() - start
            call = self._calls[0]
            left = _SLICE_SECONDS if timeout is None else min(_SLICE_SECONDS, timeout - waited)
            try:
                messages: _Sent = ray.get(call.answer, timeout=max(left, 0.0))
            except GetTimeoutError:
                if self._moved():
                    start = time.monotonic()
                elif timeout is not None and time.monotonic() - start >= timeout:
                    raise self._stalled(time.monotonic() - start) from None
                continue
            except _LOST as error:
                _check_connected()
                self._replace(error, call)
                on_loss()
                start = time.monotonic()
                continue
            except RayError as error:
                raise self._unusable(error) from error
            value = self._value(messages, call)
            del messages  # the object store can free it
            with self._lock:
                if self._calls[0] is not call:  # a thread that waits for another worker has replaced the actor
                    continue
                if not call.opens:
                    if self._resume is not None and call.request is not None:
                        self._first = [self._resume(call.request, value)]
                    self._losses = 0
                self._calls.popleft()
            if not call.opens:
                return value

    def _value(self, messages: _Sent, call: _Call[Request]) -> Any:
        """Returns the value of an answer; raises the error that it holds."""
        value = None
        for kind, pickled, arrays in messages:
            value = frames.unpack(pickled, arrays)
            if kind == serving.CACHE_USE:
                CACHES.add(value)
            elif kind == serving.READY:
                self._check_version()
                self._ready = True
            elif kind == serving.ERROR:
                error = serving.rebuild_error(value, f"in {self.label} ({self._where_it_is()}) while {self._doing()}")
                if call.opens:
                    self._death = error  # raised by every later request too
                else:
                    self._losses = 0
                    self._calls.popleft()
                raise error
        return value

    def _check_version(self) -> None:
        ray.wait([self._where], timeout=_PLACE_SECONDS)  # the other thread of the actor may answer later
        if (place := self._find_place()) is not None and place.version != _version():
            self._death = SettingsError(
                f"num_workers: {self.label} ({place}) has meshfeed {place.version}, this host {_version()}. Install the same "
                "version on all machines of the Ray cluster.",
                setting="num_workers",
            )
            raise self._death

    # ------------------------------------------------------------------ waiting

    def _find_place(self) -> _Place | None:
        """Returns where the actor runs, or ran; None before it has started."""
        if self._place is None and ray.wait([self._where], timeout=0)[0]:
            with contextlib.suppress(RayError):  # lost before it could answer
                self._place = ray.get(self._where)
        return self._place

    def _moved(self) -> bool:
        """Whether the actor has dropped records, to resume, since the last call; asks it for the next call."""
        if self._find_place() is None:
            return False
        if self._asked is None:
            self._asked = self.actor.progress.remote()
        if not ray.wait([self._asked], timeout=0)[0]:
            return False
        asked, self._asked = self._asked, None
        try:
            progress: Any = ray.get(asked)
        except RayError:  # reported by its request
            return False
        if progress:
            self._resuming = progress
            PROGRESS.moved(progress)
        return bool(progress)

    def _where_it_is(self) -> str:
        return str(self._find_place() or "a Ray actor that has not started")

    def _doing(self) -> str:
        call = self._calls[0]
        if not self._ready:  # the answer to the set-up is often lost with the request that ends the process
            first = next((call.request for call in self._calls if call.request is not None), None)
            work = f", or {self._describe(first)}" if first is not None else ""
            return "being set up (importing, opening the source)" + shorten(work, _SHOWN_CHARACTERS)
        what = shorten(self._describe(call.request), _SHOWN_CHARACTERS)
        return self._resuming or (f"taking over from a lost actor, {what}" if call.opens else f"working on {what}")

    def _stalled(self, waited: float) -> StalledError:
        place = self._find_place()
        if place is None:
            needs = {name: value for name, value in self._options.items() if value and not name.startswith("max_")}
            hint = (
                f"Ray has not started it. It needs {needs}; free in the cluster are {_free()}. Add machines with `ray start "
                "--address=…`, use fewer workers, or reserve less with Workers(ray_options=…)."
            )
        else:
            hint = (
                f"It is {self._doing()}. Its storage or its decoder hangs, or is slow. See where with `py-spy dump --pid "
                f"{place.pid}` on that machine, or allow more time with timeout_seconds=."
            )
        return StalledError(
            f"{self.label} ({self._where_it_is()}) has not answered within {waited:.1f} s. {hint}",
            waited_seconds=waited,
        )

    # ------------------------------------------------------------------ losses

    def _replace(self, error: RayError, lost: _Call[Request]) -> None:
        """Starts a new actor in place of the one that lost a call, with the pending requests."""
        with self._lock:
            if lost not in self._calls:  # another thread was first
                return
            self._losses += 1
            text = f"{self.label} ({self._where_it_is()}) was lost while it was {self._doing()}: {_cause(error)}"
            if self._losses > _MAX_LOSSES:
                self._death = SourceError(
                    f"{text} It has been replaced {_MAX_LOSSES} times without answering. If memory runs out, use fewer "
                    "workers, or reserve more for each with Workers(ray_options={'memory': …}); if a record makes the "
                    "decoder crash, see the worker's output in the Ray logs of that node."
                )
                raise self._death from error
            _log.warning("%s A new actor takes over (replacement %d of %d in a row).", text, self._losses, _MAX_LOSSES)
            self.close()
            self._begin([call.request for call in self._calls if not call.opens])  # pyright: ignore[reportArgumentType] # only calls that open have none

    def _unusable(self, error: RayError) -> Exception:
        """Returns the error for a worker that no new actor can replace."""
        hint = "It cannot import or load what it needs: install the same packages on all machines of the Ray cluster."
        if isinstance(error, ActorUnschedulableError):
            hint = "No machine of the cluster can have it: change Workers(ray_options=…)."
        self._death = SourceError(f"{self.label} ({self._where_it_is()}) failed in Ray: {_cause(error)} {hint}")
        return self._death

    def close(self) -> None:
        """Kills the actor."""
        with contextlib.suppress(Exception):  # it is dead, or Ray is being shut down
            ray.kill(self.actor)

    def forget(self) -> None:
        """Drops the answers that were not collected."""
        self._calls.clear()


def _cause(error: RayError) -> str:
    """Returns Ray's description of an error in one line, without what only Ray can read."""
    cause = getattr(error, "cause", None)  # of an exception in the actor, whose text is a traceback
    lines = [line.strip() for line in str(error if cause is None else repr(cause)).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(_OWN_LINES))
    return shorten(text, _SHOWN_CAUSE).rstrip(".") + "."


def _free() -> dict[str, float]:
    try:
        free = ray.available_resources()
    except Exception:
        return {}
    return {name: value for name, value in free.items() if not name.startswith("node:")}


def _close_workers(workers: list[_RayWorker[Any, Any]]) -> None:
    connected = ray.is_initialized()  # at exit, Ray disconnects first, which ends its actors
    for worker in workers:
        worker.forget()
        if connected:
            worker.close()
