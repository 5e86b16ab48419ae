"""A hook of mkdocs: docs/api/ has an entry for every public name, and errors.md a heading for every class of errors."""

from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

import meshwright
from meshwright import errors

PLACEMENTS = {"Partial", "Replicate", "Shard"}  # torch's own


def on_pre_build(*, config: Any) -> None:
    """Fail the build for a public name that the pages of the API leave out."""
    lines = [line for page in Path(config.docs_dir, "api").glob("*.md") for line in page.read_text().splitlines()]
    entries = {line.removeprefix("::: ").rpartition(".")[2] for line in lines if line.startswith("::: ")}
    if missing := sorted(set(meshwright.__all__) - entries - PLACEMENTS - set(vars(errors))):
        raise PluginError(f"docs/api/ has no entry for {', '.join(missing)}")
    headings = Path(config.docs_dir, "errors.md").read_text().splitlines()
    found = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    classes = {name for name in found if not name.startswith("_")}
    if missing := sorted(name for name in classes if f"### {name}" not in headings):
        raise PluginError(f"docs/errors.md has no heading for {', '.join(missing)}")
