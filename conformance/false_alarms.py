"""Run legal programs under many plans, to check that the comparison of replicas never stops one of them.

Four processes train small models of several families. The events of each step are drawn at random, equally on all
ranks: a new learning rate, a parameter that is frozen or unfrozen, weights written in place, gradients that are
accumulated, kept as zeros or clipped, a batch that all ranks skip, sampled text, an evaluation, a save.
"""

from __future__ import annotations

import contextlib
import random
import time
from itertools import islice
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

import meshwright as mw
from harness.torchrun import torchrun

PROCESSES = 4
EVERY = 3  # steps between two comparisons of the weights
PLANS = (
    *(f"dp4 zero{stage}" for stage in range(4)),
    *("tp4", "tp4+sp", "tp4+sp recompute"),
    *(f"dp2 tp2{sp} zero{stage}" for sp in ("", "+sp") for stage in range(4)),
    *("dp4 zero1 mb1", "dp4 zero2 mb1", "dp2 tp2+sp mb1", "dp2 tp2 zero3 mb1", "dp2 tp2+sp zero1 recompute"),
)
FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "olmo2")
WORDS, LENGTH = 97, 12


def plan_of(words: str) -> dict[str, Any]:
    """Return the fields of a plan that is written in the words of PLANS."""
    fields: dict[str, Any] = {}
    for word in words.split():
        name = word.rstrip("0123456789")
        match name:
            case "recompute":
                fields["recompute"] = "full"
            case "mb":
                fields["micro_batch_size"] = int(word[2:])
            case "zero":
                fields["zero_stage"] = int(word[4:])
            case _:
                fields[word[:2]] = int(word[2:].removesuffix("+sp"))
                fields |= {"sequence_parallel": True} if word.endswith("+sp") else {}
    return fields


def small_model(family: str) -> Any:
    """Return a model of two layers and two key/value heads, which four tensor-parallel ranks hold as copies."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
    more = {"num_key_value_heads": 2, "head_dim": 4, "vocab_size": WORDS, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **more, **special, attn_implementation="eager")
    return AutoModelForCausalLM.from_config(config).train()


class LegalProgram:
    """One program under one plan.

    Args:
        words: the plan, one of PLANS.
        family: the family of the model, one of FAMILIES.
        seed: the seed from which the events of the steps are drawn.
    """

    def __init__(self, words: str, family: str, seed: int):
        fields = plan_of(words)
        plan = mw.ParallelPlan(**fields)
        model = small_model(family)
        groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) is wide]} for wide in (True, False)]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        config = mw.ToDistributedConfig(plan=plan, check_replicas_every=EVERY)
        self.model, self.optimizer, _ = mw.to_distributed(model, optimizer, config=config)
        self.plan, self.draw = plan, random.Random(seed)
        self.dp_rank = dist.get_rank() // plan.tp
        self.step_number = 0

    def batch(self) -> dict[str, Tensor]:
        """Return this data-parallel rank's rows; each rank has a different length of left padding."""
        self.step_number += 1
        generator = torch.Generator().manual_seed(1000 * self.step_number + self.dp_rank)
        ids = torch.randint(3, WORDS, (2, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, : self.dp_rank] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def step(self) -> None:
        """Train one step, with the events that are drawn for it."""
        events = (self.rate, self.frozen, self.written, self.evaluated, self.sampled, self.saved)
        if self.draw.random() < 0.4:
            self.draw.choice(events)()
        if self.draw.random() < 0.05:
            self.batch()  # a batch that all ranks skip
        passes = self.draw.choice((1, 1, 1, 2))
        for number in range(passes):
            with mw.no_sync(self.model) if number < passes - 1 else contextlib.nullcontext():
                (self.model(**self.batch()).loss / passes).backward()
        if self.draw.random() < 0.7:
            mw.clip_grad_norm_(self.model, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.draw.random() < 0.7)

    def rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= self.draw.choice((0.5, 1.1))

    def frozen(self) -> None:
        if self.plan.zero_stage < 3:
            norm = self.model.model.norm.weight
            norm.requires_grad_(not norm.requires_grad)

    def written(self) -> None:
        if self.plan.zero_stage < 3:
            for parameter in self.model.parameters():
                if self.step_number % 2:
                    parameter.data.mul_(0.999)
                else:
                    with torch.no_grad():
                        parameter.clamp_(-3, 3)

    def evaluated(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(**self.batch())
        self.model.train()

    def sampled(self) -> None:
        self.model.eval()
        batch = self.batch()
        self.model.generate(input_ids=batch["input_ids"], do_sample=True, max_new_tokens=3)
        self.model.train()

    def saved(self) -> None:
        mw.full_state_dict(self.model)


def train(words: str, family: str, steps: int, seed: int = 0) -> int:
    """Run a legal program and return its number of steps. Any error that stops the program is raised."""
    program = LegalProgram(words, family, seed)
    for _ in range(steps):
        program.step()
    return steps


def work(steps: int, first: int) -> None:
    """Run the plans from ``first`` on in turn, on each process; ``steps`` is the total over all 20 plans."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    each, start = -(-steps // len(PLANS)), time.monotonic()
    for index, words in islice(enumerate(PLANS), first, None):
        family = FAMILIES[index % len(FAMILIES)]
        done = train(words, family, each, seed=index)
        if dist.get_rank() == 0:
            print(f"{words:28s} {family:8s} {done} steps, no alarm ({time.monotonic() - start:.0f} s)", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(
    steps: Annotated[int, typer.Option(min=1, help="total number of steps over all plans (default: 10000)")] = 10_000,
    first: Annotated[int, typer.Option(min=0, max=19, help="index of the plan to begin with")] = 0,
    worker: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Train legal programs under 20 plans on 4 processes; a false alarm ends the run with an error."""
    if worker:
        work(steps, first)
        return
    arguments = ["--worker", f"--steps={steps}", f"--first={first}"]
    raise typer.Exit(torchrun(PROCESSES, "conformance.false_alarms", *arguments))


if __name__ == "__main__":
    typer.run(main)
