"""``register`` makes stock ``from_pretrained(distributed_config=...)`` distribute the model by Meshwright.

transformers builds the model on the meta device, finds and downloads the files and determines the dtype. Then
``to_distributed`` is called in place of transformers' loading, and each rank reads only its shard. ``register``
replaces these methods of ``PreTrainedModel``. Calls without a configuration for Meshwright are passed on to the stock
method:

* ``prepare_distribute_model`` recognises the configurations for Meshwright,
* ``maybe_distribute_model`` marks the models of such configurations, which are still on the meta device,
* ``_load_pretrained_model`` distributes these models,
* ``_finalize_model_loading`` skips these models, since no weight is missing and shards must not be initialised,
* ``_load_and_finalize_distributed_pretrained_model``, which reads transformers' distributed checkpoints, refuses them.

Gives a model the form of its quantised checkpoint before any weight is read, so that a plan can cut it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.core_model_loading import build_glob_alternation
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.utils.loading_report import LoadStateDictInfo

from meshwright.checkpoint.one_device.published_form import as_of_model
from meshwright.checkpoint.one_device.weight_files import WeightFiles, WeightSource
from meshwright.construct.deferred_init import is_deferring
from meshwright.construct.initial_weights import InitialWeights, is_waiting
from meshwright.distribute.quantised import method_of
from meshwright.distribute.to_distributed import to_distributed
from meshwright.errors import CheckpointError, PlanError
from meshwright.facts import Facts
from meshwright.optim.runtime import find_runtime
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright_hf.distributed_config import options_for
from meshwright_hf.styles import STYLES
from meshwright_hf.versions import warn_outside_range


def give_packed_form(model: nn.Module, quantizer: Any) -> None:
    """Pack the weights on the meta device that bitsandbytes has quantised in the checkpoint.

    Args:
        model: the model, on the meta device, with the modules of its quantisation.
        quantizer: transformers' ``HfQuantizer``.

    Raises:
        PlanError: if the checkpoint is not quantised, or by another library.
    """
    method = method_of(model)
    if method != "bitsandbytes" or not quantizer.pre_quantized:
        why = (
            "has weights that bitsandbytes would quantise as they are loaded, whole"
            if method == "bitsandbytes"
            else f"is quantised by {method}, and each rank would need the whole of it"
        )
        raise PlanError(
            f"the checkpoint {why}, but with distributed_config and under deferred_init a rank reads its part alone. "
            "Load it whole on each rank, model = from_pretrained(path), and then call to_distributed(model, optimizer, "
            "loader, plan=...); or write a checkpoint that is quantised, once and in one process: "
            "from_pretrained(..., quantization_config=BitsAndBytesConfig(...)).save_pretrained(...)"
        )
    import bitsandbytes

    # The library keeps the codes of second statistics on the device of its first call, for all models of the process.
    bitsandbytes.functional.name2qmap.setdefault("dynamic", bitsandbytes.functional.create_dynamic_map())
    module: Any
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if isinstance(weight, bitsandbytes.nn.Int8Params | bitsandbytes.nn.Params4bit) and module.bias is not None:
            module.bias.requires_grad_()  # as after a whole load
        if isinstance(weight, bitsandbytes.nn.Int8Params):
            weight.SCB = torch.empty(module.out_features, device="meta")
        elif isinstance(weight, bitsandbytes.nn.Params4bit):
            values = torch.empty(module.out_features, module.in_features, device="meta")
            weight.data, state = bitsandbytes.functional.quantize_4bit(
                values,
                blocksize=weight.blocksize,
                compress_statistics=weight.compress_statistics,
                quant_type=weight.quant_type,
                quant_storage=weight.quant_storage,
            )
            if state.nested:
                state.offset = torch.zeros(())  # saves read its value
            weight.quant_state = module.quant_state = state
            weight.bnb_quantized = True


def rules_without(quantizer: Any, rules: list[Any]) -> list[Any]:
    """Return transformers' rules from a checkpoint's tensors to a model's, without those of the quantisation."""

    def is_of_quantizer(rule: Any) -> bool:
        return any(getattr(each, "hf_quantizer", None) is quantizer for each in getattr(rule, "operations", ()))

    return rules if quantizer is None else [rule for rule in rules if not is_of_quantizer(rule)]


