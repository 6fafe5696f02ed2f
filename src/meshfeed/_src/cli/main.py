"""The ``meshfeed`` command line. Each command imports its dependencies when it runs, which keeps ``--help`` fast.

A :class:`~meshfeed.MeshfeedError` or an OSError is printed as a message without a traceback. The exit status is 2 for an
invalid argument, 130 after Ctrl-C, and 1 for any other error.
"""

from __future__ import annotations

import contextlib
import errno
import json

import click

from meshfeed import __version__
from meshfeed._src.base.errors import MeshfeedError, PlanError, SettingsError, missing_package
from meshfeed._src.base.stores import write_output
from meshfeed._src.cli import checkpoint as cli_checkpoint
from meshfeed._src.cli import data as cli_data
from meshfeed._src.cli import doctor as cli_doctor
from meshfeed._src.cli import plan as cli_plan
from meshfeed._src.cli.text import (
    INTERRUPTED,
    LocalPath,
    OutputPath,
    at_least,
    counted,
    example,
    json_option,
    printable,
    show,
)

_MAX_STEP_MS = 3_600_000


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except MeshfeedError as error:
            click.echo(f"Error: {printable(str(error))}", err=True)
            ctx.exit(2 if isinstance(error, SettingsError | PlanError) else 1)
        except OSError as error:
            if error.errno == errno.EPIPE:  # click ends quietly if the reader of the output has ended
                raise
            raise click.ClickException(printable(str(error))) from error
        except ModuleNotFoundError as error:
            extra = "convert" if ctx.invoked_subcommand == "convert" else "all"
            missing = missing_package(f"meshfeed {ctx.invoked_subcommand}", error, extra)
            raise click.ClickException(str(missing)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="meshfeed")
def main() -> None:
    """Feed a JAX device mesh: one stream of global batches on any number of hosts."""


@main.command(short_help="Train, kill every host, continue, and compare.", epilog=example("demo --directory demo-out"))
@click.option(
    "--quick", is_flag=True, help="A smaller training, on 2 hosts and then on 1: half a minute on 2 free cores."
)
@at_least(20, "--steps", help="Training steps; default: 160, or 24 with --quick.")
@click.option(
    "--directory",
    type=LocalPath(),
    help="Folder for corpus, checkpoints and logs; without it, they are removed at the end.",
)
@click.option("--break", "how", type=click.Choice(["seed", "position"]), hidden=True)
def demo(quick: bool, steps: int | None, directory: str | None, how: str | None) -> None:
    """Train on 2 hosts, kill them, resume on 1 and then 4, and prove that the data stream is identical.

    Everything runs on this machine: hosts are processes, devices are CPU devices. Takes a few minutes. The exit status
    is 1 if any check fails.
    """
    from meshfeed._src.demo import demo

    if not demo.run_demo(steps, directory, how, quick=quick):
        raise SystemExit(1)


@main.command(epilog=example("replay checkpoints/ --batch-index 812 --array-record 'data/*.array_record'"))
@click.argument("state", type=click.Path())
@at_least(
    0, "--batch-index", "--step", "batch_index", help="Index of the batch, from 0; default: the last one delivered."
)
@at_least(
    1, "--global-batch-size", help="Batch size of steps after the state; default: that of the last one delivered."
)
@click.option(
    "--array-record",
    "paths",
    metavar="FILES",
    multiple=True,
    help="ArrayRecord files; shows each record's file and first bytes. Repeatable.",
)
@json_option("Print JSON, with all records.")
def replay(
    state: str, batch_index: int | None, global_batch_size: int | None, paths: tuple[str, ...], as_json: bool
) -> None:
    """Show which records a past or future batch contains.

    STATE is a JSON file with the result of feed.get_state(), or a checkpoint folder, of which the newest step is used.
    Reads no data unless --array-record is given. If the feed has balance=, which moves records between the rows of a
    batch, the order of the rows differs: feed.record_ids(step) returns it.
    """
    from meshfeed._src.cli import replay as cli_replay

    parsed = cli_replay.load_state(state)
    found = cli_replay.replay(parsed, batch_index, global_batch_size)
    records = cli_replay.describe_records(parsed, list(paths), found["record_ids"]) if paths else None
    found["record_ids"] = found["record_ids"].tolist()
    as_found = found | ({"records": records} if records else {})
    show(as_found, cli_replay.lines(found, records), as_json=as_json)


@main.command(
    short_help="Measure how fast this machine feeds its devices.",
    epilog=example("bench 'data/*.array_record' --global-batch-size 256 --step-ms 20"),
)
@click.argument("paths", nargs=-1)
@at_least(1, "--global-batch-size", default=256, help="Records per batch.")
@at_least(1, "--steps", default=100, help="Batches in each of three rounds.")
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Simulated step time (ms): the loop sleeps that long after each batch, which limits the feed's rate.",
)
@click.option("--shuffle/--no-shuffle", default=True, show_default=True, help="Whether to shuffle the records.")
@at_least(0, "--prefetch", default=2, help="Batches kept ready on the devices.")
@at_least(1, "--num-threads", help="Threads that read; default: as for a feed.")
@at_least(0, "--num-workers", default=0, help="Processes that read and decode.")
@at_least(1, "--record-bytes", help="Bytes per row, to which records are cut or padded; default: the size of record 0.")
@json_option()
def bench(
    paths: tuple[str, ...], step_ms: float, steps: int, record_bytes: int | None, as_json: bool, **settings: object
) -> None:
    """Measure how fast this machine feeds its devices from ArrayRecord files.

    PATHS are files or globs, read in turns by a feed and by a bare loop, for comparison. Without PATHS, uses temporary
    files of 20,000 random records.
    """
    from meshfeed._src.cli import bench as cli_bench

    if not step_ms <= _MAX_STEP_MS:  # neither for NaN
        raise SettingsError(f"--step-ms {step_ms:g}. Expected at most {_MAX_STEP_MS:,}, an hour.", setting="step_ms")
    with contextlib.ExitStack() as stack:
        files = list(paths) or stack.enter_context(cli_bench.example_files(20_000, record_bytes or 4096))
        result = cli_bench.bench(files, steps=steps, step_seconds=step_ms / 1e3, record_bytes=record_bytes, **settings)
    show(result, cli_bench.report(result), as_json=as_json)


@main.command(
    short_help="Show where a run's time went, from its logs.", epilog=example("report logs/ --output report.html")
)
@click.argument("logs", type=click.Path(), nargs=-1, required=True)
@click.option(
    "--output",
    type=OutputPath(),
    default="report.html",
    show_default=True,
    help="The HTML page to write: a path or a URL.",
)
@json_option("Print the figures as JSON, and write no page.")
def report(logs: tuple[str, ...], output: str, as_json: bool) -> None:
    """Write one HTML page about a run: stalls over time, stages, hosts, cache hits.

    LOGS are the folder or the files that meshfeed.monitoring.log wrote, of one or several hosts, or their URLs. The page
    needs no network.
    """
    from meshfeed._src.monitoring.exporters import read_logs
    from meshfeed._src.pictures.report import report_figures, report_page

    figures = report_figures(read_logs(logs))
    if as_json:
        click.echo(json.dumps(figures))
    else:
        write_output("output", output, report_page(figures))
        hosts = sum(len(feed["hosts"]) for feed in figures["feeds"])
        click.echo(f"wrote {output}: {counted(len(figures['feeds']), 'feed')}, {counted(hosts, 'host')}")


for _command in (
    cli_plan.plan,
    cli_data.convert,
    cli_doctor.doctor,
    cli_data.manifest,
    *cli_checkpoint.COMMANDS,
):
    main.add_command(_command)
