"""``to_static`` makes one call of a whole training step: forward, loss, backward, clip and update."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.compiling import leave_out_of_graphs
from meshwright.errors import PlanError
from meshwright.mesh.process_mesh import ProcessMesh
from meshwright.optim.clip_grad_norm import clip_grad_norm_, scale_by_norm
from meshwright.optim.runtime import check_steps, find_runtime
from meshwright.parallel.autograd_graph import loss_of
from meshwright.parallel.forward.compiled_layers import CompilableLayers, check_compile_options
from meshwright.placement import Replicate, reshard
from meshwright.plan.fields import check_number
from meshwright.resharding.layouts import process_mesh

logger = logging.getLogger(__name__)

Loss = Callable[..., Any]


def to_static(
    model: nn.Module,
    loader: Iterable[Any] | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    *,
    max_norm: float | None = None,
    compile_options: Mapping[str, Any] | None = None,
) -> StaticStep:
    """Return an object whose call is one whole step of a program, compiled where torch.compile can.

    The numbers are those of the loop that the step replaces, up to rounding. For a model from ``to_distributed``, the
    layers are compiled. A plain module is compiled as a whole. For a module with parameters from ``shard_tensor`` on
    meshes of all ranks, the code between calls of ``reshard`` is compiled. A module on meshes of some of the ranks, and
    plans whose layers cannot be compiled, run eagerly; one line of the log says why.

    Args:
        model: a model from ``to_distributed``, a module with parameters from ``shard_tensor``, or a plain module.
        loader: the loader of the batches, kept as ``step.loader``.
        loss: a function of the model's output and the label that returns a scalar. None for a model that returns its
            own loss, as transformers' models with labels do.
        optimizer: the optimizer of the model's parameters; None for a step that only evaluates.
        max_norm: maximum global norm of the gradients, as for ``clip_grad_norm_``; None does not clip.
        compile_options: dict of arguments of ``torch.compile``.

    Returns:
        A StaticStep, in the mode ``train`` if there is an optimizer, otherwise ``eval``.

    Raises:
        PlanError: if an argument has the wrong type, the optimizer belongs to another model, or the model was
            distributed without an optimizer.

    Example::

        step = mw.to_static(model, loader, loss_fn, optimizer)
        step.train()
        for inputs, label in loader:
            loss = step(inputs, label)
    """
    _check(model, loader, loss, optimizer)
    if max_norm != math.inf:
        check_number("to_static", "max_norm", max_norm, optional=True)
    options = {} if compile_options is None else compile_options
    check_compile_options(options)
    return StaticStep(
        model, _compiled(model, dict(options)), loader=loader, loss=loss, optimizer=optimizer, max_norm=max_norm
    )


class StaticStep:
    """A program's step as one call, made by ``to_static``.

    In the mode ``train``, a call runs forward, loss, backward, clip and update, and clears the gradients. In the mode
    ``eval``, it computes the loss without gradients. It returns the loss on every rank, as a scalar without a graph.

    Args of a call:
        The model's inputs, and last the label: ``step(inputs, label)``. An input that is a list stands for several
        inputs. For a model that returns its own loss, the batch as a dict or as keywords: ``step(batch)``.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        *,
        loader: Iterable[Any] | None,
        loss: Loss | None,
        optimizer: Optimizer | None,
        max_norm: float | None,
    ):
        self.model, self.loader, self.loss, self.optimizer, self.max_norm = model, loader, loss, optimizer, max_norm
        self._forward = forward
        self._trains = optimizer is not None
        self.model.train(self._trains)

    def train(self) -> StaticStep:
        """Make the next calls train.

        Raises:
            PlanError: if the step has no optimizer.
        """
        if self.optimizer is None:
            raise PlanError(
                "this step cannot train, since to_static got no optimizer; write to_static(model, loader, loss, "
                "optimizer)"
            )
        self._trains = True
        self.model.train()
        return self

    def eval(self) -> StaticStep:
        """Make the next calls compute the loss alone, with the model in evaluation mode."""
        self._trains = False
        self.model.eval()
        return self

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Run one step.

        Raises:
            ValueError: if the arguments do not fit the loss, or the loss is not a scalar.
        """
        if not self._trains:
            with torch.no_grad():
                return _on_every_rank(self._loss_of(args, kwargs))
        assert self.optimizer is not None
        loss = self._loss_of(args, kwargs)
        loss.backward()
        if self.max_norm is not None:
            _clip(self.model, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return _on_every_rank(loss.detach())

    def _loss_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.loss is None:
            batch = dict(args[0]) | kwargs if len(args) == 1 and isinstance(args[0], Mapping) else None
            try:
                output = self._forward(*args, **kwargs) if batch is None else self._forward(**batch)
            except TypeError as error:
                _explain_arguments(self.model, args, kwargs if batch is None else batch, error)
                raise
            loss = loss_of(output)
            if loss is None:
                raise ValueError(
                    f"{type(self.model).__name__} returned no loss; pass the labels in the batch, as in step(input_ids="
                    "..., labels=...), or a loss function: to_static(model, loader, loss_fn, optimizer)"
                )
        else:
            inputs, label = _inputs_and_label(args, kwargs)
            loss = self.loss(self._forward(*inputs), label)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"the loss of a step must be a scalar tensor, but it is {what}; sum it, or take its mean")
        return loss


def _explain_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError) -> None:
    """Raise a ValueError if a model was called with arguments that its forward does not take."""
    try:
        inspect.signature(model.forward).bind(*(() if kwargs else args), **kwargs)
    except TypeError as wrong:
        raise ValueError(
            f"a step without a loss function passes all its arguments to {type(model).__name__}.forward, which does "
            f"not take them ({wrong}); write to_static(model, loader, loss_fn, optimizer) for step(inputs, label)"
        ) from error


def _inputs_and_label(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the model's inputs and the label of a batch, which is given whole or as several arguments."""
    parts = args
    if len(args) == 1 and isinstance(args[0], list | tuple):
        parts = tuple(args[0])
    elif len(args) == 1 and isinstance(args[0], Mapping):
        parts = tuple(args[0].values())
        if len(parts) != 2:
            raise ValueError(
                f"a batch with the keys {list(args[0])} does not show which values are inputs; write step(inputs, "
                "label)"
            )
    if kwargs or len(parts) < 2:
        raise ValueError(
            f"a step with a loss function takes the inputs and the label, but got {len(parts)} argument(s)"
            f"{f' and the keywords {list(kwargs)}' if kwargs else ''}; write step(inputs, label)"
        )
    *inputs, label = parts
    return [x for part in inputs for x in (part if isinstance(part, list | tuple) else (part,))], label