TakeOver = Literal["sequence_parallel", "all"]

logger = logging.getLogger(__name__)

_METHODS = ("prepare_distribute_model", "maybe_distribute_model", "_load_pretrained_model", "_finalize_model_loading")
_NEWER = "_load_and_finalize_distributed_pretrained_model"


def register(*, take_over: TakeOver = "sequence_parallel") -> None:
    """Make ``from_pretrained(path, distributed_config=...)`` distribute models by Meshwright.

    ``distributed_config`` may then also be a ``meshwright.ParallelPlan``, a plan in words ("dp2 tp2+sp"), or a
    ``ToDistributedConfig``, in which plan=None means the plan in the model's config.json. The styles of
    ``meshwright_hf.styles`` can be used in transformers' own ``tp_plan``. Nothing else changes. A second
    call replaces the first.

    Args:
        take_over: which ``DistributedConfig`` objects Meshwright handles: "sequence_parallel" for those with
            ``enable_sequence_parallel=True``, which transformers itself ignores, or with ``pp_size`` above 1, under
            which transformers itself computes no loss; "all" also for all others with more than one process.

    Raises:
        ValueError: if ``take_over`` is something else.
        RuntimeError: if this version of transformers lacks a method that ``register`` replaces.

    Example::

        meshwright_hf.register()
        model = AutoModelForCausalLM.from_pretrained(
            path, distributed_config=DistributedConfig(tp_size=2, enable_sequence_parallel=True)
        )
        model.train()  # from_pretrained leaves every model in evaluation mode
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = meshwright.to_distributed(model, optimizer, loader)
    """
    warn_outside_range()
    if take_over not in ("sequence_parallel", "all"):
        raise ValueError(f"register(take_over={take_over!r}) must be 'sequence_parallel' or 'all'")
    if absent := [name for name in _METHODS if not callable(getattr(PreTrainedModel, name, None))]:
        raise RuntimeError(
            f"transformers {transformers_version} has no PreTrainedModel.{', '.join(absent)}, which register() "
            "replaces; call meshwright.to_distributed(model, config=ToDistributedConfig(weights=path)) instead"
        )
    unregister()
    _Registration(take_over).install()
    for name, style in STYLES.items():
        ALL_PARALLEL_STYLES[name] = style


def unregister() -> None:
    """Undo ``register``, if it was called: restore transformers' methods. Distributed models stay distributed.

    Raises:
        RuntimeError: if something else has replaced the same methods after ``register``.
    """
    if _active:
        _active[-1].remove()
    for name, style in STYLES.items():
        if ALL_PARALLEL_STYLES.get(name) is style:
            del ALL_PARALLEL_STYLES[name]


@dataclass(frozen=True)
class _Request:
    """Carries Meshwright's options through ``from_pretrained``, which stores this object in the model's config."""

    options: ToDistributedConfig

    def __deepcopy__(self, memo: object) -> _Request:
        return self


