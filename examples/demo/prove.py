"""The proof: repeats the first steps in one process, with stock torch and transformers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.demo.recipe import batches, build, optimizer_bytes, tensor_bytes
from examples.demo.settings import Settings

# Two float32 runs that sum in a different order differ by about 1e-7 in the loss and, with equal weights, by 1e-6 in
# gradients. Each update increases the difference: Adam divides small gradients by their own size, and clipping by a
# float32 norm, as torch does on one device, scales all gradients by a factor that is off by 1e-5 to 1e-4. A sum over
# the wrong ranks is off by 1e-1 and more.
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The differences between the distributed run and one process, and the memory of one process.

    Args:
        losses: the losses of one process, one per step.
        max_rel_loss_diff: the largest difference of a step's loss, relative to that loss.
        max_rel_grad_diff: the largest difference of a gradient's element, relative to the largest
            element of that gradient.
        worst_gradient: the parameter and step of that gradient.
        param_bytes, optimizer_bytes: the bytes of one process's parameters and optimizer state.
    """

    losses: list[float]
    max_rel_loss_diff: float
    max_rel_grad_diff: float
    worst_gradient: str
    param_bytes: int
    optimizer_bytes: int

    @property
    def holds(self) -> bool:
        """Whether the two runs are equal except for float32 rounding."""
        return self.max_rel_loss_diff <= LOSS_TOLERANCE and self.max_rel_grad_diff <= GRADIENT_TOLERANCE


def prove(settings: Settings, distributed_losses: list[float]) -> Proof:
    """Repeat the first steps in this process and compare.

    Args:
        settings: the settings of the distributed run, whose gradients are in ``settings.gradients``.
        distributed_losses: the losses of the distributed run, one per step.
    """
    assert "meshwright" not in sys.modules, "the proof has to run on stock libraries alone"
    device = torch.device(settings.device)
    model, optimizer, scheduler, loader = build(settings, device)
    losses: list[float] = []
    differences: dict[str, float] = {}
    for step, batch in enumerate(batches(loader, settings.proof_steps)):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        found = gradient_differences(load_file(settings.gradient_file(step)), gradients)
        differences |= {f"{name}, step {step + 1}": difference for name, difference in found.items()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    pairs = zip(distributed_losses, losses, strict=False)
    names, grad_diffs = list(differences), torch.tensor(list(differences.values()))
    # torch's maximum is NaN if any value is NaN; Python's may skip a NaN.
    worst = int(grad_diffs.argmax())
    return Proof(
        losses=losses,
        max_rel_loss_diff=torch.tensor([abs(found - one) / abs(one) for found, one in pairs]).max().item(),
        max_rel_grad_diff=grad_diffs[worst].item(),
        worst_gradient=names[worst],
        param_bytes=tensor_bytes(model.parameters()),
        optimizer_bytes=optimizer_bytes(optimizer),
    )


def gradient_differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of every gradient, relative to that gradient's largest element.

    Raises:
        ValueError: if the two runs do not have gradients of the same names and shapes.
    """
    shapes = [{name: tuple(tensor.shape) for name, tensor in side.items()} for side in (found, expected)]
    if shapes[0] != shapes[1]:
        odd = sorted(name for name, _ in set(shapes[0].items()) ^ set(shapes[1].items()))
        raise ValueError(f"the two runs have different gradients: {', '.join(odd)}")
    return {name: _relative_difference(found[name], gradient) for name, gradient in expected.items()}


def _relative_difference(found: Tensor, expected: Tensor) -> float:
    difference = (found - expected).abs().max().item()
    return difference / expected.abs().max().item() if difference else 0.0
