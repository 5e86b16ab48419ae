"""Runs steps of a plan on fake CUDA tensors, which need no GPU, and says where a real run would wait or hang.

The step takes the branches for CUDA and issues its collectives, but nothing is computed or sent. It shows
where the host would wait for the GPU. The order in which the ranks of each process group issue their collectives is
compared, since NCCL hangs if it differs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.errors import PlanError
from meshwright.faults.guard import Guard
from meshwright.monitor.monitor import Preparation, start_monitor
from meshwright.optim.clip_grad_norm import clip_grad_norm_
from meshwright.optim.runtime import Runtime
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright_tools.tracing.host_waits import HostWaitMode, Issued
from meshwright_tools.tracing.trace import OptimizerFactory, fake_world, foresee, install, traceable

DEVICE = "cuda:0"
_SOURCE = Path(__file__).with_name("cuda_guard.cpp")


class FakeEvent:
    """Stands in for ``torch.cuda.Event``; tells the observer of a wait for an event of the current step.

    The device counts as done with earlier steps, and as not having begun the current step.
    """

    def __init__(self, observer: HostWaitMode, *_: object, **__: object) -> None:
        self._observer, self._step = observer, -1

    def record(self, *_: object) -> None:
        self._step = self._observer.step

    def query(self) -> bool:
        return self._step != self._observer.step

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.query() and end.query()):  # CUDA raises an error
            self._observer.host_waits("Event.elapsed_time")
        return 1.0

    def synchronize(self) -> None:
        if self._step == self._observer.step:
            self._observer.host_waits("Event.synchronize")


class FakeStream:
    """Stands in for ``torch.cuda.Stream``; what runs on it is ordered by events alone."""

    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Order what follows after what the other stream has to do."""


def why_unavailable() -> str | None:
    """Return why this machine cannot make fake CUDA tensors; None if it can."""
    if torch.cuda.is_available() or shutil.which(os.environ.get("CXX", "c++")):
        return None
    return "torch finds no GPU here, so a C++ compiler (c++, or CXX) is needed to build a small library for fake ones"


