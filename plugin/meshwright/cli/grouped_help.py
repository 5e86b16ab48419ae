"""Commands whose help lists their options in groups."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from meshwright.cli.other_names import Command, known_by_other_names


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
