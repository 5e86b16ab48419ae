"""``generate`` and loops that sample draw the tokens of one device for each row, under every plan that generates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import meshwright as mw
from support.exact import Float64
from support.logs import logged

WORDS, ROWS = 61, 7  # the last batch has 3 rows, which two ranks do not share evenly
PROMPTS = torch.randint(3, WORDS, (ROWS, 6), generator=torch.Generator().manual_seed(1))


def made() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    words = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**words, **sizes)).double()
    for parameter in model.parameters():
        parameter.data *= 3  # so that the next token is not the same for all rows
    return model


def without_padding(rows: Any) -> list[list[int]]:
    return [row.tolist()[: int(row.ne(0).nonzero()[-1]) + 1] for row in rows]


def trained_and_sampled(plan: str | None) -> dict[str, Any]:
    """Train with dropout and sample in turn; one step's texts have one sequence of each row, the next one's two."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in PROMPTS], batch_size=4)
    if plan is not None:
        config = mw.ToDistributedConfig(plan=plan)
        model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
    torch.manual_seed(5)
    found: dict[str, Any] = {"losses": [], "texts": [], "own": [], "looped": []}
    options = {"do_sample": True, "max_new_tokens": 16, "pad_token_id": 0, "sequence_bias": [[[2], 2.0]]}
    with Float64():
        for number, batch in enumerate(loader):
            loss = model.train()(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
            model.eval()
            texts = model.generate(batch["input_ids"], num_return_sequences=1 + number, **options)
            found["texts"].append(without_padding(texts))
            found["own"] += without_padding(model.generate(PROMPTS[:1], **options))  # a prompt that every rank has
            generator = mw.sampling_generator(model, batch, seed=number)
            tokens = batch["input_ids"]
            for _ in range(3):
                with torch.no_grad():
                    probabilities = model(input_ids=tokens).logits[:, -1].softmax(-1)
                tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
            found["looped"].append(tokens.tolist())
    return found | {"state": torch.rand(3).tolist()}


@pytest.mark.parametrize("plan", ["dp2", "dp2 zero3", "tp2+sp"])
def test_each_row_has_the_tokens_of_one_device(plan: str, pool2: Any) -> None:
    expected = trained_and_sampled(None)
    assert len({len(text) for texts in expected["texts"] for text in texts}) > 3  # ranks end after unequal steps
    for rank, found in enumerate(pool2.run(trained_and_sampled, plan)):
        for number, rows in enumerate((4, 3)):
            low, high = (rank * rows // 2, (rank + 1) * rows // 2) if "dp2" in plan else (0, rows)
            each = 1 + number
            assert found["texts"][number] == expected["texts"][number][low * each : high * each], (rank, number)
            assert found["looped"][number] == expected["looped"][number][low:high], (rank, number)
        assert found["own"] == expected["own"] and found["state"] == expected["state"], rank
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-10, atol=0)


def test_what_is_not_sampled_as_on_one_device_is_told(pool2: Any) -> None:
    for rank, found in enumerate(pool2.run(sampled_otherwise)):
        assert "rows of a batch, but was asked for shape (6,)" in found["shape"] and "pass copies=" in found["shape"]
        assert "inside of a kernel" in found["kernel"] and "without replacement" in found["kernel"]
        assert "no tensor of the batch is the loader's" in found["copy"]
        assert found["copies"] == found["all"][6 * rank : 6 * rank + 6]
        assert "not those of its tokens" in found["processor"] and found["processor"].count("generate draws") == 1
        assert "for prompts that differ" in found["prompts"]
        assert found["alone"] == [True] * 6  # a rank that samples alone stops no other


def added_noise(ids: Any, scores: Any) -> Any:
    return scores + torch.rand(WORDS)


def sampled_otherwise() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def begun() -> tuple[Any, Any, Any]:
        data = [{"input_ids": row, "labels": row} for row in PROMPTS[:4]]
        model = made()
        loader: Any = torch.utils.data.DataLoader(data, batch_size=4)
        config = mw.ToDistributedConfig(plan="dp2")
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
        return model, optimizer, next(iter(loader))

    def failure(draw: Any) -> str:
        with pytest.raises(mw.PlanError) as raised:
            draw()
        return str(raised.value)

    model, optimizer, batch = begun()
    generator = mw.sampling_generator(model, batch, seed=0)
    found["shape"] = failure(lambda: torch.rand(6, generator=generator))
    found["all"] = torch.rand(12, generator=torch.Generator().manual_seed(1)).tolist()
    found["copies"] = torch.rand(6, generator=mw.sampling_generator(model, batch, seed=1, copies=3)).tolist()
    torch.rand(2, generator=generator)
    torch.multinomial(torch.ones(2, 5), 3, replacement=True, generator=generator)
    found["kernel"] = failure(lambda: torch.rand(2, generator=generator))
    found["copy"] = failure(lambda: mw.sampling_generator(model, {"input_ids": batch["input_ids"].clone()}, seed=0))
    options = {"do_sample": True, "max_new_tokens": 3, "pad_token_id": 0}
    with logged("meshwright.parallel.draws") as lines:
        model.eval().generate(batch["input_ids"], logits_processor=[added_noise], **options)
        found["processor"] = "\n".join(lines)
    model, optimizer, batch = begun()
    with logged("meshwright.parallel.draws") as lines:
        model.eval().generate(batch["input_ids"].clone(), **options)
        model.train()(**batch).loss.backward()
        optimizer.step()
        found["prompts"] = "\n".join(lines)
    found["alone"] = []
    model, optimizer, batch = begun()
    for step in range(6):
        if step == 4 and torch.distributed.get_rank() == 0:
            model.eval().generate(PROMPTS[:1], **options)
        loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["alone"].append(bool(loss.isfinite()))
    return found
