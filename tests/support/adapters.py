"""What PEFT's adapters need of the versions that are installed."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

CAN_ADD_ADAPTERS = Version(version("peft")) >= Version(MIN_PEFT_VERSION)
needs_add_adapter = pytest.mark.skipif(
    not CAN_ADD_ADAPTERS,
    reason=f"add_adapter of transformers {version('transformers')} asks for PEFT >= {MIN_PEFT_VERSION}, "
    f"and {version('peft')} is installed",
)
