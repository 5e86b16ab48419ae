"""Stock ``from_pretrained`` with a DistributedConfig, and ``register()``: the numbers of one process.

Tolerance 1e-10 relative to a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a
sum, and three AdamW steps divide tiny differences by tiny moments.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import meshwright as mw
import meshwright_hf
from meshwright.optim.runtime import Runtime
from meshwright.parallel.gradients.buckets import Bucket
from meshwright.parallel.shards.stand_in import own_shape
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.parity import crossed
from support.reference import LENGTH, ROWS, Result, dataset, make_optimizer
from support.replicas import uncompared
from support.tiers import crossings
from support.traffic import Traffic

TOLERANCE = 1e-10
STEPS = 3
SP = {"tp_size": 2, "enable_sequence_parallel": True}

# What each checkpoint is for: names of q/k norms in files with an index; tied weights without a head in the file; a
# head of other values in a tied model's file, whose names lack that of the base model.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen3, several files": {"family": "qwen3", "max_shard_size": "40KB"},
    "llama, tied, one kv head": {"family": "llama", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama, tied, a head of its own": {"family": "llama", "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A float64 checkpoint of each kind."""
    paths = {}
    for name, options in CHECKPOINTS.items():
        options = dict(options)
        limit = options.pop("max_shard_size", "1GB")
        path = tmp_path_factory.mktemp("checkpoint")
        build(options.pop("family"), **options).double().save_pretrained(path, max_shard_size=limit)
        paths[name] = str(path)
    file = Path(paths["llama, tied, a head of its own"], "model.safetensors")
    weights = {name.removeprefix("model."): weight for name, weight in load_file(file).items()}
    save_file({**weights, "lm_head.weight": weights["embed_tokens.weight"].flip(0)}, file, {"format": "pt"})
    assert len(list(Path(paths["qwen3, several files"]).glob("*.safetensors"))) > 1
    return paths


@contextlib.contextmanager
def registered(**options: Any) -> Iterator[None]:
    meshwright_hf.register(**options)
    try:
        yield
    finally:
        meshwright_hf.unregister()


def train(
    path: str, asked: dict[str, int] | None, later: dict[str, Any] | None, out: str, *, sums_copies: bool = True
) -> Result:
    """Three clipped AdamW steps; without ``asked`` one process and stock everything."""
    result = Result()
    average = Bucket.average_copies
    if not sums_copies:
        Bucket.average_copies = lambda *_: None  # type: ignore[method-assign]
    try:
        with Float64(), registered(), contextlib.nullcontext() if sums_copies else uncompared():
            options = {} if asked is None else {"distributed_config": DistributedConfig(**asked)}
            model = AutoModelForCausalLM.from_pretrained(path, **options).train()
            optimizer = make_optimizer(model)
            loader: Any = DataLoader(dataset(STEPS), batch_size=ROWS)
            if asked is not None:
                plan = None if later is None else mw.ParallelPlan(**later)
                config = mw.ToDistributedConfig(plan=plan)
                model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
            for batch in loader:
                loss = model(**batch).loss
                loss.backward()
                result.losses.append(loss.item())
                if not result.norms:
                    whole = {n: p.grad.clone() for n, p in model.named_parameters()} if asked is None else None
                    result.first_gradients = whole or mw.full_gradients(model)
                clip = torch.nn.utils.clip_grad_norm_ if asked is None else mw.clip_grad_norm_
                result.norms.append(clip(model.parameters() if asked is None else model, 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
            model.save_pretrained(out)
    finally:
        Bucket.average_copies = average  # type: ignore[method-assign]
    return result


def differences(actual: Result, expected: Result, out: Path, reference_out: Path) -> dict[str, float]:
    assert len(actual.losses) == len(expected.losses) == STEPS
    assert actual.first_gradients.keys() == expected.first_gradients.keys()
    ours, stock = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, reference_out))
    pairs = (zip(actual.losses, expected.losses, strict=True), zip(actual.norms, expected.norms, strict=True))
    losses, norms = (max(abs(a - b) / b for a, b in pair) for pair in pairs)
    return {
        "losses": losses,
        "norms": norms,
        "gradients": max(
            relative_difference(actual.first_gradients[name], grad) for name, grad in expected.first_gradients.items()
        ),
        "saved weights": max(relative_difference(ours[name], weight) for name, weight in stock.items()),
    }


