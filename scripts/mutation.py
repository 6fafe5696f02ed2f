"""Runs mutation tests with mutmut, package by package, and prints a table; ``scripts/mutate`` calls it.

Each package is tested in a copy of the repository in build/mutation, which keeps the results: a run that was interrupted
continues, and a run with more mutants tests only the new ones. The copy is made again after any change of src, tests or
pyproject.toml. The sample depends only on the source, so two runs compare tests by the same mutants. Mutants that change only
what people read do not count (``mutant_texts.py``).
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time

import mutant_texts

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutation"
COPIED = ("src", "tests", "pyproject.toml")
BESIDE = ("benchmarks", "docs", "examples", "scripts", "README.md", "mkdocs.yml")  # which tests read
MUTANTS = 60  # the aim is less than an hour for all packages with 2 processes
AIM = 0.85
CONFIGURATION = """
[tool.mutmut]
source_paths = ["src"]
also_copy = {beside}
only_mutate = ["src/meshfeed/_src/{package}/*"]
pytest_add_cli_args_test_selection = ["tests/{package}"]
pytest_add_cli_args = ["-m", "not multihost and not slow", "-p", "no:cacheprovider", "--hypothesis-seed=0",
  "--deselect", "tests/cli/test_cli.py::test_it_runs_as_a_program", # in a folder where mutmut finds no settings
  # counts frames, and mutmut adds some
  "--deselect", "tests/base/test_tracebacks.py", "--deselect", "tests/base/test_stacks.py"]
debug = true # or it hides why a test fails without a mutant
process_isolation = "forkserver" # JAX's threads do not survive a fork
timeout_multiplier = 3
timeout_constant = 10
"""
KILLED = ("killed", "timeout", "caught by type check")
IGNORED = re.compile(r"__pycache__|\.hypothesis|\.egg-info")


def packages() -> list[str]:
    """Packages of the source that have tests of their own."""
    found = (path.parent.name for path in (ROOT / "src/meshfeed/_src").glob("*/__init__.py"))
    return sorted(name for name in found if any((ROOT / "tests" / name).glob("test_*.py")))


def digest() -> str:
    """Of everything that a copy holds."""
    found = hashlib.sha256()
    for top in COPIED:
        path = ROOT / top
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and not IGNORED.search(str(file)):
                found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()


class Package:
    """The copy of the repository in which one package is mutated."""

    def __init__(self, name: str) -> None:
        self.name, self.copy = name, FOLDER / name

    def _mutmut(self, *arguments: str, log: bool = False) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if arguments[0] == "run" and log:
            env["PYTHONPATH"] = str(self.copy / "mutants" / "src")  # for processes that tests start
        return subprocess.run(["mutmut", *arguments], cwd=self.copy, env=env, capture_output=True, text=True)

    def prepare(self, wanted: str, fresh: bool) -> None:
        """Makes the copy and every mutant, and finds which tests call each; does nothing if that has been done."""
        mark = self.copy / "prepared"
        if mark.exists() and mark.read_text() == wanted and not fresh:
            return
        shutil.rmtree(self.copy, ignore_errors=True)
        self.copy.mkdir(parents=True)
        for top in (*COPIED, *BESIDE):
            if (ROOT / top).is_dir():
                shutil.copytree(ROOT / top, self.copy / top, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (self.copy / top).write_bytes((ROOT / top).read_bytes())
        with open(self.copy / "pyproject.toml", "a") as file:
            file.write(CONFIGURATION.format(package=self.name, beside=list(BESIDE)))
        ended = self._mutmut("run", "none")  # no mutant has this name, so none is run
        if not (self.copy / "mutants" / "mutmut-stats.json").exists():
            raise SystemExit(f"{self.name}: mutmut failed\n{(ended.stdout + ended.stderr)[-4000:]}")
        mark.write_text(wanted)

    def results(self) -> dict[str, str]:
        """Mutant → what became of it."""
        lines = self._mutmut("results", "--all", "true").stdout.splitlines()
        prefix = f"meshfeed._src.{self.name}."
        pairs = (line.strip().rpartition(": ") for line in lines)
        return {name: status for name, _, status in pairs if name.startswith(prefix)}

    def sample(self, count: int) -> list[str]:
        """Mutants from each module in turn, in an order that depends only on their names."""
        by_module: dict[str, list[str]] = collections.defaultdict(list)
        files = (self.copy / "mutants" / "src" / "meshfeed" / "_src" / self.name).rglob("*.py")
        behaves = {name for file in files for name in mutant_texts.counted(file)}
        for name in sorted(behaves & self.results().keys()):
            by_module[name.rpartition(".")[0]].append(name)
        for module, names in by_module.items():
            random.Random(module).shuffle(names)
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_module.values()))
        return [name for name in in_turn if name is not None][:count]

    def run(self, names: list[str], children: int) -> dict[str, str]:
        """Tests the mutants that have not been tested yet; returns the results of all of them."""
        results = self.results()
        if left := [name for name in names if results[name] == "not checked"]:
            ended = self._mutmut("run", *left, "--max-children", str(children), log=True)
            results = self.results()
            if any(results[name] == "not checked" for name in left):
                raise SystemExit(f"{self.name}: mutmut failed\n{(ended.stdout + ended.stderr)[-4000:]}")
        return {name: results[name] for name in names}

    def show(self, names: list[str]) -> str:
        """The mutants as diffs."""
        return "\n".join(self._mutmut("show", name).stdout for name in names)


def main() -> None:
    """The command line."""
    every = packages()
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__.partition("\n\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE[:MUTANTS]", help=f"of {', '.join(every)}; default: all")
    parser.add_argument("--mutants", type=int, default=MUTANTS, help="mutants of each package (default: %(default)s)")
    parser.add_argument("--children", type=int, default=2, help="processes at a time (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    options = parser.parse_args()
    wanted = dict.fromkeys(every if not options.packages else [], options.mutants)
    for argument in options.packages:
        name, _, count = argument.partition(":")
        if name not in every or not (count or "1").isdecimal():
            parser.error(f"{argument!r}: expected one of {', '.join(every)}, with :MUTANTS or without")
        wanted[name] = int(count or options.mutants)
    content, rows, enough = digest(), [], True
    for name, count in wanted.items():
        start = time.monotonic()
        print(f"{name}: {count} mutants", file=sys.stderr, flush=True)
        package = Package(name)
        package.prepare(content, options.fresh)
        results = package.run(package.sample(count), options.children)
        alive = [mutant for mutant, status in results.items() if status not in KILLED]
        (FOLDER / f"{name}.diff").write_text(package.show(alive))
        tally = collections.Counter(results.values())
        share = 1 - len(alive) / max(1, len(results))
        enough = enough and share >= AIM
        others = ", ".join(f"{n} {status}" for status, n in sorted(tally.items()) if status not in KILLED)
        rows.append(f"| {name} | {len(results)} | {len(results) - len(alive)} | {share:.0%} | {others} |")
        print(f"{rows[-1]} {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    print("| package | mutants | killed | share | not killed |\n|---|---|---|---|---|")
    print(*rows, sep="\n")
    print(f"\nthe mutants that were not killed: {FOLDER.relative_to(ROOT)}/PACKAGE.diff")
    sys.exit(not enough)


if __name__ == "__main__":
    main()
