"""Runs the tasks of a conversion as Apache Beam pipelines, on any of its runners.

The workers must see the input and the output folder under the same paths as this process, as on a shared file system, and
have meshfeed installed.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from meshfeed._src.base.errors import MeshfeedError, SettingsError, SourceError
from meshfeed._src.convert.job import Conversion, Phase, write_json


class RunInBeam:
    """An engine (see ``run.py``) that runs each phase as one pipeline.

    Args:
      runner: name of the runner, such as DirectRunner, PrismRunner, FlinkRunner or DataflowRunner.
      options: further pipeline options, such as ``--direct_num_workers=4``.

    Raises:
      SettingsError: Apache Beam is not installed, or there is no such runner.
    """

    def __init__(self, runner: str, options: Sequence[str] = ()) -> None:
        try:
            from apache_beam.options.pipeline_options import PipelineOptions
            from apache_beam.runners.runner import create_runner
        except ImportError as error:
            raise SettingsError(
                "--runner needs Apache Beam. Run: pip install apache-beam.", setting="runner"
            ) from error
        try:
            create_runner(runner)
        except (ValueError, ImportError) as error:
            raise SettingsError(
                f"--runner {runner}: {error} Name one that Apache Beam has, such as DirectRunner.", setting="runner"
            ) from error
        self._runner = runner
        self._options = PipelineOptions(list(options))

    def __call__(self, directory: str, phase: Phase, numbers: Sequence[int]) -> None:
        """See ``run.Engine``."""
        import apache_beam as beam

        if not numbers:
            return
        failures = pathlib.Path(Conversion(directory).folder) / "failures"
        failures.mkdir(exist_ok=True)
        for path in failures.iterdir():
            path.unlink()
        pipeline = beam.Pipeline(self._runner, self._options)
        tasks = pipeline | beam.Create(list(numbers), reshuffle=False) | beam.Reshuffle()
        _ = tasks | beam.Map(_run_task, directory=str(pathlib.Path(directory).absolute()), phase=phase)
        try:
            pipeline.run().wait_until_finish()
        except Exception as error:  # Beam wraps the error of a task in text of its own
            found = sorted(failures.iterdir())
            if not found:
                raise MeshfeedError(f"the Beam pipeline failed: {error}. See the log of {self._runner}.") from error
            raise SourceError(json.loads(found[0].read_text())) from error


def _run_task(number: int, directory: str, phase: Phase) -> int:
    job = Conversion(directory)
    try:
        job.run(phase, number)
    except MeshfeedError as error:
        write_json(job.folder / "failures" / f"{number:05}.json", str(error))
        raise
    return number
