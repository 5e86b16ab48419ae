"""A command whose help lists its options in groups."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class GroupedCommand(TyperCommand):
    """A command whose ``--help`` lists the options by their ``rich_help_panel``, without needing rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        for name, records in sorted(groups.items(), key=lambda group: group[0] == "Options"):
            with formatter.section(name):
                formatter.write_dl(records)
