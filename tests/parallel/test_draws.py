"""What a forward draws at random is what one device draws with the same seed, under every plan that says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import meshwright as mw
from support.exact import Float64
from support.logs import logged

ROWS, LENGTH, WORDS, STEPS = 4, 11, 61, 2  # a length that two ranks of sp do not share evenly
SIZES = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Noisy(nn.Module):
    """Draws by functions of torch, for rows, for all of them and from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(LENGTH, 32), nn.Linear(32, 3)
        self.generator = torch.Generator().manual_seed(3)
        self.kept: list[Tensor] = []  # which passes without values must leave alone

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        hidden = torch.relu(self.first(x))
        hidden = hidden * torch.rand(32, dtype=x.dtype) + 0.1 * torch.randn_like(hidden)
        hidden = hidden + torch.empty(32, len(x), dtype=x.dtype).exponential_(generator=self.generator).T
        hidden = hidden * torch.bernoulli(torch.sigmoid(hidden.detach()))
        self.kept.append(hidden.detach())
        order = torch.randperm(32)
        logits = self.second(nn.functional.dropout(hidden[:, order], 0.3, self.training))
        loss = nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


def made(name: str) -> Any:
    torch.manual_seed(0)
    if name == "noisy":
        return Noisy()
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **sizes))
    if name == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES, **sizes, dropout_rate=0.2))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **sizes, num_labels=3))
    model.set_attn_implementation("eager")

    def add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + torch.zeros_like(output).uniform_(-0.1, 0.1)

    model.get_input_embeddings().register_forward_hook(add_noise)
    return model


def batch(name: str, number: int) -> dict[str, Tensor]:
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))
    if name == "noisy":
        return {"x": ids.double() / WORDS, "labels": ids[:, 0] % 3}
    labels = {"gpt2": ids, "t5": ids[:, : 4 + number % 2].contiguous(), "bert": ids[:, 0] % 3}[name]
    return {"input_ids": ids, "labels": labels}


def trained(name: str, plan: str | None, dp: int = 1) -> list[float]:
    """The losses and norms of some steps, and what the program draws after them."""
    with Float64():
        model = made(name).double().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if plan is not None:
            averages = "rows" if name == "noisy" else None
            config = mw.ToDistributedConfig(plan=plan, loss_averages_over=averages, draws="device")
            model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
        torch.manual_seed(7)
        found = []
        for number in range(STEPS):
            own = {key: x.chunk(dp)[dist.get_rank() if dp > 1 else 0] for key, x in batch(name, number).items()}
            loss = model(**own).loss
            loss.backward()
            clip = mw.clip_grad_norm_ if plan is not None else clipped
            found += [loss.item(), float(clip(model, 1.0))]
            optimizer.step()
            optimizer.zero_grad()
        if name == "noisy":
            assert all(x.device.type == "cpu" for x in model.kept)
        return [*found, torch.rand(()).item()]


def clipped(model: nn.Module, most: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), most)


CASES = [
    ("noisy", "dp2 zero2 ga2", 2), ("bert", "dp2 zero3", 2), ("bert", "tp2", 1),
    ("gpt2", "dp2 mb1 recompute=full", 2), ("gpt2", "tp2 recompute=full", 1), ("t5", "tp2+sp ga2", 1),
]  # fmt: skip


def all_trained() -> list[list[float]]:
    return [trained(*case) for case in CASES]


def test_draws_are_those_of_one_device(pool2: Any) -> None:
    """Dropout of modules and functions, attention's, a hook's noise, other distributions, generators and shapes."""
    expected = {name: trained(name, None) for name in dict.fromkeys(name for name, *_ in CASES)}
    for (name, plan, _), found in zip(CASES, pool2.run(all_trained)[0], strict=True):
        assert found == pytest.approx(expected[name], rel=1e-12), (name, plan)  # another mask changes 1e-2 of a loss


class Unplaced(nn.Module):
    """Draws what a rank cannot place: for as many entries as a value says, or inside of a kernel."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(LENGTH, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        if self.kind == "values":
            x = x.index_add(0, torch.tensor([0]), torch.rand(1 + int(x.sum() > 1), LENGTH).sum(0, keepdim=True))
        if self.kind == "kernel":
            x = x + torch.poisson(x.abs())
        x = nn.functional.dropout(x, 0.5, self.training)
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


def told(kind: str, draws: str = "device") -> list[str]:
    torch.manual_seed(0)
    config = mw.ToDistributedConfig(plan="dp2", loss_averages_over="rows", draws=draws)  # type: ignore[arg-type]
    model = mw.to_distributed(Unplaced(kind), config=config)[0]
    torch.manual_seed(dist.get_rank() if kind == "seeds" else 0)
    with logged(level=logging.WARNING) as said:
        for _ in range(3):
            model(torch.rand(2, LENGTH), torch.tensor([0, 1]))["loss"].backward()
    return said


def test_draws_that_are_not_those_of_one_device_are_told_of_once(pool2: Any) -> None:
    words = {"values": "Unplaced.forward, test_draws.py:", "kernel": "inside of a kernel", "seeds": "Seed all ranks"}
    for kind, word in words.items():
        said, quiet = pool2.run(told, kind), pool2.run(told, kind, "rank")
        assert said[0] == said[1] and len(said[0]) == 1 and word in said[0][0] and "draws='rank'" in said[0][0], said
        assert quiet == [[], []]
