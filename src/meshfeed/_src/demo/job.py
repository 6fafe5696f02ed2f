"""A training job of the demo: one child process per host, each writing one line of JSON per step."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self

from meshfeed import MeshfeedError
from meshfeed._src.base.child import ChildProcess, Parent
from meshfeed._src.testing.hosts import cpu_environment, free_port

_LOG_TAIL_LINES = 12
_EXIT_SECONDS = 30.0


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


class Job:
    """The processes of one job; a context manager that kills them on exit.

    Args:
      topology: hosts and devices.
      directory: new folder for the logs.
      arguments: arguments of the training script, the same on all hosts.
    """

    def __init__(self, topology: Topology, directory: pathlib.Path, arguments: Sequence[str]) -> None:
        self.topology = topology
        self.directory = directory
        directory.mkdir(parents=True)
        env = {
            **cpu_environment(topology.devices),
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
        address = f"127.0.0.1:{free_port()}"
        self._children: list[ChildProcess] = []
        self._read_to = 0
        try:
            for host in range(topology.hosts):
                command = [str(example_script()), *arguments]
                command += ["--model-axis", str(topology.model_axis), "--log", str(self.log_path(host))]
                if topology.hosts > 1:
                    command += ["--coordinator", address, "--num-hosts", str(topology.hosts), "--host", str(host)]
                run = f"{__name__}:run_script"
                self._children.append(
                    ChildProcess(run, *command, env=env, log_path=self.output_path(host), own_group=True)
                )
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
        """Whether any process is still running.

        Raises:
          MeshfeedError: a process exited with an error; quotes the end of its log.
        """
        codes = [child.returncode for child in self._children]
        for host, code in enumerate(codes):
            if code:
                raise MeshfeedError(
                    f"{self.topology}: host {host} {self._children[host].how_it_ended()}. {self.output_path(host)} ends:\n"
                    + "\n".join(self.output(host)[-_LOG_TAIL_LINES:])
                )
        return None in codes

    def output(self, host: int) -> list[str]:
        """Returns the lines that a host printed."""
        return self._children[host].log().splitlines()

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def run_script(parent: Parent) -> None:
    """Runs a script as ``python script arguments`` does; the target of the children of a job."""
    del parent
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(pathlib.Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
