"""A process whose reads hang for ever still exits, with the code that it asked for."""

from __future__ import annotations

import ast
import pathlib
import signal
import subprocess
import sys

import pytest

from meshfeed._src.base import child as child_process

CHILD = pathlib.Path(__file__).with_name("exit_child.py")
SOURCE = pathlib.Path(__file__).parents[1] / "src" / "meshfeed"
NEEDS = {"grain": "grain", "hugging_face": "datasets", "shards": "array_record", "maxtext": "grain"}
ALL = [
    "plain", "threads", "grain", "grain_dataset", "grain_iterator", "grain_thread", "grain_loader", "hugging_face",
    "shards", "maxtext",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kinds"), [("close", ALL), ("leave", ["plain", "grain_iterator", "grain_thread", "shards", "maxtext"])]
)
def test_a_process_whose_reads_hang_exits(how: str, kinds: list[str]) -> None:
    for kind in kinds:
        needed = NEEDS.get(kind) or NEEDS.get(kind.partition("_")[0])
        if needed:
            pytest.importorskip(needed)
    child = subprocess.Popen([sys.executable, str(CHILD), how, *kinds], stdout=subprocess.PIPE, text=True)
    try:
        output, _ = child.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        pytest.fail(f"the process did not exit:\n{output}")
    assert [line.split()[1] for line in output.splitlines() if line.startswith("stalled")] == kinds
    assert f"leaving {len(kinds)} MainThread" in output
    assert child.returncode == 3


FORBIDDEN = {
    "ThreadPoolExecutor": "joins its threads at exit; use meshfeed._src.base.threads.Threads",
    "ProcessPoolExecutor": "joins its processes at exit; use meshfeed._src.base.child",
    "to_thread": "runs on a ThreadPoolExecutor, which joins its threads at exit",
    "run_in_executor": "runs on a ThreadPoolExecutor, which joins its threads at exit",
    "Timer": "is a thread that Python joins at exit",
    "multiprocessing": "joins its processes at exit; use meshfeed._src.base.child",
}


def joined_at_exit(text: str) -> list[tuple[int, str]]:
    """Lines that start what Python waits for at exit, and why."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [part for name in (*(a.name for a in node.names), module or "") for part in name.split(".")]
        elif isinstance(node, ast.Call):
            names = [node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")]
            daemon = [word.value for word in node.keywords if word.arg == "daemon"]
            if names == ["Thread"] and not (daemon and getattr(daemon[0], "value", None) is True):
                found.append((node.lineno, "a thread without daemon=True is joined at exit"))
        else:
            continue
        found += [(node.lineno, f"{name} {FORBIDDEN[name]}") for name in names if name in FORBIDDEN]
    return found


def test_the_search_finds_what_is_joined_at_exit() -> None:
    assert len(joined_at_exit("import threading\nthreading.Thread(target=print).start()")) == 1
    assert len(joined_at_exit("Thread(target=print, daemon=False)")) == 1
    assert not joined_at_exit("threading.Thread(target=print, daemon=True)")
    for line in (
        "concurrent.futures.ThreadPoolExecutor(2)",
        "from concurrent.futures import ThreadPoolExecutor",
        "asyncio.to_thread(print)",
        "loop.run_in_executor(None, print)",
        "import multiprocessing.pool",
        "from multiprocessing import Pool",
    ):
        assert joined_at_exit(line), line


@pytest.mark.slow
def test_nothing_is_started_that_python_waits_for_at_exit() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 100
    found = {str(path.relative_to(SOURCE)): joined_at_exit(path.read_text()) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_worker_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A process in an uninterruptible read of a dead disk stays after SIGKILL until that read returns."""
    monkeypatch.setattr(child_process, "_EXIT_SECONDS", 0.1)
    killed = []

    class Unkillable:
        pid = 4711

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "would wait for ever"
            raise subprocess.TimeoutExpired("worker", timeout)

        def send_signal(self, number: int) -> None:
            killed.append(number)

    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: ended)
        child = child_process.ChildProcess("builtins:print")
    child._process, child.pid = Unkillable(), Unkillable.pid  # type: ignore[assignment]
    child_process.close_children({"worker 0": child})
    assert killed == [signal.SIGKILL]
    assert "worker 0 (process 4711) is in a read that cannot be killed" in caplog.text
