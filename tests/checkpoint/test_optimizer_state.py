"""An optimizer's state saved under one plan goes on under any other, with the numbers of a run that never stopped."""

from __future__ import annotations

import itertools
import re
import shutil
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import meshwright as mw
from meshwright.checkpoint.files import disk
from meshwright.optim.owners import parts_of
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.optimizer_files import contents
from support.tiers import crossings

ONE: dict[str, Any] = {}
PLANS: dict[str, dict[str, Any]] = {
    "one": ONE,
    "dp2": {"dp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2+zero1": {"dp": 2, "zero_stage": 1},
    "tp2xdp2+zero1": {"dp": 2, "tp": 2, "zero_stage": 1},
    "tp2+spxdp2+zero3": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 3},
    "pp2xdp2+zero1": {"pp": 2, "dp": 2, "zero_stage": 1},
}
# One key head for two ranks, biases, a tied and uneven vocabulary: every way to cut and to copy.
TRAITS = {"num_key_value_heads": 1, "tie_word_embeddings": True}
BEFORE, AFTER = 3, 2
Run = tuple[list[float], dict[str, Tensor]]


def batches() -> list[dict[str, Tensor]]:
    ids = [tokens(4, 12, seed=step + 1) for step in range(BEFORE + AFTER)]
    return [{"input_ids": x, "labels": labels_for(x)} for x in ids]


class Training:
    """A model with a frozen norm and an optimizer of three groups; without a plan as they are."""

    def __init__(
        self,
        plan: dict[str, Any],
        *,
        seed: int = 0,
        lr: float = 1e-2,
        family: str = "llama",
        dtype: torch.dtype = torch.float64,
        kind: type = torch.optim.AdamW,
        options: dict[str, Any] | None = None,
        **traits: Any,
    ):
        self.model: Any = build(family, seed=seed, **{**TRAITS, **traits}).to(dtype)
        decoder = self.model.model
        decoder.layers[0].post_attention_layernorm.requires_grad_(False)
        first = [p for p in decoder.layers[0].parameters() if p.ndim > 1]
        chosen = {id(p) for p in first}
        rest = [p for p in self.model.parameters() if id(p) not in chosen]
        groups = [
            {"params": first, "lr": lr / 2, "weight_decay": 0.1},
            {"params": [p for p in rest if p.ndim > 1]},
            {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = kind(groups, lr=lr, **(options or {}))
        self.batches: Any = batches()
        if plan:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), bucket_size_mb=0.01)
            self.model, self.optimizer, self.batches = mw.to_distributed(
                self.model, self.optimizer, self.batches, config=config
            )

    def run(self, start: int, stop: int) -> list[float]:
        losses = []
        for step, batch in enumerate(self.batches):
            if start <= step < stop:
                loss = self.model(**batch).loss
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
        return losses


def uninterrupted(**options: Any) -> Run:
    with Float64():
        training = Training(ONE, **options)
        training.run(0, BEFORE)
        return training.run(BEFORE, BEFORE + AFTER), mw.full_state_dict(training.model)


def start_and_save(plan: dict[str, Any], folder: Path, **options: Any) -> None:
    with Float64():
        training = Training(plan, **options)
        training.run(0, BEFORE)
        training.model.save_pretrained(folder)
        mw.save_optimizer(training.model, training.optimizer, folder / "optimizer")


def resume(plan: dict[str, Any], folder: Path, *, loads: bool = True, **options: Any) -> Run:
    """Another seed and other rates: everything comes from the folder."""
    with Float64():
        training = Training(plan, seed=1, lr=1.0 if loads else 1e-2, **options)
        mw.load_weights(training.model, folder)
        if loads:
            mw.load_optimizer(training.model, training.optimizer, folder / "optimizer")
        return training.run(BEFORE, BEFORE + AFTER), mw.full_state_dict(training.model)


