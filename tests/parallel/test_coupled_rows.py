"""Rows whose numbers depend on each other, in stock models: an error or a warning where dp splits the batch."""

from __future__ import annotations

import inspect
import logging
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.mixed_rows import POSITIONS, PositionsOfRows
from meshwright.parallel.forward.coupled_rows import CoupledRows
from support.exact import Float64
from support.logs import logged

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION = {**SIZES, "image_size": 16, "patch_size": 4}
TEXT = {**SIZES, "vocab_size": 60, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
ROWS = 4


def program(name: str) -> tuple[Any, dict[str, Any]]:
    """A model whose loss is of no known kind, and a batch."""
    torch.manual_seed(0)
    batch: dict[str, Any] = {"pixel_values": torch.randn(ROWS, 3, 16, 16)}
    if name in ("clip", "siglip"):
        config, kind = {
            "clip": (transformers.CLIPConfig, transformers.CLIPModel),
            "siglip": (transformers.SiglipConfig, transformers.SiglipModel),
        }[name]
        model: nn.Module = kind(config(text_config=TEXT, vision_config=VISION, projection_dim=16))
        ids = torch.randint(3, 50, (ROWS, 8))
        batch |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "return_loss": True}
    elif name == "random":
        decoder = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 32}
        model = transformers.ViTMAEForPreTraining(
            transformers.ViTMAEConfig(**VISION, **decoder, decoder_num_attention_heads=4)
        )
    else:
        model = transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**VISION, encoder_stride=4))
        counts = (5, 3, 4, 4) if name == "alike" else (5, 3, 4, 7)
        batch["bool_masked_pos"] = torch.arange(16) < torch.tensor(counts)[:, None]
    return model.train(), batch


def own_rows(batch: dict[str, Any]) -> dict[str, Any]:
    low = dist.get_rank() * ROWS // 2
    return {name: x[low : low + ROWS // 2] if isinstance(x, Tensor) else x for name, x in batch.items()}


def step(
    plan: dict[str, Any], name: str, draws: Literal["device", "rank"] = "device"
) -> tuple[list[str], dict[str, Tensor]]:
    """What is logged in a step, and whole gradients."""
    with Float64(), logged(level=logging.WARNING) as said:
        model, batch = program(name)
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), draws=draws)
        model = mw.to_distributed(model.double(), config=config)[0]
        batch["pixel_values"] = batch["pixel_values"].double()
        model(**own_rows(batch)).loss.backward()
    return said, mw.full_gradients(model)


def later_step(plan: dict[str, Any]) -> None:
    """A step without the loss, and then one with it."""
    model, batch = program("clip")
    model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
    model(**own_rows(batch) | {"return_loss": False}).logits_per_text.sum().backward()
    model(**own_rows(batch))


def test_a_contrastive_loss_of_a_later_call_is_refused(pool2: Any) -> None:
    for kind, said in pool2.run_expecting_error(later_step, {"dp": 2}):
        assert kind == "PlanError" and "for the same rows twice" in said, said


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_stock_contrastive_loss_is_refused(name: str, pool2: Any) -> None:
    for plan in ({"dp": 2}, {"dp": 2, "zero_stage": 3}):
        for kind, said in pool2.run_expecting_error(step, plan, name):
            assert kind == "PlanError" and "for the same rows twice" in said and "gather_rows" in said, said


def test_a_mean_over_chosen_patches_is_told_of_and_exact_where_they_are_as_many(pool2: Any) -> None:
    (first, _), (second, _) = pool2.run(step, {"dp": 2}, "unlike")
    assert len(first) == 1 and "8 labels or tokens that count on rank 0" in first[0] and "11" in first[0], first
    assert not second  # one rank speaks
    (said, found), _ = pool2.run(step, {"dp": 2}, "alike")
    model, batch = program("alike")
    batch["pixel_values"] = batch["pixel_values"].double()
    model.double()(**batch).loss.backward()
    assert not said
    for name, parameter in model.named_parameters():
        # float64: only the order of sums differs, and the 1e-5 that the model adds to each count
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-9)


def test_random_draws_of_a_forward_are_told_of(pool2: Any) -> None:
    (first, _), (second, _) = pool2.run(step, {"dp": 2}, "random", "rank")
    assert len(first) == 1 and "draws random numbers" in first[0] and not second, first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "added"), [(1.0, 0.0), (1.0, 1e3), (1e-3, 0.0), (1e-6, 0.0), (1e3, 0.0)])
