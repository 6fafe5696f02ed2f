"""MaxText's RemoteIterator and RemoteIteratorWrapper: the loader runs on the CPU hosts attached to the accelerators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from etils import epath
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshfeed._src.base import coordination
from meshfeed._src.base.fork import NotCopied
from meshfeed._src.base.types import PyTree, public
from meshfeed._src.maxtext.loader import MultiHostDataLoadIterator
from meshfeed._src.remote.client import RemoteClient, make_payload
from meshfeed._src.state import grain_files
from meshfeed._src.state.files import write_text

Step: TypeAlias = "jax.Array | np.ndarray | np.integer | int"
"""A step number, also as an array with one element."""


@public("meshfeed.maxtext")
class RemoteIterator(NotCopied):
    """A host's loader and its state files; runs on the CPU host attached to the accelerators.

    Args:
      get_ds_fn: ``get_ds_fn(dataloading_host_index=, dataloading_host_count=) -> dataset``.
      preprocessing_fn: ``preprocessing_fn(dataset=) -> loader`` of pytrees of arrays ``[host_rows, ...]``.
      global_shape: shape of a global batch. Only the first entry, the number of rows, is checked; the other dimensions
        may vary by leaf. None accepts any number of rows.
      checkpoint_path: folder that contains ``<step>/iter/process_<i>-of-<n>.json``.
      elastic: whether all hosts share one state, ``process_0.json``, from which any number of hosts can resume.

    Raises:
      SettingsError: (a ValueError) the loader is not iterable.
    """

    def __init__(
        self,
        get_ds_fn: Callable[..., Any],
        preprocessing_fn: Callable[..., Any],
        global_shape: Sequence[int] | None,
        checkpoint_path: epath.PathLike,
        elastic: bool = False,
    ) -> None:
        self.get_ds_fn, self.preprocessing_fn = get_ds_fn, preprocessing_fn
        self.global_shape = global_shape
        self.checkpoint_path = checkpoint_path
        self.elastic = elastic
        self._mesh: Mesh | None = None
        self._loader: MultiHostDataLoadIterator | None = None
        self._dataloader = self._make_dataloader()

    def _make_dataloader(self) -> Any:
        index, count = coordination.process_index(), coordination.process_count()
        dataset = self.get_ds_fn(dataloading_host_index=index, dataloading_host_count=count)
        return self.preprocessing_fn(dataset=dataset)

    @property
    def iterator(self) -> Any:
        """The loader's own iterator, with its state after the last delivered batch."""
        return self._iterator_near(None)

    def _iterator_near(self, array: object) -> Any:
        return self.over(self._mesh or _mesh_of(array)).local_iterator

    def over(self, mesh: Mesh) -> MultiHostDataLoadIterator:
        """Returns an iterator over global arrays on ``mesh``, with dimension 0 sharded over all its axes."""
        before = self._loader
        if before is not None and mesh == self._mesh:
            return before
        dataloader = self._dataloader if before is None else self._make_dataloader()
        loader = MultiHostDataLoadIterator(dataloader, mesh)
        if self.global_shape is not None:
            loader.expect_rows(int(self.global_shape[0]))
        if before is not None:  # a different mesh: continue from the same state, or keep the loader if that fails
            loader.local_iterator.set_state(before.local_iterator.get_state())
            before.close()
        self._dataloader, self._loader, self._mesh = dataloader, loader, mesh
        return loader

    def reset(self, dummy_array: jax.Array | None = None) -> None:
        """Restarts from the beginning with a new dataset."""
        del dummy_array  # MaxText passes it because a method of colocated Python needs an array
        dataloader = self._make_dataloader()
        self.close()
        self._loader, self._dataloader = None, dataloader

    def get_next(self, dummy_array: jax.Array) -> PyTree:
        """Returns the next batch over the mesh of ``dummy_array``, a pytree of global arrays.

        Raises:
          StopIteration: the end, on all hosts at the same step.
          PlanError: (a ValueError) the rows cannot be divided evenly over the devices or do not match ``global_shape``;
            names the path of the leaf.
        """
        return next(self.over(_mesh_of(dummy_array)))

    def _path(self, step_array: Step) -> epath.Path:
        # NumPy cannot read an array over devices of other hosts.
        step = int(np.asarray(getattr(step_array, "addressable_data", lambda _: step_array)(0)).reshape(-1)[0])
        name = "process_0.json" if self.elastic else grain_files.file_name()
        return epath.Path(self.checkpoint_path) / str(step) / "iter" / name

    def save_state(self, step_array: Step) -> Step:
        """Writes the state after the last delivered batch; with ``elastic``, on process 0 only."""
        path, iterator = self._path(step_array), self._iterator_near(step_array)
        if not self.elastic or coordination.process_index() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, iterator.to_text())
        return step_array

    def restore_state(self, step_array: Step) -> Step:
        """Resumes from the file written by ``save_state``; discards the read-ahead.

        Raises:
          MissingIteratorStateError: (a FileNotFoundError) the file does not exist.
          StateMismatchError: the file is damaged.
        """
        remedy = "Restore a different step, or set elastic=True for data whose state all hosts share."
        self._iterator_near(step_array).set_from(self._path(step_array), remedy)
        return step_array

    def close(self) -> None:
        """Stops threads and closes the loader."""
        if self._loader is not None:
            self._loader.close()


