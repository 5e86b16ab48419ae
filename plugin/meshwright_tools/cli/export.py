"""``meshwright export``: writes the weights of a checkpoint as one-device files."""

from __future__ import annotations

import enum
import json as json_format
from typing import Annotated

import typer

from meshwright_tools.cli.command import failures_of, say


class Dtype(enum.StrEnum):
    """The dtypes that floating-point weights can be converted to."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="Checkpoint, or folder of checkpoints (then the newest); path or URL."
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    max_shard_size: Annotated[
        str, typer.Option(help="Largest size of a file; a tensor above this size gets a file of its own.")
    ] = "5GB",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype to convert floating-point weights to (default: as they were saved).")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export; everything in OUT is removed.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write the weights of a checkpoint as files for from_pretrained and load_weights.

    Writes the weights, under the names of the model's parameters, to model.safetensors, or to several such files with
    an index. Also writes config.json and generation_config.json if the model has them. Checks the digest of everything
    it reads, and holds one tensor in memory at a time. Needs no GPU, no model and no launcher. OUT gets all files at
    once, or stays as it was.

    The exit code is 0 if OUT is written, 1 if the disk fails, and 2 if the checkpoint is not whole or an argument is
    wrong.

    For example:

    \b
      meshwright export runs/step-1000 exported
      meshwright export runs exported --dtype bfloat16 --max-shard-size 2GB --overwrite
    """
    with failures_of(
        "export", json=json, codes={ValueError: 2, OSError: 1}, interrupted="interrupted; nothing was written"
    ):
        # Imported here so that --help is fast.
        from meshwright_tools.checkpoints.export_checkpoint import DTYPES, export_checkpoint

        done = export_checkpoint(
            checkpoint,
            out,
            max_shard_size=max_shard_size,
            dtype=None if dtype is None else DTYPES[dtype.value],
            overwrite=overwrite,
        )
        if json:
            found = {"folder": done.folder, "checkpoint": done.checkpoint, "step": done.step, "files": done.files}
            say(json_format.dumps(found, indent=2, default=str))
            return
        step = "" if done.step is None else f", step {done.step}"
        say(f"{done.folder} has the weights of {done.checkpoint}{step}:")
        for name, size in done.files.items():
            say(f"  {name:<36} {size:>17,} bytes")