@pytest.mark.parametrize("compares", [True, False])
def test_rows_that_are_compared_are_found_whatever_the_size_of_the_loss(
    compares: bool, scale: float, added: float, dtype: torch.dtype
) -> None:
    """Of a loss, a factor and a constant added; a loss that rounding hides is told of."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(dtype)

    def loss(x: Tensor) -> Tensor:
        logits = (model(x) @ x.T if compares else model(x)).float()
        return F.cross_entropy(logits, torch.arange(len(x)) % ROWS) * scale + added

    check = CoupledRows(model, mw.ParallelPlan(dp=2), BatchFormat(), warns=True)
    check.signature, check.method = inspect.signature(loss), loss
    is_hidden = scale == 1e-6 or (dtype is torch.bfloat16 and (scale, added) in ((1.0, 1e3), (1e-3, 0.0)))
    with logged(level=logging.WARNING) as said:
        if compares and not is_hidden:
            with pytest.raises(mw.PlanError, match="for the same rows twice"):
                check(torch.randn(ROWS, 16, dtype=dtype))
        else:
            check(torch.randn(ROWS, 16, dtype=dtype))
    assert not compares or bool(said) == is_hidden, said


def test_a_sum_over_rows_is_told_as_one() -> None:
    """The default of transformers' CTC heads, whose loss under dp would be the mean of the ranks' sums."""

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x, torch.arange(len(x)) % ROWS, reduction="sum")

    check = CoupledRows(nn.Linear(16, 16), mw.ParallelPlan(dp=2), BatchFormat(), warns=True)
    check.signature, check.method = inspect.signature(loss), loss
    with pytest.raises(mw.PlanError, match=r"is a sum over rows.*ctc_loss_reduction = 'mean'"):
        check(torch.randn(ROWS, 16))


def train_ctc(plan: str | None) -> list[float]:
    """The losses and the norm of three rows of unlike lengths, which two ranks cannot share evenly."""
    layers: dict[str, Any] = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    kinds = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    rates = dict.fromkeys((*kinds, "layerdrop"), 0)
    config = transformers.Wav2Vec2Config(
        **layers, **sizes, **rates, num_feat_extract_layers=2, num_conv_pos_embeddings=4, mask_time_prob=0,
        num_conv_pos_embedding_groups=2, vocab_size=12, feat_extract_norm="layer", ctc_loss_reduction="mean",
    )  # fmt: skip
    with Float64():
        torch.manual_seed(0)
        model: Any = transformers.Wav2Vec2ForCTC(config).double()
        labels = torch.randint(1, 12, (3, 8)).masked_fill(torch.arange(8) >= torch.tensor([[2], [5], [8]]), -100)
        sounds = torch.randn(3, 400, dtype=torch.float64)
        rows = [{"input_values": x, "labels": y} for x, y in zip(sounds, labels, strict=True)]
        loader: Any = DataLoader(rows, batch_size=3)
        if plan is not None:
            options = mw.ToDistributedConfig(plan=plan, loss_averages_over="rows")
            model, _, loader = mw.to_distributed(model, None, loader, config=options)
        (batch,) = loader
        loss = model(**batch).loss
        loss.backward()
        clip = torch.nn.utils.clip_grad_norm_ if plan is None else mw.clip_grad_norm_
        return [loss.item(), float(clip(model.parameters() if plan is None else model, 1e9))]


def test_the_mean_of_a_ctc_head(pool2: Any) -> None:
    """A mean over rows of the loss for each label. transformers computes it in float32; a mean of means is 28% off."""
    for found in pool2.run(train_ctc, "dp2"):
        assert found == pytest.approx(train_ctc(None), rel=1e-6)


class Positions(nn.Module):
    """Counts images from the batch's first row on, or from each row's."""

    def __init__(self, counts_batch: bool):
        super().__init__()
        self.counts_batch = counts_batch

    def get_rope_index(self, input_ids: Tensor, image_grid_thw: Tensor) -> tuple[Tensor, None]:
        images = (input_ids == 9).int()
        count = images.flatten().cumsum(0).view_as(images) if self.counts_batch else images.cumsum(1)
        return torch.stack([count] * 3), None


@pytest.mark.parametrize("counts_batch", [True, False])
def test_positions_that_depend_on_other_rows_are_refused(counts_batch: bool) -> None:
    owner = Positions(counts_batch)
    check = PositionsOfRows(owner, mw.ParallelPlan(dp=2))
    check.method = getattr(owner, POSITIONS)
    ids, grid = torch.tensor([[1, 9, 2, 3]]), torch.tensor([[1, 4, 4]])
    if counts_batch:
        with pytest.raises(mw.PlanError, match=r"Positions\.get_rope_index .* splits the batch over dp=2"):
            check(ids, image_grid_thw=grid)
    else:
        assert torch.equal(check(ids, image_grid_thw=grid)[0], owner.get_rope_index(ids, grid)[0])  # type: ignore[index]
