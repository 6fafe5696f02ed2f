"""The demo: the whole of it in real processes, and that its proof can fail."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

pytest.importorskip("rich")
pytest.importorskip("optax")

from rich.console import Console

from meshfeed import MeshfeedError, SourceError
from meshfeed._src.cli import main
from meshfeed._src.demo.demo import (
    BREAKS,
    JOURNEY,
    QUICK,
    Corpus,
    Demo,
    Job,
    JobLog,
    Leg,
    Plan,
    Step,
    Topology,
    _why,
    broken,
    build_corpus,
    effective,
    example_script,
    prove,
    read_job,
    read_records,
)

RECORDS = [bytes([number]) * 8 for number in range(10)]
NUM_STEPS, BATCH = 5, 2  # one epoch
ONE_DEVICE = Topology(hosts=1, devices=2, model_axis=1)


def digest(record: int) -> str:
    return hashlib.sha256(RECORDS[record]).hexdigest()[:32]


def job(restored: int, last: int, *, first_record: int | None = None) -> JobLog:
    """A job that makes the steps after ``restored`` up to ``last`` from consecutive records."""
    start = restored * BATCH if first_record is None else first_record
    steps = {}
    for number in range(restored + 1, last + 1):
        ids = [(start + (number - restored - 1) * BATCH + row) % len(RECORDS) for row in range(BATCH)]
        steps[number] = Step(ids, {row: digest(record) for row, record in enumerate(ids)}, 1.0)
    return JobLog(restored, steps, [])


def failing(jobs: list[JobLog], reference: JobLog | None = None) -> set[str]:
    return {check.name for check in prove(reference or job(0, 5), jobs, RECORDS, NUM_STEPS) if not check.holds}


# ---------------------------------------------------------------------------------------------------- the proof


def test_the_proof_says_how_much_was_compared() -> None:
    whole = {check.name: check.detail for check in prove(job(0, 5), [job(0, 5)], RECORDS, NUM_STEPS)}
    assert whole["steps"] == "5 of 5 are complete"
    assert whole["epoch"] == "10 distinct records among the first 10 delivered: each record of the corpus once"
    part = {check.name: check.detail for check in prove(job(0, 5), [job(0, 3)], RECORDS, NUM_STEPS)}
    assert part["steps"] == "3 of 5 are complete"
    assert part["epoch"] == "6 distinct records among the first 6 delivered, of 10 in the corpus"


def test_the_end_of_the_log_of_a_host_is_shown() -> None:
    lines = [f"line {number}" for number in range(200)]
    of_host = SimpleNamespace(
        _children=[SimpleNamespace(log=lambda: ""), SimpleNamespace(log=lambda: "\n".join(lines))]
    )
    tail = Job.log_tail(of_host, 1).splitlines()  # type: ignore[arg-type]
    assert 5 <= len(tail) < 100
    assert tail == lines[-len(tail) :]


def test_a_run_that_went_on_where_it_was_saved_holds() -> None:
    assert failing([job(0, 3), job(2, 4), job(2, 5)]) == set()


def test_later_jobs_replace_what_the_kill_undid() -> None:
    jobs = [job(0, 4), job(1, 2, first_record=6)]
    assert {number: step.record_ids for number, step in effective(jobs).items()} == {1: [0, 1], 2: [6, 7]}


def test_data_that_begins_again_does_not_hold() -> None:
    assert failing([job(0, 3), job(2, 5, first_record=0)]) == {"record ids", "batches", "epoch", "replayed"}


def test_a_step_that_nobody_made_does_not_hold() -> None:
    jobs = [job(0, 2), job(3, 5)]
    assert {"steps", "record ids", "batches"} <= failing(jobs)


def test_a_row_that_no_host_held_does_not_hold() -> None:
    jobs = [job(0, 5)]
    del jobs[0].steps[4].rows[1]
    assert failing(jobs) == {"steps", "batches", "files"}


def test_other_bytes_under_the_right_id_do_not_hold() -> None:
    jobs = [job(0, 5)]
    jobs[0].steps[4].rows[1] = "0" * 32
    assert failing(jobs) == {"batches", "files"}


def test_both_runs_wrong_in_the_same_way_do_not_hold() -> None:
    both = job(0, 5)
    both.steps[4].rows[1] = "0" * 32
    assert failing([both], reference=both) == {"files"}
    both = job(0, 5)
    both.steps[5] = both.steps[1]
    assert failing([both], reference=both) == {"epoch"}


def test_hosts_that_saw_different_things_do_not_hold(tmp_path: pathlib.Path) -> None:
    line = '{{"step": 1, "loss": 1.0, "record_ids": [0, 1], "rows": {{"{row}": "{digest}"}}}}\n'
    paths = [tmp_path / f"{host}.jsonl" for host in range(2)]
    restored = '{"restored": 0}\n'
    paths[0].write_text(restored + line.format(row=0, digest="a") + '{"step": 2, "lo')  # killed in mid-line
    paths[1].write_text(restored + line.format(row=1, digest="b"))
    log = read_job(paths)
    assert log.problems == []
    assert log.steps[1].whole
    assert set(log.steps) == {1}
    paths[1].write_text(restored + line.format(row=0, digest="b"))
    log = read_job(paths)
    assert log.problems == ["host 1 has different bytes in row 0 of step 1"]
    assert not log.steps[1].whole
    assert "hosts" in failing([JobLog(0, job(0, 5).steps, log.problems)])
    paths[1].write_text('{"restored": 7}\n')
    assert read_job(paths).problems == ["hosts resumed from different steps: [0, 7]"]


# ---------------------------------------------------------------------------------------------------- the parts


@pytest.mark.slow
def test_the_corpus_is_text_in_records_of_one_length(tmp_path: pathlib.Path) -> None:
    corpus = build_corpus(tmp_path / "c", num_records=1_009, record_bytes=65)
    records = read_records(corpus)
    assert len(records) == 1_009
    assert {len(record) for record in records} == {65}
    assert b"import" in b"".join(records)
    assert corpus.num_sources >= 1


def test_a_standard_library_without_enough_text_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.py").write_text("pass\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(SourceError, match=r"has 5 bytes of Python text; the demo needs 650"):
        build_corpus(tmp_path / "c", num_records=10, record_bytes=65)


def test_hosts_end_when_the_demo_is_killed(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time, sys\nprint('started', flush=True)\ntime.sleep(100)\n")
    parent = (
        "import time\n"
        "from meshfeed._src.base.child import ChildProcess\n"
        f"child = ChildProcess('meshfeed._src.demo.demo:run_script', {str(script)!r}, own_group=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "started\n"
        process.kill()
    deadline = time.monotonic() + 30
    while _alive(pid):
        assert time.monotonic() < deadline, f"process {pid} outlives the demo"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_host_that_fails_is_quoted(tmp_path: pathlib.Path) -> None:
    def wait_for(job: Job) -> None:
        while job.running():
            time.sleep(0.1)

    data = str(tmp_path / "no.array_record")
    with Job(ONE_DEVICE, tmp_path / "job", ["--data", data, "--checkpoints", "c"]) as job:
        with pytest.raises(MeshfeedError, match=r"host 0 exited with code 1(.|\n)*no\.array_record"):
            wait_for(job)


def test_a_folder_that_holds_something_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").write_text("")
    result = CliRunner().invoke(main.main, ["demo", "--directory", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty; pass a new folder" in result.output


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "optax" else object())
    result = CliRunner().invoke(main.main, ["demo"])
    assert result.exit_code == 1
    assert "the demo needs optax. Run pip install '.[demo]' in a checkout." in result.output


def test_a_checkout_has_the_training_script() -> None:
    assert example_script().read_text().startswith('"""Trains a small byte-level language model')


