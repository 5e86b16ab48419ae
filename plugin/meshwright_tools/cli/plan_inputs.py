"""Reads from the command line what ``meshwright plan`` plans: the cluster, the job and the user's own plans."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import PlanError
from meshwright.mesh.rank_grid import OPTIONS, PLAN_AXES
from meshwright_tools.cli.command import MODEL, option
from meshwright_tools.cli.plan_settings import Settings, names, numbers, precision_of

if TYPE_CHECKING:
    from meshwright.plan.config import ParallelPlan
    from meshwright_plan.answers.cost import Budget
    from meshwright_plan.answers.sweep import TrainingWay
    from meshwright_plan.job.adapters import Lora
    from meshwright_plan.job.candidate import Job
    from meshwright_plan.job.shapes import ModelShape
    from meshwright_plan.machine.hardware import Cluster, HardwareProfile
    from meshwright_plan.search.search import Search
    from meshwright_plan.search.space import Space

RUN_PANEL = "The whole run: days, GPU-hours and cost"
_of_run = partial(option, panel=RUN_PANEL)
_of_job = partial(option, panel="What is trained, and where")
_of_output = partial(option, panel="Output")
_SEVERAL = "plan sweep takes several, separated by commas."
_OF_PAGE = "plan sweep and --html take several, separated by commas."


class Quantised(StrEnum):
    """The format of a frozen base."""

    nf4 = "nf4"
    int8 = "int8"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options about the whole run."""

    tokens: str | None = _of_run(
        "Tokens of the whole run, for example 300B or 1.5T: also print its days, GPU-hours and cost."
    )
    price: str | None = _of_run(
        "Price of one GPU-hour, in any currency; with --tokens. With several --gpu, one price, or one for each.",
        metavar="PRICE",
    )

    def budgets(self, gpu: Sequence[str]) -> dict[str, Budget]:
        """Return the tokens and the price of each GPU, and under the empty name those of the first; {} without tokens.

        Raises:
            PlanError: an option is wrong, or there are not as many prices as GPUs.
        """
        from meshwright_plan.answers.cost import Budget, parse_tokens, price_of

        if self.tokens is None and self.price is not None:
            raise PlanError(f"--price {self.price} needs the tokens of the run; write --tokens 1T")
        if self.tokens is None:
            return {}
        tokens, prices = parse_tokens(self.tokens), [price_of(word) for word in (self.price or "").split(",") if word]
        if len(prices) > 1 and len(prices) != len(gpu):
            raise PlanError(
                f"--price {self.price} has {len(prices)} prices for {max(1, len(gpu))} GPU types; write one price, or "
                "one for each type of --gpu"
            )
        budgets = [Budget(tokens=tokens, price=price) for price in prices] or [Budget(tokens=tokens)]
        each = budgets * len(gpu) if len(budgets) == 1 else budgets
        return {"": budgets[0], **dict(zip(gpu, each, strict=True))}


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The options about the plans to show."""

    top: int = _of_output("Number of plans to show.", default=5)
    simple: bool = _of_output(
        "Prefer a plan with fewer axes and even stages that takes up to 10 percent longer (default: only among ties).",
        "--simple",
        default=False,
    )
    allow_future: bool = _of_output(
        "Also show plans that this version cannot run yet, such as recompute of attention alone.",
        "--allow-future",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options about what is trained, and where."""

    model: Path | None = _of_job(f"{MODEL} Required.")
    gpus: str | None = _of_job(
        f"Number of devices (default: 8, or as many as --profile measured). {_SEVERAL}", metavar="N"
    )
    gpus_per_node: int | None = _of_job("Number of devices per node (default: 8, or as many as --profile measured).")
    gpu: str | None = _of_job(
        "Device model, for example a100, h100, h200, b200, rtx-4090 or cpu (default: h100-sxm, or the device that "
        f"--profile measured). {_OF_PAGE}"
    )
    gpu_spec: str | None = _of_job(
        "Data sheet of a device that is not in the catalogue, in place of --gpu: memory in GB, dense 16-bit flops in "
        "TFLOP/s, bandwidth, link and network in GB/s.",
        metavar="memory=96,flops=148,bandwidth=4000,link=450,network=50",
    )
    seq_len: str = _of_job(f"Tokens per sequence. {_SEVERAL}", default="4096", metavar="N")
    global_batch: str = _of_job(
        f"Sequences per optimizer step, over all devices. {_SEVERAL}", default="64", metavar="N"
    )
    precision: str = _of_job(
        "Dtype of the layers' matrix multiplications: bf16, fp8 or fp4; this version trains in bf16 and fp8. "
        f"{_OF_PAGE}",
        default="bf16",
        metavar="DTYPE",
    )
    optimizer: str = _of_job(
        "Optimizer, whose state is counted: adamw, adamw8bit, adamw4bit, ademamix, schedule-free, lion, lion8bit, muon "
        "(with AdamW for embeddings, norms and the head), adafactor, sgd or sgd-momentum.",
        default="adamw",
    )
    lora: int | None = _of_job(
        "Rank of LoRA adapters on the projections of attention and MLPs: train these alone, and compare with training "
        "all weights (default: all weights are trained)."
    )
    quantised: Quantised | None = _of_job(
        "With --lora, the format of the frozen base's projections, as bitsandbytes packs them: nf4 or int8 (default: "
        "16 bits).",
        "--quantised",
        "--quantized",
    )
    double_quant: bool = _of_job(
        "With --quantised nf4, also quantise the scales (bnb_4bit_use_double_quant).", "--double-quant", default=False
    )
    gather_logits: bool = _of_job(
        "Count the memory of whole logits, as with ToDistributedConfig(gather_logits=True): for a program that reads "
        "outputs.logits in training, as TRL's trainers do.",
        "--gather-logits",
        default=False,
    )
    expert_load: float = _of_job(
        "For a model with experts: rows of the rank with the fullest experts, relative to the mean over the ranks that "
        "share them; 1 is balanced routing.",
        default=1.0,
    )
    images_per_row: float = _of_job(
        "For a model with a tower: images per sequence, each of the size that the model's config states.", default=1.0
    )
    interconnect: str | None = _of_job(
        "Bandwidth from one device to other nodes, in Gb/s (default: that of the system in which the device is "
        f"usually sold, or what --profile measured). {_SEVERAL}",
        metavar="GBPS",
    )
    memory: float = _of_job("Share of the device memory that a plan may fill, up to 1.", default=0.9)
    profile: Path | None = _of_job(
        "Profile that meshwright calibrate wrote (default: data sheets and typical efficiencies)."
    )

    def adapters(self) -> Lora | None:
        """Return the adapters that are trained; None if all weights are.

        Raises:
            PlanError: an option has no effect without another one.
        """
        from meshwright_plan.job.adapters import Lora

        if self.lora is None and (self.quantised is not None or self.double_quant):
            raise PlanError("a quantised base is frozen, so it needs adapters to train: write --lora 16 too")
        if self.double_quant and self.quantised is not Quantised.nf4:
            raise PlanError("--double-quant quantises the scales of 4-bit weights; write --quantised nf4 too")
        if self.lora is None:
            return None
        if self.quantised is None:
            return Lora(rank=self.lora)
        return Lora(rank=self.lora, quantised=self.quantised.value, double=self.double_quant)

    def question(self, run: RunOptions, search: SearchOptions) -> PlanQuestion:
        """Return what is asked.

        Raises:
            PlanError: an option is wrong, or the planner does not know the model.
        """
        from meshwright_plan.machine.hardware import HardwareProfile, device

        if self.model is None:
            raise PlanError("--model is missing; write --model config.json")
        if not 0 < self.memory <= 1:
            raise PlanError(f"--memory={self.memory} must be a share of the device's memory, above 0 and at most 1")
        if search.top < 1:
            raise PlanError(f"--top={search.top} must be at least 1")
        settings = Settings(
            gpu=names("--gpu", self.gpu, lambda word: device(word).name),
            precision=names("--precision", self.precision, precision_of),
            gpus=numbers("--gpus", self.gpus, int),
            seq_len=numbers("--seq-len", self.seq_len, int),
            global_batch=numbers("--global-batch", self.global_batch, int),
            interconnect=numbers("--interconnect", self.interconnect, float),
        )
        shape, against = _described(self.model)
        return PlanQuestion(
            options=self,
            settings=settings,
            shape=shape,
            against=against,
            measured=HardwareProfile.load(self.profile) if self.profile else None,
            search_options=search,
            budgets=run.budgets(settings.gpu),
        )


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """What is asked.

    Args:
        options: the options about the job.
        settings: the settings that may have several values; the first value of each counts.
        shape: the model.
        against: axis -> why the planner has no estimate for the model under it.
        measured: the profile; None for the catalogue.
        search_options: which plans to show.
        budgets: the tokens and the price of each GPU, and under the empty name those of the first; none without a
            number of tokens.
    """

    options: JobOptions
    settings: Settings
    shape: ModelShape
    against: Mapping[str, str]
    measured: HardwareProfile | None
    search_options: SearchOptions
    budgets: Mapping[str, Budget]

    @property
    def budget(self) -> Budget | None:
        """The tokens and the price of the first GPU; None without a number of tokens."""
        return self.budget_at(self.settings)

    def budget_at(self, settings: Settings) -> Budget | None:
        """Return the tokens and the price of the GPU of some settings; None without a number of tokens."""
        return self.budgets.get(settings.gpu[0] if settings.gpu else "")

    def others(self) -> Iterator[PlanQuestion]:
        """Yield the question for each GPU and precision of the page's menus but the first."""
        for settings in itertools.islice(self.settings.of_page(), 1, None):
            yield dataclasses.replace(self, settings=settings)

    def space(self, settings: Settings | None = None) -> Space:
        """Return the plans to search, perhaps with other settings."""
        from meshwright_plan.search.space import Space

        settings = settings or self.settings
        cluster = self.cluster(settings)
        job, allow_future = self._job(settings, cluster), self.search_options.allow_future
        return Space(shape=self.shape, cluster=cluster, job=job, allow_future=allow_future, against=self.against)

    def cluster(self, settings: Settings) -> Cluster:
        """Return the devices of some settings."""
        from meshwright_plan.machine.devices import device_of_spec
        from meshwright_plan.machine.hardware import Cluster, device

        options, measured = self.options, self.measured
        gpus = settings.gpus[0] if settings.gpus else None
        slow_link = settings.interconnect[0] / 8 * 1e9 if settings.interconnect else None
        gpu = settings.gpu[0] if settings.gpu else None
        if gpu is not None and options.gpu_spec is not None:
            raise PlanError("--gpu and --gpu-spec both name the device; leave one of them out")
        if measured is not None and measured.device is not None:
            if (given := gpu or options.gpu_spec) is not None:
                raise PlanError(
                    f"--gpu {given} cannot be combined with {options.profile}, which measured "
                    f"{measured.device.name!r}; leave out one of them"
                )
            return measured.cluster(gpus=gpus, gpus_per_node=options.gpus_per_node, slow_link=slow_link)
        return Cluster(
            device=device_of_spec(options.gpu_spec) if options.gpu_spec else device(gpu or "h100-sxm"),
            gpus=gpus or 8,
            gpus_per_node=8 if options.gpus_per_node is None else options.gpus_per_node,
            slow_link=slow_link,
        )

    def _job(self, settings: Settings, cluster: Cluster) -> Job:
        """Return the job, in 32 bits if the profile measured float32 or the cluster has CPUs only."""
        from meshwright_plan.job.candidate import Job

        on_cpu = cluster.device.is_cpu
        job = Job(
            seq_len=settings.seq_len[0],
            global_batch=settings.global_batch[0],
            precision=settings.precision[0],  # type: ignore[arg-type]
            on_cpu=on_cpu,
            expert_load=self.options.expert_load,
            prefers_masters=True,
            images=self.options.images_per_row,
            logits="gathered" if self.options.gather_logits else "chunked",
            lora=self.options.adapters(),
            optimizer=self.options.optimizer,
        )
        dtype = self.measured.dtype if self.measured and self.measured.dtype else "float32" if on_cpu else "bfloat16"
        return job.in_32_bits() if dtype == "float32" else job

    def search(self, space: Space, *, top: int | None = None, is_shown: bool = True) -> Search:
        """Return the fastest plans that fit, as many as asked for after equal ones are merged.

        Args:
            space: the plans to search.
            top: number of plans (default: that of ``--top``).
            is_shown: whether the reasons against other plans are shown.
        """
        from meshwright_plan.answers.notes import without_repetitions
        from meshwright_plan.search.search import SIMPLER, TIE, search

        wanted, within = top or self.search_options.top, SIMPLER if self.search_options.simple else TIE
        found = search(
            space, self.measured, top=2 * wanted, budget=self.filled(space), explains=is_shown, within=within
        )
        return without_repetitions(found, wanted)

    def compared(self, space: Space, found: Search) -> list[TrainingWay]:
        """Return the ways to train the model, if adapters are asked for.

        Args:
            space: the space of the job.
            found: its search, so that the table has its first plan.
        """
        from meshwright_plan.answers.sweep import trainings

        if space.job.lora is None:
            return []

        def find(job: Job) -> Search:
            return found if job == space.job else self.search(dataclasses.replace(space, job=job), is_shown=False)

        return trainings(self.shape, space.job, find)

    def filled(self, space: Space) -> float:
        """Return the bytes of a device that a plan may fill."""
        return self.options.memory * space.cluster.device.memory


