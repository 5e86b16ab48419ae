"""A run that a test or a benchmark kills, and that a launcher starts again.

python killed_script.py loop|trainer FOLDER STEPS TIMEOUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(kind: str, folder: Path, steps: int, timeout: float) -> None:
    """Train with dropout, shuffling and a schedule, and a checkpoint after each step; write the weights' digest."""
    rank, attempt = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Before the imports, which take seconds, so that the process can be killed in them.
    (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    result = trained(kind, folder, steps, timeout)
    if rank == "0":
        (folder / "result").write_text(result)


def trained(kind: str, folder: Path, steps: int, timeout: float) -> str:
    """Train under the launcher's plan, on every rank; return the digest of the weights, which rank 0 has."""
    import hashlib

    import meshwright as mw

    train = by_trainer if kind == "trainer" else by_loop
    digest = hashlib.sha256()
    for name, tensor in sorted(mw.full_state_dict(train(folder, steps, timeout)).items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def note(folder: Path, step: int) -> None:
    if os.environ["RANK"] == "0":
        with (folder / "progress").open("a") as file:
            file.write(f"{step}\n")


def by_loop(folder: Path, steps: int, timeout: float):
    """A plain loop, with one line that finds the checkpoint."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    import meshwright as mw

    # Not the models and rows of the other tests, whose imports take seconds of each start.
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=2, attention_dropout=0.2, **sizes))
    tokens = torch.randint(3, 97, (20, 12), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loader = DataLoader(rows, batch_size=4, shuffle=True)
    config = mw.ToDistributedConfig(timeout_s=timeout)
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
    saved = {"loader": loader, "scheduler": scheduler}
    done = mw.load_checkpoint(folder / "saved", model, optimizer, missing_ok=True, **saved)
    step = 0 if done is None else done.step
    note(folder, step)
    while step < steps:
        for batch in loader:
            model(**batch).loss.backward()
            mw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            mw.save_checkpoint(folder / "saved" / f"step-{step}", model, optimizer, step=step, keep=2, **saved)
            note(folder, step)
            if step == steps:
                break
    return model


def by_trainer(folder: Path, steps: int, timeout: float):
    """A program with the Trainer, which has no line for restarts."""
    from transformers import TrainerCallback

    import meshwright as mw
    from meshwright_hf import MeshwrightTrainer
    from support.models import build
    from support.trainers import Rows, arguments

    class Noting(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            note(folder, state.global_step)

    args = arguments(
        folder / "saved", dp=2, max_steps=steps, save_strategy="steps", save_steps=1, save_total_limit=2
    )  # fmt: skip
    trainer = MeshwrightTrainer(
        build("llama", attention_dropout=0.2), args, train_dataset=Rows(20), callbacks=[Noting()],
        meshwright=mw.ToDistributedConfig(timeout_s=timeout),
    )  # fmt: skip
    trainer.train()
    return trainer.model


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
