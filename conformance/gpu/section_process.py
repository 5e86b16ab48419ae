"""The process of one section: ``python -m conformance.gpu.section_process NAME PLACE RESULT``.

It writes a line of JSON for each check as soon as it is done, so that those before a crash are kept.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

from conformance.gpu.catalogue import section_named
from conformance.gpu.section import Place


def main(name: str, place: Place, result: Path) -> None:
    """Run a section, and append what it finds to a file."""
    warnings.filterwarnings("ignore")  # of torch, about its own names; the page has room for figures only
    section, began = section_named(name), time.monotonic()
    with result.open("w", buffering=1) as file:

        def say(**fields: object) -> None:
            print(json.dumps(fields), file=file)

        if missing := section.needs(place):
            say(missing=missing)
            return
        is_judged = False
        for check in section.run(place):
            is_judged |= check.goal is not None
            say(check=check.as_dict())
            print(f"{time.monotonic() - began:6.1f} s  {check.what}: {check.words}  {check.note}")
            if check.leaves_out or (is_judged and time.monotonic() - began > place.seconds):
                say(is_cut=True)
                break
        say(is_done=True)


if __name__ == "__main__":
    fields = json.loads(sys.argv[2])
    main(sys.argv[1], Place(**{**fields, "folder": Path(fields["folder"])}), Path(sys.argv[3]))
