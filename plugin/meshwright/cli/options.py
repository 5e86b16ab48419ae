"""Options that several commands have, and how a command takes a group of them as one object."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

MODEL = (
    "transformers config.json, a directory that holds one, the id of a Hub model whose config is in the local cache, "
    'or a model type, such as "llama", for its default config; no weights are read.'
)
ModelConfig = Annotated[Path, typer.Option(help=MODEL)]
PlanWords = Annotated[
    str,
    typer.Option(help='Plan in words, for example "dp2 tp2+sp zero1", or a file that meshwright plan --save wrote.'),
]
HIDDEN = "hidden"  # Annotated[PlanSizes, HIDDEN]: the options work, and --help does not list them


def option(help: str, *names: str, panel: str | None = None, default: object = None, metavar: str | None = None) -> Any:
    """Return the field of a dataclass that is an option of the commands that take it.

    Args:
        help: the description in ``--help``.
        names: the option's names, if they are not the field's.
        panel: the group of options in ``--help``.
        default: the default.
        metavar: the name of the value in ``--help``.
    """
    given = typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)
    return dataclasses.field(default=default, metadata={"option": given})


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has an option for each field of a dataclass among its parameters, and passes the object.

    A command with the parameter ``sizes: PlanSizes`` has the options ``--tp``, ``--pp`` and so on.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(_bare(kind))}

    @functools.wraps(command)
    def run(**values: object) -> None:
        for name, kind in groups.items():
            values[name] = _bare(kind)(**{field: values.pop(field) for field in _options(kind)})
        command(**values)

    options = dict[str, tuple[object, object]]()
    for name, parameter in inspect.signature(command).parameters.items():
        found = _options(hints[name]) if name in groups else {name: (hints[name], parameter.default)}
        is_hidden = HIDDEN in get_args(hints[name])
        options |= {
            option: (_hidden(hint) if is_hidden else hint, default) for option, (hint, default) in found.items()
        }
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, (hint, default) in options.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {name: hint for name, (hint, _) in options.items()}
    return run


def _bare(kind: object) -> type:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind  # type: ignore[return-value]


def _options(kind: object) -> dict[str, tuple[object, object]]:
    """Return the type and the default of each option of a group."""
    hints = get_type_hints(_bare(kind))
    fields = dataclasses.fields(_bare(kind))
    return {field.name: (Annotated[hints[field.name], field.metadata["option"]], field.default) for field in fields}


def _hidden(hint: object) -> object:
    kind, option, *_ = get_args(hint)
    option = copy.copy(option)
    option.hidden = True
    return Annotated[kind, option]


class Recompute(StrEnum):
    """Which layers backward recomputes."""

    none = "none"
    full = "full"


class Schedule(StrEnum):
    """The schedules of a pipeline, which are those of ``meshwright.plan.schedule``."""

    gpipe = "gpipe"
    one_forward_one_backward = "1f1b"
    interleaved = "interleaved"
    zero_bubble_h1 = "zb-h1"
    zero_bubble_v = "zbv"


class Context(StrEnum):
    """The methods of context parallelism, which are those of ``meshwright.plan.context_methods``."""

    gather = "gather"
    ulysses = "ulysses"
    ring = "ring"
    hybrid = "hybrid"


_of_plan = partial(option, panel="A plan of your own")


@dataclass(frozen=True, kw_only=True)
class PlanSizes:
    """Fields of ``ParallelPlan``; None for those that were not given."""

    dp: int | None = _of_plan(
        "Data-parallel size (default: --gpus or --num-processes / the other sizes; 1 without that option)."
    )
    tp: int | None = _of_plan("Tensor-parallel size (default: 1).")
    cp: int | None = _of_plan("Context-parallel size: ranks that share each sequence (default: 1).")
    context: Context | None = _of_plan(
        "With --cp, method by which attention reaches the whole sequence (default: gather)."
    )
    ulysses: int | None = _of_plan("With --context hybrid, number of neighbouring ranks that exchange heads.")
    ep: int | None = _of_plan(
        "Expert-parallel size: neighbouring ranks of dp x cp x tp that share the experts of a layer (default: 1)."
    )
    pp: int | None = _of_plan("Pipeline-parallel size: ranks that share the layers (default: 1).")
    schedule: Schedule | None = _of_plan("With --pp, the order of forwards and backwards (default: 1f1b).")
    sequence_parallel: bool | None = _of_plan(
        "With --tp, also shard the activations between blocks over tp (default: no).",
        "--sequence-parallel/--no-sequence-parallel",
    )
    zero_stage: int | None = _of_plan(
        "ZeRO stage over dp: 1 shards the optimizer state, 2 gradients too, 3 parameters too (default: 0)."
    )
    micro_batch_size: int | None = _of_plan("Rows per rank and micro-batch (default: all rows of the rank).")
    recompute: Recompute | None = _of_plan("What backward recomputes: no layers, or whole layers (default: none).")
    recomputed_layers: int | None = _of_plan(
        "With --recompute full, number of layers of each rank to recompute (default: all of them)."
    )

    @property
    def given(self) -> dict[str, object]:
        """The fields that were given, with enums as their values."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        return {name: value.value if isinstance(value, StrEnum) else value for name, value in found.items()}