def on(plan: dict[str, Any], pools: dict[int, Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """Rank 0's result under a plan; one process without a launcher for the empty one."""
    size = mw.ParallelPlan(**plan).world_size
    return pools[size].run(function, plan, *args, **kwargs)[0] if plan else function(plan, *args, **kwargs)


@pytest.fixture(scope="module")
def pools(pool2: Any, pool4: Any) -> dict[int, Any]:
    return {2: pool2, 4: pool4}


@pytest.fixture(scope="module")
def saves(pools: dict[int, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """What each plan wrote after the first steps."""
    root = tmp_path_factory.mktemp("saves")
    for name, plan in PLANS.items():
        on(plan, pools, start_and_save, root / name)
    yield {name: root / name for name in PLANS}
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def expected() -> Run:
    return uninterrupted()


def difference(actual: Run, wanted: Run) -> float:
    """The largest of the losses' and of the weights' relative differences."""
    (losses, weights), (wanted_losses, wanted_weights) = actual, wanted
    assert weights.keys() == wanted_weights.keys()
    of_losses = relative_difference(torch.tensor(losses).double(), torch.tensor(wanted_losses).double())
    return max(of_losses, *(relative_difference(weights[name], w) for name, w in wanted_weights.items()))


@pytest.mark.parametrize(
    ("before", "after"),
    crossings(
        itertools.product(PLANS, PLANS),
        but=[*(("tp2+spxdp2+zero3", after) for after in PLANS), ("tp2+sp", "dp2+zero1"), ("pp2xdp2+zero1", "one")],
        quick=[("dp2+zero1", "tp2+sp")],
    ),
)
def test_training_goes_on_exactly(
    before: str, after: str, saves: dict[str, Path], expected: Run, pools: dict[int, Any]
) -> None:
    actual = on(PLANS[after], pools, resume, saves[before])
    # float64, where only the order of sums differs between plans: 1e-16 a sum, which Adam's division by the root of
    # small second moments widens. The state itself passes without a change of a bit.
    assert difference(actual, expected) < 1e-10


def test_zero_on_one_process(saves: dict[str, Path], expected: Run, tmp_path: Path) -> None:
    one = {"zero_stage": 1}
    start_and_save(one, tmp_path)
    for folder in (saves["dp2+zero1"], tmp_path):
        assert difference(resume(one, folder), expected) < 1e-10  # as above


def test_without_the_state_the_numbers_are_others(saves: dict[str, Path], expected: Run) -> None:
    assert difference(resume(ONE, saves["one"], loads=False), expected) > 1e-4


def test_all_plans_write_the_same(saves: dict[str, Path]) -> None:
    manifest, tensors = contents(saves["one"] / "optimizer")
    moments = tensors["state/model.embed_tokens.weight/exp_avg"]
    assert moments.shape == (97, 32) and manifest["values"]["model.embed_tokens.weight"]["step"]["tensor"] == BEFORE
    assert "model.layers.0.post_attention_layernorm.weight" in manifest["groups"][2]["parameters"]
    assert "model.layers.0.post_attention_layernorm.weight" not in manifest["tensors"]
    for name in PLANS:
        other, others = contents(saves[name] / "optimizer")
        assert other == manifest and others.keys() == tensors.keys()
        # As above; a shard in the wrong place would be off by the whole value.
        assert max(relative_difference(others[key], value) for key, value in tensors.items()) < 1e-10


@pytest.mark.parametrize(
    ("kind", "options", "family"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "phi3"),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, "gemma2"),
        (torch.optim.SGD, {}, "llama"),
        (torch.optim.Adagrad, {}, "olmo2"),
        (torch.optim.NAdam, {"foreach": True}, "llama"),
    ],
)
def test_other_optimizers_and_families(
    kind: type, options: dict[str, Any], family: str, pools: dict[int, Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"family": family, "kind": kind, "options": options}
    if family != "llama":
        settings |= {"num_key_value_heads": 2}
    wanted = uninterrupted(**settings)
    on(PLANS["tp2xdp2+zero1"], pools, start_and_save, tmp_path, **settings)
    for plan in ("tp2+sp", "one"):
        # See test_training_goes_on_exactly.
        assert difference(on(PLANS[plan], pools, resume, tmp_path, **settings), wanted) < 1e-10


def bfloat16_run(plan: dict[str, Any], folder: Path, action: str) -> dict[str, Tensor]:
    """Save, or load and save again; what is in the files then."""
    training = Training(plan, seed=int(action == "load"), dtype=torch.bfloat16)
    if action == "save":
        training.run(0, BEFORE)
        training.model.save_pretrained(folder)
    else:
        mw.load_weights(training.model, folder)
        mw.load_optimizer(training.model, training.optimizer, folder / "optimizer")
        folder = folder / "again"
    mw.save_optimizer(training.model, training.optimizer, folder / "optimizer")
    masters = {}
    for name, part in parts_of(training.model, training.optimizer).parts.items():
        if part.has_master and part.key is not None:
            parameter = training.model.get_parameter(name).detach().as_subclass(torch.Tensor)
            masters[name] = (part.key.detach().bfloat16() == part.layout.own(parameter)).all()
    assert all(masters.values()) and bool(masters) == bool(plan.get("zero_stage"))
    return contents(folder / "optimizer")[1]


def test_float32_masters_pass_between_plans(pools: dict[int, Any], tmp_path: Path) -> None:
    saved = on(PLANS["tp2xdp2+zero1"], pools, bfloat16_run, tmp_path, "save")
    name = "model.layers.0.mlp.up_proj.weight"
    master = saved[f"master/{name}"]
    assert master.dtype == torch.float32 and not torch.equal(master, master.bfloat16().float())
    assert torch.equal(load_file(tmp_path / "model.safetensors")[name], master.bfloat16())
    again = on(PLANS["dp2+zero1"], pools, bfloat16_run, tmp_path, "load")
    assert again.keys() == saved.keys() and all(torch.equal(again[key], saved[key]) for key in saved)
    # Where there are no masters, state is of the weights' dtype, as with torch's own load_state_dict.
    halves = on(ONE, pools, bfloat16_run, tmp_path, "load")
    assert halves.keys() == {key for key in saved if key.startswith("state/")}
    assert all(torch.equal(halves[key], saved[key].bfloat16()) for key in halves)


def refused(plan: dict[str, Any], folder: Path, changes: dict[str, Any]) -> None:
    """Loading raises, and leaves the optimizer as it was."""
    training = Training(plan, **{"dtype": torch.float32, **changes})
    training.run(0, 1)
    optimizer = training.optimizer
    before = [(key, {k: torch.as_tensor(v).clone() for k, v in s.items()}) for key, s in dict.items(optimizer.state)]
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        mw.load_optimizer(training.model, optimizer, folder)
    finally:
        assert options == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for (key, state), (other, values) in zip(before, dict.items(optimizer.state), strict=True):
            assert key is other and all(torch.equal(state[k], torch.as_tensor(values[k])) for k in state)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": torch.optim.SGD}, ("AdamW", "SGD")),
        (
            {"intermediate_size": 64},
            ("model.layers.0.mlp.up_proj.weight: [48, 32] in the state, [64, 32] in the model",),
        ),
        ({"num_hidden_layers": 3}, ("model.layers.2.mlp.up_proj.weight is not in the state",)),
    ],
    ids=["another optimizer", "another width", "another depth"],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], words: tuple[str, ...], saves: dict[str, Path], pools: dict[int, Any]
) -> None:
    for _, message in pools[2].run_expecting_error(refused, PLANS["dp2+zero1"], saves["one"] / "optimizer", changes):
        assert all(word in message for word in words), message
    with pytest.raises(mw.CheckpointError):
        refused(ONE, saves["one"] / "optimizer", changes)


