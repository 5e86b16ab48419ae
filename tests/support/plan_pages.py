"""Searches for the planner's page, and what a page holds."""

from __future__ import annotations

import base64
import functools
import json
import xml.etree.ElementTree as ElementTree
import zlib
from typing import Any

from meshwright_plan.job.candidate import Job, Precision
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster, device
from meshwright_plan.search.search import Search, search
from meshwright_plan.search.space import Space
from meshwright_tools.plan_page import Answer
from meshwright_tools.plan_page.listing import Listed, listed_plans, pareto
from support.shapes import changed

SEVEN = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000)
SEVENTY = changed(SEVEN, name="70B", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
SMALL = changed(SEVEN, name="small", layers=8, hidden=2048, heads=16, kv_heads=8, ffn=8192)
HUGE = changed(SEVENTY, name="405B", layers=126, hidden=16384, heads=128, ffn=53248)


@functools.cache
def find(
    shape: ModelShape, gpus: int, batch: int, *, seq: int = 8192, future: bool = False, gpu: str = "h100-sxm",
    precision: Precision = "bf16", masters: bool = False,
) -> Search:  # fmt: skip
    cluster = Cluster(device=device(gpu), gpus=gpus)
    job = Job(seq_len=seq, global_batch=batch, precision=precision, prefers_masters=masters)
    return search(Space(shape=shape, cluster=cluster, job=job, allow_future=future))


def answer(found: Search) -> list[Answer]:
    return [Answer(found=found, changed=())]


def held(content: str) -> list[dict[str, Any]]:
    """Return the data of a page's answers."""
    packed = next(node.text for node in tree(content).iter("script") if node.get("id") == "data")
    answers: list[dict[str, Any]] = json.loads(zlib.decompress(base64.b64decode(str(packed))))
    return answers


def tree(content: object) -> ElementTree.Element:
    return ElementTree.fromstring(str(content).removeprefix("<!DOCTYPE html>\n"))


def listed(found: Search) -> list[Listed]:
    return listed_plans(found, *pareto(found))
