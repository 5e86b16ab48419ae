"""The monitor of a run, which observes the steps and shows their figures."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import PlanError
from meshwright.faults.together import succeed_together
from meshwright.layout.tensor_layout import global_shape
from meshwright.mesh.host import core_count
from meshwright.monitor.card import Card, Comparison, Estimate, Machine, estimate
from meshwright.monitor.figures import ExpertLoad, Figures, line, say, together
from meshwright.monitor.records import VERSION, RunLog, provenance
from meshwright.monitor.reporter import HostValues, PendingRecord, Reporter
from meshwright.monitor.step_observer import StepObserver
from meshwright.optim.runtime import Runtime, Watch, device_of
from meshwright.parallel.experts.load_balancing import ExpertCounts
from meshwright.pipeline.pipeline_forward import PipelineForward
from meshwright.plan.config import ToDistributedConfig
from meshwright.progress import is_first_rank
from meshwright.roles.adapters import without_wrappers
from meshwright_plan.formatting import memory

_COMPARED = 10  # steps after which the estimate is compared with what was measured
_MONITORS = itertools.count()  # numbers the monitors, which every rank makes in the same order
_SOON = 5.0  # seconds that a caller waits for the figures of the other ranks


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The facts that a monitor reads from a model before the model is distributed.

    Args:
        machine: the model's sizes and the devices; None if they are unknown.
        parameters: number of the model's parameters.
        log: rank 0's log, if there is one.
        unknown: why they are unknown.
        origin: what the log says about the program: its command, revision, versions and settings.
    """

    machine: Machine | None
    parameters: int
    log: RunLog | None
    unknown: str = ""
    origin: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        model: nn.Module,
        config: ToDistributedConfig,
        *,
        optimizer: Optimizer | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Preparation:
        """Describe the model and the program, and open the log; every rank makes the call.

        Args:
            model: the model.
            config: the options of the call.
            optimizer: the optimizer, whose defaults go into the log.
            settings: further settings that go into the log.

        Raises:
            PlanError: on every rank, if rank 0 cannot write the log.
        """
        folder = config.logging_dir
        log = succeed_together(lambda: RunLog(folder) if folder is not None and is_first_rank() else None)
        machine, unknown = None, ""
        try:
            machine = Machine.find(model, config, optimizer)
        except PlanError as error:
            unknown = str(error)
        origin = {} if log is None else provenance(config, optimizer, settings or {})
        parameters = sum(global_shape(p).numel() for p in model.parameters())
        return cls(machine=machine, parameters=parameters, log=log, unknown=unknown, origin=origin)