def test_lines_wrap_at_the_width_of_the_terminal(tmp_path: pathlib.Path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=60)
    one = job(0, 5)
    checks = prove(one, [one], RECORDS, NUM_STEPS)
    Demo(Plan(), tmp_path, console)._show_proof(one, [one], checks)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(text.getvalue().split()).count("10 distinct records among the first 10 delivered") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "steps", "hosts", "duration"),
    [
        ([], 160, [2, 1, 4], "2 minutes"),
        (["--steps", "600"], 600, [2, 1, 4], "5 minutes"),
        (["--quick"], 24, [2, 1], "30 seconds"),
        (["--quick", "--steps", "40"], 40, [2, 1], "30 seconds"),
    ],
)
def test_how_long_it_takes_is_said_first(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    arguments: list[str],
    steps: int,
    hosts: list[int],
    duration: str,
) -> None:
    legs = []

    def run_leg(demo: Demo, leg: Leg, *_: object) -> JobLog:
        legs.append(leg)
        return job(0, 5)

    @contextlib.contextmanager
    def uninterrupted(*_: object) -> Iterator[Callable[[], JobLog]]:
        yield lambda: job(0, 5)

    monkeypatch.setattr(Demo, "_run_leg", run_leg)
    monkeypatch.setattr(Demo, "_uninterrupted", uninterrupted)
    result = CliRunner().invoke(main.main, ["demo", "--directory", str(tmp_path / "d"), *arguments])
    lines = result.stdout.splitlines()
    assert lines[0].split()[:5] == ["Time", "about", *duration.split(), "on"]
    assert ("--quick is shorter" in lines[0]) == ("--quick" not in arguments)
    assert f"{steps} steps of" in result.output
    assert [leg.topology.hosts for leg in legs] == hosts
    assert max(map(len, lines)) <= 80


