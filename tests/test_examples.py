"""The examples as a user runs them, and that the README shows what is run."""

from __future__ import annotations

import ast
import concurrent.futures
import importlib
import inspect
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import meshfeed
from meshfeed._src.testing.hosts import cpu_environment, free_port

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def environment(devices: int) -> dict[str, str]:
    env = dict(os.environ) | cpu_environment(devices)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), env.get("PYTHONPATH")]))
    return env


def run(name: str, *arguments: str, devices: int = 8) -> str:
    command = [
        sys.executable,
        "-W",
        "error::DeprecationWarning:__main__",
        str(EXAMPLES / name),
        *arguments,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(devices))
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.mark.slow
def test_the_others_survive_the_loss_of_a_host() -> None:
    out = run("survive_a_loss.py")
    losses = {}
    for host in (0, 2):
        assert re.search(rf"host {host}, continues at step 20 on 2 devices", out)
        losses[host] = re.findall(rf"host {host}, step (\d+), (\d) devices, loss (\d+\.\d{{4}})", out)
    steps = [(step, devices) for step, devices, _ in losses[0]]
    assert steps == [("20", "3"), ("40", "2"), ("60", "2")]
    assert losses[0] == losses[2]
    assert float(losses[0][-1][2]) < 0.01


@pytest.mark.slow
def test_the_first_lines() -> None:
    out = run("quickstart.py")
    *steps, last = out.splitlines()
    assert [line.split(",")[0] for line in steps] == [f"step {step}" for step in (20, 40, 60, 80, 100)]
    assert re.fullmatch(r"step 100, 6,400 of 10,000 records, state of \d{2,4} characters", last)


def test_the_readme_shows_them_as_they_are() -> None:
    for page in ("README.md", "docs/index.md"):
        first = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[0]
        assert first == (EXAMPLES / "quickstart.py").read_text(), page


def _calls(page: pathlib.Path, name: str) -> list[ast.Call]:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == name]


