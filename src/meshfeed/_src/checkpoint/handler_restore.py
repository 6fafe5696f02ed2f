"""Restores for the TypeHandler: converts Orbax's parameter infos and restore arguments to our requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from meshfeed._src.arrays.reshard import without_ambient_mesh
from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.engine import restore_leaves
from meshfeed._src.checkpoint.options import RestoreOptions
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed._src.checkpoint.want import array_wanted, saved_sharding


def restore_for_handler(
    infos: Sequence[Any], args: Sequence[Any], saved: Sequence[Any] | None, options: RestoreOptions
) -> list[Any]:
    """Restores the parameters of ``infos`` according to ``args``.

    Args:
      infos: Orbax's parameter infos, all from one folder.
      args: ``ArrayRestoreArgs``, or plain ``RestoreArgs`` to use the saved sharding.
      saved: Orbax's metadata of the same parameters; needed if any sharding is not given.
      options: how to restore them.
    """
    agreement = Agreement(f"restoring {infos[0].parent_dir}", options.timeout_seconds)

    def plan() -> tuple[StoredArrays, list[Any]]:
        stored = StoredArrays(infos[0].parent_dir, options.memory_limit_bytes, options.metadata_key)
        wanted = []
        for number, (info, arg) in enumerate(zip(infos, args, strict=True)):
            shape = getattr(arg, "global_shape", None)
            shape = getattr(arg, "shape", None) if shape is None else shape
            metadata = None if saved is None else saved[number]
            wanted.append(
                array_wanted(
                    stored,
                    info.name,
                    shape=shape,
                    dtype=arg.dtype,
                    sharding=_sharding(stored, info.name, arg, metadata),
                    strict=getattr(arg, "strict", True),
                    any_cast=True,  # Orbax's restore arguments request a dtype explicitly, not through a template tree
                )
            )
        return stored, wanted

    with without_ambient_mesh():  # parameters may be on devices outside the caller's jax.set_mesh
        stored, wanted = agreement.attempt(plan)
        requests = [request for request, _ in wanted if request is not None]
        results = iter(restore_leaves(stored, requests, options, agreement))
        return [finish(None if request is None else next(results)) for request, finish in wanted]


def _sharding(stored: StoredArrays, name: str, arg: Any, metadata: Any) -> Any:
    mesh, axes = getattr(arg, "mesh", None), getattr(arg, "mesh_axes", None)
    if mesh is not None and axes is not None:
        return jax.sharding.NamedSharding(mesh, axes)
    sharding = getattr(arg, "sharding", None)
    if sharding is None and metadata is not None:
        sharding = getattr(metadata, "sharding", None)
    if sharding is not None and hasattr(sharding, "to_jax_sharding"):
        try:
            sharding = sharding.to_jax_sharding()
        except Exception as error:  # devices of a different topology
            raise CheckpointError(
                f"parameter {name!r}: the saved sharding does not fit these devices ({error}). Give one."
            ) from error
    return saved_sharding(stored, name) if sharding is None else sharding