class Monitor(Watch):
    """Shows a run on rank 0: a card, a line per interval, and records in the log; other ranks send their figures.

    Args:
        model: the distributed model.
        runtime: its runtime, whose ``watch`` this becomes.
        config: the options of the call.
        prepared: what was found before the model was distributed.
        every: number of steps from line to line; None if lines come only from ``figures_now``.
        prints: whether to print the lines; the card is always printed.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        config: ToDistributedConfig,
        prepared: Preparation,
        *,
        every: int | None,
        prints: bool = True,
    ) -> None:
        self.every, self.prints = every, prints
        self.latest: Figures | None = None
        self._number = next(_MONITORS)
        self._sent: tuple[int, PendingRecord | None] | None = None  # the steps before the last line, and that line
        self._max_steps = config.max_steps
        self.has_log_folder = config.logging_dir is not None  # in which rank 0 writes a log; every rank knows
        self._prepared, self._runtime = prepared, runtime
        self._device = device_of(model)
        self._model_name = type(without_wrappers(model)[1]).__name__
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._first_step = 0  # the run's steps before this program began
        self._estimate: Estimate | None = None
        self._has_compared = False
        machine = prepared.machine
        self.steps = StepObserver(
            model,
            runtime,
            without_wrappers(model)[1],
            device=self._device,
            flops=None if machine is None else machine.shape.flops,
            is_due=self._is_due,
        )
        self.steps.on_batch, self.steps.on_due = self._begin, self._end_interval
        self.reporter = Reporter(
            runtime.guard,
            functools.partial(
                together,
                row_copies=runtime.mesh.row_copies,
                peak_flops=None if machine is None else machine.peak_flops,
                ep=runtime.mesh.ep.size,
            ),
        )
        counts = None if config.compile else runtime.features.find(ExpertCounts)  # a compiled layer has no more steps
        self._experts = None if counts is None else ExpertLoad(model, counts, self._device)
        if is_first_rank() and runtime.guard is not None and prepared.log is not None:
            note = weakref.WeakMethod(self._note_fault)  # the guard lives longer than the model
            runtime.guard.on_failure = lambda what: None if (call := note()) is None else call(what)
        weakref.finalize(self, self.reporter.stop)

    def __deepcopy__(self, memo: dict[int, Any]) -> Monitor:
        return self

    # ---- what the runtime tells; see Watch

    def saw_norm(self, norm: Tensor) -> None:
        self.steps.saw_norm(norm)

    def saw_loss(self, loss: Tensor) -> None:
        self.steps.saw_loss(loss)

    def end_step(self, *, lr: float | None, norm: Tensor | None) -> None:
        self.steps.end_step(lr=lr, norm=norm)

    def resumed(self, step: int, max_steps: int | None = None) -> None:
        """Count the next steps from the step of a checkpoint.

        Args:
            step: the run's last step.
            max_steps: number of steps of the run, if the caller knows it.
        """
        self._first_step = step - self.steps.steps
        self._max_steps = max_steps or self._max_steps

    # ---- what others ask

    @property
    def machine(self) -> Machine:
        """The model's sizes and the devices.

        Raises:
            PlanError: if they are unknown.
        """
        if self._prepared.machine is None:
            raise PlanError(self._prepared.unknown)
        return self._prepared.machine

    @property
    def step(self) -> int:
        """The run's last step."""
        return self._first_step + self.steps.steps

    def figures_now(
        self, *, step: int, max_steps: int | None = None, values: Mapping[str, float | None] | None = None
    ) -> Figures | None:
        """Return the figures since the last line, on rank 0; every rank makes the call, after the same step.

        Rank 0 waits a few seconds for the figures of the other ranks, and returns None if they do not come.

        Args:
            step: the run's last step, as the caller counts.
            max_steps: number of steps of the run.
            values: the loss, the norm and the learning rate, as far as the caller knows them.
        """
        self.resumed(step, max_steps)
        pending = self._send(HostValues(values or {}))
        if pending is None:
            return None
        pending.done.wait(_SOON)
        return pending.figures

    def note_values(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Write numbers of the program, such as an evaluation's loss, to the log, which rank 0 has.

        Args:
            values: name -> number; other values are left out.
            step: the step to which they belong; the default is the last one.
        """
        numbers = {name: float(x) for name, x in values.items() if isinstance(x, int | float) and type(x) is not bool}
        if self._prepared.log is not None and numbers:
            record = {"step": self.step if step is None else step, "values": numbers, "time": time.time()}
            self._prepared.log.write("values", record)

    def close(self) -> None:
        """Show the lines whose figures have not all arrived."""
        self.reporter.close()

    # ---- steps

    def _is_due(self, count: int) -> bool:
        if self.every is None:
            return False
        step = self._first_step + count
        return count in (1, _COMPARED) or step % self.every == 0 or step == self._max_steps

    def _end_interval(self, loss: Tensor | None, norm: Tensor | None, lr: Tensor | float | None) -> None:
        self._send(HostValues({"loss": loss, "norm": norm, "lr": lr} if is_first_rank() else {}))

    def _send(self, values: HostValues) -> PendingRecord | None:
        """Send this rank's figures to rank 0; on rank 0, return the line that will be put together from them."""
        count = self.steps.steps
        if self._sent is not None and self._sent[0] == count:
            return self._sent[1]  # the line after this step exists already
        own, per_step = self.steps.take(), self.steps.seconds_per_step
        if self._experts is not None:
            own = dataclasses.replace(own, experts=self._experts.take())
        topic = f"figures {self._number}.{count}"
        if self._runtime.guard is not None:
            self._runtime.guard.post(topic, dataclasses.asdict(own))
        pending = None
        if is_first_rank():
            pending = PendingRecord(
                step=self.step,
                count=count,
                topic=topic,
                own=own,
                values=values,
                per_step=per_step,
                max_steps=self._max_steps,
            )
            self.reporter.put(pending, self._show)
        self._sent = (count, pending)
        return pending

    # ---- what rank 0 shows

    def _begin(self) -> None:
        """Show the card, before the first forward pass in training."""
        if not is_first_rank():
            return
        card = self._card()
        say(str(card))
        if self._prepared.log is not None:
            if self._prepared.log.has_earlier and self._first_step == 0:
                say(
                    f"meshwright: {self._prepared.log.path} has an earlier run, which this run's "
                    "steps replace in the report. To keep both, set another ToDistributedConfig(logging_dir=...)"
                )
            plan, found = card.plan, card.estimate
            record: dict[str, Any] = {
                "version": VERSION,
                "time": time.time(),
                "first_step": self._first_step,
                "model": card.model,
                "parameters": card.parameters,
                "plan": plan.label,
                "why": card.source,
                "mesh": plan.sizes,
                "ranks": plan.world_size,
                "device": card.device,
                "rows_per_rank": None if card.batch is None else card.batch[0],
                "row_tokens": None if card.batch is None else card.batch[1],
                "tokens_per_pass": card.tokens_per_pass,
                "max_steps": self._max_steps,
                "memory_is": "resident" if self._device.type == "cpu" else "allocated",
                **self._prepared.origin,
            }
            self._prepared.log.write("run", record | _of_estimate(found))

    def _card(self) -> Card:
        plan, batch, machine = self._runtime.plan, self.steps.batch, self._prepared.machine
        assert plan is not None
        card = Card(
            model=self._model_name,
            parameters=self._prepared.parameters,
            plan=plan,
            source=self._runtime.plan_source,
            device=self._device.type,
            batch=batch,
            reason=self._prepared.unknown,
            unknown_peak=self._prepared.unknown,
            is_cpu=self._device.type == "cpu",
            measured="at the first step that is logged" if self.every is None else f"after step {self._first_step + 1}",
        )
        if machine is None:
            return card
        if batch is not None:
            try:
                self._estimate = estimate(machine, plan, self._dtype, batch, 1)
            except PlanError as error:
                card = dataclasses.replace(card, reason=str(error))
        return dataclasses.replace(
            card,
            device=machine.cluster.device.name,
            estimate=self._estimate,
            basis=machine.basis,
            unknown_peak=machine.unknown_peak,
            unused_profile=machine.unused_profile,
            notes=(() if batch is None else machine.notes(batch)) + self._uncounted(),
            active=machine.shape.active_parameters if machine.shape.experts else None,
        )

    def _uncounted(self) -> tuple[str, ...]:
        """Return what the estimate of a pipeline leaves out."""
        forward = self._runtime.features.find(PipelineForward)
        if forward is None or forward.pipeline.cut.order.is_plain:
            return ()
        return ("what crosses the stages beside hidden states of [rows, tokens, channels] is not counted",)

    def _show(self, pending: PendingRecord, figures: Figures) -> None:
        is_first, self.latest = self.latest is None, figures
        log = self._prepared.log
        if log is not None:
            log.write("step", {**dataclasses.asdict(figures), "time": time.time()})
        if is_first:
            self._show_memory(figures)
        if self.prints and self.every is not None:
            say(line(figures, max_steps=pending.max_steps))
        if not self._has_compared and pending.count >= _COMPARED and pending.per_step:
            self._has_compared = True
            self._compare(figures, pending.per_step)

    def _show_memory(self, figures: Figures) -> None:
        """Show the memory after the first step, and the tokens of a step that has several forward passes."""
        what = "resident memory of the process" if self._device.type == "cpu" else "allocated"
        words = f"peak {memory(figures.peak[figures.fullest])} on rank {figures.fullest}, the fullest ({what})"
        if self.steps.passes_per_step > 1:
            words += f"; {self.steps.passes_per_step} forward passes per step"
        say(f"meshwright: measured after step {figures.step}: {words}")
        if self._prepared.log is not None:
            self._prepared.log.write("memory", {"step": figures.step, "peak": figures.peak, "memory_is": what})

    def _compare(self, figures: Figures, per_step: float) -> None:
        machine, plan, batch = self._prepared.machine, self._runtime.plan, self.steps.batch
        if machine is None or self._estimate is None or plan is None or batch is None:
            return
        found = self._estimate
        if self.steps.passes_per_step > 1:
            found = estimate(machine, plan, self._dtype, batch, self.steps.passes_per_step)
        compared = Comparison(
            estimate=found,
            seconds=per_step,
            peak=figures.peak[figures.fullest],
            rank=figures.fullest,
            has_profile=machine.profile.rows > 0,
            is_cpu=self._device.type == "cpu",
            command=machine.command,
            processes=machine.cluster.per_node,
            cores=core_count(),
        )
        say(str(compared))
        if self._prepared.log is not None:
            record: dict[str, Any] = {
                "step": figures.step,
                "measured_seconds": per_step,
                "measured_peak": compared.peak,
                "hints": compared.hints,
            }
            self._prepared.log.write("estimate", record | _of_estimate(found))

    def _note_fault(self, what: str) -> None:
        assert self._prepared.log is not None
        self._prepared.log.write("fault", {"step": self.step, "what": what, "time": time.time()})


def start_monitor(
    model: nn.Module,
    runtime: Runtime,
    config: ToDistributedConfig,
    prepared: Preparation,
    *,
    every: int | None,
    prints: bool = True,
) -> Monitor:
    """Watch a distributed model from now on, and return the monitor."""
    monitor = Monitor(model, runtime, config, prepared, every=every, prints=prints)
    runtime.features.add(monitor, is_copied=False)
    return monitor


def monitor_of(runtime: Runtime | None) -> Monitor | None:
    """Return the monitor that watches a runtime's model; None if none does."""
    watch = None if runtime is None else runtime.features.find(Watch)
    return watch if isinstance(watch, Monitor) else None


def _of_estimate(found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {"estimated_seconds": None, "estimated_parts": {}, "estimated_memory": [], "band": None}
    return {
        "estimated_seconds": found.time.total,
        "estimated_parts": found.time.parts,
        "estimated_memory": [memory.parts for memory in found.memory],
        "ranks_per_stage": found.ranks_per_stage,
        "band": found.band,
    }
