"""The contenders that train a sequence on several ranks: our methods, and DeepSpeed's Ulysses for transformers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

from benchmarks import contenders
from benchmarks.contenders import MAX_NORM
from benchmarks.workload import Workload
from meshwright.parallel.losses.causal_lm import shift


@dataclass(frozen=True, kw_only=True)
class LongRows(Workload):
    """A decoder and rows, which may hold several documents.

    Args:
        documents: the number of documents in a row.
        window: the number of tokens to which a query attends at most; None for all.
    """

    documents: int = 1
    window: int | None = None

    def model(self) -> nn.Module:
        """Return a new Llama, or a Mistral if there is a window, with the same weights in every call."""
        if self.window is None:
            return super().model()
        from transformers import MistralConfig, MistralForCausalLM

        config: Any = super().model().config
        options = {name: value for name, value in config.to_dict().items() if name != "model_type"}
        torch.manual_seed(self.seed)
        return MistralForCausalLM(MistralConfig(**options | {"sliding_window": self.window})).train()

    @property
    def positions(self) -> Tensor:
        """Each token's position in its document, ``[sequence_length]``."""
        return torch.cat([torch.arange(len(x)) for x in torch.arange(self.sequence_length).chunk(self.documents)])

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the rows; those of several documents have ``position_ids``, which is how transformers finds them."""
        packed = {} if self.documents == 1 else {"position_ids": self.positions}
        return [row | packed for row in super().rows()]


class OneProcess(contenders.OneProcess):
    """Plain torch on rank 0."""

    def norm(self) -> float | None:
        """Return the norm of the gradients of a backward pass; None on an idle rank."""
        return None if self.idle else _number(self.clip())


class EachAlone(contenders.Contender):
    """Plain torch on every rank at once, so that a rank has as much of the machine as under a plan for all ranks."""

    def __init__(self, workload: Workload) -> None:
        self.model, self.batch = workload.model(), workload.batch()
        self.optimizer = workload.optimizer(self.model.parameters())


class Ours(contenders.Ours):
    """This project's ``to_distributed`` under a plan with cp."""

    def norm(self) -> float | None:
        return _number(self.clip())


class DeepSpeedUlysses(contenders.Contender):
    """DeepSpeed's ``UlyssesSPAttentionHF`` in the loop of its tutorial.

    Its registration replaces transformers' "sdpa" for all models of the process, so it holds during its own steps only.

    Args:
        workload: what to train.
        stage: the stage of ZeRO.
    """

    def __init__(self, workload: LongRows, stage: int = 1):
        import deepspeed
        import deepspeed.ops
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # DeepSpeed's shared-memory all-reduce needs a compiler at run time; all other contenders use gloo.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed()
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None  # DeepSpeed supports one model per process
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
        model, size = workload.model(), dist.get_world_size()
        with _stock_attention():
            groups = UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=model,
                core_attn_implementation="sdpa",
                sequence_parallel_size=size,
                micro_batch_size=workload.batch_size,
                seq_length_is_variable=True,
            )
            self._attention = _functions()["sdpa"]
        config = {
            "train_micro_batch_size_per_gpu": workload.batch_size,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "sequence_parallel_size": size,
            "gradient_clipping": MAX_NORM,
        }
        self.model, *_ = deepspeed.initialize(
            model=model, optimizer=workload.optimizer(model.parameters()), config=config, mpu=groups
        )
        self.group = groups.get_sequence_parallel_group()
        if workload.sequence_length % size:
            raise ValueError(f"{workload.sequence_length} tokens cannot be cut into {size} equal parts")
        whole = workload.batch()
        whole["position_ids"] = workload.positions.expand(workload.batch_size, -1)
        whole["shift_labels"] = shift(whole.pop("labels"))  # DeepSpeed's loader also shifts, then cuts evenly
        self.batch = {name: x.chunk(size, 1)[dist.get_rank()].contiguous() for name, x in whole.items()}

    def forward(self) -> Tensor:
        targets = self.batch["shift_labels"]
        inputs = {name: x for name, x in self.batch.items() if name != "shift_labels"}
        with _stock_attention(self._attention):
            logits = self.model(**inputs).logits
        loss = self.model.module.loss_function(
            logits=logits, labels=None, shift_labels=targets, vocab_size=self.model.module.config.vocab_size
        )
        losses = differentiable.all_gather(loss, group=self.group)
        counts = differentiable.all_gather((targets != -100).sum(), group=self.group)
        total: Tensor = sum(x * n for x, n in zip(losses, counts, strict=True)) / sum(counts)
        return total

    def backward(self, loss: Tensor) -> None:
        with _stock_attention(self._attention):
            self.model.backward(loss)

    def clip(self) -> None:
        """Do nothing: the engine clips in its step."""

    def norm(self) -> float | None:
        """Take the step, in which the engine computes the norm."""
        self.model.step()
        return float(self.model.get_global_grad_norm())

    def update(self) -> None:
        self.model.step()


def _number(norm: Tensor | None) -> float:
    assert norm is not None
    return float(norm)


def _functions() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


@contextlib.contextmanager
def _stock_attention(function: Any = None) -> Iterator[None]:
    """Give transformers its "sdpa" back at the end, and a function in its place until then."""
    functions = _functions()
    before = functions["sdpa"]
    if function is not None:
        functions["sdpa"] = function
    try:
        yield
    finally:
        functions["sdpa"] = before