class _Registration:
    """Holds transformers' stock methods, and installs and removes the methods that replace them."""

    def __init__(self, take_over: TakeOver):
        self.take_over = take_over
        methods = [*_METHODS, *([_NEWER] if hasattr(PreTrainedModel, _NEWER) else [])]
        self._stock = {name: getattr(PreTrainedModel, name) for name in methods}
        # The methods that PreTrainedModel itself defines; the others are inherited.
        self._own = {name: vars(PreTrainedModel)[name] for name in methods if name in vars(PreTrainedModel)}
        self._installed: dict[str, Any] = {}

    def install(self) -> None:
        registration, stock = self, self._stock

        def prepare_distribute_model(
            cls: type[PreTrainedModel], distributed_config: object, *args: object, **kwargs: object
        ) -> tuple[Any, Any, Any]:
            options = registration.options_of(distributed_config)
            if options is None:
                return stock["prepare_distribute_model"].__func__(cls, distributed_config, *args, **kwargs)
            for name, value in kwargs.items():
                if value is not None:  # device_map or device_mesh
                    raise PlanError(f"{name}={value!r} and distributed_config both place the weights; leave {name} out")
            return _Request(options), None, None

        def maybe_distribute_model(
            cls: type[PreTrainedModel],
            model: PreTrainedModel,
            distributed_config: object,
            *args: object,
            **more: object,
        ) -> Any:
            if not isinstance(distributed_config, _Request):
                return stock["maybe_distribute_model"].__func__(cls, model, distributed_config, *args, **more)
            model.config.distributed_config = distributed_config
            return model

        def load_and_finalize(model: nn.Module, checkpoint: object, *args: object, **kwargs: object) -> Any:
            if isinstance(getattr(model.config, "distributed_config", None), _Request):
                raise PlanError(
                    f"{checkpoint} was saved with distributed_checkpoint=True, which only transformers' own "
                    "parallelism reads; save it with save_pretrained(...) in one process"
                )
            return stock[_NEWER](model, checkpoint, *args, **kwargs)

        ours: dict[str, Any] = {
            "prepare_distribute_model": classmethod(prepare_distribute_model),
            "maybe_distribute_model": classmethod(maybe_distribute_model),
            "_load_pretrained_model": staticmethod(self.load),
            "_finalize_model_loading": staticmethod(self.finalize),
            _NEWER: load_and_finalize,
        }
        self._installed = {name: ours[name] for name in stock}
        for name, method in self._installed.items():
            setattr(PreTrainedModel, name, method)
        _active.append(self)

    def remove(self) -> None:
        """Put the stock methods back."""
        if others := [name for name, x in self._installed.items() if vars(PreTrainedModel).get(name) is not x]:
            raise RuntimeError(
                f"something else has replaced PreTrainedModel.{', '.join(others)} since register(); undo that first"
            )
        for name in self._installed:
            if name in self._own:
                setattr(PreTrainedModel, name, self._own[name])
            else:
                delattr(PreTrainedModel, name)
        _active.remove(self)

    def options_of(self, distributed_config: object) -> ToDistributedConfig | None:
        """Return the options that correspond to a configuration; None if transformers itself handles it."""
        if isinstance(distributed_config, ToDistributedConfig):
            return distributed_config
        if isinstance(distributed_config, ParallelPlan | str):
            return ToDistributedConfig(plan=distributed_config)
        config = distributed_config
        if isinstance(config, dict):
            config = DistributedConfig.from_dict(config)
        if not isinstance(config, DistributedConfig):
            return None
        sizes = [
            getattr(config, field.name) or 1 for field in dataclasses.fields(config) if field.name.endswith("_size")
        ]
        is_parallel = max(sizes) > 1
        is_trained_by_us = config.enable_sequence_parallel or (getattr(config, "pp_size", None) or 1) > 1
        is_ours = is_trained_by_us or (self.take_over == "all" and is_parallel)
        return options_for(config) if is_ours else None

    def load(
        self,
        model: PreTrainedModel,
        state_dict: object,
        checkpoint_files: Iterable[str],
        load_config: Any,
        *args: object,
        **kwargs: object,
    ) -> tuple[Any, Any]:
        """Load only this rank's shards if the configuration is for Meshwright, otherwise as transformers does.

        Under ``deferred_init``, leave the weights to be read by ``to_distributed``.
        """
        if find_runtime(model) is not None:
            raise PlanError(
                "an adapter cannot be loaded into a model that is already distributed; load the model and its adapter "
                "whole, then call meshwright.to_distributed"
            )
        request = getattr(model.config, "distributed_config", None)
        options = request.options if isinstance(request, _Request) else None
        if options is None and (request is not None or state_dict is not None or not is_deferring()):
            stock = self._stock["_load_pretrained_model"]
            return stock(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        if options is not None:
            # With this attribute, transformers would treat the model as sharded by itself, e.g. in save_pretrained.
            del model.config.distributed_config
        if load_config.hf_quantizer is not None:
            give_packed_form(model, load_config.hf_quantizer)
        _check_loading(model, state_dict, load_config)
        if options is not None and options.weights is not None:
            raise PlanError(
                f"ToDistributedConfig.weights={options.weights!r} and the path of from_pretrained both name the "
                "weights; leave weights=None"
            )
        files = tuple(checkpoint_files)
        rules = rules_without(load_config.hf_quantizer, list(load_config.weight_mapping or ()))
        vars(model)["_weight_conversions"] = rules
        _set_dtypes(model, load_config.dtype_plan or {})
        model.tie_weights()
        names, apart = _names_in(files, model)
        # As transformers leaves them, for save_pretrained to undo.
        vars(model)["_weight_conversions"] = [rule for rule in rules if rule.was_used()]
        _keep_apart(model, apart)
        expected = set(model.state_dict())
        if options is None:
            facts = Facts(model)
            InitialWeights.find(facts, files).defer(facts)
        else:
            to_distributed(model, config=dataclasses.replace(options, weights=files))
        info = LoadStateDictInfo(
            missing_keys=set(),
            unexpected_keys=names - expected,
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )
        return info, None

    def finalize(self, model: nn.Module, load_config: object, loading_info: object) -> Any:
        """Finish loading as transformers does; return the loading info unchanged for a distributed model."""
        if find_runtime(model) is not None or is_waiting(model):
            return loading_info
        return self._stock["_finalize_model_loading"](model, load_config, loading_info)


# The active registration, if any.
_active: list[_Registration] = []


def _names_in(weights: WeightSource, model: nn.Module) -> tuple[set[str], dict[str, str]]:
    """Return a model's names of the tensors in a checkpoint, and those tied names whose values differ there."""
    try:
        files = as_of_model(WeightFiles.open(weights), model)
        return set(files.entries), files.untied(model)
    except CheckpointError:
        return set(), {}  # to_distributed then raises on every rank, even if only one rank has a bad file


def _keep_apart(model: PreTrainedModel, names: dict[str, str]) -> None:
    """Give tied names whose values differ in the files weights of their own, as transformers does."""
    for name, first in names.items():
        weight = model.get_parameter(name)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(torch.empty_like(weight), weight.requires_grad))
        getattr(model, "all_tied_weights_keys", {}).pop(name, None)
        logger.warning(
            "%s of the checkpoint has other values than %s, so the two are not tied, though the config says so. Set "
            "config.tie_word_embeddings=False to leave this message out",
            name,
            first,
        )


