"""Ways to train one model on one device, whose steps are timed one after the other."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

import meshwright as mw
from meshwright.choose.given_plan import resolve_plan

OURS = ("meshwright", "meshwright compiled", "meshwright liger")
_NEEDED = ("stock", "meshwright")
LORA_RANK = 16
_WARM, _STEPS = 3, 7  # steps that are not measured, since they compile and allocate, and steps that are


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A Llama and its batch.

    Args:
        name: in words.
        rows, length: the batch.
        hidden, layers, ffn, heads, kv_heads, vocab: the sizes.
        recompute: whether backward recomputes the layers.
        adapters: whether LoRA adapters are trained instead of the weights.
    """

    name: str
    rows: int
    length: int
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    recompute: bool = False
    adapters: bool = False

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden, num_hidden_layers=self.layers, intermediate_size=self.ffn,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, vocab_size=self.vocab,
            max_position_embeddings=self.length, use_cache=False,
        )  # fmt: skip

    def model(self, device: torch.device) -> Any:
        """Return the model with the same weights in every call: bfloat16 on a GPU, float32 on a CPU."""
        torch.manual_seed(0)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        with device:
            model: Any = LlamaForCausalLM._from_config(self.config, dtype=dtype).train()
        if self.adapters:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules="all-linear"))
        return model


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one way of training measured.

    Args:
        seconds: of a step, the median: wall time on a GPU, and CPU time on a CPU, whose cores others may use too.
        loss: the loss of the first batch.
    """

    seconds: float
    loss: float


def stock(contest: Contest, device: torch.device) -> tuple[Any, Any]:
    """Return a model and an optimizer as transformers and torch have them."""
    model = contest.model(device)
    if contest.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, _optimizer(model)


def compiled(contest: Contest, device: torch.device) -> tuple[Any, Any]:
    """Return the stock model, compiled."""
    model, optimizer = stock(contest, device)
    return torch.compile(model), optimizer


def liger(contest: Contest, device: torch.device) -> tuple[Any, Any]:
    """Return the stock model with Liger's kernels."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model, optimizer = stock(contest, device)
    apply_liger_kernel_to_llama(model=model)  # also replaces names in modules; see _names_of_transformers
    return model, optimizer


def meshwright(contest: Contest, device: torch.device) -> tuple[Any, Any]:
    """Return the model after ``to_distributed`` with the plan of one device."""
    return _distributed(contest, contest.model(device))


def meshwright_liger(contest: Contest, device: torch.device) -> tuple[Any, Any]:
    """Return the same with Liger's norms, rotation and MLPs, and Meshwright's own head and loss."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = contest.model(device)
    apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False, model=model)
    return _distributed(contest, model)


def _distributed(contest: Contest, model: Any, compile: Literal["layers"] | None = None) -> tuple[Any, Any]:
    plan = resolve_plan("tp1 recompute=full" if contest.recompute else "tp1")
    config = mw.ToDistributedConfig(plan=plan, compile=compile)
    model, optimizer, _ = mw.to_distributed(model, _optimizer(model), config=config)
    return model, optimizer


def meshwright_compiled(contest: Contest, device: torch.device) -> tuple[Any, Any]:
    """Return the model after ``to_distributed``, whose layers torch compiles; compiled whole it has whole logits."""
    return _distributed(contest, contest.model(device), compile="layers")


WAYS: dict[str, Callable[[Contest, torch.device], tuple[Any, Any]]] = {
    "stock": stock, "meshwright": meshwright, "compiled": compiled, "liger": liger,
    "meshwright compiled": meshwright_compiled, "meshwright liger": meshwright_liger,
}  # fmt: skip


def _optimizer(model: Any) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=1e-4, fused=parameters[0].is_cuda)


@dataclass(frozen=True)
class Race:
    """How each way of training did: its turn, or why it has none."""

    turns: dict[str, Turn]
    missing: dict[str, str]


def race(contest: Contest, ways: tuple[str, ...], kind: str, sleep: float = 0.0) -> Race:
    """Time each way to train a contest's model, one after the other; a compiler or Liger that fails is named.

    Args:
        contest: the model and its batch.
        ways: names of ``WAYS``.
        kind: "cpu" or "cuda".
        sleep: seconds by which each forward of Meshwright's model is late: a planted fault if it is not 0.
    """
    turns, missing = {}, {}
    for way in ways:
        if way.endswith("liger") and find_spec("liger_kernel") is None:
            missing[way] = "Liger is not installed"
            continue
        began = time.perf_counter()
        try:
            with _names_of_transformers():
                torch.compiler.reset()  # what another way has compiled, and how often it was compiled anew
                turns[way] = _turn(contest, way, torch.device(kind), sleep if way == "meshwright" else 0.0)
        except Exception as error:
            if way in _NEEDED:
                raise
            traceback.print_exc()
            missing[way] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        took = f"{time.perf_counter() - began:.0f} s with its set-up"
        print(f"{contest.name}: {way}: {turns.get(way, 'failed')}, {took}", flush=True)
    return Race(turns, missing)


@contextlib.contextmanager
def _names_of_transformers() -> Iterator[None]:
    """Give back what a package has replaced in the modules that a Llama runs by and its classes; drop what it added."""
    owners: list[Any] = [modeling_llama, loss_utils, torch.nn.functional, LlamaForCausalLM]
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, names in zip(owners, before, strict=True):
            for name in [name for name in vars(owner) if name not in names and not name.startswith("__")]:
                delattr(owner, name)
            for name, value in names.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


def _turn(contest: Contest, way: str, device: torch.device, sleep: float) -> Turn:
    model, optimizer = WAYS[way](contest, device)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(contest.vocab, (contest.rows, contest.length), generator=generator).to(device)
    first = float(_step(model, optimizer, ids))
    if sleep:
        model.register_forward_pre_hook(lambda *_: burn(sleep))
    for _ in range(_WARM - 1):
        _step(model, optimizer, ids)
    seconds = []
    for _ in range(_STEPS):
        began = _now(device)
        _step(model, optimizer, ids)
        seconds.append(_now(device) - began)
    del model, optimizer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Turn(seconds=statistics.median(seconds), loss=first)


def _step(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def burn(seconds: float) -> None:
    """Keep the host busy, as a planted fault."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
