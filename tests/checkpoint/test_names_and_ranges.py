"""Paths and names of leaves that would be saved and not found again, and values outside the range of the requested dtype."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from meshfeed import checkpoint
from meshfeed._src.base.errors import CheckpointError, SettingsError
from meshfeed._src.checkpoint.casts import may_overflow
from meshfeed._src.checkpoint.step import verify
from meshfeed.checkpoint import ArraysHandler, ArraysRestore, ArraysSave, Checkpointer


def saved(directory: Any, tree: Any) -> Any:
    with Checkpointer(directory) as ckpt:
        assert ckpt.save(1, tree)
    return directory


def restored(directory: Any, tree: Any = None) -> Any:
    with Checkpointer(directory) as ckpt:
        return ckpt.restore(tree)[1]


def test_brackets_in_the_path(tmp_path: pathlib.Path) -> None:
    folder = saved(tmp_path / "run[lr=0.1]*", {"w": jnp.arange(3.0)})
    assert restored(folder)["w"].tolist() == [0, 1, 2]
    assert not [problem for found in verify(folder) for problem in found.problems]


def test_relative_paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "run", {"w": jnp.arange(3.0)})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("../run", "~/run", "../here/../run"):
        assert [found.step for found in verify(path) if not found.problems] == [1]
        assert checkpoint.restore_once(f"{path}/1/arrays", None)["w"].tolist() == [0, 1, 2]


def test_names_of_leaves_that_would_not_be_found_are_refused(tmp_path: pathlib.Path) -> None:
    wrong = ["a/"]
    for name in wrong:
        with Checkpointer(tmp_path / "c") as ckpt, pytest.raises(CheckpointError, match="ends with a slash"):
            ckpt.save(1, {name: jnp.ones(3)})
    right = {name: jnp.full(2, number) for number, name in enumerate(("a\\b", "a::b", "x/y", "/z", "..", "long" * 100))}
    found = restored(saved(tmp_path / "right", right))
    assert {name: leaf.tolist() for name, leaf in found.items()} == {
        name: leaf.tolist() for name, leaf in right.items()
    }
    for number, (tree, problem) in enumerate(
        (
            *(
                ({name: 1}, "is not the name of a folder in a store")
                for name in ("a\\b", "a::b", "/z", "a//b", "..", "a/../b", "./a")
            ),
            ({"a/": 1}, "ends with a slash"),
            ({"a" * 300: 1}, "more than 255 bytes"),
            ({"a": 1, "a/0": 2}, r"is a folder inside that of leaf \['a'\]"),
        )
    ):
        arrays = {name: jnp.ones(3) for name in tree}
        with Checkpointer(f"memory://names/{number}") as ckpt, pytest.raises(CheckpointError, match=problem):
            ckpt.save(1, arrays)
    deep = {"linear/~/w": jnp.arange(3.0), "linear/~/b": jnp.zeros(1)}
    assert restored(saved("memory://names/deep", deep))["linear/~/w"].tolist() == [0, 1, 2]


def test_text_that_is_not_unicode_is_named(tmp_path: pathlib.Path) -> None:
    with Checkpointer(tmp_path) as ckpt, pytest.raises(CheckpointError, match=r"leaf \['t'\]: character 1 of the text"):
        ckpt.save(1, {"t": "a\ud800"})


def test_keys_come_back_as_keys_in_orbax(tmp_path: pathlib.Path) -> None:
    tree = {
        "k": jax.random.key(1),
        "r": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "u": jnp.ones(2, jnp.uint32),
    }
    before = ocp.type_handlers.get_type_handler(jax.Array)
    found = []
    for handler in (before, checkpoint.ArrayHandler()):
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
        try:
            checkpointer = ocp.StandardCheckpointer()
            checkpointer.save(tmp_path / str(len(found)), tree)
            checkpointer.wait_until_finished()
            found.append(checkpointer.restore(tmp_path / str(len(found)), tree))
        finally:
            ocp.type_handlers.register_type_handler(jax.Array, before, override=True)
    plain, ours = ({name: (leaf.dtype, leaf.shape) for name, leaf in one.items()} for one in found)
    assert ours == plain == {name: (leaf.dtype, leaf.shape) for name, leaf in tree.items()}
    np.testing.assert_array_equal(*(jax.random.key_data(one["r"]) for one in found))


def test_numpy_leaves_are_cast_as_save_args_say(tmp_path: pathlib.Path) -> None:
    tree = {"j": jnp.full(4, 1.234567), "n": np.full(4, 1.234567), "s": np.float64(1.234567), "x": np.arange(2)}
    cast = {name: ocp.SaveArgs(dtype=jnp.bfloat16) for name in "jns"} | {"x": ocp.SaveArgs()}
    handler = ArraysHandler()
    handler.save(tmp_path / "arrays", ArraysSave(tree, save_args=cast))
    handler.finalize(tmp_path / "arrays")
    found = handler.restore(tmp_path / "arrays", ArraysRestore())
    assert {name: leaf.dtype for name, leaf in found.items()} == {
        **dict.fromkeys("jns", np.dtype(jnp.bfloat16)),
        "x": np.dtype(np.int64),
    }
    assert np.asarray(found["n"]).astype(np.float32).tolist() == [1.234375] * 4


@pytest.mark.parametrize(
    ("value", "wanted", "holds"),
    [
        (
            jnp.array([1e6, 1.0]),
            jnp.zeros(2, jnp.float16),
            "1000000.0, stored as float32, but float16 holds only -65504",
        ),
        (jnp.array([1.0, np.nan, 1e6]), jnp.zeros(3, jnp.float16), "1000000.0"),
        (jnp.array([100_000, 1]), jnp.zeros(2, jnp.float16), "100000, stored as int32"),
        (jnp.array([1000.0, 1.0]), jnp.zeros(2, jnp.float8_e4m3fn), "1000.0"),
        (jnp.array([-1.0, 1.0]), jnp.zeros(2, jnp.float8_e8m0fnu), "-1.0"),
        (jnp.array([1e6 + 1j, 1.0]), np.zeros(2, np.complex64), None),
        (np.array([1e300 + 1j, 1.0]), np.zeros(2, np.complex64), "1e\\+300"),
        (1e300, jnp.zeros(()), "1e\\+300"),
        (np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")]), np.zeros(1, [("b", "i4"), ("a", "f4")]), r"\['a', 'b'\]"),
        (np.array(["1400-01-01"], "M8[s]"), np.zeros(1, "M8[ns]"), "1400-01-01"),
        (np.array(["2000-01-01", "NaT"], "M8[s]"), np.zeros(2, "M8[ns]"), None),
        (jnp.array([np.inf, -np.inf, np.nan, 65504.0, -65504.0]), jnp.zeros(5, jnp.float16), None),
        (jnp.array([1e-30, 3.0]), jnp.zeros(2, jnp.float16), None),
        (jnp.array([3e38]), jnp.zeros(1, jnp.bfloat16), None),
        (jnp.array([np.finfo(np.float32).max]), jnp.zeros(1, jnp.bfloat16), "3.4028"),
    ],
)
def test_values_outside_the_range_are_refused(
    tmp_path: pathlib.Path, value: Any, wanted: Any, holds: str | None
) -> None:
    folder = saved(tmp_path / "c", {"x": value})
    if holds is not None:
        with pytest.raises(CheckpointError, match=holds):
            restored(folder, {"x": wanted})
        return
    found = np.asarray(restored(folder, {"x": wanted})["x"])
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, np.asarray(value).astype(wanted.dtype))


def test_which_casts_are_checked() -> None:
    for stored, wanted, checked in (
        (np.float32, np.float64, False),
        (np.int16, np.float32, False),
        (ml_dtypes.bfloat16, np.float32, False),
        (np.float16, ml_dtypes.bfloat16, False),
        (np.bool_, np.float16, False),
        (np.uint32, np.float16, True),
        (np.float64, np.complex64, True),
        (np.int8, np.uint8, True),
    ):
        assert may_overflow(stored, wanted) is checked, (stored, wanted)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("max_to_keep", 0), ("save_interval_steps", 0), ("keep_period", 0), ("best_fn", len), ("read_only", True)),
        ("single_host_load_and_broadcast", True),
    ],
)
@pytest.mark.parametrize("directory", ["c", "memory://options/c"])
def test_options_that_would_fail_or_keep_nothing_are_refused(
    tmp_path: pathlib.Path, option: str, value: Any, directory: str
) -> None:
    where = directory if "://" in directory else str(tmp_path / directory)
    with pytest.raises(SettingsError, match=f"orbax_options.*{option}"):
        Checkpointer(where, orbax_options={option: value})


def test_a_folder_with_zeros_before_its_number_is_no_step(tmp_path: pathlib.Path) -> None:
    saved(tmp_path / "c", {"w": jnp.ones(3)})
    os.rename(tmp_path / "c/1", tmp_path / "c/0001")
    with Checkpointer(tmp_path / "c") as ckpt:
        assert ckpt.save(3, {"w": jnp.ones(3)})
    with Checkpointer(tmp_path / "c") as ckpt:
        assert ckpt.restore(None)[0] == 3


def test_a_folder_from_which_a_step_is_removed_meanwhile_is_opened(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "c", {"w": jnp.ones(3)})
    manager, left = ocp.CheckpointManager, [2]

    def removed(*arguments: Any, **settings: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise FileNotFoundError(2, "No such file or directory", str(tmp_path / "c/0"))
        return manager(*arguments, **settings)

    monkeypatch.setattr(ocp, "CheckpointManager", removed)
    assert restored(tmp_path / "c")["w"].tolist() == [1, 1, 1]


def test_a_large_python_int_must_fit_a_float_too(tmp_path: pathlib.Path) -> None:
    folder = saved(tmp_path / "c", {"n": 2**80})
    with pytest.raises(CheckpointError, match=f"holds {2**80}, stored as int, but float16 holds only"):
        restored(folder, {"n": jnp.zeros((), jnp.float16)})
    assert float(restored(folder, {"n": jnp.zeros(())})["n"]) == 2.0**80
