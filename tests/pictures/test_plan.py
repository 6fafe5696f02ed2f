"""Pictures of plans: what the SVG shows, from 4 to 4,096 hosts, and the pictures of the docs."""

from __future__ import annotations

import html.parser
import pathlib
import re
import struct
import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import NamedSharding, PartitionSpec

import meshfeed
from meshfeed._src.cli import main
from meshfeed._src.pictures.drawing import COLORS, HOST_COLORS, host_color
from meshfeed._src.pictures.plan import MeshPlan, make_plan, plan_of_batch

ROOT = pathlib.Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def cells(svg: str) -> list[str]:
    """The description of every device drawn; raises if the SVG is not XML."""
    return [title.text or "" for title in ElementTree.fromstring(svg).iterfind(f"{SVG}rect/{SVG}title")]


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iterfind(f"{SVG}text")]


def small(**changes: object) -> MeshPlan:
    settings = {"mesh_axes": {"data": 4, "model": 2}, "spec": ["data"], "global_shape": [16]}
    return make_plan(**(settings | {"hosts": 4, "devices_per_host": 2} | changes))  # pyright: ignore[reportArgumentType]


def test_every_device_is_drawn_with_its_host_and_rows() -> None:
    drawn = cells(small().to_svg())
    assert drawn == [f"device {d} of host {d // 2}: rows {d // 2 * 4}–{d // 2 * 4 + 3}" for d in range(8)]
    assert {"rows 0–3", "rows 12–15", "host 3", "device 7", "data 3", "model 1"} <= set(texts(small().to_svg()))


def test_columns_are_drawn_if_they_are_divided() -> None:
    svg = small(mesh_axes={"model": 4, "data": 2}, spec=["data", "model"], global_shape=[16, 2048]).to_svg()
    assert cells(svg)[:2] == ["device 0 of host 0: rows 0–7, col 0–511", "device 2 of host 1: rows 0–7, col 512–1,023"]
    assert "col 1,536–2,047" in texts(svg)


def test_hosts_of_a_plain_data_mesh_are_bands() -> None:
    svg = small(mesh_axes={"data": 8}).to_svg()
    assert {"rows 0–3", "rows 0–1", "rows 14–15"} <= set(texts(svg))
    assert cells(svg)[3] == "device 3 of host 1: rows 6–7"


def test_4096_hosts_are_folded() -> None:
    axes = {"data": 4096, "model": 4}
    svg = small(mesh_axes=axes, global_shape=[16384], hosts=4096, devices_per_host=4).to_svg()
    assert len(cells(svg)) == 11 * 4
    assert cells(svg)[-1] == "device 16,383 of host 4,095: rows 16,380–16,383"
    assert "⋮  4,085 more blocks of rows" in texts(svg)
    wide = small(mesh_axes={"data": 2, "model": 512}, global_shape=[2], hosts=128, devices_per_host=8).to_svg()
    assert len(cells(wide)) == 2 * 7
    assert texts(wide).count("…") == 2


