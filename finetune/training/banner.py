"""The first lines of a run: what is trained on what, and what is too small to learn or judge by."""

from __future__ import annotations

import math
from typing import Any

from finetune.data.sampling import draws_in_words, imbalance
from finetune.errors import visible
from finetune.evaluation.intervals import TOO_FEW_IMAGES
from finetune.recipe.load import Recipe
from finetune.recipe.schema import OptimSection
from finetune.run.environment import precision_of
from finetune.run.record import teacher_in_words
from finetune.text import counted, short_count
from finetune.training.setup import TrainingSetup
from finetune.training.trainer_state import TrainerState

__all__ = ["FEW_STEPS", "banner", "size_notices"]

FEW_STEPS = 50  # a run of fewer has hardly moved the weights


def banner(trainer: TrainerState) -> list[str]:
    """Return the lines that a run begins with: network, images, classes, length, place."""
    setup, recipe = trainer.setup, trainer.recipe
    processes = counted(trainer.accelerator.num_processes, "process", "processes")
    rows = {
        "network": _network(setup),
        "images": _images(setup),
        "classes": _classes(setup),
        "sampling": _sampling(setup),
        "training": _length(setup),
        "teacher": "",
        "device": f"{processes} on {setup.device.type}",
        "auto": ", ".join(f"{key} is {value}" for key, value in _chosen(trainer).items()),
        "output": visible(str(trainer.run.path)),
    }
    if (teacher := trainer.distillation) is not None:
        words = teacher_in_words(teacher.section, {"teacher": teacher.facts})
        rows["teacher"] = f"{visible(teacher.section.teacher)}, {words}"
    if trainer.counters.step:
        rows["training"] += f"; continues at step {trainer.counters.step:,}"
    if not recipe.model.pretrained:
        rows["network"] += ", trained from scratch"
    return [f"{name:<9} {text}" for name, text in rows.items() if text]


def size_notices(setup: TrainingSetup) -> list[str]:
    """Return a line for each thing that is too small, with what to do about it.

    It may be the run, compared with its warm-up or in itself, a split to measure on, or a class;
    or what a key of the recipe changes, which is nothing.
    """
    lines = [*_idle_keys(setup.recipe), *_warmup_notices(setup), *_step_notices(setup)]
    for name in ("val", "test"):
        split = setup.source.splits.get(name)
        if split is not None and len(split) < TOO_FEW_IMAGES:
            lines.append(_few_images(setup, name, len(split)))
    return [*lines, *_rare_classes(setup)]


def _network(setup: TrainingSetup) -> str:
    counts = setup.built.provenance
    total, trained = counts["parameters"], counts["trainable_parameters"]
    share = "" if trained == total else f", of which {short_count(trained)} are trained"
    name = visible(setup.recipe.model.name)
    of = "" if name == setup.built.architecture else f" ({setup.built.architecture})"
    return f"{name}{of}, {short_count(total)} parameters{share}"


def _images(setup: TrainingSetup) -> str:
    sizes = {name: len(split) for name, split in setup.source.splits.items()}
    sizes["train"] = setup.num_samples  # those that can be read
    names = [name for name in ("train", "val", "test") if name in sizes]
    splits = ", ".join(f"{sizes[name]:,} {name}" for name in names)
    height, width = setup.preprocessing.image_size
    return f"{splits}; seen at {height} × {width} pixels"


def _classes(setup: TrainingSetup) -> str:
    counts_K, several = setup.class_counts, ""
    if setup.multilabel:
        several = f"; {counts_K.sum() / max(setup.num_samples, 1):.3g} labels an image"
    fewest, most = int(counts_K.argmin()), int(counts_K.argmax())
    if counts_K[fewest] == counts_K[most]:
        images = counted(int(counts_K[most]), "training image")
        return f"{len(counts_K):,}, with {images} each{several}"
    return (
        f"{len(counts_K):,}, from {counts_K[fewest]:,} training images ({_name(setup, fewest)}) "
        f"to {counts_K[most]:,} ({_name(setup, most)}){several}"
    )


def _sampling(setup: TrainingSetup) -> str:
    kind = setup.recipe.data.sampling
    if kind is None:
        return ""
    counts_K, names = setup.class_counts, setup.source.class_names
    return f"{kind}: {draws_in_words(counts_K, setup.class_draws, names)}"


def _length(setup: TrainingSetup) -> str:
    epochs = setup.recipe.optim.epochs or setup.steps / setup.steps_per_epoch
    warmup = f", {setup.warmup_steps:,} of them warm-up" if setup.warmup_steps else ""
    return (
        f"{counted(setup.steps, 'step')} of {counted(setup.recipe.data.batch_size, 'image')}, "
        f"{epochs:.3g} epochs{warmup}"
    )


