"""Runs mutation tests and prints a table of packages; ``scripts/mutate`` calls it.

mutmut makes the mutants, in a copy of the repository in build/mutation. A first run of the quick tests, without a mutant,
records which functions each test calls, in child processes too (``calls.py``); tests that fail in the copy are left
out. A mutant is then tested in a process of its own by the tests that call its function: those of its package first, the
quickest first, up to a number of seconds.

The copy keeps the results: a run that was interrupted continues, and a run with more mutants tests only the new ones. It is
made again after any change of src, tests or pyproject.toml. The sample depends only on the source, so two runs compare tests
by the same mutants. Mutants that change only what people read do not count (``texts.py``).
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

import texts

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COPY = ROOT / "build" / "mutation"
MUTATED = COPY / "mutants"
CALLS, RESULTS = COPY / "calls.json", COPY / "results.json"
CONTENT = ("src", "tests", "pyproject.toml")
BESIDE = (
    "benchmarks",
    "docs",
    "examples",
    "scripts",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "mkdocs.yml",
)
MUTANTS = 15  # the aim is less than an hour for all packages with 2 processes
AIM = 0.85
TEST_SECONDS = 40.0  # of the tests of one mutant, without it
CONFIGURATION = f"""
[tool.mutmut]
source_paths = ["src"]
also_copy = {list(BESIDE)}
only_mutate = ["src/meshfeed/_src/*"]
pytest_add_cli_args_test_selection = ["tests/order/test_extensions.py"] # mutmut runs it and no mutant
process_isolation = "forkserver"
"""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=line"]
# They look for what mutants and their wrappers change: frames, and the text of modules.
LEFT_OUT = ["tests/base/test_tracebacks.py", "tests/base/test_stacks.py", "tests/test_no_copies.py"]
# Packages that do little but start processes, whose other tests are few and take a minute in all.
WITH_SLOW_TESTS = ["tests/demo", "tests/testing"]
SELECTIONS = [["-m", "not multihost and not slow", "tests"], ["-m", "multihost or slow", *WITH_SLOW_TESTS]]
IGNORED = re.compile(r"__pycache__|\.hypothesis|\.egg-info")


def packages() -> list[str]:
    """Packages of the source that have tests of their own."""
    found = (path.parent.name for path in (ROOT / "src/meshfeed/_src").glob("*/__init__.py"))
    return sorted(name for name in found if any((ROOT / "tests" / name).glob("test_*.py")))


def digest() -> str:
    """Of everything that decides what the mutants are and which tests find them."""
    found = hashlib.sha256()
    for top in CONTENT:
        path = ROOT / top
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and not IGNORED.search(str(file)):
                found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()


def environment(mutant: str) -> dict[str, str]:
    """Of a process in which ``mutant`` replaces its function; ``"stats"`` only reports the functions that are called."""
    return {
        **os.environ,
        "MUTANT_UNDER_TEST": mutant,
        "PYTHONPATH": os.pathsep.join(map(str, (MUTATED / "src", COPY / "scripts" / "mutation"))),
    }


def prepare(fresh: bool) -> None:
    """Makes the copy and every mutant, and finds which tests call each; does nothing if that has been done."""
    mark, wanted = COPY / "prepared", digest()
    if mark.exists() and mark.read_text() == wanted and not fresh:
        return
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    for top in (*CONTENT, *BESIDE):
        if (ROOT / top).is_dir():
            shutil.copytree(ROOT / top, COPY / top, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (COPY / top).write_bytes((ROOT / top).read_bytes())
    with open(COPY / "pyproject.toml", "a") as file:
        file.write(CONFIGURATION)
    print("making the mutants (about 2 minutes)", file=sys.stderr, flush=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        ["mutmut", "run", "none"], cwd=COPY, env=env, capture_output=True, text=True
    )  # none has this name
    if not (MUTATED / "mutmut-stats.json").exists():
        raise SystemExit(f"mutmut failed\n{(ended.stdout + ended.stderr)[-4000:]}")
    record_calls()
    mark.write_text(wanted)


def record_calls() -> None:
    """Runs the tests without a mutant, and keeps the seconds and the functions of those that pass."""
    print("finding which functions the tests call (about 10 minutes)", file=sys.stderr, flush=True)
    options = [*(f"--ignore={path}" for path in LEFT_OUT), "-n", "2", "--dist", "loadfile", "-p", "calls"]
    found: dict[str, list[object]] = {}
    with open(COPY / "calls.log", "w") as log:
        for number, selection in enumerate(SELECTIONS):
            folder = COPY / "calls" / str(number)
            folder.mkdir(parents=True)
            env = {**environment("stats"), "MUTATION_CALLS": str(folder)}
            subprocess.run([*PYTEST, *options, *selection], cwd=MUTATED, env=env, stdout=log, stderr=log)
            for file in folder.glob("*.json"):
                found |= json.loads(file.read_text())
    if not found:
        raise SystemExit(f"the tests failed: see {COPY.relative_to(ROOT)}/calls.log")
    CALLS.write_text(json.dumps(found))


def sample(package: str, count: int) -> list[str]:
    """Mutants from each module in turn, in an order that depends only on their names."""
    by_module: dict[str, list[str]] = collections.defaultdict(list)
    for file in sorted((MUTATED / "src" / "meshfeed" / "_src" / package).rglob("*.py")):
        for name in sorted(texts.counted(file)):
            by_module[name.rpartition(".")[0]].append(name)
    for module, names in by_module.items():
        random.Random(module).shuffle(names)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*(by_module[module] for module in sorted(by_module))))
    return [name for name in in_turn if name is not None][:count]


class Tests:
    """Which tests to run for a mutant."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._calling: dict[str, list[str]] = collections.defaultdict(list)
        for test, (seconds, functions) in json.loads(CALLS.read_text()).items():
            self._seconds[test] = seconds
            for function in functions:
                self._calling[function].append(test)

    def of(self, mutant: str) -> tuple[list[str], float]:
        """The tests of a mutant, and the seconds that they take without it."""
        package = mutant.split(".")[2]
        calling = self._calling[mutant.rpartition("__mutmut_")[0]]
        calling = sorted(calling, key=lambda test: (not test.startswith(f"tests/{package}/"), self._seconds[test]))
        until = itertools.accumulate(self._seconds[test] for test in calling)
        tests = [test for test, seconds in zip(calling, until, strict=True) if seconds <= TEST_SECONDS] or calling[:1]
        return tests, sum(self._seconds[test] for test in tests)


