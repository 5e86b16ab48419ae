"""Checkpoints over the protocol of S3, from a server on this machine: `make test-s3`, which installs s3fs and moto."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from harness.programs import run_program
from meshwright.checkpoint.files.place import Url
from meshwright.checkpoint.format.checkpoint_folders import find_checkpoint
from meshwright.checkpoint.format.load_weights import OpenCheckpoint
from support.models import build

s3fs = pytest.importorskip("s3fs", reason="make test-s3 installs it")
server = pytest.importorskip("moto.server", reason="make test-s3 installs it")

PART = 5 * 2**20  # bytes, the least that S3 takes of a part
SIZES = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}


@pytest.fixture(scope="module")
def bucket() -> Iterator[Url]:
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://localhost:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with mock.patch.dict(os.environ, settings):
        store().mkdir("runs")
        yield Url("s3://runs")
    running.stop()


def store() -> Any:
    return fsspec.filesystem("s3")


class Run:
    """A model and an optimizer whose every element is a number, under one plan or another."""

    def __init__(self, **plan: Any):
        self.model: Any = build("llama", **SIZES)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if plan:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), timeout_s=20)
            self.model, self.optimizer, _ = mw.to_distributed(self.model, self.optimizer, config=config)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def save(self, folder: str, number: int, **options: Any) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(number)
        mw.save_checkpoint(folder, self.model, self.optimizer, step=number, **options)

    def load(self, folder: str) -> int | None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(-1)
        done = mw.load_checkpoint(folder, self.model, self.optimizer, missing_ok=True)
        found = {float(x) for parameter in self.model.parameters() for x in parameter.unique()}
        assert done is None or found == {float(done.step)}, found
        return done and done.step


def saves(root: str, number: int, victim: int = -1) -> None:
    """On each of two ranks: save a run; the victim is killed when it has sent one part of its file."""
    with mock.patch.dict(fsspec.config.conf, {"s3": {"default_block_size": PART}}):
        run = Run(dp=2, zero_stage=1)
        run.load(root)
        send = s3fs.core.S3File._upload_chunk

        def send_and_die(self: Any, final: bool = False) -> Any:
            sent = send(self, final)
            if self.parts:
                os.kill(os.getpid(), signal.SIGKILL)
            return sent

        with mock.patch.object(s3fs.core.S3File, "_upload_chunk", send_and_die if dist.get_rank() == victim else send):
            run.save(f"{root}/last", number, keep=1)


def uploads(root: Url) -> list[str]:
    return [
        upload["Key"] for upload in store().list_multipart_uploads("runs") if f"/{root.name}/" in f"/{upload['Key']}"
    ]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_it_sends_a_file(victim: int, bucket: Url) -> None:
    root = bucket / f"killed-{victim}"
    assert [outcome.code for outcome in run_program(saves, 2, str(root), 1, timeout=90)] == [0, 0]
    before = store().find(root)
    assert len(before) == 5 and not uploads(root)
    outcomes = run_program(saves, 2, str(root), 2, victim, timeout=90)
    assert outcomes[victim].code == -signal.SIGKILL and outcomes[1 - victim].code not in (0, None), outcomes
    assert len(uploads(root)) >= 1
    assert find_checkpoint(root)[1].step == 1 and {*before} <= {*store().find(root)}
    assert Run().load(root) == 1  # in one process, whole and to the bit
    assert [outcome.code for outcome in run_program(saves, 2, str(root), 3, timeout=90)] == [0, 0]
    assert len(store().find(root)) == 5 and not {*before[1:]} & {*store().find(root)} and not uploads(root)
    assert Run().load(root) == 3


def test_saves_in_the_background_and_older_ones(bucket: Url) -> None:
    root, run = bucket / "background", Run()
    assert run.load(root) is None
    for number in range(1, 4):
        run.save(f"{root}/step-{number}", number, keep=2, asynchronous=True)
    assert run.load(root) == 3
    assert [path.rpartition("/")[0] for path in store().find(root)] == ["runs/background/step-2"] * 3 + [
        "runs/background/step-3"
    ] * 3
    opened = OpenCheckpoint.read(root / "step-2")
    assert sum(len(part.pieces) for part in opened.parts) == len(opened.manifest.tensors)


def test_a_program_that_ends_during_its_save(bucket: Url) -> None:
    """The interpreter waits, while the store's threads still start."""
    root = bucket / "ending"
    outcome = run_program(save_at_the_end, 1, str(root), timeout=60)[0]
    assert outcome.code == 0, outcome.output
    assert Run().load(root) == 5


def save_at_the_end(root: str) -> None:
    Run().save(f"{root}/a", 5, asynchronous=True)
