"""What a forward draws at random is what one device draws with the same seed, under every plan that says so."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import meshwright as mw
from meshwright.optim.runtime import runtime_of
from meshwright.parallel.draws import sites
from meshwright.parallel.draws.part import DrawnPart, draw_part
from meshwright.parallel.draws.passes import DrawingTime
from meshwright.parallel.dropout_streams import DropoutStreams
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
        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **sizes))
    if name == "phimoe":  # noise of routers over all tokens, [rows * tokens, experts]
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        noise = {"router_jitter_noise": 0.05, "input_jitter_noise": 0.1, "attention_dropout": 0.1}
        config = transformers.PhimoeConfig(
            **SIZES, **sizes, **noise, num_key_value_heads=2, num_local_experts=4, experts_implementation="eager"
        )
        return transformers.PhimoeForCausalLM(config)
    if name == "opt":  # whose draws have the rows and the tokens in one dim
        sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
        more = {"num_attention_heads": 4, "max_position_embeddings": 16}
        return transformers.OPTForCausalLM(transformers.OPTConfig(**SIZES, **sizes, **more))
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
    words = {"gpt2": ids, "phimoe": ids, "opt": ids, "t5": ids[:, : 4 + number % 2].contiguous()}
    labels = {**words, "bert": ids[:, 0] % 3}[name]
    return {"input_ids": ids, "labels": labels}


def trained(name: str, plan: str | None, dp: int = 1) -> list[float]:
    """The losses and norms of some steps, and what the program draws after them."""
    with Float64():
        model = made(name).double().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if plan is not None:
            averages = "rows" if name == "noisy" else None
            config = mw.ToDistributedConfig(plan=plan, loss_averages_over=averages)
            model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
        torch.manual_seed(7)
        found = []
        for number in range(STEPS):
            ranks = dist.get_world_size() // (2 if "pp2" in plan else 1) if plan is not None else 1  # of a stage
            part = dist.get_rank() % ranks * dp // ranks if dp > 1 else 0
            own = {key: x.chunk(dp)[part] for key, x in batch(name, number).items()}
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
    ("gpt2", "pp2 mb1 recompute=full", 1), ("gpt2", "pp2 mb1 schedule=interleaved", 1), ("bert", "pp2", 1),
    ("t5", "pp2 mb2 schedule=gpipe", 1),
    ("gpt2", "cp2 context=ring mb1 recompute=full", 1), ("bert", "cp2 mb1", 1), ("t5", "cp2 recompute=full", 1),
    ("phimoe", "tp2+sp ep2", 1), ("phimoe", "dp2 etp2", 2),
    ("opt", "dp2", 2), ("opt", "tp2+sp ga2", 1),
]  # fmt: skip
OF_FOUR = [
    ("bert", "pp2 dp2 mb1", 2), ("gpt2", "pp2 tp2+sp mb2", 1), ("gpt2", "pp2 cp2 context=ring mb1", 1),
    ("gpt2", "cp4 context=hybrid ulysses=2", 1), ("phimoe", "tp2+sp cp2 context=ulysses", 1),
    ("phimoe", "dp2 cp2 ep2 recompute=full", 2),
]  # fmt: skip


def all_trained(cases: list[tuple[str, str, int]]) -> list[list[float]]:
    return [trained(*case) for case in cases]


def test_draws_are_those_of_one_device(pool2: Any, pool4: Any) -> None:
    """Dropout of modules and functions, attention's, a hook's noise, other distributions, generators and shapes."""
    expected = {name: trained(name, None) for name in dict.fromkeys(name for name, *_ in CASES)}
    for pool, cases in ((pool2, CASES), (pool4, OF_FOUR)):
        for rank, of_cases in enumerate(pool.run(all_trained, cases)):
            for (name, plan, _), found in zip(cases, of_cases, strict=True):
                # Another mask changes 1e-2 of a loss.
                assert found == pytest.approx(expected[name], rel=1e-12), (name, plan, rank)


class Unplaced(nn.Module):
    """Draws what a rank cannot place: by a value, by the number of its rows, or inside of a kernel."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(LENGTH, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        if self.kind == "values":
            x = x.index_add(0, torch.tensor([0]), torch.rand(1 + int(x.sum() > 1), LENGTH).sum(0, keepdim=True))
        if self.kind == "kernel":
            x = x + torch.poisson(x.abs())
        if self.kind == "host":
            x = x + torch.from_numpy(np.random.rand(len(x), 1).astype("float32"))
        if self.kind == "bounds":
            x = x + torch.randint(0, 10 * len(x), (len(x), 1))
        if self.kind == "choice":
            x = x[torch.randint(0, len(x), (len(x),))]
        if self.kind == "permutation":
            x = x[torch.randperm(len(x))]
        if self.kind == "order":  # the rows of each token
            x = nn.functional.dropout(x.T.reshape(-1, 1), 0.5, self.training).view(LENGTH, len(x)).T
        x = nn.functional.dropout(x, 0.5, self.training)
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