def _mesh_of(array: object) -> Mesh:
    """Returns the mesh of an array's sharding, or a mesh of all devices if it has none."""
    mesh = getattr(getattr(array, "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, Mesh) else Mesh(np.array(jax.devices()), ("devices",), axis_types=(AxisType.Auto,))


@public("meshfeed.maxtext")
class RemoteIteratorWrapper(NotCopied):
    """Runs a :class:`RemoteIterator` on each host of the mesh and transfers its batches to the accelerators.

    Arguments not listed below are those of :class:`RemoteIterator`. The functions are sent to the hosts as pickles, which
    execute code there: the network between the controller and the hosts must be trusted.

    Args:
      global_mesh: the mesh of accelerators.

    Attributes:
      cpu_devices: the CPU devices colocated with the devices of the mesh.
      cpu_mesh: the mesh of these devices.
      tpu_sharding, cpu_sharding: shardings of dimension 0 over all axes.
      dummy_array: float32 ``[devices]`` over ``cpu_mesh``.

    Raises:
      SettingsError: a function cannot be pickled.
      Exception: any error raised while creating the loader on a host.
    """

    def __init__(
        self,
        get_ds_fn: Callable[..., Any],
        preprocessing_fn: Callable[..., Any],
        global_mesh: Mesh,
        global_shape: Sequence[int] | None,
        checkpoint_path: epath.PathLike = "",
        elastic: bool = False,
    ) -> None:
        what = "functions that can be imported on those hosts, or pickled with all that they refer to"
        make_payload(get_ds_fn, setting="get_ds_fn", what=what)
        make_payload(preprocessing_fn, setting="preprocessing_fn", what=what)
        rows = None if global_shape is None else tuple(int(size) for size in global_shape)
        arguments = get_ds_fn, preprocessing_fn, rows, str(checkpoint_path), elastic
        make_target = functools.partial(_IteratorTarget, functools.partial(RemoteIterator, *arguments))
        payload = make_payload(make_target, setting="checkpoint_path", what="a path")
        self._client = RemoteClient(payload, global_mesh)
        self._client.know_spec()
        self.cpu_mesh = self._client.cpu_mesh
        self.cpu_devices = tuple(self.cpu_mesh.devices.flat)
        self.tpu_sharding = NamedSharding(global_mesh, PartitionSpec(global_mesh.axis_names))
        self.cpu_sharding = NamedSharding(self.cpu_mesh, PartitionSpec(self.cpu_mesh.axis_names))
        zeros = np.zeros(self.cpu_mesh.size, np.float32)
        self.dummy_array = jax.make_array_from_callback(zeros.shape, self.cpu_sharding, lambda index: zeros[index])

    @property
    def local_iterator(self) -> RemoteIteratorWrapper:
        """Itself: it has the methods of the RemoteIterator, which it calls on all hosts."""
        return self

    def __iter__(self) -> RemoteIteratorWrapper:
        return self

    def __next__(self) -> PyTree:
        """Returns the next global batch on the accelerators.

        Raises:
          StopIteration: the end of the data.
          Exception: any error that the loader raised on a host, with its message.
        """
        return self._client.take(self._client.to_accelerators)

    def get_next(self, dummy_array: jax.Array | None = None) -> PyTree:
        """Returns the next global batch over ``cpu_mesh``."""
        del dummy_array
        return self._client.take()

    def reset(self, dummy_array: jax.Array | None = None) -> None:
        """Restarts from the beginning."""
        del dummy_array
        self._client.call("reset")

    def save_state(self, step: Step) -> Step:
        """Writes, on each host, the state of its loader after the last delivered batch."""
        self._client.call("save_state", int(np.asarray(step)))
        return step

    def restore_state(self, step: Step) -> Step:
        """Resumes each host from its file of that step.

        Raises:
          FileNotFoundError: a host has no such file; the iterator of that host is unchanged.
        """
        self._client.call("restore_state", int(np.asarray(step)))
        return step

    def close(self) -> None:
        """Stops threads on the hosts."""
        self._client.close()


class _IteratorTarget:
    """The target of a :class:`meshfeed._src.remote.client.Endpoint`: a RemoteIterator over a mesh of CPU devices."""

    def __init__(self, make_remote: Callable[[], RemoteIterator], mesh: Mesh) -> None:
        self._remote = remote = make_remote()
        self._loader = lambda: remote.over(mesh)  # a reset replaces it
        self._size = 0
        self.calls: dict[str, Any] = {
            "reset": self._reset,
            "save_state": lambda step: bool(remote.save_state(step)),
            "restore_state": lambda step: bool(remote.restore_state(step)),
            "close": remote.close,
        }

    def next(self) -> PyTree:
        """Returns the next batch of the loader."""
        return self._loader().__next__()  # not next(loader): an interrupt after that C call would lose the batch

    def set_delivered(self, batch: PyTree, delivered: bool) -> None:
        """Counts the batch that the last :meth:`next` returned as delivered, or has it come again."""
        self._loader()._set_delivered(batch, delivered)

    def numbers(self) -> tuple[int, int, int]:
        """Returns the step, the position, and the rows of a batch."""
        loader = self._loader()
        return loader.step, loader.position, self._size

    def spec(self) -> PyTree | None:
        """Returns the spec of a batch, or None if this host has no batch."""
        try:
            spec = self._loader().peek_spec()
        except Exception:  # next() raises it again and informs the other hosts
            return None
        self._size = jax.tree.leaves(spec)[0].shape[0]
        self._loader().expect_rows(self._size)  # the compiled take() returns one shape
        return spec

    def _reset(self) -> None:
        self._remote.reset()
        loader = self._loader()
        if self._size:
            loader.expect_rows(self._size)
