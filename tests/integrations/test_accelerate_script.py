"""What a script does with its Accelerator besides training: metrics, clipping, weights, later prepares, bad input."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

import meshwright as mw
from examples import accelerate_train
from meshwright.errors import AlreadyDistributedError, PlanError
from meshwright.optim.runtime import runtime_of
from meshwright.parallel.method_chain import find_chain
from meshwright.temporarily import temporarily
from meshwright_hf.accelerate import activate, deactivate, prepare
from support.accelerated import accelerator, dataset, forget
from support.models import build, tokens
from support.reference import make_optimizer
from support.tiers import crossing, nightly

TP2, DP2 = {"tp": 2}, {"dp": 2}
PP2 = {"pp": 2, "gradient_accumulation_steps": 2}
SP_DP_ZERO = {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}


def config(plan: dict[str, Any]) -> mw.ToDistributedConfig:
    return mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), gather_logits="pp" in plan)


def numbered(rows: int) -> list[dict[str, torch.Tensor]]:
    """Rows that know their number; without labels."""
    ids = tokens(rows, 6)
    return [{"input_ids": ids[i], "number": torch.tensor(i)} for i in range(rows)]


def evaluate(plan: dict[str, Any], rows: int, batch_size: int, *, split_batches: bool) -> dict[str, Any]:
    options = {"dataloader_config": DataLoaderConfiguration(split_batches=split_batches)}
    with accelerator(**options) as accelerate:
        model, loader = prepare(
            accelerate, build("llama"), DataLoader(numbered(rows), batch_size=batch_size), config=config(plan)
        )
        model.eval()
        found: dict[str, Any] = {"numbers": [], "texts": [], "losses": [], "logits": [], "ends": [], "words": []}
        for batch in loader:
            number = batch.pop("number")
            with torch.no_grad():
                logits = model(**batch).logits
            found["numbers"] += accelerate.gather_for_metrics(number).tolist()
            both = accelerate.gather_for_metrics({"last": logits[:, -1], "flag": number > 2})
            assert both["flag"].dtype is torch.bool
            found["logits"].append(both["last"])
            found["words"].append(len(accelerate.gather_for_metrics(logits.argmax(-1).flatten())))
            found["texts"] += accelerate.gather_for_metrics([f"row {i}" for i in number.tolist()])
            # As scripts gather a mean, once for each row of a full batch.
            found["losses"] += accelerate.gather_for_metrics(torch.ones(()).repeat(batch_size)).tolist()
            found["ends"].append(accelerate.gradient_state.end_of_dataloader)
        assert accelerate.gradient_state.active_dataloader is None
        found["logits"] = torch.cat(found["logits"])
        return found


@pytest.mark.parametrize("split_batches", [False, True], ids=["a rank's batch", "global batch"])
@pytest.mark.parametrize("plan", [TP2, DP2, PP2], ids=["tp2", "dp2", "pp2"])
def test_each_row_is_gathered_once_and_in_order(plan: dict[str, Any], split_batches: bool, pool2: Any) -> None:
    # 9 rows: at a global batch of 4 the last has one row, of which one rank of dp gets a copy that must not count.
    batch_size = 2 if plan is DP2 and not split_batches else 4
    found = pool2.run(evaluate, plan, 9, batch_size, split_batches=split_batches)
    model = build("llama").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.stack([row["input_ids"] for row in numbered(9)])).logits[:, -1]
    for rank in found:
        assert rank["numbers"] == list(range(9))
        assert rank["texts"] == [f"row {i}" for i in range(9)]
        assert rank["ends"] == [False, False, True]
        if not (
            split_batches and plan is DP2
        ):  # there, each rank has 4 copies of the mean for 2 rows, as in accelerate
            assert len(rank["losses"]) == 9
        # 1e-5: float32 sums in another order; another row's logits differ by 0.1 and more.
        torch.testing.assert_close(rank["logits"], logits, rtol=1e-5, atol=1e-5)


def test_a_full_last_batch_may_have_more_values_than_rows(pool2: Any) -> None:
    for rank in pool2.run(evaluate, DP2, 8, 4, split_batches=True):
        assert rank["words"] == [4 * 6, 4 * 6]


def gather_ragged(plan: dict[str, Any]) -> Any:
    with accelerator() as accelerate:
        prepare(accelerate, build("llama"), config=config(plan))
        return accelerate.gather_for_metrics(torch.zeros(2, 3 + accelerate.process_index))


def test_rows_of_other_lengths_name_what_pads_them(pool2: Any) -> None:
    errors = pool2.run_expecting_error(gather_ragged, DP2)
    assert all(kind == "ValueError" and "accelerator.pad_across_processes" in message for kind, message in errors)


def clip_value(plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    with accelerator() as accelerate:
        model = build("llama")
        loader = DataLoader(dataset(4), batch_size=4 // plan.get("dp", 1))
        model, _, loader = prepare(accelerate, model, make_optimizer(model), loader, config=config(plan))
        for batch in loader:
            accelerate.backward(model(**batch).loss)
        accelerate.clip_grad_value_(model.parameters(), 1e-2)
        return mw.full_gradients(model)


@pytest.mark.parametrize("plan", [SP_DP_ZERO, {**PP2, "tp": 2}], ids=["dp2xtp2", "pp2xtp2"])
def test_clip_grad_value_clips_shards(plan: dict[str, Any], pool4: Any) -> None:
    gradients = pool4.run(clip_value, plan)[0]
    model = build("llama")
    batch = {name: torch.stack([row[name] for row in dataset(4)]) for name in ("input_ids", "labels")}
    model(**batch).loss.backward()
    assert any(p.grad.abs().max() > 2e-2 for p in model.parameters()), "clipping changes something"
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    for name, parameter in model.named_parameters():
        # 1e-6: gradients of float32 here are up to 1; unclipped they would be off by 1e-2 and more.
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def accumulate_by_hand(plan: dict[str, Any]) -> tuple[list[bool], Any, Any]:
    with accelerator(gradient_accumulation_steps=2) as accelerate:
        model = build("llama")
        loader = DataLoader(dataset(8), batch_size=2)
        model, _, loader = prepare(accelerate, model, make_optimizer(model), loader, config=config(plan))
        unsynced, norms = [], []
        for batch in loader:
            with accelerate.accumulate(model):
                accelerate.backward(model(**batch).loss)
                unsynced.append(any(sync.has_unsynced for sync in runtime_of(model).gradients.syncs))
                norms.append(accelerate.clip_grad_norm_(model.parameters(), 1.0))
        partial = None
        try:
            accelerate.clip_grad_norm_(list(model.parameters())[:2], 1.0)
        except ValueError as error:
            partial = str(error)
        return unsynced, norms, partial


def test_accumulation_communicates_once_a_window(pool2: Any) -> None:
    unsynced, norms, partial = pool2.run(accumulate_by_hand, DP2)[0]
    assert unsynced == [True, False]
    assert norms[0] is None, "there is no global gradient to clip yet"
    assert norms[1] > 0
    assert "2 of these 2 parameters" in partial


def weights_and_wrappers(plan: dict[str, Any], directory: str) -> Any:
    with accelerator(mixed_precision="bf16") as accelerate:
        model = build("llama")
        loader, none = DataLoader(dataset(6), batch_size=2), None
        prepared = prepare(accelerate, loader, model, none, make_optimizer(model), config=config(plan))
        assert prepared[1] is model
        assert prepared[2] is None
        accelerate.save_model(model, directory)
        state = accelerate.get_state_dict(model)
        again = accelerate.prepare(*prepared)
        assert all(one is other for one, other in zip(prepared, again, strict=True)), "a second prepare changes nothing"
        later = accelerate.prepare(DataLoader(dataset(6), batch_size=2))
        assert type(later) is type(prepared[0]), "a loader that comes later is put on the mesh too"
        batch = next(iter(later))
        logits = model.eval()(**batch).logits
        assert accelerate.unwrap_model(model) is model
        accelerate.unwrap_model(model, keep_fp32_wrapper=False)
        assert find_chain(model) is not None  # accelerate takes its own wrapper off, and leaves ours
        assert len(accelerate._models) == len(accelerate._optimizers) == 1
        return state, logits.dtype, model(**batch).logits.dtype, len(batch["labels"])


def test_weights_unwrapping_and_later_prepares(pool2: Any, tmp_path: Any) -> None:
    (state, *rest), (others, *_) = pool2.run(weights_and_wrappers, TP2, tmp_path)
    assert others == {}
    expected = build("llama").state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected), "whole, and to the bit"
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], expected[name]) for name in expected), "accelerator.save_model"
    assert rest == [torch.float32, torch.float32, 2], "bf16 inside, float32 outside, as in accelerate"


def save_with_hooks(plan: dict[str, Any], directory: str) -> list[str]:
    """A user's hook that takes the models out, and a loader that skips what it had seen."""
    with accelerator() as accelerate:
        model = build("llama")
        loader = DataLoader(dataset(12), batch_size=2)
        model, loader = prepare(accelerate, model, loader, config=config(plan))
        handle = accelerate.register_save_state_pre_hook(lambda models, weights, _: weights.clear())
        next(iter(loader))
        accelerate.save_state(directory)
        handle.remove()
        assert loader.state_dict()["samples"] == 2
        first = [batch["input_ids"] for batch in accelerate.skip_first_batches(loader, 4)]
        assert len(first) == 2
        assert torch.equal(first[0][0], dataset(12)[8]["input_ids"])
        assert isinstance(loader.sampler, SequentialSampler) and len(loader.batch_sampler) == 6
        with pytest.raises(mw.PlanError, match=r"accelerator\.skip_first_batches\(loader, n\) in place"):
            next(iter(skip_first_batches(loader, 4)))
        return sorted(os.listdir(directory))