PP_LATER = {"pp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1, "gradient_accumulation_steps": 2}

# What DistributedConfig says beside tp_size=2 with sequence parallelism, and the plan that the optimizer brings.
ASKED: dict[str, tuple[dict[str, int], dict[str, Any] | None]] = {
    "tp2": ({}, None),
    "dp2xtp2, zero1 later": ({"dp_replicate_size": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}),
    "fsdp2xtp2": ({"fsdp_size": 2}, None),
    "pp2": ({"pp_size": 2, "tp_size": 1, "enable_sequence_parallel": False}, None),
    "pp2xtp2, other micro-batches later": ({"pp_size": 2}, PP_LATER),
}


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    crossings(
        crossed(CHECKPOINTS, ASKED),
        but=[
            ("qwen3, several files", "dp2xtp2, zero1 later"),
            ("llama, tied, one kv head", "pp2xtp2, other micro-batches later"),
            ("llama, tied, a head of its own", "pp2"),
        ],
        quick=[("llama, tied, one kv head", "tp2")],
    ),
)
def test_equals_one_process(
    checkpoint: str, name: str, checkpoints: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = checkpoints[checkpoint]
    expected = train(path, None, None, str(tmp_path / "stock"))
    asked, later = ASKED[name]
    asked = {**SP, **asked}
    world = math.prod(size for key, size in asked.items() if key.endswith("_size"))
    ranks = request.getfixturevalue(f"pool{world}").run(train, path, asked, later, str(tmp_path / "ours"))
    found = differences(ranks[0], expected, tmp_path / "ours", tmp_path / "stock")
    assert max(found.values()) <= TOLERANCE, found
    assert all(rank.losses == ranks[0].losses and rank.norms == ranks[0].norms for rank in ranks)


def test_a_wrong_gradient_would_be_caught(checkpoints: dict[str, str], tmp_path: Path, pool2: Any) -> None:
    path = checkpoints["qwen3, several files"]
    expected = train(path, None, None, str(tmp_path / "stock"))
    ranks = pool2.run(train, path, SP, None, str(tmp_path / "ours"), sums_copies=False)
    found = differences(ranks[0], expected, tmp_path / "ours", tmp_path / "stock")
    assert found["gradients"] > 1e-2, found


def micro_batches_after(path: str, out: str) -> tuple[list[float], Any]:
    """A plan that says more than the model's: micro-batches and recomputation, which need no optimizer."""
    with Float64(), registered():
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**SP)).train()
        plan = mw.ParallelPlan(tp=2, sequence_parallel=True, gradient_accumulation_steps=2, recompute="full")
        config = mw.ToDistributedConfig(plan=plan)
        loader = DataLoader(dataset(1), batch_size=ROWS)
        # Loaders alone may come as often as there are some, an optimizer once.
        _, _, evaluation = mw.to_distributed(model, None, loader)
        model, _, loader = mw.to_distributed(model, torch.optim.SGD(model.parameters()), loader, config=config)
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
        assert len(list(evaluation)) == 1 and model.model.layers[0].gradient_checkpointing and mw.plan_of(model) == plan
        return losses, mw.full_gradients(model)


def test_a_later_plan_adds_micro_batches(checkpoints: dict[str, str], tmp_path: Path, pool2: Any) -> None:
    path = checkpoints["qwen3, several files"]
    expected = train(path, None, None, str(tmp_path))
    losses, gradients = pool2.run(micro_batches_after, path, str(tmp_path))[0]
    assert abs(losses[0] - expected.losses[0]) / losses[0] <= TOLERANCE
    worst = max(relative_difference(gradients[n], g) for n, g in expected.first_gradients.items())
    assert worst <= TOLERANCE


