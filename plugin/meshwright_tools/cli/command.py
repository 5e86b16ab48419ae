"""What all commands share: what they print, how they fail, and the options and help that they have in common.

The error about an unknown option says what to write in its place.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import json as json_format
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from meshwright.errors import PlanError
from meshwright.printable import printable_lines


def say(text: object, *, err: bool = False) -> None:
    """Print lines to standard output, or to standard error."""
    typer.echo(printable_lines(text), err=err)


def check_pages() -> None:
    """Raise if jinja2, which fills the pages' templates, is not installed.

    Raises:
        PlanError: if it is missing; the message has the command that installs it.
    """
    if find_spec("jinja2") is None:
        raise PlanError("an HTML page needs jinja2, which is not installed: pip install 'meshwright[tools]'")


_WRONG_ARGUMENT: Mapping[type[Exception], int] = {ValueError: 2}
# The errors of the command line itself, such as an unknown option; the class is not public in all versions of typer.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def fail(command: str, message: object, *, code: int, kind: str, json: bool) -> NoReturn:
    """End the command with an error.

    Args:
        command: the words of the command, after ``meshwright``.
        message: what is wrong.
        code: the exit code.
        kind: the class of the error.
        json: whether ``--json`` was given.
    """
    say(f"{_words(command)}: {message}", err=True)
    if json:
        print_error(command, message, code=code, kind=kind)
    sys.exit(code)


def print_error(command: str, message: object, *, code: int, kind: str) -> None:
    """Print an error as an object; the arguments are those of ``fail``."""
    error = {"command": _words(command), "kind": kind, "message": str(message), "exit_code": code}
    say(json_format.dumps({"error": error}, indent=2))


def _words(command: str) -> str:
    return f"meshwright {command}".rstrip()


@contextlib.contextmanager
def failures_of(
    command: str,
    *,
    json: bool = False,
    codes: Mapping[type[Exception], int] = _WRONG_ARGUMENT,
    interrupted: str = "interrupted",
) -> Iterator[None]:
    """End the command if an error is raised in this context.

    Args:
        command: the words of the command, after ``meshwright``.
        json: whether ``--json`` was given.
        codes: class of errors -> exit code; the first class that an error has counts.
        interrupted: what Ctrl-C leaves behind.
    """
    try:
        yield
    except tuple(codes) as error:
        code = next(code for kind, code in codes.items() if isinstance(error, kind))
        fail(command, error, code=code, kind=type(error).__name__, json=json)
    except KeyboardInterrupt:
        fail(command, interrupted, code=130, kind="KeyboardInterrupt", json=json)


def run_with_json_errors(app: typer.Typer) -> NoReturn:
    """Run the command line so that wrong options are errors as an object too; for a command with ``--json``."""
    try:
        code = app(standalone_mode=False)
    except _USAGE_ERROR as error:
        message = error.format_message()  # type: ignore[attr-defined]
        fail(_command(getattr(error, "ctx", None)), message, code=2, kind=type(error).__name__, json=True)
    except typer.Abort:
        fail("", "interrupted", code=130, kind="KeyboardInterrupt", json=True)
    sys.exit(code)


def _command(context: typer.Context | None) -> str:
    """Return the words of the command in which an error was raised."""
    words: list[str] = []
    while context is not None and context.parent is not None:
        words.insert(0, context.info_name or "")
        context = context.parent  # type: ignore[assignment]
    return " ".join(words)


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
    """The methods of context parallelism, which are those of ``meshwright.plan.parts``."""

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
