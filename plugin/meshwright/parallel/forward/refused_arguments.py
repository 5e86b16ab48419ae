"""What a model cannot be asked for under a plan: one table of arguments, by the axis whose ranks have parts.

docs/support.md prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.mesh.axes import Mesh
from meshwright.parallel.batch.schema import CACHES
from meshwright.parallel.experts.load_balancing import LoadBalancing
from meshwright.parallel.experts.routers import OPTION
from meshwright.parallel.method_chain import ChainStep, find_step


@dataclass(frozen=True)
class Refused:
    """Arguments that a decoder's forward cannot take under one axis of a plan.

    Args:
        axis: the axis, if it has more than one rank.
        arguments: the names of the arguments.
        reason: why they cannot be taken.
        cure: what to do instead.
        is_given: whether a value of an argument asks for it.
        is_option: whether the model's config may set the argument too.
        unless: the step of a model with which its forward can take the arguments.
    """

    axis: str
    arguments: tuple[str, ...]
    reason: str
    cure: str
    is_given: Callable[[object], bool] = bool
    is_option: bool = False
    unless: type[ChainStep] | None = None


def _is_passed(value: object) -> bool:
    return value not in (None, False)  # an empty cache is false, but asks for one


def _is_no_padding_mask(mask: object) -> bool:
    return mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2)


_INTERNALS = ("output_hidden_states", "output_attentions")
_OWN_HEADS = "each rank has only its own heads, and under sequence parallelism only its own tokens"
_ELSEWHERE = "save the model (model.save_pretrained) and generate on one device"
GENERATE = "generate()"  # the method, which asks for keys and values
_CACHES = (*CACHES, "use_cache", GENERATE)

_OFF = "turn the option off"
_ROUTED = "and only the load-balancing loss of transformers' causal LMs is known for all of them"

REFUSALS = (
    Refused("tp", _INTERNALS, _OWN_HEADS, _OFF, is_option=True),
    Refused("cp", _INTERNALS, "each rank has only its own tokens", _OFF, is_option=True),
    *(
        Refused(axis, (OPTION,), f"each rank routes only its own tokens{layers}, {_ROUTED}", _OFF, is_option=True,
                unless=LoadBalancing)
        for axis, layers in (("tp", ""), ("cp", ""), ("pp", " in its own layers"))
    ),
    Refused("cp", _CACHES, "each rank has the keys and values of its own tokens", _ELSEWHERE, is_given=_is_passed),
    Refused("cp", ("logits_to_keep",), "each rank has the logits of its own tokens",
            "leave it out and read outputs.logits[:, -n:] in eval mode",
            is_given=lambda kept: isinstance(kept, Tensor) or bool(kept)),
    Refused("cp", ("attention_mask",), "a mask that is not of shape [rows, tokens] cannot be cut",
            "pass one of this shape, or position_ids that begin anew for each document", is_given=_is_no_padding_mask),
    Refused("pp", _INTERNALS, "each rank has only the layers of its stage", _OFF, is_option=True),
    Refused("pp", _CACHES, "each rank has only the keys and values of its stage", _ELSEWHERE, is_given=_is_passed),
)  # fmt: skip


def check_arguments(model: nn.Module, batch: Mapping[str, object], mesh: Mesh) -> None:
    """Raise if a forward pass is given an argument that it cannot take under an axis with more than one rank.

    Args:
        model: the model, whose config may set an option.
        batch: the arguments by name.
        mesh: the axes.

    Raises:
        PlanError: if there is such an argument; the message says why, and what to do instead.
    """
    config = getattr(model, "config", None)
    for refusal in REFUSALS:
        size = getattr(mesh, refusal.axis).size
        if size == 1 or (refusal.unless is not None and find_step(model, refusal.unless)):
            continue
        for name in refusal.arguments:
            value = batch.get(name)  # PEFT passes None
            if value is None and refusal.is_option:
                value = getattr(config, name, False)
            if refusal.is_given(value):
                raise PlanError(
                    f"{_shown(name, value)} cannot be used under ParallelPlan.{refusal.axis}={size}: "
                    f"{refusal.reason}. To go on, {refusal.cure}, or use {refusal.axis}=1"
                )


def _shown(name: str, value: object) -> str:
    if isinstance(value, Tensor):
        return f"{name} {tuple(value.shape)}"
    return f"{name}={value}" if isinstance(value, bool | int) else name


def table() -> Iterator[str]:
    """Yield the rows of the table in docs/support.md."""
    yield "| argument of the model | under | why | instead |"
    yield "|---|---|---|---|"
    for refusal in REFUSALS:
        names = ", ".join(f"`{name}`" for name in refusal.arguments)
        yield f"| {names} | {refusal.axis} | {refusal.reason} | {refusal.cure}, or use {refusal.axis}=1 |"