def test_the_short_demo_kills_and_crosses_an_epoch_as_the_long_one_does() -> None:
    for plan in (Plan(), QUICK):
        assert plan.num_steps * plan.batch // 2 < plan.num_records < plan.num_steps * plan.batch
        assert plan.num_records % plan.batch
        kills = [leg.kill_at for leg in plan.legs]
        assert all(kills[:-1])
        assert kills[-1] is None


def test_what_an_installer_prints_is_shown(tmp_path: pathlib.Path) -> None:
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "uv"):
        (programs / name).write_text('#!/bin/sh\n[ "$1" = -c ] || [ "$3" = --quiet ] || echo "$0 $*"\n')
        (programs / name).chmod(0o755)
    root = pathlib.Path(__file__).parent.parent.parent
    (tmp_path / "scripts").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "scripts" / "environment").write_text((root / "scripts" / "environment").read_text())
    script = f"source {tmp_path}/scripts/environment; meshfeed_environment demo"
    environment = {**os.environ, "MESHFEED_VENV": "venv"}
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert "uv pip install --python venv/bin/python -e .[demo]" in result.stderr
    assert "this can take some minutes" in result.stderr
    (tmp_path / "uv.lock").write_text("version = 1\n")
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert "uv sync --locked --inexact --python venv/bin/python --extra demo" in result.stderr
    assert "pip install" not in result.stderr
    again = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert again.stderr == ""


@pytest.mark.parametrize(
    ("restored", "killed_after", "lost"),
    [
        (4, 11, "killed: what steps 5 to 11 computed died with them, so steps 5 to 11 are repeated."),
        (8, 9, "killed: what step 9 computed died with them, so step 9 is repeated."),
        (8, 10, "killed: what steps 9 and 10 computed died with them, so steps 9 and 10 are repeated."),
        (8, 8, "killed."),
    ],
)
def test_why_a_job_begins_again_at_an_earlier_step(restored: int, killed_after: int, lost: str) -> None:
    text = io.StringIO()
    Console(file=text, width=200).print(_why(restored, killed_after))
    newest = f"step {restored} has the newest checkpoint that was complete when the hosts were"
    assert text.getvalue().split() == f"{newest} {lost}".split()


# ---------------------------------------------------------------------------------------------------- all of it


SMALL = Plan(
    num_steps=20,
    save_every=4,
    batch=12,
    num_records=199,
    record_bytes=17,
    reference=ONE_DEVICE,
    legs=(
        Leg(Topology(hosts=2, devices=2, model_axis=2), kill_at=0.36),
        Leg(Topology(hosts=1, devices=4, model_axis=4), kill_at=0.68),
        Leg(Topology(hosts=3, devices=2, model_axis=2)),
    ),
)


