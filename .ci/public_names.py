"""A hook of mkdocs: docs/api.md has an entry for every public name."""

from typing import Any

from mkdocs.exceptions import PluginError

import meshwright
from meshwright import errors

PLACEMENTS = {"Partial", "Replicate", "Shard"}  # torch's own


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Fail the build for a public name that the page of the API leaves out."""
    if page.file.src_uri != "api.md":
        return
    entries = {
        line.removeprefix("::: ").rpartition(".")[2] for line in markdown.splitlines() if line.startswith("::: ")
    }
    if missing := sorted(set(meshwright.__all__) - entries - PLACEMENTS - set(vars(errors))):
        raise PluginError(f"docs/api.md has no entry for {', '.join(missing)}")
