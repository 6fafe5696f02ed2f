"""The command line: what it prints, what it refuses, and with which status."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner, Result

import meshfeed
from meshfeed._src.base.errors import CheckpointError, SettingsError
from meshfeed._src.cli import data, main
from meshfeed._src.convert import run as convert_run
from meshfeed._src.convert.formats import FORMATS
from meshfeed._src.sources.files.manifest import FileEntry, write_manifest

BIG = "plan --hosts 4096 --devices-per-host 4 --mesh data=4096,model=4 --spec data --global-batch-size 16384"
SMALL = "plan --hosts 4 --devices-per-host 2"


def run(line: str) -> Result:
    return CliRunner().invoke(main.main, line.split())


def test_plan_of_4096_hosts_as_json() -> None:
    result = run(f"{BIG} --json")
    assert result.exit_code == 0
    hosts = json.loads(result.output)["hosts"]
    assert hosts == [{"host": host, "rows": [[host * 4, host * 4 + 4]]} for host in range(4096)]


def test_plan_where_the_model_axis_spans_hosts_reads_rows_several_times() -> None:
    result = run(f"{SMALL} --mesh model=4,data=2 --spec data --global-batch-size 16")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split() for line in lines[1:5]] == [[str(host), "16", "0..15"] for host in range(4)]
    assert lines[-2:] == [
        "4 of 4 hosts read, 16 rows each.",
        "Every value is read 4 times over all hosts; load='once' would read it once.",
    ]


def test_plan_says_how_many_devices_the_mesh_leaves_out() -> None:
    left = "The mesh has 6 positions, so 2 of 8 devices, the last, do nothing."
    found = run(f"{SMALL} --mesh data=6 --spec data --global-batch-size 12").output.splitlines()
    assert found[-2:] == ["3 of 4 hosts read, 4 rows each.", left]
    assert left not in run(f"{SMALL} --mesh data=8 --spec data --global-batch-size 16").output


def test_plan_shows_columns_of_a_divided_sequence() -> None:
    line = f"{SMALL} --mesh model=4,data=2 --spec data,model --global-batch-size 16 --shape 8"
    hosts = json.loads(run(f"{line} --json").output)["hosts"]
    assert [host["columns"] for host in hosts] == [[[0, 2]], [[2, 4]], [[4, 6]], [[6, 8]]]
    text = run(line).output
    assert "0..15  ×  columns 2..3" in text
    assert "load='once'" not in text  # each value is read once: the hosts hold different columns


def test_plan_spec_joins_axes_and_skips_dimensions() -> None:
    line = f"{SMALL} --mesh a=4,b=2 --spec b+a,None --global-batch-size 16 --json"
    hosts = json.loads(run(line).output)["hosts"]
    assert [host["rows"] for host in hosts] == [[[2 * h, 2 * h + 2], [8 + 2 * h, 10 + 2 * h]] for h in range(4)]


def test_plan_with_a_cache_shows_downloads(tmp_path: pathlib.Path) -> None:
    line = f"{SMALL} --mesh data=8 --spec data --global-batch-size 32 --cache 1000 --shards 80 --shard-bytes 100"
    line += f" --svg {tmp_path / 'mesh.svg'}"
    along = run(f"{line} --shard-records 32 --shuffle shards --num-lanes 4 --json")
    hosts = json.loads(along.output)["hosts"]
    assert [host["host"] for host in hosts] == [0, 1, 2, 3]
    assert 40 <= sum(host["downloads"] for host in hosts) <= 88  # caches keep 40 shards of the epoch before
    assert all(host["bytes"] == 100 * host["downloads"] for host in hosts)
    assert (tmp_path / "mesh.svg").exists()
    uniform = run(f"{line} --shard-records 32")
    rows = [row.split() for row in uniform.stdout.splitlines()]
    assert rows[0] == ["host", "downloads", "bytes", "per", "epoch", "share", "of", "the", "set", "hit", "rate"]
    assert all(int(row[1]) > 80 for row in rows[1:5])
    for part, message in (("--cache 1000", "--cache needs --shards"), ("--shards 3", "Add --cache BYTES.")):
        refused = run(f"{SMALL} --mesh data=8 --spec data --global-batch-size 32 {part}")
        assert (refused.exit_code, message in refused.output) == (2, True)


SIMULATE = "--hosts 4 --bandwidth 1MB/s --step-seconds 0.1 --cache 10MB"


def test_plan_simulates_the_files_of_manifests(tmp_path: pathlib.Path) -> None:
    files = [FileEntry(f"{tmp_path}/{number}.array_record", 1_000_000, 64) for number in range(32)]
    write_manifest(f"{tmp_path}/manifest.json", "ArrayRecord", files)
    line = f"plan --simulate {tmp_path}/manifest.json {SIMULATE} --global-batch-size 16 --lanes 4"
    page = tmp_path / "page.html"
    compared = run(f"{line} --html {page}")
    assert compared.exit_code == 0, compared.output
    assert "Recommended: shuffle=ShardShuffle(affinity=True) waits" in compared.output
    assert page.read_text().count("<svg") == 2
    found = json.loads(run(f"{line} --json").output)
    assert [order["shuffle"] for order in found["orders"]] == [
        "True", "256", '"shards"', "ShardShuffle(affinity=True)",
    ]  # fmt: skip
    wanted = {"first_batch_seconds", "stall_seconds", "stall_fraction", "bytes_per_epoch", "disk_bytes", "quality"}
    assert all(wanted <= order.keys() for order in found["orders"])
    one = json.loads(run(f"{line} --shuffle affinity --epochs 3 --json").output)
    assert one["orders"][0]["bytes_per_epoch"] == [32_000_000, 0, 0]
    assert json.loads(run(f"plan --simulate {tmp_path}/manifest.json {SIMULATE} --json").output)["orders"]
    meshed = run(f"{line} --shuffle shards --mesh data=4,model=2 --spec data --devices-per-host 2 --json")
    assert json.loads(meshed.output)["orders"][0] == found["orders"][2]
    equal = run(f"plan --simulate {SIMULATE} --shards 32 --shard-bytes 1000000 --shard-records 64 --global-batch-size 16 "
                "--lanes 4 --shuffle shards --json")  # fmt: skip
    assert json.loads(equal.output)["orders"] == [found["orders"][2]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{SIMULATE}", "--simulate needs manifests, or --shards, --shard-bytes and --shard-records in their place"),
        (f"nowhere/manifest.json {SIMULATE}", "there is no manifest"),
        ("m.json --hosts 2 --cache 1GB", "Missing option '--bandwidth', '--step-seconds', which --simulate needs"),
        (f"m.json {SIMULATE} --shards 3", "--simulate needs manifests"),
        (f"m.json {SIMULATE} --mesh data=4", "Missing option '--devices-per-host', '--spec', '--global-batch-size'"),
        (f"m.json {SIMULATE} --png mesh.png", "--svg and --png draw a mesh"),
        (f"m.json {SIMULATE} --weights a,b", "'a,b' is not a list of numbers"),
        (f"m.json {SIMULATE} --shuffle files", "'files' is not shards, affinity, yes, no or a number of records"),
        (f"{SIMULATE} --shards 9 --shard-bytes 9 --shard-records 9 --weights 1", "--weights is for several manifests"),
        (f"{SIMULATE} --shards 9 --shard-bytes 99999999 --shard-records 999", "smaller than a file"),
    ],
)
def test_plan_refuses_to_simulate(line: str, message: str) -> None:
    refused = run(f"plan --simulate {line}")
    assert refused.exit_code in (1, 2)
    assert message in " ".join(refused.output.split())


def test_manifests_and_missing_options_without_simulate() -> None:
    forgotten = run(f"{SMALL} --mesh data=8 --spec data --global-batch-size 8 --bandwidth 1GB/s --step-seconds 1")
    assert "'--bandwidth', '--step-seconds' would have no effect without --simulate" in forgotten.output
    assert forgotten.exit_code == 2
    assert (
        "Manifests are for --simulate" in run(f"{SMALL} --mesh data=8 --spec data --global-batch-size 8 m.json").output
    )
    refused = run("plan --hosts 4")
    assert (refused.exit_code, "Missing option '--devices-per-host', '--mesh'" in refused.output) == (2, True)


def test_plan_leaves_out_the_middle_unless_asked() -> None:
    assert "4,080 more hosts; --all or --json shows them" in run(BIG).output
    assert len(run(f"{BIG} --all").output.splitlines()) == 1 + 4096 + 2


def test_plan_counts_hosts_without_a_device_in_the_mesh() -> None:
    text = run(f"{SMALL} --mesh data=4 --spec data --global-batch-size 8").output
    assert "2 of 4 hosts read, 4 rows each." in text
    assert text.count("none") == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mesh data=8 --spec data --global-batch-size 13", "Nearest valid sizes: 8 and 16"),
        (
            "--mesh data=8 --spec dat --global-batch-size 16",
            "the spec names the axis 'dat', which the mesh does not have",
        ),
        ("--mesh data=9 --spec data --global-batch-size 9", "9 positions"),
        ("--mesh data=8 --spec data,data --global-batch-size 16", "as in --shape 2048, or fewer entries"),
        ("--mesh data --spec data --global-batch-size 16", "'data' is not axis=size"),
        ("--mesh data=2,data=4 --spec data --global-batch-size 16", "the axis 'data' is given twice"),
        ("--mesh data=8 --spec data+ --global-batch-size 16", "'data+' is not an axis"),
        ("--mesh data=8 --spec data --global-batch-size 16 --shape 3,x", "'3,x' is not a list of sizes"),
        ("--mesh data=8 --spec data --global-batch-size 0", "0 is not in the range x>=1"),
        ("--mesh data=8 --spec data", "Missing option '--global-batch-size'"),
    ],
)
def test_plan_refuses_with_one_message_and_status_2(line: str, message: str) -> None:
    result = run(f"{SMALL} {line}")
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "status"), [(CheckpointError("step 7 is damaged"), 1), (SettingsError("end='x'"), 2)]
)
def test_errors_of_meshfeed_are_one_line(error: Exception, status: int) -> None:
    @click.group(cls=type(main.main))
    def group() -> None: ...

    @group.command()
    def failing() -> None:
        raise error

    result = CliRunner().invoke(group, ["failing"])
    assert result.exit_code == status
    assert result.output == f"Error: {error}\n"


@pytest.mark.parametrize("option", ["svg", "html"])
def test_a_file_that_cannot_be_written_is_one_message(option: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "missing" / f"mesh.{option}"
    result = run(f"{SMALL} --mesh data=8 --spec data --global-batch-size 8 --{option} {path}")
    assert result.exit_code == 1
    assert result.output == f"Error: [Errno 2] No such file or directory: '{path}'\n"


@pytest.mark.slow
def test_output_that_is_not_read_to_its_end_is_no_error() -> None:
    meshfeed_plan = f"{sys.executable} -m meshfeed {BIG} --json"
    ended = subprocess.run(f"{meshfeed_plan} | head -c 9", shell=True, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ('{"hosts":', "")


def test_a_library_that_is_not_installed_is_one_message(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    result = run(f"convert {tmp_path / 'x.jsonl'} --to {tmp_path / 'out'} --workers 1")
    assert (result.exit_code, result.output[:7], "pip install '.[convert]'" in result.output) == (1, "Error: ", True)


@pytest.mark.parametrize(
    ("package", "file", "arguments", "status", "extra"),
    [
        ("datasets", "x.arrow", "", 1, "hf"),
        ("tokenizers", "x.txt", "--encoding tokens --tokenizer x.json", 1, "convert"),
        ("google_crc32c", "x.tfrecord", "", 1, "convert"),
        ("apache_beam", "x.txt", "--runner DirectRunner", 2, "beam"),
    ],
)
def test_convert_names_the_extra_that_installs_a_library(
    package: str,
    file: str,
    arguments: str,
    status: int,
    extra: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / file).write_text("one line\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text("{}")
    result = run(f"convert {tmp_path / file} --to {tmp_path / 'out'} --workers 1 {arguments}")
    assert (result.exit_code, f"Run pip install '.[{extra}]' in a checkout." in result.output) == (status, True)
    assert not (tmp_path / "out").exists()


def test_convert_hints_at_a_csv_without_a_header_or_with_another_delimiter(tmp_path: pathlib.Path) -> None:
    option = next(param for param in main.main.commands["convert"].params if param.name == "named_format")
    assert isinstance(option.type, click.Choice)
    assert list(option.type.choices) == sorted(FORMATS)
    (tmp_path / "x.csv").write_text("3,-1.5\n4,2\n5,6\n")
    for arguments in ("", "--json"):
        result = run(f"convert {tmp_path / 'x.csv'} --to {tmp_path / 'out'} --workers 1 {arguments}")
        assert result.exit_code == 0
        assert (
            "All names of columns are numbers: -1.5, 3. If the first line of the CSV input is a record" in result.stderr
        )
    (tmp_path / "x.csv").write_text("a;b\n4;2\n")
    result = run(f"convert {tmp_path / 'x.csv'} --to {tmp_path / 'one'} --workers 1")
    assert (result.exit_code, "The only column is 'a;b'. If it is several, separate" in result.stderr) == (0, True)
    (tmp_path / "x.csv").write_text("2024,name\n4,2\n")
    result = run(f"convert {tmp_path / 'x.csv'} --to {tmp_path / 'named'} --workers 1")
    assert (result.exit_code, result.stderr) == (0, "")
    refused = run(f"convert {tmp_path / 'x.csv'} --to {tmp_path / 'other'} --workers 1 --columns ,")
    assert (refused.exit_code, "it names no column" in refused.output) == (2, True)
    refused = run(f"convert {tmp_path / 'x.csv'} --to {tmp_path / 'other'} --workers 1 --columns name,no")
    assert (refused.exit_code, refused.output) == (
        2,
        "Error: unknown columns ['no']; the data has ['2024', 'name']. Choose some of these.\n",
    )


def test_it_runs_as_a_program(tmp_path: pathlib.Path) -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}; from meshfeed._src.cli.main import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0
    assert "plan" in ended.stdout


_INTERRUPTED_AT = """
import os, signal, sys