@dataclasses.dataclass
class Recording(Demo):
    """Keeps what each leg logged, and the checkpoints as they were after the first kill."""

    logs: list[JobLog] = dataclasses.field(default_factory=list)
    reference: JobLog = dataclasses.field(default_factory=lambda: JobLog(0, {}, []))

    def _run_leg(self, leg: Leg, corpus: Corpus) -> JobLog:
        log = super()._run_leg(leg, corpus)
        self.logs.append(log)
        if len(self.logs) == 1:
            shutil.copytree(self.directory / "checkpoints-killed", self.directory / "checkpoints-after-one-kill")
        return log

    @contextlib.contextmanager
    def _uninterrupted(self, corpus: Corpus) -> Iterator[Callable[[], JobLog]]:
        with super()._uninterrupted(corpus) as finish:

            def kept() -> JobLog:
                self.reference = finish()
                return self.reference

            yield kept


@dataclasses.dataclass
class Continued(Demo):
    """The uninterrupted run and the first kill are those of another demo; only the last leg runs."""

    before: Recording | None = None

    def _run_leg(self, leg: Leg, corpus: Corpus) -> JobLog:
        assert self.before is not None
        if leg != self.plan.legs[-1]:
            return self.before.logs[self.plan.legs.index(leg)]
        shutil.copytree(self.before.directory / "checkpoints-after-one-kill", self.directory / "checkpoints-killed")
        return super()._run_leg(leg, corpus)

    @contextlib.contextmanager
    def _uninterrupted(self, corpus: Corpus) -> Iterator[Callable[[], JobLog]]:
        before = self.before
        assert before is not None
        yield lambda: before.reference


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, bool, str]:
    """The demo from its beginning to its end, its answer, and what it printed."""
    text = io.StringIO()
    demo = Recording(SMALL, tmp_path_factory.mktemp("demo") / "demo", Console(file=text, width=200))
    return demo, demo.run(), text.getvalue()


def continued(before: Recording, how: str, folder: pathlib.Path) -> tuple[bool, str]:
    plan = dataclasses.replace(SMALL, legs=(SMALL.legs[0], Leg(Topology(hosts=1, devices=1, model_axis=1))))
    text = io.StringIO()
    holds = Continued(broken(plan, how), folder, Console(file=text, width=200), before=before).run()
    return holds, text.getvalue()


@pytest.mark.multihost
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_journey(journey: tuple[Recording, bool, str]) -> None:
    assert [(leg.topology.hosts, leg.topology.devices) for leg in JOURNEY] == [(2, 4), (1, 8), (4, 2)]
    _, holds, text = journey
    assert holds, text
    assert text.count("SIGKILL") == 2
    reasons = re.findall(r"step (\d+) has the newest checkpoint that was complete when the hosts were killed", text)
    resumed = re.findall(r"from step (\d+), record", text)
    assert reasons == resumed
    assert len(reasons) == 2
    assert "199 distinct records among the first 199 delivered: each record of the corpus once" in text
    assert "All checks pass" in text


@pytest.mark.multihost
@pytest.mark.timeout(900)
def test_a_position_that_is_forgotten_is_seen(journey: tuple[Recording, bool, str], tmp_path: pathlib.Path) -> None:
    holds, text = continued(journey[0], "position", tmp_path / "demo")
    assert not holds, text
    assert "✗ record ids  different from the uninterrupted run" in text
    assert "Some checks fail" in text


@pytest.mark.multihost
@pytest.mark.timeout(900)
def test_another_seed_is_refused(journey: tuple[Recording, bool, str], tmp_path: pathlib.Path) -> None:
    with pytest.raises(MeshfeedError, match="state mismatch in 'seed': saved 0, current 1"):
        continued(journey[0], "seed", tmp_path / "demo")
    assert set(BREAKS) == {"seed", "position"}


@pytest.mark.multihost
def test_an_interrupted_demo_leaves_no_process(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "meshfeed", "demo", "--directory", str(tmp_path / "demo")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        log = tmp_path / "demo" / "job-1-1x8" / "host-0.log"
        deadline = time.monotonic() + 60
        while not log.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    # A host that was being started when the signal came is not known to its parent yet. It ends by itself within a second.
    deadline = time.monotonic() + 30
    while mine := [path for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if _mentions(path, str(tmp_path))]:
        assert time.monotonic() < deadline, mine
        time.sleep(0.1)


def _mentions(path: pathlib.Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except OSError:  # it has just ended
        return False
