"""The control groups of this process, by which containers and schedulers limit it."""

from __future__ import annotations

import contextlib
import pathlib

_OF_PROCESS, _MOUNTED = pathlib.Path("/proc/self/cgroup"), pathlib.Path("/sys/fs/cgroup")


def group_limits(controller: str, name: str, *names: str) -> list[list[int]]:
    """Returns the numbers of a limit in the groups of this process and in those above them, each of which applies.

    Args:
      controller: such as "memory".
      name: the file of the limit in groups of version 2.
      *names: the files of the limit in groups of version 1.
    """
    found: list[list[int]] = []
    with contextlib.suppress(OSError):  # a system without groups
        for line in _OF_PROCESS.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            files, mounted = (names, _MOUNTED / controller) if controllers else ((name,), _MOUNTED)
            # A container may see the path of its group outside, and the group itself where the outermost one would be.
            own = pathlib.PurePosixPath(group).relative_to("/")
            for folder in (own, *own.parents):
                with contextlib.suppress(OSError, ValueError):  # there is no such file, or it contains "max"
                    words = " ".join((mounted / folder / file).read_text() for file in files).split()
                    found.append([int(word) for word in words])
    return found