def _cut_short(folder: Path) -> None:
    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4])


def _with_another_rate(folder: Path) -> None:
    path = folder / "optimizer.json"
    path.write_bytes(path.read_bytes().replace(b'"lr": 0.0', b'"lr": 0.1'))


def _without_a_file(folder: Path) -> None:
    max(folder.glob("*.safetensors")).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut_short, "bytes, and .* were saved"),
        (_without_a_file, "No such file"),
        (_with_another_rate, "not what was saved"),
        (lambda folder: (folder / "optimizer.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "optimizer.json").write_text("[]"), "damaged"),
        (lambda folder: (folder / "optimizer.json").unlink(), "no optimizer state"),
        (shutil.rmtree, "no optimizer state"),
    ],
)
def test_damage_is_found(damage: Any, words: str, saves: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saves["one"] / "optimizer", tmp_path / "copy")
    damage(folder)
    with pytest.raises(mw.CheckpointError, match=words):
        refused(ONE, folder, {})


def save_on_a_full_disk(folder: Path) -> None:
    training = Training(PLANS["tp2+sp"])
    with Float64():
        training.run(0, 1)
    error = OSError(28, "No space left on device")
    with mock.patch.object(disk.NewFile, "close", side_effect=error) if dist.get_rank() == 1 else nullcontext():
        mw.save_optimizer(training.model, training.optimizer, folder)