def traffic_of(path: str, asked: dict[str, int], take_over: str | None) -> tuple[dict[str, int], dict[str, Any]]:
    """Collectives of one forward pass, and what the model says of itself; ``take_over`` None: not registered."""
    context = contextlib.nullcontext() if take_over is None else registered(take_over=take_over)
    with context:
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**asked)).train()
    ids = tokens(ROWS, LENGTH)
    with Traffic() as traffic:
        model(input_ids=ids, labels=ids)
    said = {
        "tp_size": model.tp_size,
        "by transformers": model.is_distributed_loading_by_transformers,
        "config": getattr(model.config, "distributed_config", None) is not None,
        "ours": isinstance(vars(model).get("_meshwright"), Runtime),
        "rows of q": own_shape(model.model.layers[0].self_attn.q_proj.weight)[0],
    }
    return dict(traffic.calls), said


def test_the_flag_means_reduce_scatter_in_place_of_all_reduce(checkpoints: dict[str, str], pool2: Any) -> None:
    path = checkpoints["qwen3, several files"]
    calls, said = pool2.run(traffic_of, path, SP, "sequence_parallel")[0]
    # Two layers with two of each; one gather more after the last norm and one in the loss; the embedding's sum.
    assert calls == {"reduce_scatter": 4, "all_gather": 6, "all_reduce": 1}
    # For whoever looks, it is a model that transformers has not touched.
    ours = {"tp_size": None, "by transformers": False, "config": False, "ours": True, "rows of q": 16}
    assert said == ours
    calls, said = pool2.run(traffic_of, path, {"tp_size": 2}, "all")[0]
    assert "reduce_scatter" not in calls and calls["all_reduce"] == 5 and said == ours


@pytest.mark.parametrize(("asked", "take_over"), [(SP, None), ({"tp_size": 2}, "sequence_parallel")])
def test_what_is_not_taken_over_is_transformers_own(
    asked: dict[str, int], take_over: str | None, checkpoints: dict[str, str], pool2: Any
) -> None:
    calls, said = pool2.run(traffic_of, checkpoints["qwen3, several files"], asked, take_over)[0]
    assert "reduce_scatter" not in calls  # without us the flag does nothing
    assert said["tp_size"] == 2 and said["by transformers"] and said["config"] and not said["ours"]


def load(path: str, *, truncated_on: int | None = None, **options: Any) -> None:
    if truncated_on is not None and dist.get_rank() == truncated_on:
        path += "-truncated"
    with registered():
        AutoModelForCausalLM.from_pretrained(path, **{"distributed_config": DistributedConfig(**SP), **options})


def test_checkpoints_that_do_not_fit_are_errors_on_every_rank(tmp_path: Path, pool2: Any) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))
    for kind, message in pool2.run_expecting_error(load, str(tmp_path / "other")):
        assert kind == "CheckpointError" and "layers.0.mlp.up_proj.weight: [48, 32] in the checkpoint" in message

    model.save_pretrained(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "good-truncated")
    weights = tmp_path / "good-truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    kinds = [kind for kind, _ in pool2.run_expecting_error(load, str(tmp_path / "good"), truncated_on=1)]
    assert kinds[1] == "CheckpointError" and len(kinds) == 2

    for _, message in pool2.run_expecting_error(load, str(tmp_path / "good"), distributed_config=mw.ParallelPlan(tp=4)):
        assert "needs 4 processes, but 2 were launched" in message
    four = DistributedConfig(tp_size=4, enable_sequence_parallel=True)
    for kind, message in pool2.run_expecting_error(load, str(tmp_path / "good"), distributed_config=four):
        assert kind == "PlanError" and "tp_size=4 x pp_size=1 x fsdp_size=1 x" in message


