"""The sections by name; the process of a section imports no other one."""

from __future__ import annotations

import importlib

from conformance.gpu.section import Section

# Name -> module and class, in the order in which they run: the first ones say whether the others' figures count.
_SECTIONS = {
    "numbers": ("numbers", "NumbersOfPlans"),
    "waits": ("waits", "Waits"),
    "memory": ("memory", "MemoryUse"),
    "time": ("step_times", "StepTimes"),
    "host": ("host", "HostTime"),
    "kernels": ("kernels", "Kernels"),
    "streams": ("streams", "Streams"),
    "faults": ("faults", "Faults"),
}
NAMES = tuple(_SECTIONS)


def section_named(name: str) -> Section:
    """Return a new section."""
    module, kind = _SECTIONS[name]
    made: Section = getattr(importlib.import_module(f"conformance.gpu.sections.{module}"), kind)()
    return made