@contextlib.contextmanager
def fake_cuda(observer: HostWaitMode) -> Iterator[None]:
    """Let ``FakeTensor`` be on CUDA inside the context.

    Without a GPU this loads a library that stays loaded, after which torch believes that CUDA is there. So call it in a
    process that does nothing else. The library is built once, in about 20 seconds, and kept in torch's folder of
    extensions.

    Args:
        observer: the object that is told when the host waits for an event.

    Raises:
        PlanError: if the library is needed and cannot be built.
    """
    if not torch.cuda.is_available():
        _load_guard()

    def no_state(*_: object) -> object:
        return torch.empty(0, dtype=torch.uint8)

    def nothing(*_: object) -> None:
        return None

    with contextlib.ExitStack() as patches:
        for name, stand_in in {
            "get_rng_state": no_state,
            "set_rng_state": nothing,
            "manual_seed": nothing,
            "current_device": lambda: 0,
            "get_device_capability": lambda *_: (9, 0),
            "is_current_stream_capturing": lambda: False,
            "Stream": FakeStream,
            "stream": contextlib.nullcontext,
            "current_stream": FakeStream,
            "Event": functools.partial(FakeEvent, observer),
            "synchronize": lambda *_: observer.host_waits("torch.cuda.synchronize"),
        }.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        # Autocast asks whether a GPU is there.
        patches.enter_context(mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        patches.enter_context(mock.patch.object(torch.cuda, "is_bf16_supported", lambda *_: True))
        # A torch without CUDA has no thread of autograd for the device.
        patches.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


@functools.cache
def _load_guard() -> None:
    if (problem := why_unavailable()) is not None:
        raise PlanError(problem)
    from torch.utils import cpp_extension

    try:
        cpp_extension.load(
            name="meshwright_cuda_guard", sources=[str(_SOURCE)], extra_cflags=["-O0"], is_python_module=False
        )
    except (RuntimeError, OSError) as error:
        first = next((line for line in str(error).splitlines() if "error" in line), "")
        raise PlanError(f"cannot build the library for fake CUDA tensors from {_SOURCE.name}: {first}") from error


_PACKED = (
    "the batch has position_ids, and the plan is {}. Under context parallelism the host reads the places of packed "
    "documents from the GPU, once for each forward pass (see docs/cuda.md), and fake tensors have no places. Trace the "
    "plan without position_ids, or packed rows under a plan without cp"
)
STEPS = 2  # only the second step counts: it has the optimizer's state, and reads what the first step left
_SENT, _RECEIVED = "send", "recv_"


@dataclass(frozen=True, kw_only=True)
class CudaStep:
    """The waits, copies and collectives of one rank in a training step on CUDA, with the places in the code.

    Args:
        waits: where the host waits for the device, and how often.
        copies: where a copy between host and device makes the host wait.
        early: where a tensor is used or overwritten before its collective, or its copy to the host, has ended.
        on_host: the names of weights, buffers and optimizer states that are not on the device. With offload, which
            keeps the states on the host, those states are listed in ``on_device`` that are not there.
        issued: the collectives and messages, in order.
    """

    waits: Counter[str]
    copies: Counter[str]
    early: Counter[str]
    on_host: tuple[str, ...]
    issued: tuple[Issued, ...]
    on_device: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """What would slow down or break a run on CUDA, in words; empty if nothing was found."""
        found = [f"the host waits: {place} ({count} times)" for place, count in self.waits.items()]
        found += [f"a blocking copy: {place} ({count} times)" for place, count in self.copies.items()]
        found += list(self.early)
        found += [f"not on the device: {name}" for name in self.on_host]
        found += [f"not on the host: {name}" for name in self.on_device]
        odd = {x.oddity for x in self.issued if x.oddity is not None}
        return found + [f"a collective that NCCL does not take as it is: {what}" for what in sorted(odd)]


@dataclass(frozen=True, kw_only=True)
class CudaProgram:
    """The training step to trace.

    Args:
        rows: the number of rows of a rank's batch.
        length: the number of tokens of a row.
        batch: a function that returns further arguments of the model, called on the fake device.
        autocast: the dtype of autocast; None runs without autocast.
        max_norm: the bound of the gradients' norm; None to leave out clipping.
        trains: False traces an evaluation instead: the forward alone, without gradients.
        make_optimizer: a function that makes the optimizer from the model's parameters.
        config: the options of ``to_distributed``.
    """

    rows: int
    length: int
    batch: Callable[[], Mapping[str, object]] = dict
    autocast: torch.dtype | None = None
    max_norm: float | None = 1.0
    trains: bool = True
    make_optimizer: OptimizerFactory = torch.optim.AdamW
    config: ToDistributedConfig = field(default_factory=ToDistributedConfig)


class _LonelyGuard:
    """Counts steps as a guard does, so that the ranks' comparisons run, and meets nobody."""

    step = 0
    is_current = False

    def begin_step(self) -> None:
        self.step += 1

    def meet(self, *_: object) -> None:
        pass

    def post(self, *_: object) -> None:
        pass


def trace_cuda_step(
    model: nn.Module,
    plan: ParallelPlan,
    program: CudaProgram,
    *,
    rank: int = 0,
    prepare: Callable[[nn.Module], object] | None = None,
) -> CudaStep:
    """Trace the second training step of one rank on fake CUDA tensors.

    Args:
        model: a causal LM on the meta device; the call shards it.
        plan: the plan, of any size.
        program: the step.
        rank: the rank of the plan.
        prepare: a function that is called with the distributed model before its first step, for example to add hooks.

    Raises:
        ValueError: if this process is already in a process group, or the model is not on the meta device.
        PlanError: if the model or this version cannot run the plan, fake CUDA tensors cannot be made here, or the batch
            has packed rows under context parallelism, whose values the host reads.
    """
    mode = HostWaitMode()
    with fake_cuda(mode), fake_world(plan.world_size, rank), traceable(has_equal=True), mode.watching():
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        runtime, optimizer = install(
            model,
            plan,
            program.make_optimizer,
            fake,
            device=DEVICE,
            config=program.config,
            guard=cast(Guard, _LonelyGuard()),
        )
        _watch(model, runtime, program.config)
        with fake, mode:
            if plan.cp > 1 and program.batch().get("position_ids") is not None:
                raise PlanError(_PACKED.format(plan.label))
            ids = torch.zeros(program.rows, program.length, dtype=torch.int64, device=DEVICE)
            foresee(model, ids, hidden=program.autocast or next(model.parameters()).dtype)
            if prepare is not None:
                prepare(model)
            for step in range(STEPS):
                if step == STEPS - 1:
                    mode.step = step
                _step(model, optimizer, ids, program)
            mode.step = -1
        weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        astray = _states(optimizer, on_device=plan.offload is not None)
        return CudaStep(
            waits=mode.waits,
            copies=mode.copies,
            early=mode.early,
            on_host=(
                *(name for name, x in weights.items() if not x.is_cuda),
                *(astray if plan.offload is None else ()),
            ),
            issued=tuple(mode.issued),
            on_device=() if plan.offload is None else astray,
        )


def _watch(model: nn.Module, runtime: Runtime, config: ToDistributedConfig) -> None:
    """Show the status lines of the program, except for what rank 0's thread does."""
    if config.logging_steps is not None:
        prepared = Preparation(machine=None, parameters=0, log=None, unknown="traced")
        monitor = start_monitor(model, runtime, config, prepared, every=config.logging_steps)
        monitor.reporter.put = lambda *_: None  # type: ignore[method-assign]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, program: CudaProgram) -> None:
    with contextlib.ExitStack() as precision:
        if program.autocast is not None:
            precision.enter_context(torch.autocast("cuda", dtype=program.autocast))
        if not program.trains:
            precision.enter_context(torch.no_grad())
        loss = model.train(program.trains)(input_ids=ids, labels=ids, **program.batch()).loss
    if not program.trains:
        return
    loss.backward()
    if program.max_norm is not None:
        clip_grad_norm_(model, program.max_norm)
    optimizer.step()
    optimizer.zero_grad()


def _states(optimizer: torch.optim.Optimizer, *, on_device: bool) -> tuple[str, ...]:
    """Return the names of an optimizer's states that are on the device, or of those that are not."""
    # A number, such as the count of steps, is on the host unless the optimizer is capturable or fused.
    named = [(key, x) for state in dict.values(optimizer.state) for key, x in state.items() if isinstance(x, Tensor)]
    return tuple(dict.fromkeys(f"{key} of the optimizer" for key, x in named if x.ndim and x.is_cuda is on_device))


def chosen_ranks(plan: ParallelPlan, most: int) -> list[int]:
    """Return which ranks of a plan to trace, so that two ranks of each kind of process group are compared.

    Rank 0 and its neighbour on each axis come first, then the first rank of each stage, then the neighbours of these.

    Args:
        plan: the plan.
        most: the largest number of ranks.
    """
    apart, neighbours = 1, [0]
    for name, size in reversed(plan.sizes.items()):  # from the innermost axis of the mesh to the outermost
        if name == "pp":
            break
        groups = {1, plan.ulysses or 1} if name == "cp" else {1}  # hybrid cuts cp in two
        neighbours += [apart * group for group in sorted(groups) if size > group]
        apart *= size
    stages = [0, 1, plan.pp - 1, *range(plan.pp)] if plan.pp > 1 else [0]
    order = [*neighbours, *(s * apart for s in stages), *(s * apart + n for s in stages for n in neighbours)]
    return sorted(list(dict.fromkeys([*order, *range(min(most, plan.world_size))]))[:most])


def order_problems(steps: Mapping[int, CudaStep]) -> list[str]:
    """Return where the ranks of a group would not fit together, in words; empty if they all do.

    All ranks of a group must issue the same collectives in the same order, of the same sizes, dtypes and roots. What
    one rank of a pair sends, the other must receive in the same order, group by group, as NCCL has no tags.

    Args:
        steps: the traced step of each rank.
    """
    problems = []
    for lists in _by_group(steps):
        problems += _of_collectives(lists) + _of_messages(lists)
    return problems


def compared_groups(steps: Mapping[int, CudaStep]) -> int:
    """Return the number of process groups of which :func:`order_problems` compares at least two ranks.

    Args:
        steps: the traced step of each rank.
    """
    return sum(len(lists) > 1 for lists in _by_group(steps))


def _by_group(steps: Mapping[int, CudaStep]) -> list[dict[int, list[Issued]]]:
    """Return for each process group what each traced rank of it issues."""
    by_group: dict[str, dict[int, list[Issued]]] = defaultdict(dict)
    members: dict[str, tuple[int, ...]] = {}
    for rank, step in steps.items():
        for issued in step.issued:
            by_group[issued.group].setdefault(rank, []).append(issued)
            members[issued.group] = issued.ranks
    return [
        {rank: by_group[group].get(rank, []) for rank in ranks if rank in steps} for group, ranks in members.items()
    ]


def _of_collectives(lists: dict[int, list[Issued]]) -> list[str]:
    own = {rank: [x for x in issued if x.kind not in (_SENT, _RECEIVED)] for rank, issued in lists.items()}
    (first, expected), *others = own.items()
    problems = []
    for rank, found in others:
        for index in range(max(len(expected), len(found))):
            a, b = (x[index] if index < len(x) else None for x in (expected, found))
            if a is None or b is None or a.must_match != b.must_match:
                problems.append(
                    f"collective {index + 1} of ranks {list(lists)}: rank {first} issues {_text(a)}, rank {rank} "
                    f"{_text(b)}"
                )
                break
    return problems


def _of_messages(lists: dict[int, list[Issued]]) -> list[str]:
    problems = []
    for sender, of_sender in lists.items():
        for receiver, of_receiver in lists.items():
            sent = [(*x.shape, x.dtype) for x in of_sender if x.kind == _SENT and x.peer == receiver]
            received = [(*x.shape, x.dtype) for x in of_receiver if x.kind == _RECEIVED and x.peer == sender]
            if sent != received:
                problems.append(
                    f"rank {sender} sends {len(sent)} messages to rank {receiver}, which receives {len(received)}, or "
                    f"their sizes or dtypes differ: {sent} and {received}"
                )
    return problems


def _text(issued: Issued | None) -> str:
    if issued is None:
        return "nothing more"
    root = "" if issued.root is None else f" with root {issued.root}"
    return f"{issued.kind} of {list(issued.shape)} {issued.dtype}{root}"
