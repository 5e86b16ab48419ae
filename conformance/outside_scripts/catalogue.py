"""Lists which scripts run, with which arguments, and which of their lines change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ROWS = 8  # of all data-parallel ranks together
STEPS = 4
TOKENS = 32  # of a row

Source = Literal["transformers", "trl", "accelerate"]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One replacement in a script.

    Args:
        old, new: the text, and what replaces it. ``{rows}`` stands for the rows of a data-parallel rank, and
            ``{warmup}`` for a warm-up that is counted in batches of a rank.
        optional: whether the script may lack ``old``, as other versions of it do.
    """

    old: str
    new: str
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script of a checkout and how it is run.

    Args:
        source: the checkout.
        path: where the script lies in it.
        arguments: the script's arguments, with the names of ``Edit``, and ``{inputs}`` and ``{output}`` for folders.
        changes: what a user changes to train by a plan.
        tolerance: the largest relative difference of weights and figures that counts as equal: rounding, and no more.
        settings: what is changed for the run in one process too, so that few steps show a difference.
        inputs: the folder of models that the script's relative names lead to.
        remark: what the page says of the row.
    """

    source: Source
    path: str
    arguments: tuple[str, ...]
    changes: tuple[Edit, ...]
    tolerance: float = 1e-9  # float64, in which sums in another order differ by about 1e-15
    settings: tuple[Edit, ...] = ()
    inputs: str = "bert"
    remark: str = ""

    @property
    def name(self) -> str:
        name = self.path.rsplit("/", 1)[-1]
        return f"{name} ({self.remark})" if self.remark else name

    @property
    def changed_lines(self) -> int:
        return sum(_lines(change) for change in self.changes)


def _lines(edit: Edit) -> int:
    """Return how many lines a diff would show as added, or as removed if there are more."""
    old, new = ([line for line in text.splitlines() if line] for text in (edit.old, edit.new))
    return max(len([line for line in new if line not in old]), len([line for line in old if line not in new]))


_TRAINING = (
    *("--per_device_train_batch_size", "{rows}", "--per_device_eval_batch_size", "{rows}", "--max_steps", str(STEPS)),
    *("--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "2"),
    *("--save_strategy", "steps", "--save_steps", str(STEPS), "--report_to", "none", "--use_cpu", "--disable_tqdm"),
    *("True", "--seed", "1", "--output_dir", "{output}"),
)
_ADAM = ("--learning_rate", "1e-2", "--dtype", "auto")


def _text(name: str) -> tuple[str, ...]:
    return (
        *("--model_name_or_path", "{inputs}/llama", "--block_size", str(TOKENS), "--output_dir", "{output}"),
        *("--train_file", f"{{inputs}}/{name}.txt", "--validation_file", "{inputs}/test.txt"),
    )


_RUN_CLM = (
    Edit(old="    Trainer,\n    TrainingArguments,", new="    TrainingArguments,"),
    Edit(
        old="from transformers.testing_utils import CaptureLogger",
        new="from meshwright_hf.trainer import MeshwrightTrainer as Trainer\n"
        "from transformers.testing_utils import CaptureLogger",
    ),
)
_ACCELERATOR = Edit(
    old="from accelerate import Accelerator, DistributedType",
    new="from accelerate import DistributedType\nfrom meshwright_hf.accelerate import Accelerator",
)


def _clm(*more: str, remark: str = "") -> Script:
    return Script(
        source="transformers",
        path="examples/pytorch/language-modeling/run_clm.py",
        arguments=("--do_train", "--do_eval", *_text("train"), *_TRAINING, *_ADAM, *more),
        changes=_RUN_CLM,
        remark=remark,
    )


def _no_trainer(*more: str, remark: str = "", text: str = "train") -> Script:
    return Script(
        source="transformers",
        path="examples/pytorch/language-modeling/run_clm_no_trainer.py",
        arguments=(
            *(*_text(text), "--per_device_train_batch_size", "{rows}", "--per_device_eval_batch_size", "{rows}"),
            *("--learning_rate", "1e-2", "--num_warmup_steps", "2", "--seed", "1", *more),
        ),
        changes=(_ACCELERATOR,),
        # accelerate 1.15 has no such type any more.
        settings=(Edit(old="DistributedType.TPU", new="DistributedType.XLA", optional=True),),
        remark=remark,
    )


def _trl(kind: str, trainer: str, *more: str, model: str = "llama", remark: str = "") -> Script:
    imported = f"    from trl import {trainer}, get_dataset, get_peft_config, get_quantization_config\n"
    return Script(
        source="trl",
        path=f"trl/scripts/{kind}.py",
        arguments=(
            *("--model_name_or_path", f"{{inputs}}/{model}", "--dataset_name", f"{{inputs}}/{kind}", "--dtype", "auto"),
            # With SGD, since Adam takes a full step even if a gradient is only a rounding error.
            *("--bf16", "False", *_TRAINING, "--optim", "sgd", "--learning_rate", "0.5", *more),
        ),
        tolerance=1e-5,
        changes=(
            Edit(
                old=imported,
                new=f"{imported}    from meshwright_hf.trainer import MeshwrightTrainerMixin\n\n"
                f"    class Planned(MeshwrightTrainerMixin, {trainer}): ...\n",
            ),
            Edit(old=f"trainer = {trainer}(", new="trainer = Planned("),
        ),
        remark=remark,
    )


_QUICK = Edit(old='"lr": 2e-5, "num_epochs": 3', new='"lr": 1e-2, "num_epochs": 2')
_ROWS = Edit(old='"seed": 42, "batch_size": 16}', new='"seed": 42, "batch_size": {rows}}')
_WARMUP = Edit(old="num_warmup_steps=100", new="num_warmup_steps={warmup}")


def _feature(
    path: str,
    *arguments: str,
    change: Edit = _ACCELERATOR,
    settings: tuple[Edit, ...] = (_QUICK, _ROWS, _WARMUP),
    inputs: str = "decoder",
) -> Script:
    """An example of accelerate: its ``bert-base-cased`` is a Llama with a classification head, or a BERT."""
    return Script(
        source="accelerate",
        path=f"examples/{path}.py",
        arguments=("--cpu", *arguments),
        changes=(change,),
        settings=settings,
        inputs=inputs,
        remark="BERT" if inputs == "bert" else "",
    )


_PLAIN = Edit(old="from accelerate import Accelerator\n", new="from meshwright_hf.accelerate import Accelerator\n")
_WITH_LOADERS = Edit(
    old="from accelerate import Accelerator, DataLoaderConfiguration, DistributedType",
    new="from accelerate import DataLoaderConfiguration, DistributedType\n"
    "from meshwright_hf.accelerate import Accelerator",
)
_LARGE_BATCH = (_QUICK, Edit(old='"batch_size": 256}', new='"batch_size": {rows}}'), _WARMUP)

SCRIPTS: list[Script] = [
    _clm(),
    _clm("--gradient_accumulation_steps", "2", "--gradient_checkpointing", remark="accumulation, checkpointing"),
    _no_trainer("--max_train_steps", str(STEPS)),
    _no_trainer("--num_train_epochs", "1", "--gradient_accumulation_steps", "2", remark="an epoch", text="even"),
    _trl("sft", "SFTTrainer", "--max_length", str(TOKENS)),
    _trl("dpo", "DPOTrainer", "--max_length", str(TOKENS)),
    _trl("kto", "KTOTrainer", "--max_length", str(TOKENS)),
    _trl("reward", "RewardTrainer", "--max_length", str(TOKENS), model="scorer"),
    _feature("by_feature/gradient_accumulation", "--gradient_accumulation_steps", "2"),
    _feature("by_feature/gradient_accumulation", "--gradient_accumulation_steps", "2", inputs="bert"),
    Script(
        source="accelerate",
        path="examples/by_feature/gradient_accumulation_for_autoregressive_models.py",
        arguments=("--cpu", "--gradient_accumulation_steps", "2", "--per_device_batch_size", "{rows}"),
        changes=(_ACCELERATOR,),
        settings=(_QUICK, Edit(old="max_training_samples=500", new="max_training_samples=40")),
    ),
    _feature("by_feature/local_sgd"),
    _feature(
        *("by_feature/checkpointing", "--checkpointing_steps", "epoch", "--output_dir", "{output}"),
        change=_WITH_LOADERS,
    ),
    _feature("by_feature/automatic_gradient_accumulation", change=_PLAIN, settings=_LARGE_BATCH),
    _feature("by_feature/memory"),
    _feature("by_feature/early_stopping"),
    _feature("by_feature/multi_process_metrics"),
    _feature("by_feature/tracking"),
    _feature("by_feature/profiler"),
    _feature("by_feature/ddp_comm_hook"),
]

# Other scripts of the checkouts, and why they do not run here.
LEFT_OUT = {
    "accelerate's `cross_validation.py` and `schedule_free.py`": "need scikit-learn and schedulefree",
    "accelerate's `deepspeed_with_config_support.py`, `fsdp_with_peak_mem_tracking.py` and "
    "`megatron_lm_gpt_pretraining.py`": "are about another engine, whose plugin `prepare` refuses",
    "TRL's `grpo.py` and `rloo.py`": "draw their completions at random ([trainer.md](../docs/trainer.md))",
}
