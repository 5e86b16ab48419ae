"""The page of a search: its figures are the planner's at every setting, and a browser draws and works it."""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import PlanError
from meshwright.plan.schedule import SCHEDULES, Kind, chunks_of, rank_of_stage, rank_operations
from meshwright.planner import page as page_package
from meshwright.planner.candidate import Job
from meshwright.planner.cost import Budget, bill_of
from meshwright.planner.formatting import gib, seconds
from meshwright.planner.hardware import Cluster, HardwareProfile, device
from meshwright.planner.memory import peak_memory
from meshwright.planner.page import page, write_page
from meshwright.planner.page.draw import PALETTE, PART_OF_AXIS
from meshwright.planner.page.front import pareto
from meshwright.planner.page.listing import Listed, listed_plans
from meshwright.planner.page.settings import PageSettings, ranges
from meshwright.planner.page.style import style
from meshwright.planner.search import Search, search
from meshwright.planner.shapes import ModelShape
from meshwright.planner.simulate import SimulatedPipeline, pipeline_events, pipeline_time
from meshwright.planner.space import Space
from meshwright.planner.time import StepModel
from support.shapes import changed
from support.tiers import crossings

WEIGHTS = (0.2126, 0.7152, 0.0722)  # of red, green and blue in the luminance
SVG = "{http://www.w3.org/2000/svg}"
SEVEN = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000)
SEVENTY = changed(SEVEN, name="70B", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
HUGE = changed(SEVENTY, name="405B", layers=126, hidden=16384, heads=128, ffn=53248)


@functools.cache
def find(shape: ModelShape, gpus: int, batch: int, *, seq: int = 8192, future: bool = False) -> Search:
    cluster = Cluster(device=device("h100-sxm"), gpus=gpus)
    job = Job(seq_len=seq, global_batch=batch)
    return search(Space(shape=shape, cluster=cluster, job=job, allow_future=future))


SEARCHES: dict[str, Callable[[], Search]] = {
    "7B": lambda: find(SEVEN, 8, 64, seq=4096),
    "70B": lambda: find(SEVENTY, 64, 512),
    "70B pipeline": lambda: find(SEVENTY, 64, 512, future=True),
    "405B": lambda: find(HUGE, 16384, 2048, future=True),
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Search:
    return SEARCHES[request.param]()


def tree(content: object) -> ElementTree.Element:
    return ElementTree.fromstring(str(content).removeprefix("<!DOCTYPE html>\n"))


def listed(found: Search) -> list[Listed]:
    return listed_plans(found, *pareto(found))


@pytest.mark.parametrize("found", crossings(SEARCHES, but=["7B", "70B pipeline"]), indirect=True)
def test_the_table_has_the_choices_and_other_kinds_of_plans(found: Search) -> None:
    points, front = pareto(found)
    plans = listed_plans(found, points, front)
    assert {choice.plan for choice in found.choices} <= {each.plan for each in plans}
    assert plans[0].plan == found.choices[0].plan and len(plans) == len({each.plan for each in plans}) <= 16
    model = StepModel(found.shape, found.cluster, found.profile.coefficients)
    for each in plans:
        assert each.memory.total <= found.budget
        assert each.time.total == pytest.approx(model.step(each.plan, found.job).total)
    for axes in {(point.plan.tp > 1, point.plan.cp > 1, point.plan.pp > 1) for point in points}:
        assert axes in {(each.plan.tp > 1, each.plan.cp > 1, each.plan.pp > 1) for each in plans}


def test_a_setting_is_what_the_planner_says_of_that_job() -> None:
    found = find(SEVENTY, 64, 512)
    settings = PageSettings(found=found, ranges=ranges(found))
    kinds: set[str] = set()
    for each in listed(found)[::3]:
        for setting in itertools.islice(settings.ranges.indices(), 7, None, 61):
            batch, length, gpus, micro = (
                values[at] for values, at in zip(vars(settings.ranges).values(), setting, strict=True)
            )
            cluster = dataclasses.replace(found.cluster, gpus=gpus)
            job = dataclasses.replace(found.job, global_batch=batch, seq_len=length)
            space = found.space(cluster, job)
            plan = each.plan
            same = [
                dataclasses.replace(space.candidate(region, size, zero, plan.recompute), stages=plan.stages)
                for region in space.regions()
                if (region.tp, region.cp, region.context, region.pp, region.schedule, region.chunks)
                == (plan.tp, plan.cp, plan.context, plan.pp, plan.schedule, plan.chunks)
                for size in space.micro_batches(region)
                if size == plan.micro_batch * micro
                for zero in space.zero(region)
                if zero[0] == plan.zero_stage
            ]
            try:
                outcome = settings.outcome(plan, setting)
            except PlanError:
                kinds.add("illegal")
                assert not same
                continue
            assert [outcome.plan] == same
            memory = peak_memory(found.shape, same[0], job).total
            assert max(group.total for _, _, group in outcome.memory) == pytest.approx(memory)
            kinds.add("fits" if outcome.time else "does not fit")
            assert (outcome.time is not None) == (memory <= found.budget)
            if outcome.time is not None:
                step = StepModel(found.shape, cluster, found.profile.coefficients).step(same[0], job)
                assert outcome.time.parts == pytest.approx(step.parts)
    assert kinds == {"illegal", "fits", "does not fit"}


def test_the_reason_against_a_setting_has_its_numbers() -> None:
    found = find(SEVEN, 8, 64, seq=4096)
    settings = PageSettings(found=found, ranges=ranges(found))
    plan = dataclasses.replace(found.choices[0].plan, shard=1, replicate=1, tp=8, zero_stage=0, pp=1, cp=1,
                               context="gather", ulysses=None, schedule="1f1b", chunks=1, stages=None)  # fmt: skip
    few = (settings.ranges.batches.index(64), 0, settings.ranges.gpus.index(4), 1)
    with pytest.raises(PlanError, match="needs a multiple of 8 GPUs, not 4"):
        settings.outcome(plan, few)
    half = dataclasses.replace(plan, micro_batch=1)
    with pytest.raises(PlanError, match=r"64 sequences per data-parallel rank do not split into micro-batches of 0\.5"):
        settings.outcome(half, (few[0], 0, settings.ranges.gpus.index(8), 0))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_events_take_the_time_of_the_pipeline_in_a_legal_order(schedule: str) -> None:
    count = 4 * chunks_of(schedule)
    times = [1.0, 1.5, 1.0, 1.2, 1.1, 0.9, 1.3, 1.0][:count]
    pipeline = SimulatedPipeline(schedule=schedule, ranks=4, forward=tuple(times), input_grad=tuple(times[::-1]),
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


@pytest.mark.parametrize("found", crossings(SEARCHES, but=["7B", "70B pipeline"]), indirect=True)
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


@pytest.mark.parametrize("found", crossings(SEARCHES, but=["7B"]), indirect=True)
def test_the_page_is_well_formed_and_needs_nothing_else(found: Search) -> None:
    content = page(found, changed=())
    root = tree(content)
    assert len(content) < 1e6
    assert "http" not in content.replace("http://www.w3.org/2000/svg", "")
    for tag in ("link", "img", "iframe"):
        assert not list(root.iter(tag))
    assert [node.get("src") for node in root.iter("script")] == [None, None]
    assert not re.search(r"@import|url\((?!#)", content)
    idents = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(idents) == len(set(idents))
    for control in (node for node in root.iter() if node.tag in ("input", "button")):
        labels = [label for label in root.iter("label") if label.get("for") == control.get("id")]
        assert control.get("aria-label") or "".join(control.itertext()).strip() or labels
    best = found.choices[0]
    for figure in (best.plan.label, f"{best.tokens_per_second:,.0f}", f"{best.mfu:.1%}", "What would change"):
        assert figure in content


def test_a_models_name_is_text_not_markup() -> None:
    name = "<script>alert(\"1\")</script> & 'co'"
    content = page(find(changed(SEVEN, name=name), 8, 64, seq=4096))
    root = tree(content)
    assert len(list(root.iter("script"))) == 2 and "alert" not in "".join(
        "".join(node.itertext()) for node in root.iter("script") if node.get("type") is None
    )
    assert next(root.iter("h1")).text == name


def test_a_plan_that_does_not_fit_has_no_page() -> None:
    with pytest.raises(PlanError, match="no plan fits"):
        page(find(HUGE, 8, 64))


def test_a_single_device_has_a_page() -> None:
    small = changed(SEVEN, name="small", layers=8, hidden=1024, heads=8, kv_heads=8, ffn=4096)
    found = find(small, 1, 3, seq=1024)
    assert found.choices[0].plan.label in page(found, changed=())


@pytest.mark.parametrize(("scheme", "card", "ink"), [(0, "#ffffff", "#16202c"), (1, "#171d25", "#e8ecf1")])
def test_the_coordinates_of_ranks_can_be_read(scheme: int, card: str, ink: str) -> None:
    sheet = style()
    assert card in sheet and ink in sheet  # the page's own colours

    def light(colour: np.ndarray) -> float:  # relative luminance of WCAG
        return float(np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4) @ WEIGHTS)

    def rgb(text: str) -> np.ndarray:
        return np.array([int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)])

    for part in PART_OF_AXIS.values():
        shares = re.findall(rf"\.chip\.f-{part}\.s\d {{ fill: color-mix\(in srgb, var\(--{part}\) (\d+)%", sheet)
        assert len(shares) == 16  # eight shades of each scheme
        for share in shares[8 * scheme : 8 * scheme + 8]:
            mixed = rgb(card) + (rgb(PALETTE[part][scheme]) - rgb(card)) * int(share) / 100
            dark, bright = sorted((light(mixed), light(rgb(ink))))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (part, share)  # WCAG's least contrast of text


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


@pytest.mark.parametrize("more", [[], ["--allow-future"], ["--profile", "tiny/my profile.json"]])
def test_the_command_writes_the_page_and_still_answers(
    tmp_path: Path, config: Path, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    HardwareProfile(name="mine").save("tiny/my profile.json")
    (target := tmp_path / "plan.html").write_text("an older page")
    result = CliRunner().invoke(app, ["plan", "--model", str(config), "--html", str(target), *more])
    assert result.exit_code == 0 and "Error band" in result.output
    assert tree(target.read_text()).tag == "html"
    assert ("--profile 'tiny/my profile.json' " in target.read_text()) == (more[:1] == ["--profile"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "tiny"]  # no draft is left


def test_a_directory_that_is_not_there_is_named(tmp_path: Path, config: Path) -> None:
    target = tmp_path / "absent" / "plan.html"
    result = CliRunner().invoke(app, ["plan", "--model", str(config), "--html", str(target)])
    assert result.exit_code == 2 and f"no directory {target.parent}" in result.output


def test_a_failed_write_leaves_the_older_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (target := tmp_path / "plan.html").write_text("an older page")

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
# The script works the page like a reader and reports what it shows. Errors become the title, which fails the test.
SCENARIO = """<script>
const report = {};
onerror = (message) => { document.title = 'error: ' + message; };
const $ = (selector) => document.querySelector(selector), $$ = (selector) => [...document.querySelectorAll(selector)];
const boxes = () => $$('.picture > svg').map(svg => { const r = svg.getBoundingClientRect();
  return [svg.id, r.x, r.y, r.width, r.height]; });
const shown = () => ({ plan: $('#shown').textContent, step: $('#tiles b').textContent, launch: $('#launch').textContent,
  replan: $('#replan').textContent, status: $('#status').textContent, memory: $$('#tiles b')[3].textContent,
  table: $$('#plans tbody tr').map(row => [row.dataset.plan, ...[...row.querySelectorAll('[data-cell]')].map(
    cell => cell.textContent.trim())]) });
const slide = (name, by) => { const input = $('#' + name); input.value = Number(input.value) + by;
  input.dispatchEvent(new Event('input')); };
report.boxes = boxes();
report.scroll = document.documentElement.scrollWidth;
report.bars = $$('.bar').map(bar => [Number(bar.dataset.total) * Number(bar.dataset.scale),
  ...[...bar.querySelectorAll('.part')].map(part => Number(part.getAttribute('width')))]);
report.ranks = $$('#ranks .rank').map(rank => Number(rank.dataset.rank));
report.named = $$('svg[role=img]').every(svg => ['aria-labelledby', 'aria-describedby'].every(
  name => document.getElementById(svg.getAttribute(name)).textContent));
report.first = shown();
$$('.pick')[1].click();
report.second = shown();
$('#front .dot-of:not(.choice)').dispatchEvent(new MouseEvent('click', { bubbles: true }));
report.dot = shown();
$('#reset').click();
report.times = [];
for (const name of ['batch', 'length', 'gpus', 'micro']) {
  slide(name, 1);
  report[name] = shown();
  const start = performance.now();
  slide(name, -1);
  document.body.getBoundingClientRect();
  report.times.push(performance.now() - start);
}
report.back = shown();
const lane = $('#timeline .rects [class$=f-forward]');
lane.scrollIntoView();
const drawn = lane.getBBox(), onPage = lane.getScreenCTM();
lane.dispatchEvent(new PointerEvent('pointermove', { bubbles: true, clientX: onPage.e + (drawn.x + 0.3) * onPage.a,
  clientY: onPage.f + (drawn.y + 1) * onPage.d }));
report.hovered = lane.parentNode.querySelector('title').textContent;
$('th.memory button').click();
report.sorted = [$('th.memory').getAttribute('aria-sort'), shown().table.map(row => row.at(-1))];
$$('.compare')[3].click();
report.compared = [$$('.picture > svg').map(svg => svg.id), !$('#compared').hidden];
$$('details').forEach(each => { each.open = true; each.dispatchEvent(new Event('toggle')); });
report.tables = $$('.as-table table').length;
const write = (name, text) => { const input = $('#' + name); input.value = text;
  input.dispatchEvent(new Event('input')); };
$('#reset').click();
write('tokens', '300B');
write('price', '2.5');
report.run = [...$$('#run b'), ...$$('#run small')].map(each => each.textContent);
report.priced = [$('#replan').textContent, location.hash];
const before = $('#timeline').getBoundingClientRect().width;
write('zoom', '2');
report.zoom = $('#timeline').getBoundingClientRect().width / before;
window.Blob = class { constructor(parts) { report.trace = JSON.parse(parts[0]); } };
URL.createObjectURL = () => '#';
$('#save-trace').click();
report.meaning = $('#shown').title;
location.hash = report.priced[1].replace('gpus=64', 'gpus=128') + '&plan=nothing';
dispatchEvent(new Event('hashchange'));
report.linked = [$('#gpus-value').textContent, $('#tokens').value];
document.title = 'done';
const node = document.body.appendChild(document.createElement('pre'));
node.id = 'report';
node.textContent = JSON.stringify(report);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: install Debian's package chromium")
def test_a_reader_works_the_page_in_a_browser(tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    found = find(SEVENTY, 64, 512)
    write_page(found, target, changed=(), model="70B/config.json")
    whole = target.read_text()
    target.write_text(whole.replace("</body>", SCENARIO))
    dom = _chromium(tmp_path, "--window-size=1280,900", "--dump-dom", target.as_uri())
    assert "<title>done</title>" in dom, re.search(r"<title>.*?</title>", dom)
    report = json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', dom).group(1)))  # type: ignore[union-attr]
    print("milliseconds per redraw:", [round(value) for value in report["times"]])

    assert report["scroll"] <= 1280 and report["named"]
    assert {name for name, *_ in report["boxes"]} == {"memory", "time", "timeline", "ranks", "front"}
    assert all(x >= 0 and width > 300 and x + width <= 1280 for _, x, _, width, _ in report["boxes"])
    for total, *parts in report["bars"]:
        assert sum(parts) == pytest.approx(total, abs=0.1)
    assert report["ranks"] == list(range(64))

    plans, best = listed(found), found.choices[0]
    assert report["first"]["plan"] == best.plan.label == report["back"]["plan"]
    assert report["first"]["step"] == seconds(best.time.total)
    assert report["first"]["memory"] == gib(best.memory.total)
    assert f'--plan "{best.plan.label}" train.py' in report["first"]["launch"]
    assert report["second"]["plan"] == plans[1].plan.label
    assert report["second"]["memory"] == gib(plans[1].memory.total)
    assert report["dot"]["plan"] in {each.plan.label for each in plans[1:]}
    settings = PageSettings(found=found, ranges=ranges(found))
    planned = [values.index(at) for values, at in zip(
        vars(settings.ranges).values(), (512, 8192, 64, 1.0), strict=True
    )]  # fmt: skip
    for slider, name in enumerate(("batch", "length", "gpus", "micro")):
        at = [index + (place == slider) for place, index in enumerate(planned)]
        cells = {int(row[0]): row[1:] for row in report[name]["table"]}
        for index, each in enumerate(plans):
            _, label, why, step, *_, memory = cells[index]
            try:
                outcome = settings.outcome(each.plan, tuple(at))  # type: ignore[arg-type]
            except PlanError as error:
                assert (step, why) == ("cannot run", str(error))
                continue
            assert label == outcome.plan.label
            assert memory == gib(max(group.total for _, _, group in outcome.memory))
            assert step == (seconds(outcome.time.total) if outcome.time else "does not fit")
    assert "--seq-len 16384" in report["length"]["replan"] and "--model 70B/config.json" in report["length"]["replan"]
    assert re.fullmatch(r"forward of micro-batch 0, stage 0: \d+(\.\d)? ms", report["hovered"]), report["hovered"]
    order, memories = report["sorted"]
    assert order == "ascending" and memories == sorted(memories, key=lambda text: float(text.split()[0]))
    drawn, is_compared = report["compared"]
    assert is_compared and {"memory", "memory-1", "timeline-1", "ranks-1"} <= set(drawn)
    money = bill_of(found, Budget(tokens=300 * 10**9, price=2.5))
    assert money.cost is not None
    steps, _, hours, cost, _, taken, *_ = report["run"]
    assert steps == f"{money.steps:,}"
    shown = [float(text.replace(",", "")) for text in (hours, cost)]
    assert shown == pytest.approx(
        [money.gpu_hours, money.cost], rel=1e-4
    )  # the page has the step in rounded milliseconds
    assert taken == f"{money.days / (1 + money.band):.1f} days to {money.days * (1 + money.band):.1f} days"
    command, address = report["priced"]
    assert "--tokens 300B --price 2.5 --html" in command and "tokens=300B&price=2.5" in address
    assert report["linked"] == ["128", "300B"] and report["zoom"] == pytest.approx(4, abs=0.1)
    ranks = f"{best.plan.dp} data-parallel rank{'s' if best.plan.dp > 1 else ''}"
    assert report["meaning"].splitlines()[0] == f"dp{best.plan.dp}: the batch is split over {ranks}"
    assert len(report["meaning"].splitlines()) == len(best.plan.label.split()), "a word of the plan is not explained"
    trace = [event for event in report["trace"]["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in trace} == set(range(best.plan.pp))
    assert max(event["ts"] + event["dur"] for event in trace) / 1e6 == pytest.approx(best.time.total, rel=0.01)
    assert report["tables"] >= 8  # two of each picture of one plan, and one of each picture of all plans


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: install Debian's package chromium")
def test_the_browser_simulates_the_schedules_of_the_runtime(tmp_path: Path) -> None:
    cases = [(schedule, p, chunks_of(schedule), m) for schedule in SCHEDULES for p in (1, 2, 4) for m in (p, 2 * p, 12)]
    cases = [case for case in cases if case[1] > 1 or case[0] in ("gpipe", "1f1b")]
    inputs, expected = [], []
    for schedule, p, v, m in cases:
        forward = [1 + 0.25 * (stage % 3) for stage in range(p * v)]
        backward, weight = [2 * value for value in forward], [0.75 * value for value in forward]
        pipeline = SimulatedPipeline(schedule=schedule, ranks=p, forward=tuple(forward), input_grad=tuple(backward),
                            weight_grad=tuple(weight), transfer=0.125)  # fmt: skip
        both = [one + two for one, two in zip(backward, weight, strict=True)]
        times = {"F": forward, "B": both, "I": backward, "W": weight}
        inputs.append({"schedule": schedule, "p": p, "v": v, "m": m, "times": times, "transfer": 0.125})
        expected.append([
            [event.rank, str(event.operation), event.start, event.end] for event in pipeline_events(pipeline, m)
        ])  # fmt: skip
    script = (Path(page_package.__file__).parent / "js" / "schedule.js").read_text()
    target = tmp_path / "schedule.html"
    target.write_text(
        f"<pre id=report></pre><script>{script}\nreport.textContent = JSON.stringify({json.dumps(inputs)}.map(one => "
        "simulate(one).map(e => [e.rank, `${e.stage}${e.kind}${e.microBatch}`, e.start, e.end])))</script>"
    )
    dom = _chromium(tmp_path, "--dump-dom", target.as_uri())
    # The times are sums of powers of two, so both languages have them to the bit.
    assert json.loads(re.search(r'<pre id="report">(.*?)</pre>', dom).group(1)) == expected  # type: ignore[union-attr]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: install Debian's package chromium")
def test_a_browser_draws_the_pictures(tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    write_page(find(SEVEN, 16, 64, seq=4096), target, changed=())
    measure = SCENARIO[: SCENARIO.index("report.scroll")].removesuffix("report.boxes = boxes();\n")
    target.write_text(
        target.read_text().replace("</body>", measure + "document.title = boxes().join(';');</script></body>")
    )
    shot = tmp_path / "plan.png"
    dom = _chromium(tmp_path, "--window-size=600,9000", "--dump-dom", f"--screenshot={shot}", target.as_uri())
    pictures = re.search(r"<title>(.*?)</title>", dom).group(1).split(";")  # type: ignore[union-attr]
    pixels = (imread(shot)[:, :, :3] * 255).astype(int) @ (65536, 256, 1)
    for picture in pictures:
        ident, *box = picture.split(",")
        x, y, wide, high = (int(float(value)) for value in box)
        assert x >= 0 and x + wide <= 600, picture
        _, counts = np.unique(pixels[y : y + high, x : x + wide], return_counts=True)
        assert (counts > 40).sum() >= 4, ident  # background, ink, and at least two parts' colours


def _chromium(tmp_path: Path, *arguments: str) -> str:
    profile = tmp_path / f"profile-{len(list(tmp_path.iterdir()))}"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
