"""`finetune start SOURCE`: create a recipe for new data, with a reason for each value.

The values depend on the images, on the weights on this machine, and on its speed. `finetune train
SOURCE` creates the recipe and trains it.

1. Weights and image size: those whose frozen features separate the classes best
   (`weight_selection.py`).
2. Only the classifier or all weights: a short trial with these weights (`freeze_trial.py`).

The choice is kept in the cache. A later start with the same images, weights and overrides reuses
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from pydantic import TypeAdapter

from finetune import __version__
from finetune.cache import CacheFolder, cache_path
from finetune.commands.freeze_trial import compare_frozen_and_full, find_reason_to_freeze
from finetune.commands.suggested_weights import is_on_hub, suggest_weights
from finetune.commands.weight_selection import (
    Candidate,
    Score,
    choose_image_sizes,
    list_candidates,
    measure_seconds_per_image,
    named_candidate,
    score_candidates,
)
from finetune.data.class_balance import count_images_per_class
from finetune.data.decode_split import sample_image_sizes
from finetune.data.from_recipe import open_data
from finetune.data.leakage import find_repeated_images
from finetune.data.source import Source
from finetune.errors import DataError, redact_urls
from finetune.files import write_atomically
from finetune.formatting import format_duration, pluralize, printable_path
from finetune.log import logger, quiet
from finetune.model_checksums import weights_hashes
from finetune.models.build import build_model
from finetune.recipe.load import MINIMAL_RECIPE, parse_overrides, parse_recipe
from finetune.recipe.paths import resolve_data_source
from finetune.recipe.schema import Recipe
from finetune.recipe.strict_yaml import parse_document
from finetune.recipe.validate import apply_override
from finetune.run.directory import RunDir
from finetune.training.accelerator import create_accelerator
from finetune.training.resume import check_no_existing_run
from finetune.training.setup import build_setup
from finetune.training.stages import has_stage

__all__ = [
    "Choice",
    "DatasetStats",
    "RecipeBuilder",
    "RecipeEntry",
    "StartResult",
    "inspect_data",
    "open_new_run",
    "start",
    "write_start_files",
]

MIN_IMAGES_PER_CLASS = 10  # to train all weights
BUDGET_SECONDS = 300.0  # time budget for training or, if frozen, for computing the features
_NUM_SAMPLED_IMAGES = 32  # images decoded to get their sizes
_MIN_STEPS, _MAX_EPOCHS = 300, 40
_HEAD_LR, _HEAD_EPOCHS = 3e-3, 40  # of a new head on frozen features
_HEAD_BATCH_SIZE, _MIN_HEAD_EPOCHS = 64, 3  # of a new head in a trial
# Length of a trial: passes over the data, more if they have few steps, but at most a share of the
# run. In 20 steps, all weights lose to the classifier alone even if they would win later.
_TRIAL_EPOCHS, _TRIAL_STEPS, _TRIAL_FRACTION, _MIN_TRIAL_STEPS = 2, 50, 0.25, 10
_STEP_PASSES = 4  # a training step takes about as long as so many forward passes
_FIXED_SECONDS = 8.0  # of a run that trains only the classifier, besides computing the features
_MAX_CHOICE_BYTES, _MAX_CACHE_BYTES = 2**20, 2**24
_CHOICE_NAME = re.compile(r"[0-9a-f]{64}\.json")
# Overrides that change frozen features, or how they are computed.
_FEATURE_KEYS = ("data.", "model.args", "model.rename.", "model.posemb", "model.pretrained", "run.")
# Overrides of a trial: settings that matter only to the run itself.
_TRIAL_OVERRIDES = (
    *("run.test=false", "run.push_to=null", "run.push_private=false", "run.trackers=[]"),
    *("run.num_processes=null", "run.patience=null", "run.best=last", "model.compile=false"),
    *("data.micro_batch=null",),
)


class RecipeEntry(NamedTuple):
    """A recipe key with its value and the reason for the value."""

    key: str
    value: Any
    reason: str = ""


@dataclass(frozen=True)
class StartResult:
    """The recipe that `start` creates.

    Attributes:
        recipe: the recipe, ready for `train`.
        yaml_text: the recipe as YAML, with reasons as comments and without secrets in URLs.
        choice: the choice that the recipe is built from.
        builder: builds the recipe of another choice for the same images.
    """

    recipe: Recipe
    yaml_text: str
    choice: Choice
    builder: RecipeBuilder = field(compare=False, repr=False)


@dataclass(frozen=True)
class DatasetStats:
    """Statistics of a dataset from which the recipe is chosen.

    Attributes:
        split_sizes: number of images by split.
        num_train: number of training images after the validation split is held out.
        images_per_class: (K,) number of training images by class.
        median_side: median of the images' shorter sides, in pixels.
    """

    split_sizes: dict[str, int]
    num_train: int
    images_per_class: np.ndarray
    median_side: int


@dataclass(frozen=True)
class Choice:
    """The choices for a dataset, which are kept in the cache for the next start.

    Attributes:
        score: the chosen weights and image size, with their score.
        frozen: True to train only the classifier.
        epochs: number of epochs in which all weights are trained.
        reason: reason for training only the classifier, or all weights.
        scores: all weights that were compared, best first.
        seconds: estimated seconds of training on this machine or, if frozen, of computing the
            features; None if they were not measured.
        weights_hashes: sha256 of the chosen weights, and of their network and preprocessing.
    """

    score: Score
    frozen: bool
    epochs: int
    reason: str
    scores: list[Score]
    seconds: float | None
    weights_hashes: tuple[str | None, ...] = ()


_CHOICE = TypeAdapter(Choice)


def start(source: str, *, overrides: Iterable[str] = (), download: bool = False) -> StartResult:
    """Create a recipe for a source of images.

    Args:
        source: a folder, or a source string as in `data.source`.
        overrides: overrides by the user, each `section.key=value`; they win over chosen values.
        download: True to download the weights of `suggest_weights` and to compare them too.
    Raises: RecipeError for invalid overrides, before any image is read; DataError if the images
        cannot be used for training.
    """
    builder = RecipeBuilder.open(source, list(overrides))
    for copies in find_repeated_images(builder.source.splits["train"]):
        logger.warning(f"{copies}; until then, accuracies on parts of train are too high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    candidates = _list_candidates(builder, device, download=download)
    key = builder.choice_key(candidates, device)
    choice = None if key is None else _read_choice(key)
    if choice is not None and choice.weights_hashes != builder.hash_weights(choice):
        choice = None
    if choice is None:
        choice = _choose(builder, candidates)
        if key is not None:
            choice = replace(choice, weights_hashes=builder.hash_weights(choice))
            _write_choice(key, choice)
    else:
        name = redact_urls(builder.source.name)
        logger.info(
            f"{name} and the settings have not changed since an earlier start: using its choice "
            f"again, {choice.score.candidate}"
        )
    if choice.seconds is not None:
        work = "computing the features" if choice.frozen else "training"
        logger.info(f"{work} takes about {format_duration(choice.seconds)} here")
    return builder.build(choice)


@contextlib.contextmanager
def open_new_run(out: str | Path) -> Iterator[RunDir]:
    """Open and lock a new run directory.

    Raises: SetupError if the folder is not writable, is in use, or already contains a run.
    """
    with contextlib.closing(RunDir(out)) as run:
        run.open()
        check_no_existing_run(run, has_stage=has_stage(run.path))
        yield run


def write_start_files(result: StartResult, out: str | Path) -> None:
    """Write start.yaml into a new run directory."""
    with open_new_run(out) as run:
        write_atomically(run.path / "start.yaml", result.yaml_text)


def _list_candidates(
    builder: RecipeBuilder, device: torch.device, *, download: bool
) -> list[Candidate]:
    """Return the weights to compare: those that the user names, or all on this machine."""
    if (name := builder.override_values.get("model.name")) is not None:
        return [named_candidate(name, "set by you")]
    candidates = list_candidates(device)
    suggested = suggest_weights(builder.stats.median_side, device)
    if suggested.name in {candidate.name for candidate in candidates}:
        return candidates
    if download:
        return [named_candidate(suggested.name, "downloaded from the hub"), *candidates]
    if is_on_hub(suggested):
        logger.info(
            f"the hub has better weights for such images, {suggested.name} "
            f"({suggested.megabytes} MB); add --download to compare them too"
        )
    return candidates


def _choose(builder: RecipeBuilder, candidates: Sequence[Candidate]) -> Choice:
    """Choose weights, image size, and whether to train all weights."""
    scores = score_candidates(candidates, builder.scoring_recipe, sizes=builder.image_sizes)
    for score in scores:
        logger.info(str(score))
    num_images = sum(builder.stats.split_sizes.values())
    affordable = [each for each in scores if each.forward_seconds * num_images <= BUDGET_SECONDS]
    best = affordable[0] if affordable else min(scores, key=lambda each: each.forward_seconds)
    logger.info(f"best weights for these images: {best.candidate}")
    seconds = best.forward_seconds * num_images
    frozen = Choice(best, True, epochs=0, reason="", scores=scores, seconds=seconds)
    full = replace(frozen, frozen=False, epochs=builder.default_epochs())
    is_frozen = builder.frozen_by_overrides() if best.has_features else False
    if is_frozen is not None:
        return frozen if is_frozen else replace(full, seconds=None)
    if not builder.has_validation():
        reason = "there are no validation images for a trial of training all weights"
        return replace(frozen, reason=reason)
    if builder.stats.num_train < MIN_IMAGES_PER_CLASS * len(builder.stats.images_per_class):
        reason = (
            f"fewer than {MIN_IMAGES_PER_CLASS} images a class are too few to train all weights"
        )
        return replace(frozen, reason=reason)
    same_weights = [each for each in scores if each.candidate.name == best.candidate.name]
    num_passes = builder.default_trial_epochs() * _STEP_PASSES * builder.stats.num_train
    is_long = num_passes * best.forward_seconds > (seconds + _FIXED_SECONDS) / 2
    if is_long and (why := find_reason_to_freeze(builder.head_trial_recipe(frozen))):
        logger.info(f"only the classifier will be trained: {why}")
        return replace(frozen, reason=why)
    for score in same_weights:  # the best image size at which all weights can be trained
        seconds_per_image = _measure_training(builder, replace(full, score=score))
        epoch_seconds = seconds_per_image * builder.stats.num_train
        if epoch_seconds * full.epochs / 2 <= BUDGET_SECONDS:
            break
    else:
        whole = format_duration(full.epochs * epoch_seconds)
        return replace(frozen, reason=f"training all weights would take about {whole} here")
    epochs = min(full.epochs, max(1, math.floor(BUDGET_SECONDS / epoch_seconds)))
    full = replace(full, score=score, epochs=epochs, seconds=epochs * epoch_seconds)
    trial_epochs = min(builder.default_trial_epochs(), epochs * _TRIAL_FRACTION)
    logger.info(
        f"at most about {format_duration(trial_epochs * epoch_seconds)} of trials decide whether "
        "to train all weights; Ctrl-C skips them"
    )
    is_full, reason = compare_frozen_and_full(
        builder.head_trial_recipe(replace(frozen, score=score)),
        builder.full_trial_recipe(full, trial_epochs),
        size=score.candidate.pixels,
    )
    return replace(full if is_full else frozen, reason=reason)


def _measure_training(builder: RecipeBuilder, choice: Choice) -> float:
    """Measure the time per image if all weights are trained."""
    with quiet():
        recipe = builder.build(choice, _TRIAL_OVERRIDES).recipe
        device = create_accelerator(recipe.run).device
        setup = build_setup(recipe, device=device, show_progress=False)
        setup.built.model.to(device)
        return measure_seconds_per_image(setup, train=True)


@dataclass(frozen=True)
class RecipeBuilder:
    """Builds the recipe for a choice.

    Attributes:
        source: the data, without a held-out validation split.
        stats: statistics of the data.
        overrides: the user's overrides; they win over chosen values.
        override_values: values of these overrides by section and key, such as "optim.lr".
    """

    source: Source
    stats: DatasetStats
    overrides: list[str]
    override_values: Mapping[str, Any]

    @classmethod
    def open(cls, source: str, overrides: list[str]) -> RecipeBuilder:
        """Check the overrides, open the data and inspect it. Raises: same as `start`."""
        override_values = parse_overrides(overrides)
        opened = _open_source(source, overrides, override_values.get("run.seed", 0))
        if "train" not in opened.splits:
            raise DataError(
                f"{opened.name}: has no training images; add a 'train' split", code="data.no_split"
            )
        val_fraction = override_values.get("data.val_fraction", _choose_val_fraction(opened)[0])
        return cls(opened, inspect_data(opened, val_fraction), overrides, override_values)

    def choice_key(self, candidates: Sequence[Candidate], device: torch.device) -> str | None:
        """Return a hash of everything that the choice depends on, except the weights themselves.

        Returns: the hash; None if a later change of the images could go unnoticed.
        """
        images_keys = {name: split.cache_key() for name, split in self.source.splits.items()}
        if None in images_keys.values():
            return None
        dependencies = [
            *(__version__, torch.__version__, device.type, self.source.class_names),
            images_keys,
            [
                None if split.groups is None else split.groups.tolist()
                for split in self.source.splits.values()
            ],
            sorted(
                (key, repr(value))
                for key, value in self.override_values.items()
                if not key.startswith("run.")
            ),
            [(each.name, each.image_size) for each in candidates],
        ]
        return hashlib.sha256(json.dumps(dependencies).encode()).hexdigest()

    def hash_weights(self, choice: Choice) -> tuple[str | None, ...]:
        """Return `Choice.weights_hashes` of the chosen weights as they are now."""
        section = self.build(choice).recipe.model
        provenance = build_model(
            section.name, **section.model_dump(include={"pretrained", "args", "rename"})
        ).provenance
        return tuple(weights_hashes(provenance))

    def frozen_by_overrides(self) -> bool | None:
        """Return whether the user's keys freeze the backbone; None if they leave it open."""
        freeze = self.override_values.get("model.freeze")
        if freeze is not None:
            return bool(freeze == "backbone")
        decisive = ("model.adapter", "model.sync_bn", "model.freeze_bn", "optim.stages")
        if any(self.override_values.get(key) for key in decisive):
            return False
        is_random = self.override_values.get("model.pretrained") is False
        has_teacher = any(key.startswith("distill.") for key in self.override_values)
        return False if is_random or has_teacher else None

    def default_epochs(self) -> int:
        """Return the number of epochs for training all weights, ignoring the time budget."""
        num_train, steps = self.stats.num_train, self.override_values.get("optim.steps")
        if steps:
            return max(1, round(steps * self._batch_size() / num_train))
        return math.ceil(self.override_values.get("optim.epochs") or _choose_epochs(num_train))

    def default_trial_epochs(self) -> float:
        """Return the number of epochs of a trial of all weights, if the run has enough epochs."""
        return max(_TRIAL_EPOCHS, _TRIAL_STEPS * self._batch_size() / self.stats.num_train)

    def has_validation(self) -> bool:
        """True if the recipe has a validation split."""
        return "val" in self.source.splits or self.override_values.get("data.val_fraction") != 0

    def image_sizes(self, candidate: Candidate) -> Sequence[int | tuple[int, int]]:
        """Return the image sizes to try for weights: the one that the user gave, if any."""
        if size := self.override_values.get("model.image_size"):
            return [size if isinstance(size, int) else tuple(size)]
        if not isinstance(candidate.image_size, int):
            return [candidate.image_size]
        return choose_image_sizes(candidate.image_size, self.stats.median_side)

    def scoring_recipe(self, candidate: Candidate) -> Recipe:
        """Build the recipe whose frozen features score a candidate.

        Raises: RecipeError or WeightsError if the network does not support the user's settings.
        """
        score = Score(
            candidate,
            accuracy=0.0,
            num_images=0,
            num_train=0,
            forward_seconds=0.0,
            eval_spec="resize",
            has_batch_norm=False,
        )
        if any(key.startswith("model.") for key in self.override_values):
            full = Choice(score, frozen=False, epochs=1, reason="", scores=[], seconds=None)
            full_recipe = self.build(full, changes=_TRIAL_OVERRIDES).recipe
            build_setup(full_recipe, device=torch.device("cpu"), show_progress=False)
        frozen = Choice(score, frozen=True, epochs=0, reason="", scores=[], seconds=None)
        kept = [
            override
            for override in self.overrides
            if override.startswith(_FEATURE_KEYS) and not override.startswith("data.train=")
        ]
        return replace(self, overrides=kept).build(frozen, _TRIAL_OVERRIDES).recipe

    def head_trial_recipe(self, choice: Choice) -> Recipe:
        """Build the recipe of a trial that trains only the classifier, with one evaluation."""
        recipe = self.build(choice, _TRIAL_OVERRIDES).recipe
        batch_size = max(recipe.data.batch_size, _HEAD_BATCH_SIZE)
        epochs = max(_MIN_STEPS * batch_size / self.stats.num_train, _MIN_HEAD_EPOCHS)
        if epochs > _HEAD_EPOCHS:  # few images: more steps need smaller batches
            batch_size, epochs = recipe.data.batch_size, _HEAD_EPOCHS
        changes = [f"data.batch_size={batch_size}", f"optim.epochs={epochs:.3g}"]
        changes += ["optim.warmup_epochs=1", "run.eval_every=1000000"]
        return self.build(choice, [*_TRIAL_OVERRIDES, *changes]).recipe

    def trains_head_first(self, choice: Choice) -> bool:
        """True if all weights are trained as in the trial: after the classifier alone (LP-FT)."""
        return self.frozen_by_overrides() is None and not choice.frozen

    def full_trial_recipe(self, choice: Choice, epochs: float) -> Recipe:
        """Build the recipe of a trial that trains all weights, starting from a trained classifier.

        Constant batch norm statistics keep this classifier useful. The learning rate is that of the
        run and falls to 0, and the first evaluation is when it has fallen to a quarter.
        """
        recipe = self.build(choice, _TRIAL_OVERRIDES).recipe
        steps = round(epochs * self.stats.num_train / recipe.data.batch_size)
        steps = max(steps, _MIN_TRIAL_STEPS)
        changes = [
            f"optim.steps={steps}",
            f"optim.warmup_steps={steps // 10}",
            "optim.min_lr=0",
            "optim.stages=[]",
            f"model.freeze_bn={str(choice.score.has_batch_norm).lower()}",
            f"run.eval_every={math.ceil(steps * 2 / 3)}",
        ]
        return self.build(choice, [*_TRIAL_OVERRIDES, *changes]).recipe

    def build(self, choice: Choice, changes: Sequence[str] = ()) -> StartResult:
        """Build the recipe's YAML and parse it.

        Args:
            choice: the weights, and whether to train only the classifier.
            changes: further overrides, for a trial.
        """
        name, stats = self.source.name, self.stats
        score, frozen = choice.score, choice.frozen
        candidate = score.candidate
        batch_size = self._batch_size()
        val_fraction, val_reason = _choose_val_fraction(self.source)
        unreadable = RecipeEntry(
            "unreadable", "quarantine", "unreadable files are listed and left out"
        )
        if self.source.splits["train"].is_streamed:
            unreadable = RecipeEntry("unreadable", "stop", "the images are streamed")
        freeze = []
        if frozen or self.frozen_by_overrides() is None:
            freeze.append(RecipeEntry("freeze", "backbone" if frozen else "none", choice.reason))
        if self.trains_head_first(choice) and score.has_batch_norm:
            reason = "keeps the statistics with which the classifier was trained"
            freeze.append(RecipeEntry("freeze_bn", True, reason))
        size = candidate.image_size
        sections = {
            "model": [
                RecipeEntry("name", candidate.name, candidate.origin),
                RecipeEntry(
                    "image_size",
                    size if isinstance(size, int) else list(size),
                    f"images of about {stats.median_side} px",
                ),
                *freeze,
            ],
            "data": [
                RecipeEntry(
                    "source",
                    name,
                    f"{self.source.description}; {_format_class_counts(self.source, stats)}",
                ),
                RecipeEntry("val_fraction", val_fraction, val_reason),
                RecipeEntry("batch_size", batch_size, pluralize(stats.num_train, "training image")),
                unreadable,
                _choose_train_pipeline(score, stats.median_side, frozen=frozen),
            ],
            "optim": self._choose_optim(choice, batch_size),
            "run": [_choose_best_metric(self.override_values)],
        }
        values = {
            section: {entry.key: entry.value for entry in entries}
            for section, entries in sections.items()
        }
        chosen = json.dumps(values)
        recipe = parse_recipe(
            chosen, name=f"recipe for {name}", overrides=[*self.overrides, *changes]
        )
        document = parse_document(chosen, name="recipe")
        for override in self.overrides:
            apply_override(document, override, Recipe)
        reasons = {
            f"{section}.{entry.key}": entry.reason
            for section, entries in sections.items()
            for entry in entries
        } | dict.fromkeys(self.override_values, "set by you")
        header = [f"created for {name}", *map(str, choice.scores)]
        yaml_text = redact_urls(_format_yaml(header, document.data, reasons))
        return StartResult(recipe, yaml_text, choice, builder=self)

    def _batch_size(self) -> int:
        """Return the batch size, the user's if there is one."""
        return int(
            self.override_values.get("data.batch_size", _choose_batch_size(self.stats.num_train))
        )

    def _choose_optim(self, choice: Choice, batch_size: int) -> list[RecipeEntry]:
        """Choose the optimizer settings; the warmup depends on the user's epochs or steps."""
        num_train, values, frozen = self.stats.num_train, self.override_values, choice.frozen
        head_epochs = min(_HEAD_EPOCHS, max(1, 2_000_000 // max(num_train, 1)))
        epochs = values.get("optim.epochs") or (head_epochs if frozen else choice.epochs)
        steps = values.get("optim.steps") or max(1, round(epochs * num_train / batch_size))
        lr, stages = _HEAD_LR if frozen else choice.score.candidate.lr, []
        lr_reason = "a rule of thumb for these weights"
        if self.trains_head_first(choice):
            lr = float(f"{lr / 3:.2g}")
            lr_reason = "a third of the usual one, because the classifier is already trained"
            stage = {"freeze": "backbone", "epochs": head_epochs, "lr": _HEAD_LR}
            stage["train"] = choice.score.eval_spec
            reason = "first the classifier alone, as in the trial (LP-FT)"
            stages = [RecipeEntry("stages", [stage], reason)]
        return [
            RecipeEntry("name", "adamw"),
            RecipeEntry("lr", lr, lr_reason),
            RecipeEntry("weight_decay", 0.05),
            RecipeEntry("schedule", "cosine"),
            RecipeEntry("epochs", epochs, f"about {steps} steps"),
            RecipeEntry(
                "warmup_steps", min(round(steps / 10), 200), "a tenth of the steps, at most 200"
            ),
            *stages,
        ]


def _open_source(source: str, overrides: Iterable[str], seed: int) -> Source:
    """Open the data with the user's overrides, without holding out a validation split."""
    recipe = yaml.safe_load(MINIMAL_RECIPE)
    recipe["data"]["source"] = resolve_data_source(source)
    section = parse_recipe(
        json.dumps(recipe),
        name=f"recipe for {source}",
        overrides=[override for override in overrides if override.startswith("data.")],
    ).data
    return open_data(section.model_copy(update={"val_fraction": 0.0, "num_val": None}), seed)


def _read_choice(key: str) -> Choice | None:
    """Return the choice of an earlier start; None if there is none, or its file is damaged."""
    with contextlib.suppress(OSError, ValueError), CacheFolder(cache_path("start")) as cache:
        body = cache.read(f"{key}.json", max_bytes=_MAX_CHOICE_BYTES)
        if body[:64] == _hash_choice(key, body[64:]):
            return _CHOICE.validate_json(body[64:])
    return None


def _write_choice(key: str, choice: Choice) -> None:
    """Write the choice into the cache, after its checksum, unless the cache is not writable."""
    name, body = f"{key}.json", _CHOICE.dump_json(choice)
    with contextlib.suppress(OSError), CacheFolder(cache_path("start")) as cache:
        with cache.write(name) as file:
            file.write(_hash_choice(key, body) + body)
        cache.evict(_MAX_CACHE_BYTES, keep_name=name, pattern=_CHOICE_NAME)


def _hash_choice(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).hexdigest().encode()


def inspect_data(source: Source, val_fraction: float) -> DatasetStats:
    """Count the images of a source, and decode a sample of them to get their sizes.

    Raises: DataError if no sampled image can be decoded.
    """
    split = source.splits["train"]
    sizes, unreadable = sample_image_sizes(split, _NUM_SAMPLED_IMAGES)
    sides = [min(size) for size in sizes]
    if not sides:
        raise DataError(
            f"{source.name}: none of {pluralize(unreadable, 'sampled image')} can be decoded; list "
            f"them with: finetune data scan {source.name}",
            code="data.damaged",
        )
    return DatasetStats(
        split_sizes={name: len(split) for name, split in source.splits.items()},
        num_train=round(len(split) * (1 - val_fraction)),
        images_per_class=count_images_per_class(split.labels, len(source.class_names)),
        median_side=int(np.median(sides)),
    )


def _choose_val_fraction(source: Source) -> tuple[float, str]:
    """Choose the fraction of train to hold out for validation. Returns: fraction and reason."""
    if "val" in source.splits:
        return 0.0, "the data has a val split"
    images = len(source.splits["train"])
    share = 0.2 if images < 1000 else 0.15 if images < 10_000 else 0.05
    return share, f"of {pluralize(images, 'image')}, stratified by class"


def _format_class_counts(source: Source, stats: DatasetStats) -> str:
    """Format the number of classes, and the classes with the fewest and most images."""
    extremes = stats.images_per_class.argmin(), stats.images_per_class.argmax()
    fewest, most = (f"{stats.images_per_class[k]} ({source.class_names[k]})" for k in extremes)
    return f"{len(source.class_names)} classes, images from {fewest} to {most}"


def _choose_epochs(num_images: int) -> int:
    """Choose the number of epochs of all weights: more for small datasets, to get enough steps."""
    if num_images > 5000:
        return 3 if num_images > 50_000 else 8
    return min(_MAX_EPOCHS, max(15, round(_MIN_STEPS * 32 / max(num_images, 1))))


def _choose_batch_size(num_images: int) -> int:
    """Choose the batch size: small for small datasets, which need more steps."""
    return 16 if num_images < 200 else 32 if num_images < 5000 else 128


def _choose_train_pipeline(score: Score, median_side: int, *, frozen: bool) -> RecipeEntry:
    """Choose the training transforms.

    Objects have the same size in training as in evaluation. Flips are never chosen, because they
    change the meaning of digits, letters and signs.
    """
    size, spec = score.candidate.image_size, score.eval_spec
    if frozen:
        return RecipeEntry("train", spec, "as in evaluation: features are computed once")
    flip_note = "no flip, as it may change the class; add '| flip' if mirroring keeps the class"
    if median_side > 64:
        spec = f"random_resized_crop({size}, scale=(0.4, 1.0))"
    elif "center_crop" in spec:
        spec = spec.replace("center_crop", "random_crop")
    else:
        spec = f"resize | random_crop(padding={np.min(size) // 8})"
    return RecipeEntry("train", spec, flip_note)


def _choose_best_metric(override_values: Mapping[str, Any]) -> RecipeEntry:
    """Choose which weights to keep: the last ones, or the best ones if run.patience is set."""
    if override_values.get("run.patience") is None:
        return RecipeEntry("best", "last", "with few validation images, the best is partly luck")
    return RecipeEntry("best", "val.loss", "the metric for patience; less noisy than accuracy")


def _format_yaml(
    header: Sequence[str], sections: Mapping[str, Mapping[str, Any]], reasons: Mapping[str, str]
) -> str:
    """Format a recipe as YAML, with a header and the reasons by `section.key` as comments."""
    lines = [f"# {printable_path(line)}" for line in header]
    for section, values in sections.items():
        lines.append(f"{section}:")
        for key, value in values.items():
            value_text = yaml.safe_dump(
                value, allow_unicode=True, width=math.inf, default_flow_style=True
            ).splitlines()[0]
            reason = reasons.get(f"{section}.{key}")
            lines.append(
                f"  {key}: {value_text}" + (f" # {printable_path(reason)}" if reason else "")
            )
    return "\n".join(lines) + "\n"