def result(mutant: str, tests: list[str], seconds: float) -> str:
    """What became of a mutant: killed, time-out, survived or not called."""
    if not tests:
        return "not called"
    listed = COPY / f"{mutant}.tests"
    listed.write_text("\n".join(tests))
    try:
        with open(COPY / f"{mutant}.log", "w") as log:
            ended = subprocess.run(
                [*PYTEST, "-x", "-n", "0", f"@{listed}"], cwd=MUTATED, env=environment(mutant), stdout=log, stderr=log,
                timeout=60 + 3 * seconds,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "time-out"
    return "killed" if ended.returncode else "survived"


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
    prepare(options.fresh)
    tests = Tests()
    results: dict[str, str] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    samples = {package: sample(package, count) for package, count in wanted.items()}
    with concurrent.futures.ThreadPoolExecutor(options.children) as pool:
        left = [mutant for names in samples.values() for mutant in names if mutant not in results]
        running = {pool.submit(result, mutant, *tests.of(mutant)): mutant for mutant in left}
        try:
            for number, future in enumerate(concurrent.futures.as_completed(running), 1):
                mutant = running[future]
                results[mutant] = future.result()
                RESULTS.write_text(json.dumps(results))
                print(f"{number}/{len(left)} {results[mutant]} {mutant}", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    enough = True
    print("| package | mutants | killed | share | not killed |\n|---|---|---|---|---|")
    for package, names in samples.items():
        tally = collections.Counter(results[name] for name in names)
        killed = tally.pop("killed", 0) + tally.get("time-out", 0)
        alive = [name for name in names if results[name] in ("survived", "not called")]
        shown = [
            subprocess.run(["mutmut", "show", name], cwd=COPY, capture_output=True, text=True).stdout for name in alive
        ]
        (COPY / f"{package}.diff").write_text("\n".join(shown))
        enough = enough and killed >= AIM * len(names)
        others = ", ".join(f"{count} {what}" for what, count in sorted(tally.items()) if what != "time-out")
        print(f"| {package} | {len(names)} | {killed} | {killed / max(1, len(names)):.0%} | {others} |")
    print(f"\nthe mutants that were not killed: {COPY.relative_to(ROOT)}/PACKAGE.diff")
    sys.exit(not enough)


if __name__ == "__main__":
    main()