def _snippets() -> list[tuple[str, ast.Module]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        (page, block) for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    return [(page.name, ast.parse(block)) for page, block in found]


def _resolve(node: ast.expr) -> object:
    """What ``meshfeed.a.b`` in a snippet is; None for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not names or not isinstance(node, ast.Name) or node.id != "meshfeed":
        return None
    value: object = meshfeed
    for name in reversed(names):
        value = getattr(value, name)
    return value


def test_names_and_keywords_of_meshfeed_in_the_pages_exist() -> None:
    num_names = num_calls = 0
    for page, tree in _snippets():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "meshfeed":
                for alias in node.names:
                    assert getattr(importlib.import_module(node.module or ""), alias.name), f"{page}: {alias.name}"
            if isinstance(node, ast.Attribute):
                num_names += _resolve(node) is not None
            called = _resolve(node.func) if isinstance(node, ast.Call) else None
            if isinstance(node, ast.Call) and callable(called):
                keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
                unknown = keywords - inspect.signature(called).parameters.keys()
                assert not unknown, f"{page}: {ast.unparse(node)} has {unknown}"
                num_calls += 1
    assert num_names >= 30
    assert num_calls >= 20


def test_pages_give_a_cache_to_files_behind_urls() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    calls = [call for page in pages for call in _calls(page, "ArrayRecord") if "://" in ast.unparse(call)]
    assert len(calls) >= 2
    for call in calls:
        assert "cache" in [keyword.arg for keyword in call.keywords], ast.unparse(call)


@pytest.mark.slow
def test_streams() -> None:
    out = run("streams.py").splitlines()
    assert out[0].startswith("uninterrupted, 8 devices: 666 batches")
    assert out[1:] == ["resumed on 2 devices at step 100, record 1,600", "the same batches"]


@pytest.mark.slow
def test_a_mixture_follows_the_losses() -> None:
    pytest.importorskip("orbax.checkpoint")
    *weights, last = run("loss_driven_mixture.py", devices=4).splitlines()
    assert [line[:14] for line in weights] == [f"from step {step:3d}:" for step in range(20, 161, 20)]
    assert last == "the same weights after a resume"


@pytest.mark.slow
def test_a_loop_from_maxtext_before_and_after(tmp_path: pathlib.Path) -> None:
    def losses(name: str, steps: int, folder: str) -> list[str]:
        lines = run(name, "--steps", str(steps), "--checkpoints", str(tmp_path / name / folder)).splitlines()
        return [line for line in lines if line.startswith("step")]

    seen = []
    for name in ("maxtext_loop_before.py", "maxtext_loop_after.py"):
        seen.append(losses(name, 5, "checkpoints") + losses(name, 7, "checkpoints"))
        assert len(seen[-1]) == 7
    assert seen[0] == seen[1]


@pytest.mark.multihost
def test_an_evaluation_counts_every_record_once_on_any_number_of_hosts() -> None:
    (alone,) = run("evaluate.py").splitlines()
    assert json.loads(alone)["records"] == 1_003
    assert run("evaluate.py", "--batch", "48", devices=1) == f"{alone}\n"
    address = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-hosts", "2", "--host"]
    with concurrent.futures.ThreadPoolExecutor() as hosts:
        other = hosts.submit(run, "evaluate.py", *address, "1", devices=2)
        assert alone in run("evaluate.py", *address, "0", devices=2).splitlines()
        other.result()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classify_images.py", "finetune_chat.py"])
def test_training_learns_and_resumes(name: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("flax" if name == "classify_images.py" else "datasets")

    def losses(steps: int) -> dict[int, float]:
        lines = run(name, "--folder", str(tmp_path), "--steps", str(steps)).splitlines()
        assert lines[0].startswith(f"from step {0 if steps == 30 else 30}, ")
        return {int(step): float(loss) for step, loss in re.findall(r"step (\d+), loss ([\d.]+)", "\n".join(lines[1:]))}

    first, second = losses(30), losses(50)
    assert first.keys() == {10, 20, 30}
    assert second.keys() == {40, 50}
    assert second[50] < first[10] / 2


@pytest.mark.slow
def test_digits_are_learned_and_continued_on_other_devices(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("sklearn")

    def lines(steps: int, devices: int) -> list[str]:
        folder = str(tmp_path / "checkpoints")
        return run("digits.py", "--steps", str(steps), "--checkpoints", folder, devices=devices).splitlines()

    first, second = lines(100, 8), lines(200, 2)
    assert first[0] == "from step 0"
    assert second[0] == "from step 100"
    right = [int(re.match(r"(\d+) of 450 test images are right", found[-1])[1]) for found in (first, second)]
    assert right[0] > 400
    assert right[1] > 425


@pytest.mark.slow
def test_a_model_learns_to_see(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("flax")
    pytest.importorskip("datasets")
    first, *steps = run("caption_images.py", "--folder", str(tmp_path / "data"), "--steps", "80").splitlines()
    assert re.fullmatch(r"\d+ rows, \d+\.\d% padding", first)
    right = [float(percent) for percent in re.findall(r"right ([\d.]+)%", "\n".join(steps))]
    # One letter of each color cannot be known without its image: then at most 91 % are right, of four colors.
    assert max(right[-4:]) > 97


JOB = """
import argparse, pathlib, jax, numpy as np
parser = argparse.ArgumentParser()
for name, kind in (("coordinator", str), ("num-hosts", int), ("host", int), ("steps", int), ("folder", str)):
    parser.add_argument(f"--{name}", type=kind)
options = parser.parse_args()
jax.distributed.initialize(options.coordinator, options.num_hosts, options.host)
import meshfeed
from meshfeed.checkpoint import Checkpointer

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
feed = meshfeed.Feed(meshfeed.sources.Memory({"x": np.arange(100)}), mesh, global_batch_size=8)
with Checkpointer(f"{options.folder}/run", save_interval_steps=2) as checkpointer:
    step, _ = checkpointer.restore({"w": np.zeros(3)}, feed)
    pathlib.Path(options.folder, f"restored-{options.num_hosts}-{options.host}").write_text(str(step))
    while step < options.steps:
        next(feed)
        step += 1
        checkpointer.save(step, {"w": np.zeros(3)}, feed)
"""


@pytest.mark.multihost
def test_a_job_restarts_on_another_number_of_hosts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    run_it = f"{shlex.quote(sys.executable)} {tmp_path}/job.py --folder {tmp_path}"
    job = tmp_path / "job.sh"  # the first time, the hosts fail after step 4
    job.write_text(
        f'if [[ " $* " == *" --num-hosts 2 "* ]]; then {run_it} --steps 4 "$@" && exit 1; else {run_it} --steps 6 "$@"; fi\n'
    )
    env = environment(devices=2) | {"PORT": str(free_port())}
    command = [EXAMPLES / "elastic_restart.sh", "2 1", "bash", job]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert ended.returncode == 0, ended.stderr
    restored = {path.name[-3:]: int(path.read_text()) for path in tmp_path.glob("restored-*")}
    assert restored == {"2-0": 0, "2-1": 0, "1-0": 4}
    failing = [EXAMPLES / "elastic_restart.sh", "2 1", "false"]
    assert subprocess.run(failing, capture_output=True, timeout=60, env=env).returncode == 1


@pytest.mark.multihost
def test_pretraining_on_documents_is_killed_and_continued_on_other_hosts(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("optax")
    files = sorted(pathlib.Path(json.__file__).parent.glob("*.py"))
    lines = [line for file in files for line in file.read_bytes().split(b"\n\n")]
    (tmp_path / "documents.bin").write_bytes(b"".join(line.replace(b"\0", b"") + b"\0" for line in lines))

    def command(folder: str, steps: int, *more: str) -> list[str]:
        return [
            sys.executable, str(EXAMPLES / "pretrain_documents.py"), "--data", f"{tmp_path}/*.bin", "--context", "64",
            "--batch", "8", "--save-every", "2", "--steps", str(steps), "--checkpoints", str(tmp_path / folder), *more,
        ]  # fmt: skip

    def train(folder: str, steps: int, hosts: int, kill_at: int | None = None) -> list[dict[str, float]]:
        address = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-hosts", str(hosts)] if hosts > 1 else []
        jobs = [
            subprocess.Popen(
                command(folder, steps, *address, "--host", str(host)),
                stdout=subprocess.PIPE,
                stderr=open(tmp_path / f"{folder}-{hosts}-{host}.log", "w"),  # noqa: SIM115 (the child's)
                text=True,
                env=environment(4 // hosts),
            )
            for host in range(hosts)
        ]
        found = []
        try:
            assert jobs[0].stdout is not None
            for line in jobs[0].stdout:
                if line.startswith("{"):
                    found.append(json.loads(line))
                if kill_at is not None and found and found[-1].get("step") == kill_at:
                    break
            else:
                codes = [job.wait(60) for job in jobs]
                logs = "".join(path.read_text() for path in tmp_path.glob(f"{folder}-{hosts}-*.log"))
                assert codes == [0] * hosts, logs[-5000:]
        finally:
            for job in jobs:
                job.kill()
                job.communicate()
        return found

    whole = {line["step"]: line["loss"] for line in train("whole", 8, hosts=1) if "step" in line}
    _, *killed = train("parts", 8, hosts=2, kill_at=5)
    first, *rest = train("parts", 8, hosts=1)  # the mesh has 4 devices each time
    assert len(whole) == 8
    assert whole[8] < whole[1]
    assert first["restored"] in (2, 4)
    for lines in (killed, rest):
        assert {line["step"]: line["loss"] for line in lines} == {line["step"]: whole[line["step"]] for line in lines}


def test_every_example_is_run_by_some_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.ipynb")):
        assert re.search(rf"\b{path.stem}\b", tests), f"{path.name} is run by no test"


def test_links_lead_somewhere() -> None:
    broken = []
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
        broken += [f"{page.relative_to(ROOT)}: {link}" for link in links if not (page.parent / link).exists()]
    assert not broken


def test_the_readme_is_of_a_size_that_is_read() -> None:
    assert 60 <= len((ROOT / "README.md").read_text().splitlines()) <= 150
