"""The page of a search: its figures are the planner's at every setting."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from meshwright.errors import PlanError
from meshwright.plan.schedule import SCHEDULES, Kind, chunks_of, rank_of_stage, rank_operations
from meshwright_plan.job.candidate import Candidate
from meshwright_plan.machine.hardware import HardwareProfile
from meshwright_plan.memory.peak import peak_memory
from meshwright_plan.search.search import TIE, Search, search
from meshwright_plan.time.simulate import SimulatedPipeline, pipeline_time
from meshwright_plan.time.step import StepModel
from meshwright_tools.cli import app
from meshwright_tools.plan_page import Answer, page, write_page
from meshwright_tools.plan_page.listing import Listed, listed_plans, pareto
from meshwright_tools.plan_page.render import PALETTE, PART_OF_AXIS, style
from meshwright_tools.plan_page.settings import (
    Elsewhere,
    PageSettings,
    Ranges,
    ranges,
    with_each_length,
    with_every_setting,
)
from support.pipeline_events import pipeline_events
from support.plan_pages import HUGE, SEVEN, SEVENTY, SMALL, answer, find, held, listed, tree
from support.shapes import changed
from support.tiers import crossings

WEIGHTS = (0.2126, 0.7152, 0.0722)  # of red, green and blue in the luminance
SVG = "{http://www.w3.org/2000/svg}"
SEARCHES: dict[str, Callable[[], Search]] = {
    "7B": lambda: find(SEVEN, 8, 64, seq=4096),
    "70B": lambda: find(SEVENTY, 64, 512),
    "7B pipeline": lambda: find(SEVEN, 16, 64, seq=4096, future=True),
    "70B pipeline": lambda: find(SEVENTY, 64, 512, future=True),
    "405B": lambda: find(HUGE, 16384, 2048, future=True),
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Search:
    return SEARCHES[request.param]()


@pytest.mark.parametrize("found", crossings(SEARCHES, but=["7B", "7B pipeline"], one_in=3), indirect=True)
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
            space = dataclasses.replace(found.space, cluster=cluster, job=job)
            plan = each.plan
            same = [
                dataclasses.replace(
                    space.candidate(region, size, zero, plan.recompute),
                    stages=plan.stages,
                    recomputed_layers=plan.recomputed_layers,
                )
                for region in space.regions()
                if (region.tp, region.cp, region.context, region.pp, region.schedule, region.stages_per_rank)
                == (plan.tp, plan.cp, plan.context, plan.pp, plan.schedule, plan.stages_per_rank)
                for size in space.micro_batches(region)
                if size == plan.micro_batch_size * micro
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


@pytest.mark.parametrize("masters", crossings([False, True], but=[False]))
def test_every_setting_that_is_searched_has_a_plan_that_ties_with_the_planners(masters: bool) -> None:
    """With masters, 7 B parameters on 2 GPUs fit without them alone."""
    found = find(SEVEN if masters else SMALL, 4, 8, seq=2048, masters=masters)
    values = Ranges(batches=(4, 8, 32), lengths=(2048, 16384, 65536), gpus=(2, 4, 8))
    settings, planned = PageSettings(found=found, ranges=values), listed(found)
    plans, is_complete = with_every_setting(settings, planned, 48, lambda done, total: None)
    assert is_complete and any(isinstance(each, Elsewhere) for each in plans)
    assert all(each.memory.total <= found.budget for each in plans if isinstance(each, Listed))
    few, is_complete = with_every_setting(settings, planned, len(planned), lambda done, total: None)
    assert not is_complete and len(few) == len(planned)
    missed, without = 0, False

    def kept(plan: Candidate) -> bool:
        return not found.job.rounds_updates(plan)

    for at in itertools.product(range(3), range(3), range(3)):
        try:
            best = search(settings.space_at(at), top=1, explains=False).choices
        except PlanError:
            continue  # there is no legal plan
        times: dict[Candidate, float] = {}
        for each in plans:
            with contextlib.suppress(PlanError):
                outcome = settings.outcome(each.plan, (*at, settings.planned[3]))
                if outcome.time is not None and (not masters or kept(outcome.plan) == kept(best[0].plan)):
                    times[each.plan] = outcome.time.total
        least = best[0].time.total * (1 + TIE) if best else math.inf
        assert min(times.values(), default=math.inf) <= least, (at, best[0].plan.label)
        without |= bool(best) and masters and not kept(best[0].plan)
        missed += min(times.get(each.plan, math.inf) for each in planned) > least
    assert without == masters and missed, "the plans of the planned job are enough, so this test compares nothing"


def test_the_table_has_a_plan_that_fits_at_each_length() -> None:
    """Some from the table, and some that only a search finds; the choices of the planned job stay in a short table."""
    found = find(SMALL, 8, 8, seq=2048)
    values = Ranges(batches=(8,), lengths=(2048, 8192, 65536, 2**20), gpus=(8,))
    settings, planned = PageSettings(found=found, ranges=values), listed(found)
    chosen = [each for each in planned if each.plan in {choice.plan for choice in found.choices}]

    def fits(plans: Sequence[Listed | Elsewhere], length: int) -> bool:
        for each in plans:
            with contextlib.suppress(PlanError):
                if settings.outcome(each.plan, (0, length, 0, settings.planned[3])).time is not None:
                    return True
        return False

    assert not all(fits(chosen, length) for length in range(4)), "the choices are enough, so this test shows nothing"
    for before in (planned, chosen):
        plans = with_each_length(settings, before, 48)
        assert {each.plan for each in plans} >= {each.plan for each in before}
        for length in range(4):
            is_there = bool(search(settings.space_at((0, length, 0)), top=1, explains=False).choices)
            assert fits(plans, length) == is_there, values.lengths[length]
    assert {each.plan for each in with_each_length(settings, planned, 1)} == {each.plan for each in chosen}


def test_a_page_has_fewer_plans_if_it_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = answer(find(SMALL, 4, 8, seq=2048))
    whole = page(answers)
    assert "since a page with more" not in whole
    module = importlib.import_module("meshwright_tools.plan_page.page")
    monkeypatch.setattr(module, "_BYTES", len(whole) - 1)
    fewer = page(answers)
    assert len(answers[0].found.choices) <= len(held(fewer)[0]["plans"]) < len(held(whole)[0]["plans"])
    assert len(fewer) < len(whole) and "since a page with more has over 1 MB" in fewer
    monkeypatch.setattr(module, "_BYTES", 50_000)
    with pytest.raises(PlanError, match=r"a page of 5 plans .* has 0.\d+ MB, and the limit is 0.05 MB; give fewer"):
        page(answers)


def test_the_reason_against_a_setting_has_its_numbers() -> None:
    found = find(SEVEN, 8, 64, seq=4096)
    settings = PageSettings(found=found, ranges=ranges(found))
    plan = dataclasses.replace(found.choices[0].plan, dp=1, replicate=1, tp=8, zero_stage=0, pp=1, cp=1,
                               context="gather", ulysses=None, schedule="1f1b", chunks=None, stages=None)  # fmt: skip
    few = (settings.ranges.batches.index(64), 0, settings.ranges.gpus.index(4), 1)
    with pytest.raises(PlanError, match="needs a multiple of 8 GPUs, not 4"):
        settings.outcome(plan, few)
    half = dataclasses.replace(plan, micro_batch_size=1)
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


@pytest.mark.parametrize("found", crossings(SEARCHES, but=["7B", "7B pipeline"], one_in=3), indirect=True)
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


@pytest.mark.parametrize("found", crossings(SEARCHES, but=["7B"], one_in=4), indirect=True)
def test_the_page_is_well_formed_and_needs_nothing_else(found: Search) -> None:
    content = page(answer(found))
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
    content = page([Answer(found=find(changed(SMALL, name=name), 1, 3, seq=1024))])
    root = tree(content)
    assert len(list(root.iter("script"))) == 2 and "alert" not in "".join(
        "".join(node.itertext()) for node in root.iter("script") if node.get("type") is None
    )
    assert next(root.iter("h1")).text == name


def test_a_plan_that_does_not_fit_has_no_page() -> None:
    with pytest.raises(PlanError, match="no plan fits"):
        page(answer(find(SEVEN, 1, 64, gpu="rtx-4090")))


def test_a_single_device_has_a_page() -> None:
    small = changed(SEVEN, name="small", layers=8, hidden=1024, heads=8, kv_heads=8, ffn=4096)
    found = find(small, 1, 3, seq=1024)
    assert found.choices[0].plan.label in page(answer(found))


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
    result = CliRunner().invoke(app, ["plan", "--model", str(config), "--gpus", "2", "--html", str(target), *more])
    assert result.exit_code == 0 and "Error band" in result.output
    assert tree(target.read_text()).tag == "html"
    command = held(target.read_text())[0]["commands"]["plan"]
    assert ("--profile 'tiny/my profile.json' " in command) == (more[:1] == ["--profile"])
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
    with pytest.raises(PlanError, match="disk full"):
        write_page(answer(find(SMALL, 1, 3, seq=1024)), target)
    assert target.read_text() == "an older page" and len(list(tmp_path.iterdir())) == 1
