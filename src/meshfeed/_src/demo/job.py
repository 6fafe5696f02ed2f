"""A training job of the demo: one process per host, each writing one line of JSON per step.

Runs a script like ``python script arguments``, and kills it when the parent process ends.

``python -m meshfeed._src.demo.job script arguments``: standard input is a pipe held open by the parent. End of input
means that the parent has exited for any reason, and the script would otherwise run on as an orphan.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

from meshfeed import MeshfeedError
from meshfeed._src.testing.spawn_host import free_port

_LOG_TAIL_LINES = 12


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
        f"the demo's training script is in neither {candidates[0]} nor {candidates[1]}; install meshfeed again."
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
        env = dict(os.environ)
        flags = [flag for flag in env.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
        flags.append(f"--xla_force_host_platform_device_count={topology.devices}")
        package_root = str(pathlib.Path(__file__).resolve().parents[3])
        env |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "XLA_FLAGS": " ".join(flags),
            "PYTHONPATH": os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")])),
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
        address = f"127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._read_to = 0
        try:
            for host in range(topology.hosts):
                command = [sys.executable, "-m", "meshfeed._src.demo.job", str(example_script()), *arguments]
                command += ["--model-axis", str(topology.model_axis), "--log", str(self.log_path(host))]
                if topology.hosts > 1:
                    command += ["--coordinator", address, "--num-hosts", str(topology.hosts), "--host", str(host)]
                # If this process dies, the pipe to the child closes, and the child kills itself.
                with open(self.output_path(host), "wb") as output:
                    self._processes.append(
                        subprocess.Popen(
                            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=env
                        )
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
        return [process.pid for process in self._processes]

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
          MeshfeedError: if a process exited with an error; quotes the end of its log.
        """
        codes = [process.poll() for process in self._processes]
        for host, code in enumerate(codes):
            if code:
                raise MeshfeedError(
                    f"{self.topology}: host {host} ended with status {code}. The end of {self.output_path(host)}:\n"
                    + "\n".join(self.output(host)[-_LOG_TAIL_LINES:])
                )
        return any(code is None for code in codes)

    def output(self, host: int) -> list[str]:
        """Returns the lines that a host printed."""
        return self.output_path(host).read_text(errors="replace").splitlines()

    def kill(self) -> None:
        """Sends SIGKILL to all processes: no handler runs, no buffer is flushed, no other host is notified."""
        for process in self._processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """Kills the processes that are still running."""
        self.kill()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _end_with_the_parent() -> None:
    while os.read(0, 1 << 10):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
