"""The private parts of tf.data that are used here: the only way to examine the steps of a pipeline.

They are tried once on a pipeline of known steps. If a version of TensorFlow lacks one, all pipelines are refused, since
randomness that differs between hosts would go unnoticed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from meshfeed._src.base.errors import SourceError, missing_package

OLDEST = "2.20"  # of pyproject.toml, with which the tests are run too
_SEEDS = ("_seed", "_seed2")  # both 0: none was given
_RANDOM = "RandomDataset"
_ANY_ORDER = "deterministic"  # the attribute of parallel ops


def import_tensorflow() -> Any:
    """Returns the module.

    Raises:
      SourceError: TensorFlow is not installed.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise missing_package("reading with tf.data", error, "tf") from error
    return tf


class Dataset(Protocol):
    """A ``tf.data.Dataset``."""

    @property
    def element_spec(self) -> object: ...

    def with_options(self, options: Any) -> Iterable[object]: ...


def steps_of(dataset: Dataset) -> list[Dataset]:
    """The steps of a pipeline, from the last to the sources.

    Raises:
      SourceError: this version of TensorFlow does not expose them.
    """
    probe()
    return _steps(dataset)


def reshuffles(step: Dataset) -> bool:
    """Whether a step gives each of its iterators other random numbers: a ``shuffle``, or what datasets are sampled by."""
    if isinstance(step, probe()):
        return _private(step, "_reshuffle_each_iteration") is not False
    return step_name(step) == _RANDOM and bool(_private(step, "_rerandomize"))


def step_name(step: Dataset) -> str:
    """The name of a step's class, which lane states record."""
    return type(step).__name__.strip("_")


@functools.cache
def probe() -> type:
    """Checks every private name on pipelines of known steps; returns the class of ``shuffle``.

    Raises:
      SourceError: a name is missing, or means something else.
    """
    tf = import_tensorflow()

    def draw(_: object) -> object:
        return tf.random.uniform((), seed=1)

    def draw_dataset(element: object) -> Any:
        return tf.data.Dataset.from_tensors(draw(element))

    def any_order(element: object) -> Any:
        return tf.data.Dataset.range(2).map(abs, num_parallel_calls=2, deterministic=False)

    numbers = tf.data.Dataset.range(2)
    shuffled = numbers.shuffle(2, seed=1)
    drawing = shuffled.map(draw, num_parallel_calls=2)
    interleaved = drawing.interleave(draw_dataset, num_parallel_calls=2)
    expected = [(interleaved, True), (drawing, True), (shuffled, False), (numbers, False)]
    steps = _steps(interleaved)
    if [(step, find_randomness(step) is not None) for step in steps] != expected:
        raise _unknown("the steps of a pipeline as expected")
    random = tf.data.Dataset.random(seed=1)
    for step in (shuffled, random):
        seeds = [int(_private(step, name)) for name in _SEEDS]
        if not any(seeds):
            raise _unknown(f"the seed of {type(step).__name__}")
    _private(shuffled, "_reshuffle_each_iteration")
    if step_name(random) != _RANDOM:
        raise _unknown("Dataset.random()")
    _private(random, "_rerandomize")
    how: Any = {"num_parallel_calls": 2, "deterministic": False}
    for step in (numbers.map(abs, **how), numbers.interleave(any_order, **how), numbers.interleave(any_order)):
        if find_randomness(step) is None:
            raise _unknown(f"deterministic=False of {type(step).__name__}")
    return type(shuffled)


def _private(step: Dataset, name: str) -> Any:
    try:
        return getattr(step, name)
    except AttributeError:
        raise _unknown(f"{type(step).__name__}.{name}") from None


def _unknown(what: str) -> SourceError:
    return SourceError(
        f"TensorFlow {import_tensorflow().__version__} does not expose {what}, so a pipeline cannot be checked for "
        f"randomness that differs between hosts. Upgrade meshfeed, or install TensorFlow {OLDEST}, the oldest one that it "
        "supports. Or check the pipeline's seeds yourself, and read it with meshfeed.sources.Stream(lambda lane_index, "
        "num_lanes: open(lane_index, num_lanes).as_numpy_iterator())."
    )