def told(kind: str, draws: Literal["device", "rank"] = "device") -> tuple[list[str], float]:
    """What was said, and what the program draws after a pass."""
    torch.manual_seed(0)
    config = mw.ToDistributedConfig(plan="dp2", loss_averages_over="rows", draws=draws)
    model = mw.to_distributed(Unplaced(kind), config=config)[0]
    torch.manual_seed(dist.get_rank() if kind == "seeds" else 0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with logged(level=logging.WARNING) as said:
        for _ in range(3):
            model(torch.rand(2, LENGTH, generator=generator), torch.tensor([0, 1]))["loss"].backward()
    return said, torch.rand(()).item()


def test_draws_that_are_not_those_of_one_device_are_told_of_once(pool2: Any) -> None:
    """The ranks then go on from the same random state, whatever they have drawn."""
    kinds = "values", "bounds", "choice", "permutation", "order"
    words = dict.fromkeys(kinds, "Unplaced.forward, test_draws.py:")
    words |= {"kernel": "inside of a kernel", "seeds": "Seed all ranks", "host": "by numpy"}
    for kind, word in words.items():
        (said, drawn), (others, other) = pool2.run(told, kind)
        assert said == others and len(said) == 1 and word in said[0] and "draws='rank'" in said[0], said
        assert drawn == other or kind == "seeds", kind
        assert all(of_rank == [] for of_rank, _ in pool2.run(told, kind, "rank"))


class Called(nn.Module):
    """Draws in the ways in which a program may come to a forward, and in which it may leave it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.calls = kind, nn.Linear(LENGTH, 3), 0

    def forward(self, x: Any, labels: Tensor) -> Any:
        if self.kind == "nested arguments":
            x = x["of"]["rows"][0] * torch.rand_like(x["of"]["rows"][0])
        if self.kind == "lengths":
            x = nn.functional.dropout(x, 0.5, self.training).unfold(1, LENGTH, 1).mean(1)
        x = nn.functional.dropout(x, 0.5, self.training)
        self.calls += 1
        if self.kind == "interrupted" and self.calls == 2:
            raise KeyboardInterrupt
        if self.kind == "itself" and self.calls % 2:  # as for self-conditioning
            x = x + self(x.detach(), labels)["loss"].detach()
        if self.kind == "thread":  # as a loader's
            thread = threading.Thread(target=torch.rand, args=(3,))
            thread.start()
            thread.join()
        x = x + 0.1 * torch.randn_like(x)
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


KINDS = ("interrupted", "itself", "thread", "nested arguments", "lengths")


def called(kind: str, plan: str | None = "dp2") -> tuple[list[float], list[str], int]:
    """The losses of four steps and the numbers drawn between them; what was said; how often forms were sought."""
    torch.manual_seed(0)
    model: Any = Called(kind).double()
    rows = slice(None)
    if plan is not None:
        config = mw.ToDistributedConfig(plan=plan, loss_averages_over="rows")
        model, rows = mw.to_distributed(model, config=config)[0], slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    generator, labels = torch.Generator().manual_seed(1), torch.tensor([0, 1, 2, 0])
    torch.manual_seed(5)
    found = []
    with (
        logged(level=logging.WARNING) as said,
        patch.object(sites, "whole_twin", side_effect=sites.whole_twin) as sought,
    ):
        for number in range(4):
            length = LENGTH + (number if kind == "lengths" else 0)
            x: Any = torch.rand(4, length, generator=generator, dtype=torch.float64)[rows]
            x = {"of": {"rows": [x]}} if kind == "nested arguments" else x
            try:
                loss = model(x, labels[rows])["loss"]
                loss.backward()
                found.append(loss.item())
            except KeyboardInterrupt:
                pass
            found.append(torch.rand(2).sum().item())
    return found, said, sought.call_count


def all_called() -> list[tuple[list[float], list[str], int]]:
    return [called(kind) for kind in KINDS]


def test_a_draw_belongs_to_the_call_that_makes_it(pool2: Any) -> None:
    """Not to a pass that was interrupted, nor to another call of the model or another thread."""
    found = pool2.run(all_called)
    for number, kind in enumerate(KINDS):
        (first, said, sought), (second, *_) = (of_rank[number] for of_rank in found)
        # The losses are those of a rank's rows, or of all if the runtime averages them.
        expected = called(kind, None)[0]
        mean = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
        assert mean == pytest.approx(expected, rel=1e-12), kind
        assert not said, said
        assert sought <= 2, (kind, sought)  # batches of further lengths have the rows where two have shown them


def numbers_beside_an_interrupted_pass() -> list[float]:
    """What the program draws after each of four steps, the second of which is interrupted."""
    model = mw.to_distributed(Called("interrupted"), config=mw.ToDistributedConfig(plan="dp2", draws="rank"))[0]
    torch.manual_seed(5)
    found = []
    for _ in range(4):
        with contextlib.suppress(KeyboardInterrupt):
            model(torch.rand(2, LENGTH), torch.tensor([0, 1]))["loss"].backward()
        found.append(torch.rand(()).item())
    return found


def test_the_program_draws_alike_after_an_interrupted_pass(pool2: Any) -> None:
    """The pass has left the ranks at streams of their own; the next one ends it first."""
    first, second = pool2.run(numbers_beside_an_interrupted_pass)
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, True, True]


class Noise:
    """Hooks on two layers that draw, from a step on, and perhaps from a generator."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind, self.is_on = kind, kind != "later hook"
        self.generator = None if kind in ("kernel", "later hook") else torch.Generator().manual_seed(3)
        if kind == "generator":
            model.generator = self.generator
        for layer in (1, 2):  # the last layer of one stage and the first of the next one
            model.transformer.h[layer].register_forward_hook(self.add)

    def add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.kind == "kernel":
            return output + (0.1 * torch.poisson(torch.ones_like(output)) if module.h == 2 else 0)
        noise = torch.zeros_like(output)
        return output + (noise.normal_(std=0.1, generator=self.generator) if self.is_on else noise)


STAGED = ("generator", "later rate", "later hook", "kernel", "foreign")


def staged(kind: str, plan: str | None = "pp2 mb2") -> tuple[list[float], list[str], bool]:
    """The losses of four steps and the numbers drawn after them; what was said; whether ranks draw as one device."""
    model: Any = made("gpt2").double().train()
    for number, layer in enumerate(model.transformer.h):
        layer.h = number
    noise = None if kind == "later rate" else Noise(kind, model)
    rates = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    for module in rates:
        module.p = 0.0
    is_on = True
    if plan is not None:
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=plan))[0]
    torch.manual_seed(7)
    found = []
    with Float64(), logged(level=logging.WARNING) as said:
        for number in range(4):
            if number == 1 and kind == "later rate":
                for module in rates:
                    module.p = 0.1
            if number == 1 and noise is not None:
                noise.is_on = True
            loss = model(**batch("gpt2", number)).loss
            loss.backward()
            found += [loss.item(), torch.rand(()).item()]
    if plan is not None:
        is_on = runtime_of(model).draws.is_on
    return found, [text for text in said if "draws" in text], is_on


