"""``meshfeed report``: a run's figures over time, from the logs of one or several hosts."""

from __future__ import annotations

import json
import pathlib

import click


@click.command(short_help="Show where a run's time went, from its logs.")
@click.argument("logs", type=click.Path(), nargs=-1, required=True)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    default="report.html",
    show_default=True,
    help="The HTML page to write.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, and write no page.")
def report(logs: tuple[str, ...], output: pathlib.Path, as_json: bool) -> None:
    """Write one HTML page about a run: stalls over time, stages, hosts, cache hits.

    LOGS are the folder or the files that meshfeed.monitoring.log wrote, of one or several hosts. The page needs no
    network.
    """
    from meshfeed._src.monitoring.log import read_logs
    from meshfeed._src.pictures.report import report_figures, report_page

    figures = report_figures(read_logs(logs))
    if as_json:
        click.echo(json.dumps(figures))
    else:
        output.write_text(report_page(figures), encoding="utf-8")
        hosts = sum(len(feed["hosts"]) for feed in figures["feeds"])
        click.echo(f"wrote {output}: {len(figures['feeds'])} feeds, {hosts} hosts")
