"""``meshfeed demo``: trains, kills all hosts, resumes on other numbers of hosts, and proves that the data is identical.

The training script is examples/train_lm.py, unmodified, in real processes. The proof (:func:`prove`) consists of pure
functions of the JSON lines that these processes write, independent of the feed. The data is a text that every machine
has: the source code of Python's standard library, as ArrayRecord files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import pathlib
import platform
import re
import runpy
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshfeed import MeshfeedError, SettingsError, SourceError
from meshfeed._src.base.child import ChildProcess, Parent
from meshfeed._src.base.errors import install_hint
from meshfeed._src.testing.hosts import cpu_environment, free_port

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_LOG_TAIL_LINES = 12
_EXIT_SECONDS = 30.0
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib"}
_SILENCE_SECONDS = 300.0
_POLL_SECONDS = 0.1
_NUM_FILES = 4
BREAKS = {
    "seed": ("--seed", "1"),  # set_state raises StateMismatchError
    "position": ("--forget-position",),  # the arrays are restored but the data restarts, as without meshfeed
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hosts, devices and mesh of a job.

    Attributes:
      hosts: number of processes.
      devices: CPU devices per process.
      model_axis: size of the model axis, whose devices share a row; the remaining factor is the data axis.
    """

    hosts: int
    devices: int
    model_axis: int

    def __str__(self) -> str:
        return f"{self.hosts} host{'s' * (self.hosts > 1)} × {self.devices} devices"

    @property
    def mesh(self) -> str:
        """Description of the mesh."""
        return f"mesh data {self.hosts * self.devices // self.model_axis} × model {self.model_axis}"


def example_script() -> pathlib.Path:
    """Returns the path of examples/train_lm.py in the checkout, or of its copy in the wheel."""
    here = pathlib.Path(__file__).resolve().parents[2]
    candidates = [here.parents[1] / "examples" / "train_lm.py", here / "_examples" / "train_lm.py"]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise MeshfeedError(
        f"the demo's training script is in neither {candidates[0]} nor {candidates[1]}; reinstall meshfeed."
    )