def _steps(dataset: Dataset) -> list[Dataset]:
    steps, pending = [], [dataset]
    while pending:
        steps.append(pending.pop())
        try:
            pending.extend(_private(steps[-1], "_inputs")())
        except NotImplementedError:  # the abstract method of the base class
            raise _unknown(f"{type(steps[-1]).__name__}._inputs") from None
    return steps


def find_randomness(step: Dataset) -> str | None:
    """Describes randomness of a step that the pipeline does not determine; None if there is none.

    That is a random op without a seed, including inside the function of a ``map`` or ``interleave``, a
    ``tf.random`` op in a function that runs in parallel, where thread timing decides which record gets which number, and
    a parallel step with ``deterministic=False``, where it decides the order.

    Args:
      step: one of :func:`steps_of`; the steps before it are not examined.
    """
    name = _words(type(step).__name__)
    # Not through _private: most steps draw nothing and lack these attributes, whose names probe() has checked.
    seeds = [getattr(step, seed, None) for seed in _SEEDS]
    if all(seed is not None and int(seed) == 0 for seed in seeds):
        return f"{name} without a seed"
    parallel = getattr(step, "_num_parallel_calls", None) is not None  # only on steps that may run in parallel
    if parallel and _is_in_any_order(step):
        return f"{name} with deterministic=False"
    # The function's own graph, and the functions that it calls, such as those of a dataset that it makes.
    for wrapper in _private(step, "_functions")():
        graph = wrapper.function.graph.as_graph_def()
        for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
            if any(map(_has_any_order, nodes)):
                return f"step with deterministic=False in the function of {name}"
            for op, is_seeded, draws in _draws(nodes):
                if not is_seeded:
                    return f"{op} without a seed in the function of {name}"
                if draws and parallel:
                    return f"{op} in the function of {name} with num_parallel_calls"
    return None


def _is_in_any_order(step: Dataset) -> bool:
    """Whether a parallel step yields its elements in the order in which they are ready."""
    known = getattr(step, "_deterministic", None)
    if known is not None:
        return known == "false"
    # That of an interleave is only in the graph, after all steps before it. Not for every step: data in memory is copied.
    graph = import_tensorflow().compat.v1.GraphDef.FromString(_private(step, "_as_serialized_graph")().numpy())
    return any(map(_has_any_order, graph.node))


def _has_any_order(node: Any) -> bool:
    return _ANY_ORDER in node.attr and node.attr[_ANY_ORDER].s == b"false"


def _draws(nodes: Iterable[Any]) -> Iterator[tuple[str, bool, bool]]:
    """The random nodes of a graph: description, whether it has a seed, and whether it is a ``tf.random`` op."""
    constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
    for node in nodes:
        if "seed" in node.attr and "seed2" in node.attr:
            yield f"tf.random ({node.op})", bool(node.attr["seed"].i or node.attr["seed2"].i), True
        elif node.op.startswith(("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")):
            yield _words(node.op), _is_seeded(node, constants), False


def _is_seeded(node: Any, constants: Mapping[str, Any]) -> bool:
    """Whether a step that draws has a seed other than 0, or one that is computed."""
    # The inputs of a shuffle begin with the dataset and the buffer size, those of a random dataset with the seeds.
    first = 0 if node.op.startswith("RandomDataset") else 2
    inputs = [name.split(":")[0] for name in node.input[first : first + 2]]
    known = [_integer(constants[name]) for name in inputs if name in constants]
    return len(known) < 2 or any(known)


def _integer(tensor: Any) -> int:
    if tensor.tensor_content:
        return int(np.frombuffer(tensor.tensor_content, np.int64)[0])
    return int(tensor.int64_val[0]) if tensor.int64_val else 0


def _words(kind: str) -> str:
    """``_ShuffleDataset``, ``ShuffleDatasetV3`` → ``shuffle()``."""
    name = kind.strip("_").split("Dataset")[0].removeprefix("Parallel").lower()
    return {"random": "sample_from_datasets() or Dataset.random()"}.get(name, f"{name}()")