def interrupt(event, arguments):
    if event == "import" and arguments[0] == module:
        os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
sys.addaudithook(interrupt)
from meshfeed.__main__ import run
run()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "status"),
    [
        ("meshfeed._src.cli.main", -signal.SIGINT),
        ("click", -signal.SIGINT),
        ("meshfeed._src.cli.plan", -signal.SIGINT),
        ("meshfeed._src.pictures.plan", 130),  # the command itself imports it
        ("jax", 130),
    ],
)
def test_an_early_interrupt_ends_quietly(module: str, status: int) -> None:
    command = f"{SMALL} --mesh data=8 --spec data --global-batch-size 16"
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_AT, module, *command.split()],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell may start these tests with it ignored
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["click", "meshfeed._src.pictures.plan"])
def test_an_ignored_interrupt_stays_ignored(module: str) -> None:
    """Shells start the background jobs of a script so, and Ctrl-C is for the script."""
    command = f"{SMALL} --mesh data=8 --spec data --global-batch-size 16"
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_AT, module, *command.split()],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "host" in ended.stdout


def test_completion() -> None:
    code = "from meshfeed._src.cli.main import main; main(prog_name='meshfeed')"
    words = {"COMP_WORDS": "meshfeed im", "COMP_CWORD": "1", "_MESHFEED_COMPLETE": "bash_complete"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **words})
    assert ended.stdout == "plain,import-position\n"