def _set_dtypes(model: nn.Module, plan: dict[str, torch.dtype]) -> None:
    """Give the tensors that a model keeps in another dtype, such as a router's bias, that dtype before they are read.

    Args:
        model: the model, on the meta device.
        plan: transformers' patterns of names, with the dtype of each.
    """
    if not plan:
        return
    pattern, dtypes, _ = build_glob_alternation(list(plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (match := pattern.search(name)) is not None:
            assert match.lastgroup is not None
            tensor.data = tensor.data.to(plan[dtypes[match.lastgroup]])


def _check_loading(model: nn.Module, state_dict: object, load_config: Any) -> None:
    """Raise if an option of from_pretrained does not work when each rank loads only its shard."""
    if len(set((load_config.device_map or {}).values())) > 1:
        raise PlanError(
            f"device_map={load_config.device_map!r} places the weights, and so does to_distributed; leave it out, or "
            "load the model outside of meshwright.deferred_init()"
        )
    if load_config.ignore_mismatched_sizes:
        raise PlanError(
            "ignore_mismatched_sizes=True would draw some weights again on each rank; with distributed_config leave it "
            "False, and save a checkpoint of the right shapes with one process first"
        )
    if state_dict is not None:
        raise PlanError(
            "state_dict= cannot be used with distributed_config, by which each rank reads its shard from files; for "
            "weights from a seed build the model under meshwright.deferred_init() and call meshwright.to_distributed"
        )
    if whole := [name for name, parameter in model.named_parameters() if not parameter.is_meta]:
        raise PlanError(
            f"{whole[0]} already has memory, from a DeepSpeed ZeRO-3 configuration or a context around "
            "from_pretrained, but distributed_config builds the model without memory; leave that out"
        )