def all_staged() -> list[tuple[list[float], list[str], bool]]:
    return [staged(kind) for kind in STAGED]


def test_stages_draw_alike_or_stop_together(pool2: Any) -> None:
    """A generator that two stages share, and rates that the program sets later; or one warning, and none waits."""
    words = {"later hook": "from the next pass on", "kernel": "inside of a kernel", "foreign": "no module has"}
    for kind, first, second in zip(STAGED, *pool2.run(all_staged), strict=True):
        if kind in words:
            said = list(dict.fromkeys(first[1] + second[1]))
            assert len(said) == 1 and words[kind] in said[0] and "draws='rank'" in said[0], (kind, said)
        else:
            assert first[0] == pytest.approx(staged(kind, None)[0], rel=1e-12), kind
            assert not first[1] + second[1]
        assert first[0][::2] == second[0][::2], kind
        assert first[2] == second[2] == (kind not in ("kernel", "foreign")), kind
        assert first[0][-1] == second[0][-1], kind  # all go on from one state


def norms_when_a_draw_is_not_placed(recompute: str) -> list[float]:
    """The norms of two steps under tp, in the first of which a hook draws inside of a kernel."""

    def draw(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + 0.01 * torch.poisson(output.abs())

    with Float64():
        model = made("gpt2").double().train()
        model.transformer.wte.register_forward_hook(draw)
        model = mw.to_distributed(model, plan=f"tp2 recompute={recompute}")[0]
        torch.manual_seed(7)
        found = []
        for number in range(2):
            model(**batch("gpt2", number)).loss.backward()
            found.append(float(mw.clip_grad_norm_(model, 1.0)))
            model.zero_grad()
        state = runtime_of(model).features.get(DropoutStreams).state_dict()
        resumed = mw.to_distributed(made("gpt2").double().train(), plan="tp2")[0]
        runtime_of(resumed).features.get(DropoutStreams).load_state_dict(state)
        assert not runtime_of(resumed).draws.is_on  # a run that goes on draws as the one that was interrupted
        return found


def test_what_is_recomputed_draws_as_its_forward_whatever_is_found_meanwhile(pool2: Any) -> None:
    kept, recomputed = (pool2.run(norms_when_a_draw_is_not_placed, kind) for kind in ("none", "full"))
    assert recomputed == [pytest.approx(norms, rel=1e-12) for norms in kept]


def apart() -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    model = mw.to_distributed(made("bert"), config=mw.ToDistributedConfig(plan="dp2 tp2"))[0].train()
    with logged(level=logging.WARNING) as said:
        losses = []
        for number in range(3):
            torch.manual_seed(0 if number == 0 else dist.get_rank() // 2)
            own = {key: x.chunk(2)[dist.get_rank() // 2] for key, x in batch("bert", number).items()}
            losses.append(model(**own).loss)
            losses[-1].backward()
    return said, [loss.item() for loss in losses]


def test_ranks_of_dp_that_stop_apart_are_told_of(pool4: Any) -> None:
    """A warning, also where ranks of tp hold the same activations, which still draw the same."""
    for said, _ in (results := pool4.run(apart)):
        assert len(said) == 1 and "Seed all ranks" in said[0], said
    assert len({tuple(losses) for _, losses in results}) == 1


def test_a_whole_draw_without_memory_names_the_cure() -> None:
    size = 2**44
    part = DrawnPart((size,), ((size, 1),), rows=(0, 0, 2))
    with pytest.raises(mw.PlanError, match=r"no room .*shape \(17592186044416,\).*\(2,\).*draws='rank'"):
        draw_part(part, Tensor.uniform_, (torch.empty(2),), {})


def test_a_line_tells_what_the_numbers_of_other_ranks_take(caplog: pytest.LogCaptureFixture) -> None:
    for seconds, count in ((0.0, 0), (1.0, 1)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "meshwright"):
            cost = DrawingTime()
            for _ in range(8):
                cost.begin()
                cost.add(seconds)
        assert caplog.text.count("ToDistributedConfig(draws='rank')") == count
