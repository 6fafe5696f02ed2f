"""``meshfeed demo``: trains, kills all hosts, resumes on other numbers of hosts, and proves that the data is identical.

The training script is examples/train_lm.py, unmodified, in real processes. The proof uses only the lines that these
processes write (:mod:`meshfeed._src.demo.proof`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshfeed import MeshfeedError, SettingsError
from meshfeed._src.demo.corpus import Corpus, build_corpus, read_records
from meshfeed._src.demo.job import Job, Topology
from meshfeed._src.demo.proof import Check, JobLog, batches_digest, effective, ids_digest, prove, read_job

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_SILENCE_SECONDS = 300.0
_POLL_SECONDS = 0.1


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

BREAKS = {
    "seed": ("--seed", "1"),  # set_state raises StateMismatchError
    "position": ("--forget-position",),  # the arrays are restored but the data restarts, as without meshfeed
}


def broken(plan: Plan, how: str) -> Plan:
    """Returns ``plan`` with a fault in its second leg."""
    legs = list(plan.legs)
    legs[1] = dataclasses.replace(legs[1], arguments=BREAKS[how])
    return dataclasses.replace(plan, legs=tuple(legs))


class Demo:
    """Runs a plan and displays the progress and the result.

    Args:
      plan: the plan to run.
      directory: folder for the corpus, checkpoints and logs; must be empty or not exist.
      console: a ``rich.console.Console``.
    """

    def __init__(self, plan: Plan, directory: pathlib.Path, console: Console) -> None:
        self._plan = plan
        self._directory = directory
        self._console = console
        self._jobs = 0

    def run(self) -> bool:
        """Runs all jobs; returns whether all checks pass.

        Raises:
          MeshfeedError: a host failed, or no step completed for 300 s.
        """
        start = time.monotonic()
        plan, show = self._plan, self._console.print
        shorter = "" if plan.legs == QUICK.legs else "; --quick is shorter"
        corpus = build_corpus(self._directory / "corpus", num_records=plan.num_records, record_bytes=plan.record_bytes)
        text = (
            f"{corpus.num_records:,} records of {corpus.record_bytes} bytes, from {corpus.num_sources} modules of Python "
            f"{platform.python_version()}'s standard library, in {len(corpus.paths)} ArrayRecord files"
        )
        training = f"{plan.num_steps} steps of {plan.batch} records, a checkpoint every {plan.save_every} steps"
        duration = f"about {plan.duration} on 2 free cores{shorter}"
        show(_columns(("[bold]Time[/]", duration), ("[bold]Corpus[/]", text), ("[bold]Training[/]", training)))
        show("\n[bold]One uninterrupted run[/]")
        reference = self._run_leg(Leg(plan.reference), corpus, "uninterrupted")
        show("\n[bold]The same training, all hosts killed, resumed on other numbers of hosts[/]")
        jobs = [self._run_leg(leg, corpus, "killed") for leg in plan.legs]
        checks = prove(reference, jobs, read_records(corpus), plan.num_steps)
        self._show_proof(reference, jobs, checks)
        holds = all(check.holds for check in checks)
        conclusion = "[bold green]All checks pass[/]" if holds else "[bold red]Some checks fail[/]"
        show(f"\n{conclusion}, after {time.monotonic() - start:.0f} s.")
        return holds

    # ------------------------------------------------------------------ one job

    def _run_leg(self, leg: Leg, corpus: Corpus, run: str) -> JobLog:
        checkpoints = self._directory / f"checkpoints-{run}"
        plan = self._plan
        arguments = ["--data", corpus.pattern, "--checkpoints", str(checkpoints), "--audit"]
        arguments += ["--steps", str(plan.num_steps), "--batch", str(plan.batch), "--save-every", str(plan.save_every)]
        self._jobs += 1
        name = f"job-{self._jobs}-{leg.topology.hosts}x{leg.topology.devices}"
        with Job(leg.topology, self._directory / name, [*arguments, *leg.arguments]) as job:
            killed_after = self._watch(job, leg, checkpoints)
            if killed_after is not None:
                pids = ", ".join(map(str, job.pids))
                self._console.print(
                    f"  [red]SIGKILL[/] to {'all ' * (len(job.pids) > 1)}{len(job.pids)} process{'es' * (len(job.pids) > 1)} "
                    f"({pids}) after step {killed_after}"
                )
        return read_job([job.log_path(host) for host in range(leg.topology.hosts)])

    def _watch(self, job: Job, leg: Leg, checkpoints: pathlib.Path) -> int | None:
        """Shows the job's progress until it ends or is killed; returns the last step seen before the kill, or None."""
        kill_at = None if leg.kill_at is None else round(leg.kill_at * self._plan.num_steps)
        step, restored, last_news = 0, None, time.monotonic()
        with _progress(self._console) as progress:
            task = progress.add_task("", total=self._plan.num_steps, note=f"starting {leg.topology}")
            while True:
                running = job.running()
                for line in job.new_lines():
                    last_news = time.monotonic()
                    if "restored" in line:
                        restored = line["restored"]
                        where = f"from step {restored}, record {line['position']:,}" if restored else "from the start"
                        self._console.print(f"  {leg.topology}, {leg.topology.mesh}, {where}", highlight=False)
                        progress.update(task, completed=restored, note="compiling")
                        continue
                    step = line["step"]
                    progress.update(task, completed=step, note=_note(line))
                # Kill only after a new checkpoint, or the next job would have nothing to resume from.
                if kill_at is not None and step >= kill_at and _newest_step(checkpoints) > (restored or 0):
                    job.kill()
                    return step
                if not running:
                    return self._ended(job, kill_at, step)
                if time.monotonic() - last_news > _SILENCE_SECONDS:
                    raise MeshfeedError(
                        f"{job.topology}: no step for {_SILENCE_SECONDS:.0f} s after step {step}. Host 0's log ends:\n"
                        + "\n".join(job.output(0)[-12:])
                    )
                time.sleep(_POLL_SECONDS)

    def _ended(self, job: Job, kill_at: int | None, step: int) -> None:
        if kill_at is not None:
            raise MeshfeedError(
                f"{job.topology}: the job ended at step {step} before it could be killed, because no checkpoint was "
                "complete. Use more --steps."
            )

    # ------------------------------------------------------------------ the proof

    def _show_proof(self, reference: JobLog, jobs: Sequence[JobLog], checks: Sequence[Check]) -> None:
        show = self._console.print
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


def _columns(*rows: tuple[str, str]) -> Table:
    """Returns a two-column grid; the second column wraps at the terminal's width."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _note(line: dict[str, Any]) -> str:
    return f"loss {line['loss']:.3f}  {line['records_per_second']:>6,} records/s  stall {line['stall_fraction']:.1%}"


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
    """Runs the demo on the terminal.

    Args:
      num_steps: number of training steps; None for the plan's number.
      directory: folder for all output; None for a temporary folder, removed if all checks pass.
      how: fault to inject, a key of :data:`meshfeed._src.demo.demo.BREAKS`, or None.
      quick: whether to run :data:`meshfeed._src.demo.demo.QUICK`.

    Returns:
      Whether all checks pass.

    Raises:
      SettingsError: the folder is not empty.
      MeshfeedError: a library is missing or a host failed.
    """
    missing = [name for name in ("rich", "optax") if importlib.util.find_spec(name) is None]
    if missing:
        raise MeshfeedError(f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}.")
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
