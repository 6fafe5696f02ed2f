"""Orders cache parts of themselves, and are freed with their last reference."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meshfeed._src.order.blocks import Packing
from meshfeed._src.order.buckets import BucketOrder
from meshfeed._src.order.mixture import MixtureOrder, MixtureSettings
from meshfeed._src.order.packing import PackingMethod
from meshfeed._src.order.shards import ShardOrder
from meshfeed._src.order.weights import Stage

POSITIONS = np.arange(8)
EPOCHS = {"seed": 0, "num_epochs": 2}


def used_packing() -> object:
    packing = Packing(np.ones(200), PackingMethod(16, "fit", "split"), block=64).shuffled(1)
    packing.pieces_at(POSITIONS)
    return packing


def used_buckets() -> object:
    order = BucketOrder([np.arange(40)], num_records=40, global_batch_size=4, shuffle=True, **EPOCHS)
    order.ids_at(POSITIONS)
    return order


def used_mixture() -> object:
    options = {"block": 8, "on_end": "repeat", "repeat": {}, "identities": {"a": None}, **EPOCHS}
    order = MixtureOrder({"a": 40}, MixtureSettings(stages=[Stage(0, {"a": 1})], **options), True)
    order.ids_between(0, 8)
    return order


def used_shards() -> object:
    order = ShardOrder(np.array([20, 20]), num_lanes=1, segments=[(0, 4)], **EPOCHS)
    order.ids_at(POSITIONS)
    return order


USED = [used_packing, used_buckets, used_mixture, used_shards]


@pytest.mark.parametrize("used", USED)
def test_an_order_is_freed_with_its_last_reference(used: Callable[[], object]) -> None:
    order = used()
    freed = weakref.ref(order)
    gc.disable()
    try:
        del order
        assert freed() is None, "it may hold the lengths of many documents, or a memory map"
    finally:
        gc.enable()


@pytest.mark.parametrize("used", USED)
def test_an_order_is_pickled_without_what_it_has_cached(used: Callable[[], Any]) -> None:
    order = used()
    before = len(pickle.dumps(order))
    answers_of(order)
    again = pickle.loads(content := pickle.dumps(order))
    assert len(content) == before
    for found, expected in zip(answers_of(again), answers_of(order), strict=True):
        np.testing.assert_array_equal(found, expected)


def answers_of(order: Any) -> list[np.ndarray]:
    return list(vars(order.pieces_at(POSITIONS)).values() if isinstance(order, Packing) else order.ids_at(POSITIONS))