def test_every_command_but_demo_prints_json() -> None:
    without = [
        name
        for name, command in main.main.commands.items()
        if not any("--json" in parameter.opts for parameter in command.params)
    ]
    assert without == ["demo"]


@pytest.mark.parametrize("command", [None, *main.main.commands])
def test_help_fits_80_columns_and_cuts_nothing_off(command: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(f"{command or ''} --help").output.splitlines()
    assert len(lines) >= 8
    assert [line for line in lines if len(line) > 80] == []
    assert [line for line in lines if line.endswith("...") and not line.startswith("Usage:")] == []


@pytest.mark.parametrize("command", main.main.commands.values(), ids=str)
def test_every_option_has_a_help_text(command: click.Command) -> None:
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    assert [option.name for option in options if not option.help] == []


def test_the_version_is_that_of_the_package_that_runs() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"meshfeed, version {meshfeed.__version__}\n")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_in_place_of_a_folder_is_refused_in_words(command: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    result = run(f"{command} {tmp_path}/state.json")
    assert result.exit_code == 1
    assert "is a file. Pass a Checkpointer's folder" in result.output


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_bucket_that_cannot_be_read_is_one_message(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    result = run(f"{command} s3://meshfeed-no-such-bucket/run")
    assert result.exit_code == 1
    assert result.output.startswith("Error: s3://meshfeed-no-such-bucket/run: NoCredentialsError: ")
    assert "AWS_ACCESS_KEY_ID (not set)" in result.output


def test_a_picture_is_named_beside_the_table(tmp_path: pathlib.Path) -> None:
    line = "plan --hosts 2 --devices-per-host 1 --mesh data=2 --spec data --global-batch-size 4"
    table = run(line).output
    result = run(f"{line} --svg {tmp_path / 'mesh.svg'} --html {tmp_path / 'mesh.html'}")
    assert result.exit_code == 0
    assert result.stderr == f"wrote {tmp_path / 'mesh.svg'}\nwrote {tmp_path / 'mesh.html'}\n"
    assert result.stdout == table


def test_options_of_a_runner_get_their_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_run, "RunInBeam", lambda runner, options: (runner, options))
    assert data._engine(None, "Runner", ("project=x", "--region=y--")) == ("Runner", ["--project=x", "--region=y--"])


def test_a_library_that_another_command_lacks_is_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(main.main.commands["doctor"], "callback", lacking)
    result = run("doctor")
    assert (result.exit_code, result.output[:6]) == (1, "Error:")
    assert "meshfeed doctor needs rich" in result.output
    assert "Run pip install '.[all]' in a checkout." in result.output