class Job(contextlib.AbstractContextManager["Job"]):
    """The processes of one job; a context manager that kills them on exit."""

    def __init__(self, topology: Topology, directory: pathlib.Path, arguments: Sequence[str]) -> None:
        self.topology = topology
        self.directory = directory
        directory.mkdir(parents=True)
        env = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "TF_CPP_MIN_LOG_LEVEL": "1"}
        env |= cpu_environment(topology.devices)
        address = f"127.0.0.1:{free_port()}"
        self._children: list[ChildProcess] = []
        self._read_to = 0
        try:
            for host in range(topology.hosts):
                command = [str(example_script()), *arguments]
                command += ["--model-axis", str(topology.model_axis), "--log", str(self.log_path(host))]
                if topology.hosts > 1:
                    command += ["--coordinator", address, "--num-hosts", str(topology.hosts), "--host", str(host)]
                run, log = f"{__name__}:run_script", self.output_path(host)
                self._children.append(ChildProcess(run, *command, env=env, log_path=log, own_group=True))
        except BaseException:
            self.close()
            raise

    def log_path(self, host: int) -> pathlib.Path:
        """Returns the path of a host's JSON lines."""
        return self.directory / f"host-{host}.jsonl"

    def output_path(self, host: int) -> pathlib.Path:
        """Returns the path of a host's standard output and standard error."""
        return self.directory / f"host-{host}.log"

    @property
    def pids(self) -> list[int]:
        """Process ids by host."""
        return [child.pid for child in self._children]

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Yields the complete lines that host 0 has written since the last call."""
        path = self.log_path(0)
        if not path.exists():
            return
        with open(path, "rb") as log:
            log.seek(self._read_to)
            content = log.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)

    def running(self) -> bool:
        """Whether any process is still running; raises MeshfeedError with the end of its log if one has failed."""
        codes = [child.returncode for child in self._children]
        for host, code in enumerate(codes):
            if code:
                what = f"host {host} {self._children[host].how_it_ended()}. {self.output_path(host)} ends"
                raise MeshfeedError(f"{self.topology}: {what}:\n{self.log_tail(host)}")
        return None in codes

    def log_tail(self, host: int) -> str:
        """Returns the last lines that a host printed."""
        return "\n".join(self._children[host].log().splitlines()[-_LOG_TAIL_LINES:])

    def kill(self) -> None:
        """Sends SIGKILL to all processes: no handler runs, no buffer is flushed, no other host is notified."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait(_EXIT_SECONDS)

    def close(self) -> None:
        """Kills the processes that are still running."""
        self.kill()
        for child in self._children:
            child.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def run_script(parent: Parent) -> None:
    """Runs a script as ``python script arguments`` does; the target of the children of a job."""
    del parent
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(pathlib.Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


class Corpus(NamedTuple):
    """Text cut into records of one length.

    Attributes:
      pattern: glob of the files.
      paths: the files, in record id order.
      num_sources: number of Python files from which the text was taken.
    """

    pattern: str
    paths: Sequence[pathlib.Path]
    num_sources: int


def build_corpus(directory: pathlib.Path, *, num_records: int, record_bytes: int) -> Corpus:
    """Writes the text of the standard library, in order of file name, as records, which the files share evenly."""
    from array_record.python.array_record_module import ArrayRecordWriter

    text, num_sources, needed = bytearray(), 0, num_records * record_bytes
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if len(text) < needed and not _LEFT_OUT.intersection(path.relative_to(root).parts):
            text += path.read_bytes()
            num_sources += 1
    if len(text) < needed:
        raise SourceError(
            f"the standard library in {root} has {len(text):,} bytes of Python text; the demo needs {needed:,}. Some systems "
            "omit modules: use a complete Python (PYTHON=...)."
        )
    directory.mkdir(parents=True, exist_ok=True)
    bounds = [num_records * number // _NUM_FILES for number in range(_NUM_FILES + 1)]
    paths = []
    for number, (first, stop) in enumerate(itertools.pairwise(bounds)):
        paths.append(directory / f"text-{number:05d}-of-{_NUM_FILES:05d}.array_record")
        writer = ArrayRecordWriter(str(paths[-1]), "group_size:1,uncompressed")
        for record in range(first, stop):
            writer.write(bytes(text[record * record_bytes : (record + 1) * record_bytes]))
        writer.close()
    return Corpus(str(directory / "*.array_record"), paths, num_sources)


def read_records(corpus: Corpus) -> list[bytes]:
    """Reads all records by id with the array_record library, not meshfeed, as an independent reference."""
    from array_record.python.array_record_module import ArrayRecordReader

    records: list[bytes] = []
    for path in corpus.paths:
        reader = ArrayRecordReader(str(path))
        records += reader.read_all()
        reader.close()
    return records


@dataclasses.dataclass(frozen=True)
class Leg:
    """One job of the run that is killed and resumed.

    Attributes:
      topology: hosts and devices.
      kill_at: fraction of all steps after which all hosts are killed; None to run to the end.
      arguments: additional arguments of the training script.
    """

    topology: Topology
    kill_at: float | None = None
    arguments: tuple[str, ...] = ()


ONE_HOST = Topology(hosts=1, devices=8, model_axis=2)
JOURNEY = (
    Leg(Topology(hosts=2, devices=4, model_axis=2), kill_at=0.36),
    Leg(Topology(hosts=1, devices=8, model_axis=4), kill_at=0.68),
    Leg(Topology(hosts=4, devices=2, model_axis=4)),  # the model axis spans two hosts
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of a demo.

    Attributes:
      num_steps: number of training steps.
      save_every: steps between checkpoints.
      batch: rows of the global batch.
      num_records: records in the corpus; a prime below ``num_steps * batch``, which puts the epoch boundary inside a
        batch.
      record_bytes: bytes per record.
      reference: topology of the uninterrupted run.
      legs: jobs of the other run, in order.
      start_seconds: approximate time to start and compile all processes, on 2 free cores.
      step_seconds: approximate time per step, both runs together.
    """

    num_steps: int = 160
    save_every: int = 16
    batch: int = 64
    num_records: int = 7_919
    record_bytes: int = 65
    reference: Topology = ONE_HOST
    legs: tuple[Leg, ...] = JOURNEY
    start_seconds: float = 60.0
    step_seconds: float = 0.4

    @property
    def duration(self) -> str:
        """Approximate duration as text."""
        seconds = self.start_seconds + self.step_seconds * self.num_steps
        if seconds < 60:
            return f"{max(10, round(seconds, -1)):.0f} seconds"
        return f"{seconds / 60:.0f} minute{'s' * (seconds >= 90)}"


QUICK = Plan(
    num_steps=24,
    save_every=4,
    batch=16,
    num_records=331,
    record_bytes=33,
    reference=Topology(hosts=1, devices=4, model_axis=2),
    legs=(
        Leg(Topology(hosts=2, devices=2, model_axis=2), kill_at=0.4),
        Leg(Topology(hosts=1, devices=4, model_axis=4)),
    ),
    start_seconds=25.0,
    step_seconds=0.2,
)


def broken(plan: Plan, how: str) -> Plan:
    """Returns ``plan`` with a fault in its second leg."""
    legs = list(plan.legs)
    legs[1] = dataclasses.replace(legs[1], arguments=BREAKS[how])
    return dataclasses.replace(plan, legs=tuple(legs))


@dataclasses.dataclass
class Demo:
    """Runs a plan in a new folder, and displays the progress and the result."""

    plan: Plan
    directory: pathlib.Path
    console: Console
    _num_jobs: int = 0
    _killed_after: int | None = None  # the last step seen of the job before this one

    def run(self) -> bool:
        """Runs all jobs; returns whether all checks pass."""
        start = time.monotonic()
        plan, show = self.plan, self.console.print
        shorter = "" if plan.legs == QUICK.legs else "; --quick is shorter"
        corpus = build_corpus(self.directory / "corpus", num_records=plan.num_records, record_bytes=plan.record_bytes)
        text = (
            f"{plan.num_records:,} records of {plan.record_bytes} bytes, from {corpus.num_sources} modules of Python "
            f"{platform.python_version()}'s standard library, in {len(corpus.paths)} ArrayRecord files"
        )
        training = f"{plan.num_steps} steps of {plan.batch} records, a checkpoint every {plan.save_every} steps"
        duration = f"about {plan.duration} on 2 free cores{shorter}"
        show(_columns(("[bold]Time[/]", duration), ("[bold]Corpus[/]", text), ("[bold]Training[/]", training)))
        with self._uninterrupted(corpus) as finish:
            show("\n[bold]A training, all hosts killed, resumed on other numbers of hosts[/]")
            jobs = [self._run_leg(leg, corpus) for leg in plan.legs]
            show("\n[bold]The same without a kill, which has been running beside it[/]")
            reference = finish()
        checks = prove(reference, jobs, read_records(corpus), plan.num_steps)
        self._show_proof(reference, jobs, checks)
        holds = all(check.holds for check in checks)
        conclusion = "[bold green]All checks pass[/]" if holds else "[bold red]Some checks fail[/]"
        show(f"\n{conclusion}, after {time.monotonic() - start:.0f} s.")
        return holds

    # ------------------------------------------------------------------ one job

    @contextlib.contextmanager
    def _uninterrupted(self, corpus: Corpus) -> Iterator[Callable[[], JobLog]]:
        """Starts the run that is not killed, in the background; yields a function that shows it until it ends."""
        leg = Leg(self.plan.reference)
        with self._job(leg, corpus, "uninterrupted") as job:

            def finish() -> JobLog:
                self._watch(job, leg, self.directory / "checkpoints-uninterrupted")
                return read_job([job.log_path(0)])

            yield finish

    def _job(self, leg: Leg, corpus: Corpus, run: str) -> Job:
        checkpoints = self.directory / f"checkpoints-{run}"
        plan = self.plan
        arguments = ["--data", corpus.pattern, "--checkpoints", str(checkpoints), "--audit"]
        arguments += ["--steps", str(plan.num_steps), "--batch", str(plan.batch), "--save-every", str(plan.save_every)]
        self._num_jobs += 1
        name = f"job-{self._num_jobs}-{leg.topology.hosts}x{leg.topology.devices}"
        return Job(leg.topology, self.directory / name, [*arguments, *leg.arguments])

    def _run_leg(self, leg: Leg, corpus: Corpus) -> JobLog:
        with self._job(leg, corpus, "killed") as job:
            killed_after = self._watch(job, leg, self.directory / "checkpoints-killed")
            if killed_after is not None:
                pids, several = ", ".join(map(str, job.pids)), len(job.pids) > 1
                which = f"{'all ' * several}{len(job.pids)} process{'es' * several}"
                self.console.print(f"  [red]SIGKILL[/] to {which} ({pids}) after step {killed_after}")
            self._killed_after = killed_after
        return read_job([job.log_path(host) for host in range(leg.topology.hosts)])

    def _watch(self, job: Job, leg: Leg, checkpoints: pathlib.Path) -> int | None:
        """Shows the job's progress until it ends or is killed; returns the last step seen before the kill, or None."""
        kill_at = None if leg.kill_at is None else round(leg.kill_at * self.plan.num_steps)
        step, restored, last_news = 0, None, time.monotonic()
        with _progress(self.console) as progress:
            task = progress.add_task("", total=self.plan.num_steps, note=f"starting {leg.topology}")
            while True:
                running = job.running()
                for line in job.new_lines():
                    last_news = time.monotonic()
                    if "restored" in line:
                        restored = line["restored"]
                        where = f"from step {restored}, record {line['position']:,}" if restored else "from the start"
                        self.console.print(f"  {leg.topology}, {leg.topology.mesh}, {where}", highlight=False)
                        if self._killed_after is not None:
                            self.console.print(_why(restored, self._killed_after), highlight=False)
                        progress.update(task, completed=restored, note="compiling")
                        continue
                    step = line["step"]
                    speed = f"{line['records_per_second']:>6,} records/s  stall {line['stall_fraction']:.1%}"
                    progress.update(task, completed=step, note=f"loss {line['loss']:.3f}  {speed}")
                # Kill only after a new checkpoint, or the next job would have nothing to resume from.
                if kill_at is not None and step >= kill_at and _newest_step(checkpoints) > (restored or 0):
                    job.kill()
                    return step
                if not running and kill_at is None:
                    return None
                if not running:
                    raise MeshfeedError(
                        f"{job.topology}: the job ended at step {step} before it could be killed, because no checkpoint "
                        "was complete. Use more --steps."
                    )
                if time.monotonic() - last_news > _SILENCE_SECONDS:
                    silence = f"no step for {_SILENCE_SECONDS:.0f} s after step {step}"
                    raise MeshfeedError(f"{job.topology}: {silence}. Host 0's log ends:\n{job.log_tail(0)}")
                time.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------------ the proof

    def _show_proof(self, reference: JobLog, jobs: Sequence[JobLog], checks: Sequence[Check]) -> None:
        show = self.console.print
        show("\n[bold]Proof[/]")
        one, other = effective([reference]), effective(jobs)
        for name, digest in (("record ids", ids_digest), ("batches", batches_digest)):
            show(f"  sha256 of all {name}, first 40 digits")
            show(f"    uninterrupted         {digest(one)[:40]}", highlight=False)
            show(f"    killed and resumed    {digest(other)[:40]}", highlight=False)
        marks = {True: "[green]✓[/]", False: "[bold red]✗[/]"}
        show(_columns(*((f"  {marks[check.holds]} {check.name}", check.detail) for check in checks)), highlight=False)
        if one and other:
            first, second = (f"{steps[max(steps)].loss:.6f}" for steps in (one, other))
            text = (
                f"The last loss is {first} uninterrupted, and {second} killed and resumed. The loss rounds differently on "
                "another mesh; the data is identical."
            )
            show(_columns((" ", text)), highlight=False)


def _why(restored: int, killed_after: int) -> Table:
    """Explains why the next job does not begin after the last step of the killed one."""
    newest = f"step {restored} has the newest checkpoint that was complete when the hosts were killed"
    if restored >= killed_after:
        return _columns((" ", f"{newest}."))
    first, num_lost = restored + 1, killed_after - restored
    lost = f"step {first}" if num_lost == 1 else f"steps {first} {'and' if num_lost == 2 else 'to'} {killed_after}"
    again = "is" if num_lost == 1 else "are"
    return _columns((" ", f"{newest}: what {lost} computed died with them, so {lost} {again} repeated."))


def _columns(*rows: tuple[str, str]) -> Table:
    """Returns a two-column grid; the second column wraps at the terminal's width."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _newest_step(checkpoints: pathlib.Path) -> int:
    """Returns the newest complete checkpoint; Orbax renames a folder to its step number once it is complete."""
    if not checkpoints.exists():
        return 0
    return max((int(path.name) for path in checkpoints.iterdir() if re.fullmatch(r"\d+", path.name)), default=0)


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("   "),
        BarColumn(bar_width=16),  # fits the line into 80 columns
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    )


def run_demo(num_steps: int | None, directory: str | None, how: str | None, *, quick: bool = False) -> bool:
    """Runs the demo on the terminal; returns whether all checks pass.

    ``how`` is a fault to inject, a key of :data:`BREAKS`. Output without a ``directory`` is removed if all checks pass.
    """
    missing = [name for name in ("rich", "optax") if importlib.util.find_spec(name) is None]
    if missing:
        raise MeshfeedError(f"the demo needs {' and '.join(missing)}. {install_hint('demo')}")
    from rich.console import Console

    folder = pathlib.Path(directory or tempfile.mkdtemp(prefix="meshfeed-demo-")).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"--directory {folder} is not empty; pass a new folder.", setting="directory")
    plan = QUICK if quick else Plan()
    if num_steps is not None:
        plan = dataclasses.replace(plan, num_steps=num_steps, save_every=max(2, num_steps // 10))
    if how is not None:
        plan = broken(plan, how)
    # On SIGTERM, unwind the stack: this kills the hosts and restores the terminal.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    holds = False
    try:
        holds = Demo(plan, folder, Console()).run()  # without a terminal, rich uses $COLUMNS or 80 columns
    finally:
        signal.signal(signal.SIGTERM, before)
        if holds and directory is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"Corpus, checkpoints and logs are in {folder}", file=sys.stderr)
    return holds


@dataclasses.dataclass
class Step:
    """One training step, merged over all hosts.

    Attributes:
      record_ids: record ids by row.
      rows: maps a row to the digest of its bytes on the devices.
      loss: loss on the first host that logged the step.
    """

    record_ids: list[int]
    rows: dict[int, str]
    loss: float

    @property
    def whole(self) -> bool:
        """Whether every row was logged by some host."""
        return sorted(self.rows) == list(range(len(self.record_ids)))

    @property
    def content(self) -> tuple[list[int], list[str]]:
        """Record ids and row digests, in row order."""
        return self.record_ids, [self.rows[row] for row in sorted(self.rows)]


@dataclasses.dataclass
class JobLog:
    """Log of a job, merged over its hosts.

    Attributes:
      restored: step from which the job resumed; 0 if it started from the beginning.
      steps: steps by number; the last steps of a killed job may lack rows.
      problems: descriptions of disagreements between hosts.
    """

    restored: int
    steps: dict[int, Step]
    problems: list[str]


def read_job(paths: Sequence[pathlib.Path]) -> JobLog:
    """Merges the logs of all hosts; ignores a partial last line, which a killed host may leave."""
    restored: set[int] = set()
    steps: dict[int, Step] = {}
    problems: list[str] = []
    for host, path in enumerate(paths):
        content = path.read_bytes() if path.exists() else b""
        for text in content[: content.rfind(b"\n") + 1].splitlines():
            line: dict[str, Any] = json.loads(text)
            if "restored" in line:
                restored.add(line["restored"])
                continue
            number = line["step"]
            step = steps.setdefault(number, Step(line["record_ids"], {}, line["loss"]))
            if step.record_ids != line["record_ids"]:
                problems.append(f"host {host} has different record ids in step {number}")
            for row, digest in line["rows"].items():
                if step.rows.setdefault(int(row), digest) != digest:
                    problems.append(f"host {host} has different bytes in row {row} of step {number}")
    if len(restored) != 1:
        problems.append(f"hosts resumed from different steps: {sorted(restored)}")
    return JobLog(min(restored, default=0), steps, problems)


def effective(jobs: Sequence[JobLog]) -> dict[int, Step]:
    """Returns the steps that count: a job supersedes earlier steps after the one from which it resumed."""
    steps: dict[int, Step] = {}
    for job in jobs:
        steps = {number: step for number, step in steps.items() if number <= job.restored} | job.steps
    return dict(sorted(steps.items()))


def ids_digest(steps: Mapping[int, Step]) -> str:
    """Returns the SHA-256 digest of the record ids of all steps, in order."""
    ids = [record_id for step in steps.values() for record_id in step.record_ids]
    return hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()


def batches_digest(steps: Mapping[int, Step]) -> str:
    """Returns the SHA-256 digest of all global batches: of the row digests, in row order, step by step."""
    rows = [digest for step in steps.values() for digest in step.content[1]]
    return hashlib.sha256("".join(rows).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the proof: what is checked, whether it holds, and the figures."""

    name: str
    holds: bool
    detail: str


def prove(reference: JobLog, jobs: Sequence[JobLog], records: Sequence[bytes], num_steps: int) -> list[Check]:
    """Compares the killed and resumed run with the uninterrupted one, and with the files, read without meshfeed."""
    steps, wanted = effective(jobs), effective([reference])
    problems = [problem for job in [reference, *jobs] for problem in job.problems]
    numbers = list(range(1, num_steps + 1))
    whole = [number for number in numbers if number in steps and steps[number].whole]
    again, differing = _replayed(jobs)
    right, rows = _rows_like_the_files(steps, records)
    delivered = [record for step in steps.values() for record in step.record_ids]
    epoch = delivered[: len(records)]
    once = len(set(epoch))
    whether = {True: "identical to the uninterrupted run", False: "different from the uninterrupted run"}
    same_ids = ids_digest(steps) == ids_digest(wanted)
    same_batches = batches_digest(steps) == batches_digest(wanted)
    complete = list(steps) == numbers and len(whole) == num_steps and list(wanted) == numbers
    of_corpus = ": each record of the corpus once" if once == len(records) else f", of {len(records):,} in the corpus"
    first_wrong = f"; the first that was not is step {differing[0]}" if differing else ""
    reproduced = f"{again - len(differing):,} of the {again:,} steps lost to the kills were reproduced exactly"
    agree = "all hosts agree on the ids and on every row that several of them hold"
    return [
        Check("steps", complete, f"{len(whole):,} of {num_steps:,} are complete"),
        Check("record ids", same_ids, whether[same_ids]),
        Check("batches", same_batches, whether[same_batches]),
        Check("files", right == rows, f"{right:,} of {rows:,} rows equal the record with their id"),
        Check(
            "epoch",
            once == len(epoch),
            f"{once:,} distinct records among the first {len(epoch):,} delivered{of_corpus}",
        ),
        Check("replayed", not differing, f"{reproduced}{first_wrong}"),
        Check("hosts", not problems, problems[0] if problems else agree),
    ]


def _replayed(jobs: Sequence[JobLog]) -> tuple[int, list[int]]:
    """Counts the steps that the next job replayed, and lists those whose content differs."""
    pairs = [
        (index, step, later.steps[index])
        for job, later in itertools.pairwise(jobs)
        for index, step in job.steps.items()
        if index > later.restored and step.whole and index in later.steps and later.steps[index].whole
    ]
    return len(pairs), [index for index, step, again in pairs if step.content != again.content]


def _rows_like_the_files(steps: Mapping[int, Step], records: Sequence[bytes]) -> tuple[int, int]:
    digests = [hashlib.sha256(record).hexdigest()[:32] for record in records]
    right = rows = 0
    for step in steps.values():
        for row, record in enumerate(step.record_ids):
            rows += 1
            right += 0 <= record < len(digests) and step.rows.get(row) == digests[record]
    return right, rows
