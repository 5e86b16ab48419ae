"""A browser draws and works the planner's page: its figures are the planner's at every setting and menu."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from meshwright.errors import PlanError
from meshwright.plan.schedule import SCHEDULES, chunks_of
from meshwright_plan.answers import explain
from meshwright_plan.answers.cost import Budget, bill_of
from meshwright_plan.formatting import gib, seconds
from meshwright_plan.job.candidate import Precision
from meshwright_plan.time.simulate import SimulatedPipeline
from meshwright_tools import plan_page as page_package
from meshwright_tools.plan_page import Answer, write_page
from meshwright_tools.plan_page.settings import PageSettings, ranges
from support.pipeline_events import pipeline_events
from support.plan_pages import SEVEN, SEVENTY, SMALL, answer, find, listed

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
    "--virtual-time-budget=10000",  # the page is dumped after its script has awaited the data
)
# The script works the page like a reader and reports what it shows. Errors become the title, which fails the test.
SCENARIO = """<script>
const report = {};
onerror = (message) => { document.title = 'error: ' + message; };
onunhandledrejection = (event) => { document.title = 'error: ' + event.reason.stack; };
const alive = async () => { // the page unpacks its data first
  while (!document.documentElement.classList.contains('is-alive')) await new Promise(done => setTimeout(done, 5));
};
const $ = (selector) => document.querySelector(selector), $$ = (selector) => [...document.querySelectorAll(selector)];
const boxes = () => $$('.picture > svg').map(svg => { const r = svg.getBoundingClientRect();
  return [svg.id, r.x, r.y, r.width, r.height]; });
const shown = () => ({ plan: $('#shown').textContent, step: $('#tiles b').textContent, launch: $('#launch').textContent,
  replan: $('#replan').textContent, status: $('#status').textContent, memory: $$('#tiles b')[3].textContent,
  table: $$('#plans tbody tr').map(row => [row.dataset.plan, ...[...row.querySelectorAll('[data-cell]')].map(
    cell => cell.textContent.trim())]) });
const slide = (name, by) => { const input = $('#' + name); input.value = Number(input.value) + by;
  input.dispatchEvent(new Event('input')); };
(async () => {
await alive();
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
})();
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: install Debian's package chromium")
def test_a_reader_works_the_page_in_a_browser(tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    found = find(SEVENTY, 64, 512)
    write_page(answer(found), target, model="70B/config.json")
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
    amounts = [float(text.split()[0]) if text else math.inf for text in memories]  # a plan that cannot run has none
    assert order == "ascending" and amounts == sorted(amounts) and min(amounts) < max(amounts)
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
def test_a_reader_chooses_the_gpu_and_the_precision(tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    kinds: list[tuple[str, Precision]] = [("h100-sxm", "bf16"), ("h100-sxm", "fp8"), ("a100-80", "bf16")]
    searches = [find(SMALL, 8, 64, seq=4096, gpu=gpu, precision=precision) for gpu, precision in kinds]
    budgets = [Budget(tokens=10**9, price=price) for price in (2.0, 2.0, 1.0)]
    write_page([Answer(found=found, budget=budget) for found, budget in zip(searches, budgets, strict=True)], target,
               refused=["a100-80 in fp8 (it has no such units)"])  # fmt: skip
    whole = target.read_text()
    assert "Without a plan: a100-80 in fp8 (it has no such units)." in whole and len(whole) < 1e6
    choose = """
    const choose = (name, value) => { const menu = $('#' + name); menu.value = value;
      menu.dispatchEvent(new Event('change')); };
    const see = () => ({ ...shown(), job: $('#job').textContent, footer: $('#footer').textContent,
      price: $('#price').value, cost: $$('#run b')[3].textContent, hash: location.hash,
      why: $('#why tbody').textContent,
      menus: ['gpu', 'precision'].map(name => $('#' + name).value), changes: $('#changes tbody').rows.length,
      off: [...$('#precision').options].map(option => option.disabled) });
    report.start = see();
    choose('precision', 'fp8'); report.fp8 = see();
    choose('gpu', 'a100-80'); report.a100 = see();  // in bf16, since there is no answer in fp8
    slide('batch', 1); report.larger = see();
    const link = location.hash;
    choose('gpu', 'h100-sxm'); report.back = see();
    location.hash = link; dispatchEvent(new Event('hashchange')); report.linked = see();
    document.title = 'done';
    const node = document.body.appendChild(document.createElement('pre'));
    node.id = 'report'; node.textContent = JSON.stringify(report); })();</script></body>"""
    target.write_text(whole.replace("</body>", SCENARIO[: SCENARIO.index("report.boxes = boxes()")] + choose))
    dom = _chromium(tmp_path, "--dump-dom", target.as_uri())
    assert "<title>done</title>" in dom, re.search(r"<title>.*?</title>", dom)
    report = json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', dom).group(1)))  # type: ignore[union-attr]
    for name, found, budget in zip(("start", "fp8", "a100"), searches, budgets, strict=True):
        seen, best = report[name], found.choices[0]
        device_name, precision = found.cluster.device.name, found.job.precision
        assert seen["menus"] == [device_name, precision] and f"{device_name}, 64 sequences" in seen["job"]
        assert (seen["plan"], seen["step"]) == (best.plan.label, seconds(best.time.total))
        assert seen["memory"] == gib(best.memory.total)
        rows = {row[2]: row for row in seen["table"]}
        for choice in found.choices:
            assert rows[choice.plan.label][4] == seconds(choice.time.total)
        assert f"{found.weighed:,} weighed" in seen["footer"] and seen["changes"] == 3
        assert all(option in seen["why"] for option, _ in explain.reasons(found))
        assert f"--gpu {device_name}" in seen["replan"] and ("--precision fp8" in seen["replan"]) == (
            precision == "fp8"
        )
        money = bill_of(found, budget).cost
        assert float(seen["cost"].replace(",", "")) == pytest.approx(money, abs=0.51)  # shown in whole units
        assert seen["price"] == f"{budget.price:g}" and seen["off"] == [False, device_name == "a100-80"]
    assert report["start"]["hash"] == "" and "gpu=h100-sxm&precision=fp8" in report["fp8"]["hash"]
    assert report["back"]["menus"] == ["h100-sxm", "bf16"] and "batch=128" in report["back"]["hash"]
    assert report["linked"]["table"] == report["larger"]["table"] != report["a100"]["table"]
    assert report["linked"]["menus"] == ["a100-80", "bf16"]


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
    write_page(answer(find(SEVEN, 16, 64, seq=4096)), target)
    measure = SCENARIO[: SCENARIO.index("report.boxes = boxes()")]
    target.write_text(
        target.read_text().replace("</body>", measure + "document.title = boxes().join(';'); })();</script></body>")
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