def test_hooks_of_the_user_and_skipping(pool2: Any, tmp_path: Any) -> None:
    assert "meshwright_0" not in pool2.run(save_with_hooks, TP2, tmp_path)[0], "the hook has taken the model out"


class Stream(IterableDataset):
    """Rows without numbers or a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(dataset(10))


def stream_and_evaluate() -> Any:
    with accelerator(gradient_accumulation_steps=2) as accelerate:
        model = build("llama")
        loaders = DataLoader(Stream(), batch_size=2), DataLoader(dataset(5), batch_size=2)
        model, loader, test_loader = prepare(accelerate, model, *loaders, config=config(DP2))
        seen = []
        for batch in loader:
            with accelerate.accumulate(model):
                accelerate.backward(model(**batch).loss)
            rows = 0
            for held_out in test_loader:
                with torch.no_grad():
                    rows += len(accelerate.gather_for_metrics(model(**held_out).logits))
            state = accelerate.gradient_state
            seen.append((len(batch["labels"]), state.sync_gradients, state.end_of_dataloader, rows))
        for _ in loader:
            break
        for rebuilt in (skip_first_batches(loader, 2), DataLoader(loader.dataset, batch_size=2)):
            with pytest.raises(mw.PlanError, match="the Stream of a loader that a plan distributes is iterated"):
                next(iter(rebuilt))
        return seen, [len(batch["labels"]) for batch in accelerate.skip_first_batches(loader, 2)]


def test_evaluation_inside_an_epoch_of_a_stream(pool2: Any) -> None:
    # 10 rows, 4 a step: the window that the end of the loader cuts short is a step too.
    seen, skipped = pool2.run(stream_and_evaluate)[0]
    assert seen == [(2, False, False, 5), (2, True, False, 5), (1, True, True, 5)]
    assert skipped == [1], "the break before it ended another epoch"


def pick() -> tuple[mw.ParallelPlan, int, list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    with (
        accelerator() as accelerate,
        temporarily(logging.getLogger("meshwright.choose.picked_plan"), handlers=[handler]),
    ):
        model = build("llama")
        objects = (model, make_optimizer(model), DataLoader(dataset(8), batch_size=2))
        model, _, loader = prepare(accelerate, *objects)
        return mw.plan_of(model), len(loader), told


def test_a_plan_is_picked_for_the_batch_that_it_makes(pool2: Any) -> None:
    (plan, steps, told), other = pool2.run(pick)
    assert (plan, steps, []) == other
    assert len(told) == 1 and f"picked {plan.label}" in told[0] and f", {2 * plan.dp} x " in told[0]
    assert plan.world_size == 2
    assert steps == 8 // (2 * plan.dp)


def prepare_plainly(plan: dict[str, Any]) -> tuple[str, str, bool]:
    activate(config(plan))
    try:
        with accelerator() as accelerate:
            model = build("llama")
            model, loader = accelerate.prepare(model, DataLoader(dataset(4), batch_size=2))
            other = accelerate.prepare(torch.nn.Linear(2, 2))
            return type(loader).__name__, type(other).__name__, mw.plan_of(model) == mw.ParallelPlan(**plan)
    finally:
        deactivate()


def test_activate_is_for_causal_lms_and_reversible(pool2: Any) -> None:
    before = Accelerator.prepare
    for rank in pool2.run(prepare_plainly, TP2):
        assert rank == ("PlannedLoader", "DistributedDataParallel", True)
    activate()
    activate()
    deactivate()
    assert Accelerator.prepare is before


def test_one_cycle_ends_at_its_end() -> None:
    with accelerator() as accelerate:
        model = build("llama")
        optimizer = make_optimizer(model)
        scheduler = OneCycleLR(optimizer, max_lr=1e-3, total_steps=3)
        _, optimizer, scheduler = prepare(accelerate, model, optimizer, scheduler, config=config({}))
        scheduler.batches = 2  # as under dp=2, where 3 batches are one and a half steps
        for _ in range(2):
            optimizer.step()
            scheduler.step()


def launched(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(count))


ROOT = Path(__file__).parents[2]


def run_example(*arguments: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        accelerate_train.main(list(arguments))
    forget()
    return output.getvalue()


@pytest.mark.crossing
def test_the_example_trains_and_goes_on_under_another_plan(pool4: Any, pool2: Any, tmp_path: Any) -> None:
    first, *others = pool4.run(run_example, "--tp", "2", "--dp", "2", "--state", str(tmp_path))
    assert set(others) == {""}
    second = pool2.run(run_example, "--dp", "2", "--state", str(tmp_path), "--resume")[0]
    assert all(output.count("30 of 30 rows right") == 2 for output in (first, second))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first + second)]
    assert losses == sorted(losses, reverse=True), "the second run goes on where the first ended"
    assert len(Path(accelerate_train.__file__).read_text().splitlines()) < 80


def launch(python: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Two CPU processes by accelerate's own launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(ROOT / part) for part in ("plugin", "integrations", "tests", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    launcher = [str(python), "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    options = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    arguments = [*launcher, *options, "--main_process_port", str(port), *command]
    return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("script", [crossing("test_script"), nightly("test_sync")])
def test_accelerates_own_scripts_pass_on_our_runtime(script: str, preloaded_python: Path) -> None:
    # Every model that they prepare is data-parallel by a plan, in place of DDP; other objects are accelerate's.
    done = launch(preloaded_python, "-m", "support.with_plugin", script)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    planned = re.findall(r"models by the plan: (\d+)\n", done.stdout)  # perhaps amid another rank's line
    assert len(planned) == 2, done.stdout[-2000:]
    assert all(int(count) >= 3 for count in planned), "the scripts have used the plugin"


class TestBadInput:
    """Each error names both settings, and leaves the objects as they were."""

    @pytest.fixture
    def accelerate(self) -> Any:
        with accelerator() as made:
            yield made

    def test_a_launch_that_the_accelerator_does_not_see(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with accelerator() as accelerate:
            launched(2, monkeypatch)
            with pytest.raises(PlanError, match=r"2 processes were launched, but this Accelerator has 1.*cpu=True"):
                prepare(accelerate, build("llama"))

    def test_objects_that_accelerate_prepared(self, accelerate: Any) -> None:
        model = build("llama")
        with pytest.raises(AlreadyDistributedError, match=r"the model was already prepared by accelerator\.prepare"):
            prepare(accelerate, accelerate.prepare(model), config=config({}))
        optimizer = accelerate.prepare(make_optimizer(build("llama")))
        with pytest.raises(AlreadyDistributedError, match="the optimizer was already prepared"):
            prepare(accelerate, build("llama"), optimizer, config=config({}))
        loader = accelerate.prepare(DataLoader(dataset(2)))
        with pytest.raises(AlreadyDistributedError, match="a loader was already prepared"):
            prepare(accelerate, build("llama"), loader, config=config({}))

    @pytest.mark.parametrize(
        ("variable", "name"),
        [
            ("ACCELERATE_USE_FSDP", "FullyShardedDataParallelPlugin.*zero_stage=1"),
            ("ACCELERATE_USE_DEEPSPEED", r"DeepSpeedPlugin.*zero_stage=1.*meshwright_hf\.deepspeed\.deepspeed_mpu"),
            ("ACCELERATE_USE_MEGATRON_LM", "MegatronLMPlugin.*tp=1, pp=1"),
        ],
    )
    def test_engines(self, accelerate: Any, variable: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(variable, "true")
        with pytest.raises(PlanError, match=name):
            prepare(accelerate, build("llama"), config=config({"zero_stage": 1}))

    def test_parallelism_config(self, accelerate: Any) -> None:
        sizes = SimpleNamespace(tp_size=4, cp_size=1, sp_size=1, dp_replicate_size=1, dp_shard_size=1)
        accelerate.state.parallelism_config = sizes
        with pytest.raises(PlanError, match=r"ParallelismConfig has tp_size=4, but the plan has tp=1"):
            prepare(accelerate, build("llama"), config=config({}))
        sizes.tp_size, sizes.dp_shard_size = 1, 2
        with pytest.raises(PlanError, match=r"dp_replicate_size x dp_shard_size=2, but the plan has dp=1"):
            prepare(accelerate, build("llama"), config=config({}))

    def test_float8(self) -> None:
        with accelerator() as accelerate:
            accelerate.state._mixed_precision = "fp8"
            with pytest.raises(PlanError, match="mixed_precision='fp8'"):
                prepare(accelerate, build("llama"), config=config({}))

    def test_dispatched_batches(self) -> None:
        with (
            accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)) as accelerate,
            pytest.raises(PlanError, match=r"dispatch_batches=True.*source='leader'"),
        ):
            prepare(accelerate, build("llama"), config=config({}))

    def test_a_compiled_model(self) -> None:
        with (
            accelerator(dynamo_backend="eager") as accelerate,
            pytest.raises(PlanError, match=r"dynamo_backend='EAGER'"),
        ):
            prepare(accelerate, build("llama"), config=config({}))

    def test_device_map_and_quantised_weights(self, accelerate: Any) -> None:
        model = build("llama")
        model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1}
        with pytest.raises(PlanError, match=r"device_map over 0, 1"):
            prepare(accelerate, model, config=config({}))
        model = build("llama")
        model.is_quantized, model.quantization_method = True, "bitsandbytes"
        with pytest.raises(PlanError, match=r"quantised \(bitsandbytes\)"):
            prepare(accelerate, model, config=config({}))

    def test_what_there_is_to_prepare(self, accelerate: Any) -> None:
        with pytest.raises(PlanError, match="the first argument of prepare is the Accelerator"):
            prepare(build("llama"))  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="prepare needs a model"):
            prepare(accelerate, DataLoader(dataset(2)))
        with pytest.raises(PlanError, match="prepare got 2 models"):
            prepare(accelerate, build("llama"), build("llama"), config=config({}))
        model = build("llama")
        prepare(accelerate, model, config=config({}))
        with pytest.raises(PlanError, match="prepared together with it"):
            prepare(accelerate, make_optimizer(model))

    def test_a_bad_loader_changes_nothing(self, accelerate: Any) -> None:
        model = build("llama")
        with pytest.raises(ValueError, match="dataset is empty"):
            prepare(accelerate, model, DataLoader(dataset(2)), DataLoader([], sampler=[]), config=config({}))
        prepare(accelerate, model, config=config({}))
        assert type(accelerate).__name__ == "PlannedAccelerator"

    def test_checkpoints_of_others(self, accelerate: Any, tmp_path: Any) -> None:
        model = build("llama")
        accelerate.prepare(build("llama"))
        accelerate.save_state(tmp_path / "stock")
        accelerate.free_memory()
        optimizer = make_optimizer(model)
        objects = (model, optimizer, DataLoader(dataset(2)), LambdaLR(optimizer, lambda _: 1.0))
        prepare(accelerate, *objects, config=config({}))
        with pytest.raises(ValueError, match="safe_serialization=False"):
            accelerate.save_state(tmp_path / "pickled", safe_serialization=False)
        accelerate.save_state(tmp_path / "own")
        prepare(accelerate, DataLoader(dataset(2)))
        with pytest.raises(ValueError, match=r"has the state of 1 loader\(s\), but this Accelerator has 2"):
            accelerate.load_state(tmp_path / "own")
        with pytest.raises(ValueError, match=r"by accelerate.s own class, and has no scheduler.bin, optimizer.bin"):
            accelerate.load_state(tmp_path / "stock")
