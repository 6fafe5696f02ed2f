"""What happens when a version of JAX has renamed what is private."""

from __future__ import annotations

import types

import jax
import pytest

from meshfeed._src.arrays.reshard import key_impl
from meshfeed._src.base import coordination, jax_internals
from meshfeed._src.base.errors import MeshfeedError


class Client:
    """Has every method of JAX's client that is used."""

    def __getattr__(self, name: str) -> object:
        if name in jax_internals._CLIENT_METHODS:
            return lambda *args: None
        raise AttributeError(name)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A job of four processes, whose coordination client the tests take away."""
    from jax._src import distributed

    made = types.SimpleNamespace(client=Client())
    monkeypatch.setattr(distributed, "global_state", made)
    monkeypatch.setattr(coordination, "process_count", lambda: 4)
    monkeypatch.setattr(coordination, "is_distributed", lambda: True)
    monkeypatch.setattr(jax_internals, "_disown_in_children", lambda: None)
    return made


def test_the_names_are_there() -> None:
    from jax._src import distributed
    from jax._src.lib import _jax

    assert hasattr(distributed.global_state, "client")
    client = _jax.DistributedRuntimeClient
    assert [name for name in jax_internals._CLIENT_METHODS if not hasattr(client, name)] == []
    assert jax_internals.probe_fast_call() is not None


@pytest.mark.usefixtures("state")
def test_the_client_is_found() -> None:
    assert coordination.require_store() is not None


@pytest.mark.parametrize("missing", ["client", "global_state", "module", *jax_internals._CLIENT_METHODS])
def test_without_the_client_a_job_of_several_processes_is_refused(
    missing: str, state: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax import _src
    from jax._src import distributed

    if missing == "client":
        del state.client
    elif missing == "global_state":
        monkeypatch.delattr(distributed, "global_state")
    elif missing == "module":
        monkeypatch.delattr(_src, "distributed")
        monkeypatch.setitem(__import__("sys").modules, "jax._src.distributed", None)
    else:
        methods = tuple(name for name in jax_internals._CLIENT_METHODS if name != missing)
        state.client = types.SimpleNamespace(**{name: lambda *args: None for name in methods})
    assert jax_internals.coordination_client() is None
    with pytest.raises(MeshfeedError, match=r"cannot find the key-value store of JAX \d.*Upgrade meshfeed"):
        coordination.require_store()


def test_a_missing_fast_call_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from jax._src.lib import xla_client

    monkeypatch.delattr(xla_client, "batched_device_put")
    jax_internals._report_slow.cache_clear()
    for _ in range(3):
        assert jax_internals.probe_fast_call() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "make_array_from_callback" in caplog.text


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_the_implementation_of_keys_is_found_through_the_public_api(impl: str) -> None:
    keys = jax.random.key(1, impl=impl)
    assert key_impl(keys.dtype) == impl == str(jax.random.key_impl(keys))


class ChangingText:
    """A call whose parameters are put together at each look, in memory that threads share, as JAX's are."""

    looks = 0

    @property
    def __doc__(self) -> str:
        self.looks += 1
        names = "aval sharding xs devices committed enable_x64" if self.looks == 3 else "aval sharding aval"
        return f"put({', '.join(f'{name}: object' for name in names.split())}) -> object"


def test_a_text_that_another_thread_spoils_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.lib import xla_client

    call = ChangingText()
    monkeypatch.setattr(xla_client, "batched_device_put", call)
    assert jax_internals.probe_fast_call() is call
    assert jax_internals.probe_fast_call() is call
    assert call.looks == 3