def _chosen(trainer: TrainerState) -> dict[str, Any]:
    """The recipe's keys that are `auto`, and what they have become."""
    recipe = trainer.recipe
    chosen = {
        "run.precision": (recipe.run.precision, precision_of(trainer.accelerator)),
        "data.micro_batch": (recipe.data.micro_batch, trainer.micro_batch),
        "data.workers": (recipe.data.workers, trainer.setup.workers),
        "model.compile": (recipe.model.compile, str(trainer.compiled).lower()),
    }
    return {
        key: value
        for key, (written, value) in chosen.items()
        if written == "auto" and value is not None
    }


def _idle_keys(recipe: Recipe) -> list[str]:
    """Not refused: `optim.schedule=constant` would have to name all that it makes idle."""
    from timm.optim import get_optimizer_info

    optim, default = recipe.optim, OptimSection.model_fields
    has_momentum = get_optimizer_info(optim.name).has_momentum
    changed = {key for key, field in default.items() if getattr(optim, key) != field.default}
    idle = [
        ("warmup_lr", not (optim.warmup_steps or optim.warmup_epochs), "there is no warm-up"),
        ("min_lr", optim.schedule == "constant", "the rate is constant"),
        ("step_factor", optim.schedule != "step", f"the schedule is {optim.schedule}"),
        ("layer_decay", recipe.model.freeze == "backbone", "the head alone is trained here"),
        ("momentum", not has_momentum, f"{optim.name} has none"),
    ]
    return [
        f"optim.{key}: changes nothing, as {why}"
        for key, is_idle, why in idle
        if is_idle and key in changed
    ]


def _warmup_notices(setup: TrainingSetup) -> list[str]:
    optim, steps = setup.recipe.optim, setup.steps
    if setup.warmup_steps < steps:
        return []
    key = "warmup_steps" if optim.warmup_epochs is None else "warmup_epochs"
    tenth = steps // 10
    shorter = f"optim.warmup_steps={tenth}"
    if optim.warmup_epochs is not None:
        shorter = f"optim.warmup_epochs={tenth / setup.steps_per_epoch:.3g}"
    return [
        f"optim.{key}: all of the {counted(steps, 'step')} are warm-up "
        f"({setup.requested_warmup_steps:,} were asked for), so that the learning rate only "
        f"rises; shorten it, for example {shorter}, unless this is meant"
    ]


def _step_notices(setup: TrainingSetup) -> list[str]:
    optim, batch_size = setup.recipe.optim, setup.recipe.data.batch_size
    if setup.steps >= FEW_STEPS:
        return []
    if optim.steps is not None:
        advice = f"raise optim.steps to {FEW_STEPS} or more"
    else:
        epochs = math.ceil(FEW_STEPS / setup.steps_per_epoch)
        advice = f"lower data.batch_size, or set optim.epochs={epochs} or more"
    return [
        f"the run has only {counted(setup.steps, 'step')} ({setup.num_samples:,} training images "
        f"in batches of {batch_size}), too few to learn much; {advice}"
    ]


def _few_images(setup: TrainingSetup, name: str, images: int) -> str:
    """The line of a split that is too small to measure an accuracy on."""
    long = {"val": "validation", "test": "test"}[name]
    advice = "add images"
    splits, fraction = setup.source.splits, TOO_FEW_IMAGES / (setup.num_samples + images)
    if name == "val" and splits["val"].items is splits["train"].items and fraction <= 0.5:
        advice += f", or set data.val_fraction={math.ceil(100 * fraction) / 100:g} or more"
    figure = "a figure" if setup.multilabel else "an accuracy"
    return f"{counted(images, f'{long} image')}: {figure} on so few is mostly chance; {advice}"


def _rare_classes(setup: TrainingSetup) -> list[str]:
    words = imbalance(setup.class_counts, setup.source.class_names)
    if not words:
        return []
    if setup.multilabel:
        return [f"{words}: F1 and average precision of rare classes rest on few images"]
    optim, sampling = setup.recipe.optim, setup.recipe.data.sampling
    advice = "add images of them, set optim.class_weights=balanced, and "
    if sampling or optim.class_weights or optim.focal_gamma or optim.logit_adjustment:
        advice = ""
    return [
        f"{words}: the accuracy hardly shows the rare classes; {advice}judge by the balanced "
        "accuracy"
    ]


def _name(setup: TrainingSetup, label: int) -> str:
    return f"'{visible(setup.source.class_names[label], keep='')}'"
