"""What networks compute for the images of all splits: frozen features, and a run's predictions."""

# B batch, C channels, H W pixels, N images, D width, K classes

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from finetune.commands.start import RecipeBuilder, inspect_data
from finetune.commands.weight_selection import (
    Candidate,
    list_candidates,
    named_candidate,
    score_candidates,
)
from finetune.data.from_recipe import open_data
from finetune.data.leakage import is_in_splits
from finetune.data.source import Source, Split
from finetune.errors import DataError, RecipeError, redact_urls
from finetune.evaluation.feature_extraction import (
    FeatureExtractor,
    feature_identity,
    load_or_compute_features,
)
from finetune.inference import eval_pipeline_and_class_names
from finetune.log import logger
from finetune.models.build import build_model
from finetune.models.features import compute_pre_logits
from finetune.models.save import BuiltModel
from finetune.precision import autocast_dtype
from finetune.recipe.load import DataSection, parse_overrides
from finetune.run.directory import RunDir
from finetune.run.record import has_changed, load_run_recipe, read_record
from finetune.training.compile import choose_kernels
from finetune.transforms.eval_transforms import build_pipeline
from finetune.transforms.pipeline import Pipeline

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["choose_weights", "compute_features", "count_trained_images", "held_out_probabilities"]

_EVAL_SPEC = "resize"  # the whole image, without cropping
# The second best network is used too, if it is nearly as accurate and not much slower.
_MAX_ACCURACY_DIFFERENCE, _MAX_SLOWDOWN = 0.1, 2.0
IMAGES_PER_FILE = 8192  # a killed run loses the features of at most so many images


def choose_weights(
    source: Source, names: Sequence[str], device: torch.device, *, group: str | None = None
) -> list[Candidate]:
    """Return the named weights, or the best one or two on this machine, each at one image size.

    Args:
        group: as in `data.group`; networks are compared with whole groups left out.
    Raises: DataError if networks cannot be compared because the source has no train split.
    """
    splits = source.splits
    if "train" not in splits and not names:
        raise DataError(
            f"{redact_urls(source.name)}: has no train split to compare pretrained networks on; "
            "name one with --weights, such as --weights embedded:vit_ti",
            code="data.no_split",
        )
    sampled = splits.get("train") or next(iter(splits.values()))
    train = replace(source, splits={"train": sampled})
    settings = _data_section(source).model_dump(exclude_unset=True) | {"group": group}
    overrides = [f"data.{key}={json.dumps(value)}" for key, value in settings.items()]
    builder = RecipeBuilder(train, inspect_data(train, 0.0), overrides, parse_overrides(overrides))

    def image_sizes(candidate: Candidate) -> Sequence[int | tuple[int, int]]:
        return builder.image_sizes(candidate)[:1]

    if names:
        named = [named_candidate(name, "set by you") for name in dict.fromkeys(names)]
        return [replace(each, image_size=image_sizes(each)[0]) for each in named]
    scores = score_candidates(list_candidates(device), builder.scoring_recipe, sizes=image_sizes)
    similar = [
        score
        for score in scores[1:]
        if score.accuracy >= scores[0].accuracy - _MAX_ACCURACY_DIFFERENCE
        and score.forward_seconds <= _MAX_SLOWDOWN * scores[0].forward_seconds
    ]
    chosen = scores[:1] + sorted(similar, key=lambda score: -score.accuracy)[:1]
    for score in chosen:
        logger.info(f"weights: {score}")
    return [score.candidate for score in chosen]


def _data_section(source: Source) -> DataSection:
    splits = source.splits.values()
    return DataSection(
        source=source.name,
        eval=_EVAL_SPEC,
        val_fraction=0.0,
        task="multilabel" if any(split.is_multilabel for split in splits) else "multiclass",
        unreadable="stop" if any(split.is_streamed for split in splits) else "quarantine",
    )


def compute_features(
    source: Source, candidate: Candidate, accelerator: Accelerator
) -> NDArray[np.float32] | None:
    """Compute or load the features of all images.

    Returns: (N, D), NaN for unreadable images; None on ranks other than 0.
    """
    built = build_model(candidate.name, image_size=candidate.image_size)
    pipeline = build_pipeline(built.preprocessing, _EVAL_SPEC)
    return _compute_outputs(source, built, pipeline, accelerator, compute_pre_logits)


