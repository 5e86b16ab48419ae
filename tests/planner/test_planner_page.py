"""The page of a search: every figure of the answer is in a picture, and the pictures are really drawn."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import PlanError
from meshwright.pipeline.schedule import SCHEDULES, Kind, chunks_of, rank_of_stage, rank_operations
from meshwright.planner.candidate import Job
from meshwright.planner.hardware import Cluster, HardwareProfile, device
from meshwright.planner.page import page, write_page
from meshwright.planner.page.bars import memory_bars, rank_groups, time_bars
from meshwright.planner.page.front import pareto
from meshwright.planner.page.ranks import coordinates, rank_picture
from meshwright.planner.page.timeline import timeline
from meshwright.planner.search import Search, search
from meshwright.planner.shapes import ModelShape
from meshwright.planner.simulate import Pipeline, pipeline_events, pipeline_time
from meshwright.planner.space import Space
from meshwright.planner.time import StepModel

SVG = "{http://www.w3.org/2000/svg}"
SEVEN = ModelShape(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000)
SEVENTY = dataclasses.replace(SEVEN, name="70B", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
HUGE = dataclasses.replace(SEVENTY, name="405B", layers=126, hidden=16384, heads=128, ffn=53248)


def find(shape: ModelShape, gpus: int, batch: int, *, seq: int = 8192, future: bool = False) -> Search:
    cluster = Cluster(device=device("h100-sxm"), gpus=gpus)
    job = Job(seq_len=seq, global_batch=batch)
    return search(Space(shape=shape, cluster=cluster, job=job, allow_future=future))


@pytest.mark.parametrize(("gpus", "in_node"), [(1, 8), (16, 2), (144, 72), (96, 8), (128, 128)])
@pytest.mark.parametrize("width", [336, 1150])
def test_nodes_of_any_size_are_drawn_or_counted(gpus: int, in_node: int, width: int) -> None:
    cluster = Cluster(device=device("b200"), gpus=gpus, gpus_per_node=in_node)
    found = search(Space(shape=SEVEN, cluster=cluster, job=Job(seq_len=2048, global_batch=gpus)))
    picture = tree(rank_picture(found, width, "ranks"))
    assert ranks_named(words(picture)) == set(range(gpus))
    for rect in picture.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width + 0.1


@pytest.fixture(scope="module", params=["7B", "70B", "70B pipeline", "405B"])
def found(request: pytest.FixtureRequest) -> Search:
    return {
        "7B": lambda: find(SEVEN, 8, 64, seq=4096),
        "70B": lambda: find(SEVENTY, 64, 512),
        "70B pipeline": lambda: find(SEVENTY, 64, 512, future=True),
        "405B": lambda: find(HUGE, 16384, 2048, future=True),
    }[request.param]()


def tree(content: object) -> ElementTree.Element:
    return ElementTree.fromstring(str(content).removeprefix("<!DOCTYPE html>\n"))


def words(node: ElementTree.Element) -> str:
    return " ".join(node.itertext())


def ranks_named(text: str) -> set[int]:
    """The ranks of 'rank 3', 'ranks 0-7' and the like."""
    ends = re.findall(r"ranks? (\d+)(?:\u2013(\d+))?", text)
    return {rank for first, last in ends for rank in range(int(first), int(last or first) + 1)}


@pytest.mark.parametrize("draw", [memory_bars, time_bars])
@pytest.mark.parametrize("width", [336, 538])
def test_bars_are_as_long_as_their_parts_add_up_to(found: Search, draw: object, width: int) -> None:
    picture = tree(draw(found, width, "picture"))  # type: ignore[operator]
    bars = [group for group in picture.iter(f"{SVG}g") if group.get("class") == "bar"]
    memory, time = [group[2] for group in rank_groups(found)], [choice.time for choice in found.choices]
    whole = memory if draw is memory_bars else time
    if len(whole) == len(bars):  # none left out
        assert [float(bar.get("data-total", 0)) for bar in bars] == pytest.approx([each.total for each in whole])
    for bar in bars:
        parts = [rect for rect in bar.iter(f"{SVG}rect") if "part" in (rect.get("class") or "")]
        total = float(bar.get("data-total", 0)) * float(bar.get("data-scale", 0))
        assert sum(float(part.get("width", 0)) for part in parts) == pytest.approx(total, abs=0.05)
        for one, two in itertools.pairwise(parts):  # they touch and do not overlap
            assert float(one.get("x", 0)) + float(one.get("width", 0)) == pytest.approx(
                float(two.get("x", 0)), abs=0.02
            )
        assert total <= width


def test_the_memory_picture_names_every_rank(found: Search) -> None:
    assert ranks_named(words(tree(memory_bars(found, 538, "memory")))) == set(range(found.cluster.gpus))
    groups = rank_groups(found)
    assert max(memory.total for _, _, memory in groups) == pytest.approx(found.choices[0].memory.total)


def test_the_rank_grid_draws_or_counts_every_rank(found: Search) -> None:
    picture = tree(rank_picture(found, 1150, "ranks"))
    cells = {int(node.get("data-rank", -1)) for node in picture.iter(f"{SVG}g") if node.get("class") == "rank"}
    assert cells == set(range(len(cells))) and len(cells) >= min(64, found.cluster.gpus)
    assert ranks_named(words(picture)) == set(range(found.cluster.gpus))
    plan = found.choices[0].plan
    places = {tuple(coordinates(plan, rank).values()) for rank in range(found.cluster.gpus)}
    sizes = (plan.pp, plan.dp, plan.cp, plan.tp)
    assert places == set(itertools.product(*(range(size) for size in sizes)))


def test_the_timeline_ends_with_the_step_and_keeps_its_schedule(found: Search) -> None:
    line, best = timeline(found), found.choices[0]
    assert line.total == pytest.approx(best.time.total)
    assert max(event.end for event in line.events) == pytest.approx(line.piped, rel=1e-6)
    for stage in range(best.plan.pp):
        events = [event for event in line.events if event.rank == stage]
        for one, two in itertools.pairwise(events):
            assert one.end <= two.start + 1e-9
        drawn = {event.operation.micro_batch for event in events}
        assert max(drawn) == best.plan.accumulation - 1
        # Chunks and warm-up straddle the cut, so a stage may leave out a few more or less.
        assert len(drawn) >= best.plan.accumulation - line.skipped


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_events_take_the_time_of_the_pipeline_in_a_legal_order(schedule: str) -> None:
    count = 4 * chunks_of(schedule)
    times = [1.0, 1.5, 1.0, 1.2, 1.1, 0.9, 1.3, 1.0][:count]
    pipeline = Pipeline(schedule=schedule, ranks=4, forward=tuple(times), input_grad=tuple(times[::-1]),
                        weight_grad=tuple(times), transfer=0.1)  # fmt: skip
    events = list(pipeline_events(pipeline, 8))
    assert max(event.end for event in events) == pytest.approx(pipeline_time(pipeline, 8))
    assert [event.operation for event in events] == [
        operation for operations in rank_operations(schedule, 4, chunks_of(schedule), 8) for operation in operations
    ]
    ends = {event.operation: event.end for event in events}
    for event in events:
        operation, rank = event.operation, event.rank
        stage = operation.stage + (-1 if operation.kind is Kind.FORWARD else 1)
        if operation.kind is not Kind.WEIGHT_GRAD and 0 <= stage < count:
            over = 0.1 if rank_of_stage(schedule, stage, 4) != rank else 0.0
            assert event.start >= ends[dataclasses.replace(operation, stage=stage)] + over - 1e-9
        if operation.kind is not Kind.FORWARD:
            assert event.start >= ends[dataclasses.replace(operation, kind=Kind.FORWARD)] - 1e-9


def test_no_plan_is_better_than_the_front(found: Search) -> None:
    points, front = pareto(found)
    model = StepModel(found.shape, found.cluster, HardwareProfile(name="catalogue").coefficients)
    assert len(points) >= found.fitting > 0
    for one, two in itertools.pairwise(front):
        assert one.memory < two.memory and one.time > two.time
    for point in points:
        assert any(other.memory <= point.memory and other.time <= point.time for other in front)
    for point in front:
        assert model.step(point.plan, found.job).total == pytest.approx(point.time)
    assert front[-1].time == pytest.approx(found.choices[0].time.total)


def test_the_page_is_well_formed_and_needs_nothing_else(found: Search) -> None:
    content = page(found, changed=())
    root = tree(content)
    assert "http" not in content.replace("http://www.w3.org/2000/svg", "")
    for tag in ("script", "link", "img", "iframe"):
        assert not list(root.iter(tag))
    assert not re.search(r"@import|url\((?!#)", content)
    idents = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(idents) == len(set(idents))
    for picture in (node for node in root.iter(f"{SVG}svg") if node.get("role") == "img"):
        kinds = [node.tag for node in picture][:2]
        assert kinds == [f"{SVG}title", f"{SVG}desc"] and all(node.text for node in picture[:2])
    best = found.choices[0]
    for figure in (best.plan.label, f"{best.tokens_per_second:,.0f}", f"{best.mfu:.1%}", "What would change"):
        assert figure in content


def test_a_models_name_is_text_not_markup() -> None:
    name = "<script>alert(\"1\")</script> & 'co'"
    content = page(find(dataclasses.replace(SEVEN, name=name), 8, 64, seq=4096))
    root = tree(content)
    assert not list(root.iter("script"))
    assert next(root.iter("h1")).text == name


def test_a_plan_that_does_not_fit_has_no_page() -> None:
    with pytest.raises(PlanError, match="no plan fits"):
        page(find(HUGE, 8, 64))


def test_a_single_device_has_a_page() -> None:
    small = dataclasses.replace(SEVEN, name="small", layers=8, hidden=1024, heads=8, kv_heads=8, ffn=4096)
    found = find(small, 1, 3, seq=1024)
    assert "rank 0" in words(tree(page(found, changed=())))


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(
        '{"model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, '
        '"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32000}'
    )
    return path


@pytest.mark.parametrize("more", [[], ["--allow-future"]])
def test_the_command_writes_the_page_and_still_answers(tmp_path: Path, config: Path, more: list[str]) -> None:
    target = tmp_path / "plan.html"
    target.write_text("an older page")
    result = CliRunner().invoke(app, ["plan", "--model", str(config), "--html", str(target), *more])
    assert result.exit_code == 0 and "Error band" in result.output
    assert tree(target.read_text()).tag == "html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "tiny"]  # no draft is left


def test_a_directory_that_is_not_there_is_named(tmp_path: Path, config: Path) -> None:
    target = tmp_path / "absent" / "plan.html"
    result = CliRunner().invoke(app, ["plan", "--model", str(config), "--html", str(target)])
    assert result.exit_code == 2 and f"no directory {target.parent}" in result.output


def test_a_failed_write_leaves_the_older_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.html"
    target.write_text("an older page")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_page(find(SEVEN, 8, 64, seq=4096), target, changed=())
    assert target.read_text() == "an older page" and len(list(tmp_path.iterdir())) == 1


# -- in a browser ---------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
# Where each picture lies is measured in the page itself, for the copy that the window's width shows.
MEASURE = """<script>
const shown = [...document.querySelectorAll('.picture > svg')].filter(svg => svg.getBoundingClientRect().width > 0);
document.title = shown.map(svg => { const r = svg.getBoundingClientRect();
  return [svg.id, r.x, r.y, r.width, r.height].join(' '); }).join(';') + ';' + document.documentElement.scrollWidth;
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: install Debian's package chromium")
@pytest.mark.parametrize("width", [1280, 600])
def test_a_browser_draws_the_pictures(tmp_path: Path, width: int) -> None:
    target = tmp_path / "plan.html"
    write_page(find(SEVENTY, 64, 512, future=True), target, changed=())
    target.write_text(target.read_text().replace("</body>", MEASURE))
    shot = tmp_path / "plan.png"
    view = f"--window-size={width},6000"
    dom = _chromium(tmp_path, view, "--dump-dom", target.as_uri())
    _chromium(tmp_path, view, f"--screenshot={shot}", target.as_uri())
    *pictures, scroll = re.search(r"<title>(.*?)</title>", dom).group(1).split(";")  # type: ignore[union-attr]
    assert int(scroll) <= width  # nothing sticks out of the page
    pixels = (imread(shot)[:, :, :3] * 255).astype(int) @ (65536, 256, 1)
    suffix = "" if width > 640 else "-narrow"
    found: dict[str, int] = {}
    for picture in pictures:
        ident, *box = picture.split()
        x, y, wide, high = (int(float(value)) for value in box)
        _, counts = np.unique(pixels[y : y + high, x : x + wide], return_counts=True)
        found[ident] = int((counts > 40).sum())
    assert set(found) == {f"{name}{suffix}" for name in ("memory", "time", "timeline", "ranks", "front")}
    assert all(count >= 4 for count in found.values()), found  # background, ink, and at least two parts' colours


def _chromium(tmp_path: Path, *arguments: str) -> str:
    profile = tmp_path / f"profile-{len(list(tmp_path.iterdir()))}"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
