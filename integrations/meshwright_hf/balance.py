"""A Trainer callback that balances experts without an auxiliary loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from meshwright import balance_experts, expert_counts


class BalanceExperts(TrainerCallback):
    """Updates the biases that correct the routing after each step, as DeepSeek-V3 does.

    Args:
        rate: the size of the update; see ``meshwright.balance_experts``.

    Attributes:
        counts: the tokens of each expert in the last step, by module of experts.

    Example::

        trainer = MeshwrightTrainer(model, args, plan=plan, train_dataset=data, callbacks=[BalanceExperts(rate=1e-3)])
    """

    def __init__(self, *, rate: float = 1e-3):
        self.rate = rate
        self.counts: dict[str, Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: object) -> None:
        """Begin to count."""
        self.counts = expert_counts(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: object) -> None:
        """Move the biases by the tokens of the step."""
        self.counts = expert_counts(model)
        balance_experts(model, self.counts, rate=self.rate)