def _described(model: Path) -> tuple[ModelShape, dict[str, str]]:
    """Return a model's shape, and axis -> why it has no estimate under it; modules show what the config does not."""
    from meshwright_plan.job.config_file import WrongConfigError, config_path
    from meshwright_plan.job.shapes import describe, name_of

    path = config_path(model)  # a missing file is said at once, without an import of torch
    try:
        return describe(model), {}
    except WrongConfigError:
        raise
    except PlanError as error:
        refusal = error
    # Imported here, since these import torch, which takes seconds.
    import torch

    from meshwright.choose.model_sizes import against_tensor, shows_more_than_its_config
    from meshwright.parallel.fake_passes.routed_shape import routed_shape
    from meshwright_tools.tracing.compare import model_on_meta

    try:
        on_meta = model_on_meta(path, torch.bfloat16)
    except PlanError as error:
        raise PlanError(f"{refusal} ({error})") from None
    if not shows_more_than_its_config(on_meta):
        raise refusal
    against = {"tp": reason} if (reason := against_tensor(on_meta)) is not None else {}
    return routed_shape(on_meta, name=name_of(model)), against


def own_plans(
    words: Sequence[str], sizes: Mapping[str, object], gpus: int | None
) -> tuple[int | None, list[ParallelPlan]]:
    """Return the number of devices of the plans that the user gives, and the plans.

    Args:
        words: plans in words, or files.
        sizes: fields of ``ParallelPlan``.
        gpus: number of devices, if it was given.

    Raises:
        PlanError: a plan is malformed, or both words and sizes are given.
    """
    # Imported here, since it imports torch, which takes seconds.
    from meshwright.choose.given_plan import plan_of_sizes, resolve_plan

    if words and sizes:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sizes)
        raise PlanError(f"--plan {words[0]!r} and {options} both give a plan; leave one of them out")
    plans = [resolve_plan(text, "--plan") for text in words]
    if gpus is None and len({plan.world_size for plan in plans}) > 1:
        counts = " and ".join(f"{text!r} has {plan.world_size}" for text, plan in zip(words, plans, strict=True))
        raise PlanError(f"--plan {counts} devices; compare plans of as many devices, or estimate each in a command")
    if sizes:
        _check_sizes(sizes, gpus)

        def uneven(plan: ParallelPlan) -> str:
            product = plan.product(*plan.sizes_beside_dp)
            return f"--gpus {gpus} is not divisible by {product}; change a size, or give --dp in place of --gpus"

        plans = [plan_of_sizes(sizes, gpus, uneven)]
    world = gpus if gpus is not None else plans[0].world_size if plans else None
    return world, plans


def _check_sizes(sizes: Mapping[str, object], gpus: int | None) -> None:
    """Raise a PlanError if an option would have no effect, or no option says how many devices the plan has."""
    for axis, options in OPTIONS.items():
        for name in options:
            if sizes.get(name) and axis not in sizes:
                raise PlanError(f"--{name.replace('_', '-')} has an effect with --{axis} only; write --{axis} 2 too")
    if gpus is None and not any(axis in sizes for axis in PLAN_AXES):
        raise PlanError(
            f"--{next(iter(sizes)).replace('_', '-')} describes a plan of your own, without its number of devices; "
            "write --gpus 8, or sizes such as --dp 8"
        )
