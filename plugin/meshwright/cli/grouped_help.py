"""Commands that list their options in groups, and that know how other launchers and planners name these options.

The error about an unknown option says what to write in its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

# Names that others have for an option -> what to write here; of several, the one whose option the command has.
_GROUPS = (
    ("batch-size batch train-batch-size global-batch-size bs gbs", ("--global-batch",)),
    ("seqlen sequence-length seq-length max-seq-len max-seq-length max-length context-length", ("--seq-len",)),
    ("gpus num-gpus n-gpus ngpus gpu-count world-size devices num-devices n-devices", ("--gpus", "--num-processes")),
    ("nproc-per-node nproc num-procs np gpus-per-node num-gpus-per-node", ("--num-processes", "--gpus-per-node")),
    ("nodes num-nodes nnodes n-nodes num-machines", ("--gpus 16 --gpus-per-node 8", "--num-machines")),
    ("node-rank", ("--machine-rank",)),
    ("master-addr master-address rdzv-endpoint", ("--main-process-ip",)),
    ("master-port", ("--main-process-port",)),
    ("fsdp use-fsdp use-deepspeed zero zero-stage-3 zero3", ("--zero-stage 3",)),
    ("dtype torch-dtype mixed-precision bf16 fp8 compute-dtype", ("--precision", "--mixed-precision")),
    ("gpu-type device accelerator hardware gpu-model", ("--gpu",)),
    ("cost price-per-hour gpu-price hourly-price", ("--price",)),
    ("config model-config model-name model-name-or-path checkpoint", ("--model",)),
    ("lora-r lora-rank peft use-peft", ("--lora 16",)),
    ("qlora load-in-4bit", ("--lora 16 --quantised nf4",)),
    ("load-in-8bit", ("--lora 16 --quantised int8",)),
    ("out html html-out page", ("--html", "--output")),
)
_WRITTEN = {name: written for names, written in _GROUPS for name in names.split()}


def written_for(option: str, known: set[str]) -> str | None:
    """Return what to write in place of an unknown option; None if no option of the command is meant.

    Args:
        option: the unknown option.
        known: the options of the command.

    Example:
        >>> written_for("--nproc-per-node", {"--num-processes", "--tp"})
        '--num-processes'
    """
    for written in _WRITTEN.get(option.lstrip("-").lower(), ()):
        if written.split()[0] in known:
            return written
    return None


@contextlib.contextmanager
def known_by_other_names(command: Any) -> Iterator[None]:
    """Say in the error about an unknown option what to write, if others have the option."""
    try:
        yield
    except Exception as error:  # typer has its own copy of click, whose errors are not public
        option = getattr(error, "option_name", None)
        known = {name for parameter in command.params for name in parameter.opts}
        if option is not None and (written := written_for(option, known)) is not None:
            error.message = f"No such option: {option}; write {written}"  # type: ignore[attr-defined]
            error.possibilities = None  # type: ignore[attr-defined]
        raise


class Command(TyperCommand):
    """A command that knows what others call its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with known_by_other_names(self):
            return super().parse_args(ctx, args)


def _format_options(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    """Write the options by their ``rich_help_panel``, without needing rich."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            default = "Arguments" if param.param_type_name == "argument" else "Options"
            groups.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
    for name, records in sorted(groups.items(), key=lambda group: group[0] == "Options"):
        with formatter.section(name):
            formatter.write_dl(records)


class GroupedCommand(Command):
    """A command whose ``--help`` lists the options in groups."""

    format_options = _format_options


class GroupedCommands(TyperGroup):
    """A command that has commands of its own, and whose ``--help`` lists the options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with known_by_other_names(self):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if "/" in args[0] or args[0].endswith(".json"):
            ctx.fail(f"No such command {args[0]!r}; if it is the model, write --model {args[0]}")
        return super().resolve_command(ctx, args)