def test_a_save_that_fails_leaves_the_last_one(saves: dict[str, Path], pools: dict[int, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(saves["dp2"] / "optimizer", tmp_path / "copy")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    errors = pools[2].run_expecting_error(save_on_a_full_disk, folder)
    assert [kind for kind, _ in errors] == ["OSError", "OSError"]
    assert all("No space left" in message for _, message in errors)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    # And one that succeeds replaces it, with what a killed one may have left.
    (folder / "optimizer-0123abcd-00001-of-00002.safetensors").write_bytes(b"half")
    (folder / "part-00007-0123abcd.safetensors").write_bytes(b"half")
    (folder / "model.safetensors").write_bytes(b"of the program")
    start = Training(ONE)
    mw.save_optimizer(start.model, start.optimizer, folder)
    names = sorted(re.sub("-[0-9a-f]{8}", "", path.name) for path in folder.iterdir())
    assert names == ["model.safetensors", "optimizer.json", "part-00000.json", "part-00000.safetensors"]
    mw.save_checkpoint(folder.with_name("whole"), start.model, start.optimizer)
    with pytest.raises(mw.CheckpointError, match="folder of its own"):
        mw.save_optimizer(start.model, start.optimizer, folder.with_name("whole"))


def peak_while_saving(plan: dict[str, Any], folder: Path) -> tuple[int, int]:
    """The bytes of new tensors that are alive at once, and those of the largest full tensor."""
    with Float64():
        training = Training(plan, vocab_size=1001)
        training.run(0, 1)
    alive: dict[int, int] = {}
    peak = 0
    original = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal peak
        tensor = original(*args, **kwargs)
        alive[id(tensor)] = tensor.untyped_storage().nbytes()
        peak = max(peak, sum(alive.values()))
        weakref.finalize(tensor, alive.pop, id(tensor))
        return tensor

    with mock.patch.object(torch, "empty", counted):
        mw.save_optimizer(training.model, training.optimizer, folder)
    return peak, 8 * max(p.meshwright.shape.numel() for p in training.model.parameters())


def test_no_rank_gathers_a_tensor(pools: dict[int, Any], tmp_path: Path) -> None:
    found = pools[4].run(peak_while_saving, PLANS["tp2xdp2+zero1"], tmp_path)
    # Each of 4 ranks stages the part of a tensor that it writes; there are two while one replaces the other.
    assert all(peak <= 0.6 * largest for peak, largest in found), found


class Wrapper(torch.optim.Optimizer):
    """As accelerate's, which needs an Accelerator."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer


def test_groups_and_wrappers(tmp_path: Path) -> None:
    training = Training(ONE, dtype=torch.float32, options={"fused": True}, lr=torch.tensor(1e-2))
    training.run(0, 1)
    mw.save_optimizer(training.model, Wrapper(training.optimizer), tmp_path)
    again = Training(ONE, dtype=torch.float32, lr=torch.tensor(1.0))
    rate = again.optimizer.param_groups[1]["lr"]
    mw.load_optimizer(again.model, again.optimizer, tmp_path)
    assert rate is again.optimizer.param_groups[1]["lr"] and rate == 1e-2
    assert again.optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    assert again.optimizer.param_groups[1]["fused"] is None  # a way to compute, which stays the new optimizer's
    with pytest.raises(mw.OptimizerMismatchError):
        mw.save_optimizer(again.model, training.optimizer, tmp_path)
    first = again.optimizer.param_groups[0]["params"]
    again.optimizer.param_groups[1]["params"].append(first.pop())
    with pytest.raises(mw.CheckpointError, match="is in group 1 of the optimizer, but in group 0 of the state"):
        mw.load_optimizer(again.model, again.optimizer, tmp_path)
    training.optimizer.state[training.model.lm_head.weight]["what"] = object()
    with pytest.raises(mw.CheckpointError, match=r"'what' of model.embed_tokens.weight is a object"):
        mw.save_optimizer(training.model, training.optimizer, tmp_path)


def test_what_is_left_of_a_save_hides_no_weights(tmp_path: Path) -> None:
    training = Training(ONE)
    training.run(0, 1)
    training.model.save_pretrained(tmp_path)
    mw.save_optimizer(training.model, training.optimizer, tmp_path)
    with pytest.raises(mw.CheckpointError, match="it has an optimizer's state alone"):
        mw.load_checkpoint(tmp_path, training.model, training.optimizer)
    (tmp_path / "optimizer.json").unlink()  # as a first save that is killed leaves the folder
    again = Training(ONE, seed=1)
    mw.load_weights(again.model, tmp_path)
    assert torch.equal(again.model.lm_head.weight, training.model.lm_head.weight)
