"""The summary logged before training: network, images, classes, length, device and output."""

from __future__ import annotations

import dataclasses
from typing import Any

from finetune.data.class_balance import describe_class_draws
from finetune.errors import escape_control_chars
from finetune.formatting import escape_to_one_line, format_short_count, pluralize
from finetune.precision import accelerator_precision
from finetune.run.record import describe_decisions, describe_teacher
from finetune.training.setup import TrainingSetup
from finetune.training.trainer_state import TrainerState

__all__ = ["format_startup_summary"]


def format_startup_summary(trainer: TrainerState) -> list[str]:
    """Summarize a run before it starts: network, images, classes, length, device, output."""
    setup, recipe = trainer.setup, trainer.recipe
    processes = pluralize(trainer.accelerator.num_processes, "process", "processes")
    rows = {
        "network": _network_line(setup),
        "images": _images_line(setup),
        "classes": _classes_line(setup),
        "decisions": "",
        "sampling": _sampling_line(setup),
        "training": _length_line(setup),
        "teacher": "",
        "device": f"{processes} on {setup.device.type}",
        "auto": ", ".join(
            f"{key} is {value}" for key, value in _resolved_auto_keys(trainer).items()
        ),
        "output": escape_control_chars(str(trainer.run.path)),
    }
    if (teacher := trainer.distillation) is not None:
        description = describe_teacher(teacher.section, {"teacher": teacher.teacher_info})
        rows["teacher"] = f"{escape_control_chars(teacher.section.teacher)}, {description}"
    if (decisions := setup.source.decisions) is not None:
        rows["decisions"] = escape_to_one_line(describe_decisions(dataclasses.asdict(decisions)))
    if trainer.counters.step:
        rows["training"] += f"; continues at step {trainer.counters.step:,}"
    if not recipe.model.pretrained:
        rows["network"] += ", trained from scratch"
    return [f"{name:<9} {text}" for name, text in rows.items() if text]


def _network_line(setup: TrainingSetup) -> str:
    counts = setup.built.provenance
    total, trained = counts["parameters"], counts["trainable_parameters"]
    trainable = "" if trained == total else f", {format_short_count(trained)} trainable"
    name = escape_control_chars(setup.recipe.model.name)
    architecture = "" if name == setup.built.architecture else f" ({setup.built.architecture})"
    return f"{name}{architecture}, {format_short_count(total)} parameters{trainable}"


def _images_line(setup: TrainingSetup) -> str:
    sizes = {name: len(split) for name, split in setup.source.splits.items()}
    sizes["train"] = setup.num_samples  # readable images only
    names = [name for name in ("train", "val", "test") if name in sizes]
    splits = ", ".join(f"{sizes[name]:,} {name}" for name in names)
    height, width = setup.preprocessing.image_size
    return f"{splits}; input size {height} × {width} pixels"


def _classes_line(setup: TrainingSetup) -> str:
    counts_K, labels_per_image = setup.class_counts, ""
    if setup.is_multilabel:
        labels_per_image = f"; {counts_K.sum() / max(setup.num_samples, 1):.3g} labels per image"
    fewest, most = int(counts_K.argmin()), int(counts_K.argmax())
    names = [escape_to_one_line(name) for name in setup.source.class_names]
    if counts_K[fewest] == counts_K[most]:
        images = pluralize(int(counts_K[most]), "training image")
        return f"{len(counts_K):,}, with {images} each{labels_per_image}"
    return (
        f"{len(counts_K):,}, from {counts_K[fewest]:,} training images "
        f"('{names[fewest]}') to {counts_K[most]:,} "
        f"('{names[most]}'){labels_per_image}"
    )


def _sampling_line(setup: TrainingSetup) -> str:
    kind = setup.recipe.data.sampling
    if kind is None:
        return ""
    counts_K, names = setup.class_counts, setup.source.class_names
    return f"{kind}: {describe_class_draws(counts_K, setup.epoch_class_counts, names)}"


def _length_line(setup: TrainingSetup) -> str:
    epochs = setup.recipe.optim.epochs or setup.num_steps / setup.steps_per_epoch
    warmup = f", including {setup.warmup_steps:,} warm-up steps" if setup.warmup_steps else ""
    return (
        f"{pluralize(setup.num_steps, 'step')} of "
        f"{pluralize(setup.recipe.data.batch_size, 'image')}, {epochs:.3g} epochs{warmup}"
    )


def _resolved_auto_keys(trainer: TrainerState) -> dict[str, Any]:
    """Return the resolved value of each recipe key that is `auto`."""
    recipe = trainer.recipe
    resolved = {
        "run.precision": (recipe.run.precision, accelerator_precision(trainer.accelerator)),
        "data.micro_batch": (recipe.data.micro_batch, trainer.micro_batch_size),
        "data.workers": (recipe.data.workers, trainer.setup.num_workers),
        "model.compile": (recipe.model.compile, str(trainer.is_compiled).lower()),
    }
    return {
        key: value
        for key, (setting, value) in resolved.items()
        if setting == "auto" and value is not None
    }