def _compiled(model: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    """Compile a model or its layers, and return what is called for its forward pass."""
    runtime = find_runtime(model)
    layers = None if runtime is None else runtime.features.find(CompilableLayers)
    if layers is not None:
        layers.compile_if_possible(**options)
        return model
    leave_out_of_graphs()
    compiled: Callable[..., Any] = torch.compile(model, **options)
    if not (placed := _dtensors(model)):
        return compiled
    smaller = {str(sorted(mesh.ranks)) for mesh in map(process_mesh, {tensor.device_mesh for tensor in placed})}
    smaller.discard(str(list(range(dist.get_world_size()))))
    if smaller:
        logger.warning(
            "to_static runs %s eagerly: parameters are on meshes of some of the ranks, %s, and torch.compile cannot "
            "trace an operation on a rank outside the mesh",
            type(model).__name__,
            " and ".join(sorted(smaller)),
        )
        return model
    return partial(_with_eager_fallback, compiled)


def _with_eager_fallback(compiled: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Call a compiled program of DTensors; what torch.compile cannot trace runs eagerly, and torch logs this.

    An example is a forward pass that moves a tensor to a mesh without this rank.
    """
    with torch._dynamo.config.patch(suppress_errors=True):
        return compiled(*args, **kwargs)


def _dtensors(model: nn.Module) -> list[DTensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if isinstance(tensor, DTensor)]


def _clip(model: nn.Module, max_norm: float) -> None:
    if not _dtensors(model):
        clip_grad_norm_(model, max_norm)
        return
    # torch's function needs all gradients on one mesh.
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    squares = [_on_every_rank(gradient.square().sum()) for gradient in gradients]
    norm = torch.stack([square.to(squares[0]) for square in squares]).sum().sqrt()
    scale_by_norm([x.to_local() if isinstance(x, DTensor) else x for x in gradients], norm, max_norm)


def _on_every_rank(loss: Tensor) -> Tensor:
    """Return a number as a plain tensor on every rank of the world, if it is on a mesh."""
    if not isinstance(loss, DTensor):
        return loss
    world = ProcessMesh(range(dist.get_world_size()), ["world"])
    return reshard(loss, world, [Replicate()]).to_local()


def _check(model: object, loader: object, loss: object, optimizer: object) -> None:
    order = "the order is to_static(model, loader, loss, optimizer)"
    if not isinstance(model, nn.Module):
        raise PlanError(f"model must be a torch.nn.Module, not a {type(model).__name__}; {order}")
    if isinstance(loader, nn.Module | Optimizer) or (loader is not None and not hasattr(loader, "__iter__")):
        raise PlanError(f"loader must yield batches, but is a {type(loader).__name__}; {order}")
    if loss is not None and (isinstance(loss, Optimizer) or not callable(loss)):
        raise PlanError(f"loss must be a function of the output and the label, not a {type(loss).__name__}; {order}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise PlanError(f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}; {order}")
    if optimizer is None:
        return
    runtime = find_runtime(model)
    if runtime is not None and runtime.plan is not None:
        runtime.check_own("to_static", "write the loop of its own engine")
        if not runtime.gradients.has_optimizer:
            raise PlanError(
                "the model was distributed without an optimizer, so nothing synchronises its gradients; write model, "
                "optimizer, loader = to_distributed(model, optimizer, loader), and pass these to to_static"
            )
    check_steps(optimizer, model)