def _compute_outputs(
    source: Source,
    built: BuiltModel,
    pipeline: Pipeline,
    accelerator: Accelerator,
    extract: FeatureExtractor,
) -> NDArray[np.float32] | None:
    """Load a network's outputs for all images from the cache, or compute them.

    A file of the cache has the outputs of a few thousand images, so that a killed run continues.
    """
    has_logits = extract is not compute_pre_logits
    identity = feature_identity(built, pipeline.transform_spec, with_classifier=has_logits)
    network = built.model.to(accelerator.device, torch.float32)
    choose_kernels(network, device=accelerator.device, dtype=autocast_dtype(accelerator))
    section, parts = _data_section(source), []
    for split in source.splits.values():
        for part in _divide(split):
            outputs = load_or_compute_features(
                part,
                model=network,
                pipeline=pipeline,
                identity=identity,
                data_config=section,
                accelerator=accelerator,
                extract=extract,
            )
            if outputs is not None:
                width = outputs.values_ND.shape[1]
                values_ND = np.full((len(part), width), np.nan, dtype=np.float32)
                values_ND[outputs.indices_N] = outputs.values_ND
                parts.append(values_ND)
    return np.concatenate(parts) if parts else None


def _divide(split: Split) -> Iterator[Split]:
    starts = range(IMAGES_PER_FILE, len(split), IMAGES_PER_FILE)
    for indices in np.split(np.arange(len(split)), starts):
        part = split.subset(indices)
        if not split.is_streamed:
            part.use_digests(split.digests[indices])
        yield part


def _compute_logits(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    return model(images_BCHW).float()


def held_out_probabilities(
    run: str, source: Source, accelerator: Accelerator
) -> NDArray[np.float64] | None:
    """Compute a run's probabilities for the images of a source that it was not trained on.

    Args:
        run: a run directory.
        source: the source; images are recognized by their content.
    Returns: (N, K) by the classes of the source, 0 for classes that the run lacks; NaN for images
        that the run was trained on or does not have. None on ranks other than 0.
    Raises: RecipeError if `run` is not a run directory, or has another kind of labels; DataError if
        the run has held out no image of the source.
    """
    recipe = load_run_recipe(run)
    if recipe is None:
        raise RecipeError(
            f"--run {run}: not a run directory; give one that `finetune train` wrote",
            code="recipe.wrong_value",
        )
    section = _data_section(source)
    if section.task != recipe.data.task:
        raise RecipeError(
            f"--run {run}: its data.task is {recipe.data.task}, but the source is read as "
            f"{section.task}; {'remove' if section.task == 'multilabel' else 'add'} --multilabel",
            code="recipe.conflict",
        )
    others = dict(open_data(recipe.data, recipe.run.seed).splits)
    record = read_record(RunDir(run))
    if changed := [name for name, split in others.items() if has_changed(record, split)]:
        logger.warning(
            f"--run {run}: {' and '.join(changed)} of its data have changed since the run, so it "
            "may have been trained on images that now count as held out; label scores may be wrong"
        )
    train = others.pop("train")
    if any(split.is_streamed for split in (train, *others.values(), *source.splits.values())):
        raise DataError(
            f"{redact_urls(source.name)}: --run recognizes images by their content, which is "
            "unknown for streamed images; leave out --run",
            code="data.unsupported",
        )
    is_held_out = {
        name: is_in_splits(split, [*others.values()]) & ~is_in_splits(split, [train])
        for name, split in source.splits.items()
    }
    is_held_out_N = np.concatenate([*is_held_out.values()])
    if not is_held_out_N.any():
        raise DataError(
            f"--run {run}: none of its validation and test images is in "
            f"{redact_urls(source.name)}; give the source that it was trained on",
            code="data.split_mismatch",
        )
    splits = {
        name: source.splits[name].subset(np.flatnonzero(mask))
        for name, mask in is_held_out.items()
        if mask.any()
    }
    held_out = replace(source, splits=splits)
    built = build_model(run)
    pipeline, class_names = eval_pipeline_and_class_names(run, built)
    logits_MK = _compute_outputs(held_out, built, pipeline, accelerator, _compute_logits)
    if logits_MK is None:
        return None
    logits = torch.from_numpy(logits_MK.astype(np.float64))
    p_MK = (logits.sigmoid() if section.task == "multilabel" else logits.softmax(dim=1)).numpy()
    p_NK = np.full((len(is_held_out_N), len(source.class_names)), np.nan)
    p_NK[is_held_out_N] = 0.0
    for k, name in enumerate(class_names):
        if name in source.class_names:
            p_NK[is_held_out_N, source.class_names.index(name)] = p_MK[:, k]
    return p_NK


def count_trained_images(run: str, source: Source) -> int | None:
    """Count the images of a source that a run was trained on, by their content.

    Returns: None if it is unknown: `run` is no run directory, its data cannot be opened any more
        or has changed, or images are streamed.
    """
    recipe = load_run_recipe(run)
    if recipe is None:
        return None
    try:
        train = open_data(recipe.data, recipe.run.seed).splits["train"]
    except DataError:
        return None
    if has_changed(read_record(RunDir(run)), train):
        return None
    splits = source.splits.values()
    if any(split.is_streamed for split in (train, *splits)):
        return None
    return sum(int(is_in_splits(split, [train]).sum()) for split in splits)
