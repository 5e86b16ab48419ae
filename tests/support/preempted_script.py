"""A run that a scheduler preempts, whose ranks are killed, and that goes on when it is started again.

python preempted_script.py loop|accelerate|trainer FOLDER STEPS
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch import nn

EVERY = 4  # steps between two checkpoints of their own; the preemptions save in between too
PACE = 0.05  # seconds that a step takes at least, so that there is time to disturb it


def main(kind: str, folder: Path, steps: int) -> None:
    """Train, note each step, and write the digest of the weights at the end."""
    rank = os.environ["RANK"]
    (folder / f"pid-{rank}").write_text(f"{os.getpid()} {os.getppid()}")

    def note(step: int) -> None:
        if rank == "0":
            with (folder / "progress").open("a") as file:
                file.write(f"{step} of {os.environ['WORLD_SIZE']}\n")
        time.sleep(PACE)

    digest = trained(kind, folder, steps, note)
    if rank == "0":
        (folder / "result").write_text(digest)


def trained(kind: str, folder: Path, steps: int, note: Callable[[int], None]) -> str:
    """Train on every rank; return the digest of the weights, which rank 0 has."""
    import meshwright as mw

    model = {"loop": by_loop, "accelerate": by_accelerate, "trainer": by_trainer}[kind](folder, steps, note)
    digest = hashlib.sha256()
    for name, tensor in sorted(mw.full_state_dict(model).items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def by_loop(folder: Path, steps: int, note: Callable[[int], None]) -> nn.Module:
    """A plain loop with a model of its own, since the imports of transformers take most of a start."""
    import torch
    from torch.utils.data import DataLoader

    import meshwright as mw
    from support.decoder import LENGTH, VOCAB, make_decoder

    torch.manual_seed(0)
    model = make_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(3, VOCAB, (20, LENGTH), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(list(tokens), batch_size=4, shuffle=True)
    config = mw.ToDistributedConfig(timeout_s=20.0)
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
    preemption = mw.Preemption()
    done = mw.load_checkpoint(folder / "saved", model, optimizer, loader=loader, missing_ok=True)
    step = 0 if done is None else done.step
    while step < steps:
        for batch in loader:
            loss, _ = model(batch, labels=batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            is_last = preemption.is_due()
            if is_last or step % EVERY == 0:
                mw.save_checkpoint(
                    folder / "saved" / f"step-{step}", model, optimizer, loader=loader, step=step, keep=2
                )
            if is_last:
                preemption.leave()
            note(step)
            if step == steps:
                break
    return model


def by_accelerate(folder: Path, steps: int, note: Callable[[int], None]) -> nn.Module:
    """accelerate's loop, whose state is saved by accelerate's own methods."""
    import torch
    from torch.utils.data import DataLoader

    import meshwright as mw
    from meshwright_hf.accelerate import Accelerator
    from support.models import build
    from support.trainers import Rows

    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    accelerator = Accelerator()
    loader = DataLoader(Rows(24), batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    preemption, saved = mw.Preemption(), folder / "saved"
    if saved.exists():
        accelerator.load_state(saved)
    step = scheduler.scheduler.last_epoch // accelerator.num_processes
    while step < steps:
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if preemption.is_due():
                accelerator.save_state(saved)
                preemption.leave()
            note(step)
            if step == steps:
                break
    return model


def by_trainer(folder: Path, steps: int, note: Callable[[int], None]) -> nn.Module:
    """A program with the Trainer, which has no line for preemptions or restarts."""
    from transformers import TrainerCallback

    from meshwright_hf import MeshwrightTrainer
    from support.models import build
    from support.trainers import Rows, arguments

    class Noting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            note(state.global_step)

    ranks = int(os.environ["WORLD_SIZE"])
    args = arguments(folder / "saved", dp=ranks, max_steps=steps, save_strategy="steps", save_steps=EVERY)
    trainer = MeshwrightTrainer(build("llama"), args, train_dataset=Rows(40), callbacks=[Noting()])
    trainer.train()
    return trainer.model


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