def test_a_drawing_stays_inside_its_frame_and_loads_nothing() -> None:
    axes = {"replica": 2, "data": 16, "fsdp": 4, "model": 16}
    spec, shape = [("replica", "data", "fsdp"), "model"], [1 << 20, 1 << 17]
    svg = small(mesh_axes=axes, spec=spec, global_shape=shape, hosts=512, devices_per_host=4).to_svg()
    root = ElementTree.fromstring(svg)
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iterfind(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert left <= x
        assert top <= y
        assert x + w <= left + width
        assert y + h <= top + height
        assert w > 0
    assert set(re.findall(r"https?://[^\"]*", svg)) == {"http://www.w3.org/2000/svg"}


def test_names_of_axes_are_text() -> None:
    name = "<img src=x onerror=alert(1)>\x1b\ud800"
    plan = small(mesh_axes={name: 4, "model": 2}, spec=[name])
    page = plan.to_html()
    page.encode()
    assert "<img" not in page
    assert "<img" not in plan._repr_html_()
    assert any("<img src=x" in text for text in texts(plan.to_svg()))  # read back as XML


def test_text_on_every_color_can_be_read() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(one: str, other: str) -> float:
        lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    for theme in (0, 1):
        pairs = [tuple(COLORS[name][theme] for name in host_color(host)) for host in range(len(HOST_COLORS))]
        pairs += [(COLORS[name][theme], COLORS["paper"][theme]) for name in ("ink", "muted", "accent", "good", "bad")]
        pairs += [(COLORS["ink"][theme], COLORS["panel"][theme])]
        assert min(contrast(*pair) for pair in pairs) >= 4.5


def test_a_real_feed_draws_its_real_devices() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = {
        "tokens": NamedSharding(mesh, PartitionSpec("data", "model")),
        "length": NamedSharding(mesh, PartitionSpec("data")),
    }
    data = {"tokens": np.zeros((32, 6), np.int32), "length": np.zeros(32, np.int32)}
    with meshfeed.Feed(data, sharding, global_batch_size=8) as feed:
        plan = feed.plan()
    assert isinstance(plan, meshfeed.MeshPlan)
    ids = [device.id for device in mesh.devices.flat]
    found = re.findall(r"device (\d+) of host 0: rows [\d–]+, col (\S+)", " ".join(cells(plan.to_svg())))
    assert [int(number) for number, _ in found] == ids
    assert [columns for _, columns in found[:2]] == ["0–2", "3–5"]
    assert str(plan).splitlines()[1].split() == ["0", "8", "0..7", "×", "columns", "0..5"]
    assert plan._repr_html_().startswith("<div")


def test_a_replicated_batch_is_one_band_of_all_devices() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = {"x": jax.ShapeDtypeStruct((4, 3), np.float32, sharding=NamedSharding(mesh, PartitionSpec()))}
    assert [cell.partition(": ")[2] for cell in cells(plan_of_batch(spec).to_svg())] == ["rows 0–3"] * 8


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_command_writes_all_three_kinds(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    line = "plan --hosts 4 --devices-per-host 2 --mesh data=4,model=2 --spec data --global-batch-size 16"
    pictures = [part for kind in ("svg", "html", "png") for part in (f"--{kind}", str(tmp_path / f"mesh.{kind}"))]
    result = CliRunner().invoke(main.main, [*line.split(), *pictures])
    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if line.startswith("wrote ")] == [
        f"wrote {tmp_path / f'mesh.{kind}'}" for kind in ("svg", "html", "png")
    ]
    assert "4 of 4 hosts read, 4 rows each." in result.output
    assert (tmp_path / "mesh.svg").read_text() == small().to_svg()
    page = _Page()
    page.feed((tmp_path / "mesh.html").read_text())
    assert page.open == []
    assert page.loaded == []
    png = (tmp_path / "mesh.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    svg = ElementTree.fromstring(small().to_svg())
    assert (width, height) == pytest.approx((2 * float(svg.attrib["width"]), 2 * float(svg.attrib["height"])), abs=3)
    refused = CliRunner().invoke(main.main, [*line.split(), "--svg", str(tmp_path / "mesh.png")])
    assert refused.exit_code == 2
    assert "must end in .svg." in refused.output


def test_a_url_is_no_path(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(meshfeed.SettingsError, match="is a URL"):  # pathlib has taken a slash from it
        small().save(pathlib.Path("gs://bucket/plan.html"))
    assert not list(tmp_path.iterdir())
    small().save(f"file://{tmp_path}/plan.svg")
    assert (tmp_path / "plan.svg").exists()


def test_the_pictures_of_the_docs_are_what_the_script_draws(tmp_path: pathlib.Path) -> None:
    lines = re.findall(
        r"^plan (.*) --svg (docs/images/\S+)$", (ROOT / "scripts" / "pictures").read_text(), re.MULTILINE
    )
    assert {path for _, path in lines} == {
        f"docs/images/{path.name}" for path in (ROOT / "docs" / "images").glob("*.svg")
    }
    for arguments, path in lines:
        fresh = tmp_path / "fresh.svg"
        result = CliRunner().invoke(main.main, ["plan", *arguments.split(), "--svg", str(fresh)])
        assert result.exit_code == 0, result.output
        assert fresh.read_text() == (ROOT / path).read_text(), f"run scripts/pictures: {path} differs"


def test_the_picture_of_the_measurements_has_their_figures(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    from benchmarks._page import pictured
    from benchmarks._picture import draw

    draw(str(tmp_path / "fresh.svg"), pictured())
    shown = pathlib.Path("docs/explanation/measurements.svg").read_text()
    assert (tmp_path / "fresh.svg").read_text() == shown, "run scripts/bench --page"
    assert "prefers-color-scheme: dark" in shown
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)"', shown)) >= 12
