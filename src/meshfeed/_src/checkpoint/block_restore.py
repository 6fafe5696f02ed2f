"""Restores one large leaf in blocks: reads some rows of each piece, then sends them a few at a time."""

from __future__ import annotations

from typing import Any

from meshfeed._src.base.coordination import process_index
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.blocks import BlockGather, cut_block, rows_in_flight
from meshfeed._src.checkpoint.gather import host_bits_of, place
from meshfeed._src.checkpoint.load_plan import devices_of_a_process
from meshfeed._src.checkpoint.read import UnitReader
from meshfeed._src.checkpoint.work import Work, read_group


def restore_in_blocks(work: Work, reader: UnitReader, agreement: Agreement, limit: int) -> Any:
    """Reads and gathers one large leaf with at most ``limit`` bytes in flight, or one unit per device if that is more.

    Args:
      work: the leaf; its plan must not be direct.
      reader: reads and checks units.
      agreement: confirms each read before its collectives.
      limit: in bytes.
    """
    plan, request, here = work.plan, work.request, process_index()
    local = devices_of_a_process(plan.sharding)
    read_rows, sent_rows = rows_in_flight(plan, request.leaf.units, request.dtype.itemsize, local, limit)
    takes_part = any(device.process_index == here for device in plan.sharding.device_set)
    gather = BlockGather(plan, request.dtype, sent_rows) if takes_part else None
    for first in range(0, plan.piece, read_rows):
        work.rows = (first, read_rows)
        agreement.attempt(lambda: read_group([work], reader))
        for at in range(0, read_rows, sent_rows):
            at = min(at, read_rows - sent_rows)  # the last block may overlap, so one program serves all
            if gather is not None:
                blocks = cut_block(work.buffers, plan.dimension, at, sent_rows)
                gather.add(first + at, {device: host_bits_of(block) for device, block in blocks.items()})
    work.buffers = {}
    if gather is None:
        return place({}, plan.shape, plan.sharding, request.dtype)
    return gather.finish()