def wrap(path: str) -> None:
    with registered():
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**SP))
    before = model.lm_head.weight.clone()
    try:
        DistributedDataParallel(model)
    finally:
        assert torch.equal(model.lm_head.weight.as_subclass(torch.Tensor), before.as_subclass(torch.Tensor))


def test_who_would_wrap_it_in_ddp_is_told(checkpoints: dict[str, str], pool2: Any) -> None:
    # Without the refusal it broadcasts the first rank's shards to all ranks.
    for kind, message in pool2.run_expecting_error(wrap, checkpoints["llama, tied, one kv head"]):
        assert kind == "AlreadyDistributedError" and "from meshwright_hf.accelerate import Accelerator" in message


def dtype_of(path: str, dtype: torch.dtype) -> tuple[torch.dtype, torch.Tensor]:
    with registered():
        plan = mw.ParallelPlan(tp=2)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=plan)
    weights = mw.full_state_dict(model)
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert weights == {} or all(w.dtype is dtype for w in weights.values())
    return model.dtype, logits


def test_dtype_converts_as_transformers_does(checkpoints: dict[str, str], pool2: Any) -> None:
    path = checkpoints["llama, tied, one kv head"]
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = stock(input_ids=tokens(2, LENGTH)).logits
    found, logits = pool2.run(dtype_of, path, torch.bfloat16)[0]
    # bfloat16 has 8 bits, and partial sums are rounded once more: 2 roundings of 2^-8 in each of 4 blocks.
    assert found is torch.bfloat16 and relative_difference(logits, expected) < 8 * 2**-8


def stock_with_styles(path: str, tp_size: int, styles: dict[str, str] | None) -> tuple[Any, Any, int]:
    """transformers' own tensor parallelism over two accumulated passes: losses, gradients, words of its logits."""
    widths: list[int] = []
    with Float64(), registered():
        asked = DistributedConfig(tp_size=tp_size, tp_plan=styles)
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=asked).train()
        losses = []
        for seed in (1, 2):
            ids = tokens(ROWS, LENGTH, seed=seed)
            output = model(input_ids=ids, labels=labels_for(ids))
            with torch._C.DisableTorchFunctionSubclass():  # our logits refuse to be read
                widths.append(output.logits.shape[-1])
            output.loss.backward()
            losses.append(output.loss.item())
        gradients = {n: _whole(p.grad) for n, p in model.named_parameters()}
        model.eval()
        with torch.no_grad():
            assert model(input_ids=ids).logits.shape == (ROWS, LENGTH, 97)
    return losses, gradients, widths[0]


def _whole(grad: Any) -> torch.Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()


def test_our_styles_in_transformers_own_tp_plan(checkpoints: dict[str, str], pool2: Any) -> None:
    path = checkpoints["qwen3, several files"]
    norms = {f"model.layers.*.self_attn.{name}": "meshwright_partial_norm" for name in ("q_norm", "k_norm")}
    losses, gradients, _ = stock_with_styles(path, 1, None)
    ours = pool2.run(stock_with_styles, path, 2, {**norms, "lm_head": "meshwright_vocab_head"})
    for rank, words in zip(ours, (49, 48), strict=True):
        assert rank[2] == words  # of 97: no rank holds the logits of all
        assert max(abs(a - b) / b for a, b in zip(rank[0], losses, strict=True)) <= TOLERANCE
        assert max(relative_difference(rank[1][name], grad) for name, grad in gradients.items()) <= TOLERANCE
    # What the first style is for: transformers' own sums the first pass's gradient twice.
    theirs = pool2.run(stock_with_styles, path, 2, None)[0][1]
    wrong = {n.rpartition(".")[0][-6:] for n, g in gradients.items() if relative_difference(theirs[n], g) > 1e-2}
    assert wrong == {"q_norm", "k_norm"}
