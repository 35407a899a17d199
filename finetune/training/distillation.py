"""Knowledge distillation: a frozen teacher sees the same pixels and adds a term to the loss.

The teacher is not part of the network: checkpoints, EMA and the published model do not contain it.
Without random training transforms, its outputs are computed once and cached like features
(`evaluation.feature_extraction`); otherwise the teacher runs at every step.
"""

# B batch, N logits or features, K classes, D teacher feature width, C channels, H W pixels

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from finetune.data.feature_loader import FeatureLoader
from finetune.data.loader import Batch
from finetune.data.source import Split
from finetune.errors import CheckpointError, RecipeError, SetupError, WeightsError
from finetune.evaluation.feature_extraction import feature_identity
from finetune.files import file_sha256
from finetune.log import logger, warn_once
from finetune.model_checksums import json_sha256, read_checksums, verify_checksum
from finetune.models.build import build_model
from finetune.models.features import compute_pre_logits, linear_classifier_names
from finetune.models.save import BuiltModel
from finetune.models.weights.resolve import locate_weights
from finetune.precision import autocast_dtype
from finetune.recipe.load import DistillSection
from finetune.run.directory import RunDir
from finetune.training.compile import choose_kernels
from finetune.training.frozen_backbone import build_feature_loader
from finetune.training.setup import TrainingSetup
from finetune.transforms.preprocessing import Preprocessing

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Distillation", "Teacher", "distillation_loss"]

_PROJECTION = "distill_projection"  # a layer of the network during training


def distillation_loss(
    student_BN: Tensor, teacher_BN: Tensor, *, kind: str, temperature: float
) -> Tensor:
    """Return the distillation loss, summed over the images of a batch.

    Args:
        student_BN: the student's float32 logits, or its float32 features after the projection to
            the width of the teacher's features.
        teacher_BN: the teacher's float32 logits or features.
        kind: "logits": Kullback-Leibler divergence of the softened probabilities, times the
            temperature squared; "features": 1 - cosine similarity, which is half the squared
            distance between the normalized vectors.
        temperature: temperature of the softmax; "features" ignores it.
    Source: Hinton et al. 2015, "Distilling the knowledge in a neural network", section 2; Navaneet
        et al. 2021, "SimReg: regression as a simple yet effective tool for self-supervised
        knowledge distillation", section 3, with a linear regressor (FitNets, Romero et al. 2015).
    """
    if kind == "features":
        return (1 - functional.cosine_similarity(student_BN, teacher_BN)).sum()
    student_BK, teacher_BK = student_BN / temperature, teacher_BN / temperature
    divergence = functional.kl_div(
        student_BK.log_softmax(1), teacher_BK.log_softmax(1), reduction="sum", log_target=True
    )
    return temperature**2 * divergence


class Teacher(nn.Module):
    """A frozen network that takes the student's pixels and returns logits or features.

    Args:
        built: the teacher with its own head.
        student_preprocessing: the student's preprocessing, already applied to the input images.
        kind: "logits" or "features".
        class_order: for each class of the data, its index in the teacher's logits; None if the
            order is the same.
    """

    def __init__(
        self,
        built: BuiltModel,
        *,
        student_preprocessing: Preprocessing,
        kind: str,
        class_order: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        own = built.preprocessing
        self.network = built.model.requires_grad_(False).eval()
        self.kind = kind
        self._resize_to = (
            None if own.image_size == student_preprocessing.image_size else own.image_size
        )
        kernels = ("bilinear", "bicubic")  # torch has antialiasing for these only
        self._interpolation = own.interpolation if own.interpolation in kernels else "bicubic"
        mean, std, own_mean, own_std = (
            torch.tensor(values).view(1, 3, 1, 1)
            for values in (student_preprocessing.mean, student_preprocessing.std, own.mean, own.std)
        )
        self.scale = nn.Buffer(std / own_std)
        self.shift = nn.Buffer((mean - own_mean) / own_std)
        self.order = None if class_order is None else nn.Buffer(torch.tensor(class_order))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits (B, K) or features (B, D), float32."""
        pixels_BCHW = images_BCHW.float() * self.scale + self.shift
        if self._resize_to is not None:
            pixels_BCHW = functional.interpolate(
                pixels_BCHW, self._resize_to, mode=self._interpolation, antialias=True
            )
        if self.kind == "features":
            return compute_pre_logits(self.network, pixels_BCHW)
        logits_BK: Tensor = self.network(pixels_BCHW).float()
        return logits_BK if self.order is None else logits_BK[:, self.order]

    forward_features = forward  # so that its outputs can be cached like features

    def forward_head(self, values_BN: Tensor, *, pre_logits: bool) -> Tensor:
        """Return the outputs of `forward_features` unchanged."""
        return values_BN


class Distillation:
    """Runs a teacher and computes the distillation loss; each rank has its own copy.

    Create it before the network is copied or wrapped. With kind "features", it adds a projection
    layer to the network; that layer is trained, averaged by the EMA and saved in checkpoints like
    any other.

    Args:
        section: the recipe's `distill` section.
        setup: the training setup; its network must be on the accelerator's device.
        accelerator: the accelerator of this rank.

    Attributes:
        teacher_info: the teacher's name, architecture, size, sha256 and accuracy, for run.json.
        caches_outputs: True if the teacher's outputs are computed once, because the training
            transforms are not random.
        output_width: width of the teacher's output, K or D.
    Raises: RecipeError, WeightsError or SetupError if the teacher does not fit the network.
    """

    def __init__(
        self, section: DistillSection, setup: TrainingSetup, accelerator: Accelerator
    ) -> None:
        self.section = section
        self._setup, self._accelerator = setup, accelerator
        student, device = setup.preprocessing, accelerator.device
        try:
            built = build_model(section.teacher)
        except (RecipeError, SetupError, WeightsError) as error:
            text = str(error).removeprefix("model ")
            raise type(error)(f"distill.teacher: {text}", code=error.code) from error
        is_logits = section.kind == "logits"
        order = (
            _match_classes(section.teacher, built, setup.source.class_names) if is_logits else None
        )
        self._teacher: Teacher | None = Teacher(
            built, student_preprocessing=student, kind=section.kind, class_order=order
        )
        choose_kernels(
            self._teacher.to(device).network, device=device, dtype=autocast_dtype(accelerator)
        )
        self.caches_outputs = not setup.train_pipeline.is_random
        self._identity: dict[str, Any] = {}
        if self.caches_outputs and accelerator.is_main_process:
            own = {"sha256": built.provenance.get("sha256"), "kind": section.kind}
            own |= {"order": order, "sees": asdict(student)}
            self._identity = feature_identity(built, setup.train_pipeline.transform_spec) | {
                "teacher": own
            }
        self._cached_outputs: FeatureLoader | None = None
        self._captured_features: list[Tensor] = []  # classifier input of the last training pass
        black_BCHW = torch.zeros(2, 3, *student.image_size, device=device)
        self.output_width = self._run_teacher(black_BCHW).shape[1]
        if not is_logits:
            self._add_projection(setup.built.model, black_BCHW)
        names = ("architecture", "parameters", "sha256")
        # config.json is not part of the sha256 of the weights
        config = [built.network_args, asdict(built.preprocessing), order]
        self.teacher_info = {
            "name": section.teacher,
            **{name: built.provenance.get(name) for name in names},
            "config_sha256": json_sha256(config),
            **_recorded_accuracy(section.teacher, built.provenance.get("sha256")),
        }

    def _add_projection(self, network: nn.Module, images_BCHW: Tensor) -> None:
        """Add the projection layer, and a hook that captures the student's features.

        The features are the input of the classifier.

        Raises: RecipeError if the network does not have exactly one linear classifier.
        """
        names = linear_classifier_names(network)
        with torch.no_grad():
            width = compute_pre_logits(network.eval(), images_BCHW).shape[1]
        layer = network.get_submodule(names[0]) if names else None
        if not isinstance(layer, nn.Linear) or layer.in_features != width or len(names) > 1:
            raise RecipeError(
                f"distill.kind: {type(network).__name__} has no single linear classifier, so its "
                "features cannot be compared; set distill.kind=logits",
                code="recipe.unsupported",
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._setup.recipe.run.seed)
            projection = nn.Linear(width, self.output_width).to(images_BCHW.device)
        network.add_module(_PROJECTION, projection)
        # The hook must not refer to self: a copy of the network would copy the teacher.
        captured = self._captured_features

        def capture_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if module is layer and module.training:  # copies of the network have this hook, too
                captured.clear()
                captured.append(inputs[0])

        layer.register_forward_pre_hook(capture_input)

    def cache_outputs(self, split: Split) -> None:
        """Compute the teacher's outputs for the training split, or read them from the cache.

        Does nothing if the training transforms are random. Every rank must call it. The teacher is
        released afterwards.

        Raises: DataError naming every unreadable image, if `data.unreadable` is "stop".
        """
        if not self.caches_outputs or self._teacher is None:
            return
        setup = self._setup
        outputs, origin = build_feature_loader(
            split,
            network=self._teacher,
            pipeline=setup.train_pipeline,
            identity=self._identity,
            section=setup.recipe.data,
            accelerator=self._accelerator,
            num_classes=setup.num_classes,
            timeout_seconds=setup.recipe.run.timeout_seconds / 2,
        )
        self.use_cached_outputs(outputs)
        logger.info(f"distill: the teacher's outputs for the training images were {origin}")

    def use_cached_outputs(self, outputs: FeatureLoader) -> None:
        """Use these outputs for all training images, and release the teacher."""
        self._cached_outputs, self._teacher = outputs, None

    def compute_loss(
        self, loss_sum: Tensor, logits_BK: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return the total loss and the distillation loss, each summed over the images.

        Args:
            loss_sum: loss on the labels, summed over the images.
            logits_BK: float32, from the training forward pass of this batch.
        """
        section, student_BN = self.section, logits_BK
        if section.kind == "features":
            projection = self._setup.built.model.get_submodule(_PROJECTION)
            student_BN = projection(self._captured_features.pop().float())
        if self._cached_outputs is not None:
            teacher_BN = self._cached_outputs.get_features(batch.indices)
        else:
            teacher_BN = self._run_teacher(batch.images_BCHW)
        teacher_sum = distillation_loss(
            student_BN, teacher_BN, kind=section.kind, temperature=section.effective_temperature
        )
        return (1 - section.weight) * loss_sum + section.weight * teacher_sum, teacher_sum

    def _run_teacher(self, images_BCHW: Tensor) -> Tensor:
        assert self._teacher is not None, "the teacher is released once its outputs are cached"
        with torch.no_grad(), self._accelerator.autocast():
            outputs_BN: Tensor = self._teacher(images_BCHW)
        return outputs_BN

    @staticmethod
    def remove_projection(weights: Mapping[str, Tensor], *networks: nn.Module) -> dict[str, Tensor]:
        """Remove the projection layer from networks. Returns: the weights without it."""
        for network in networks:
            if hasattr(network, _PROJECTION):
                delattr(network, _PROJECTION)
        return {name: t for name, t in weights.items() if not name.startswith(f"{_PROJECTION}.")}


def _match_classes(name: str, built: BuiltModel, class_names: Sequence[str]) -> list[int] | None:
    """Find each class of the data among the teacher's classes.

    Returns: for each class of the data, its index in the teacher's logits; None if the order is the
        same, or the teacher has no class names.
    Raises: WeightsError if the teacher's classes differ from those of the data, or if it is a
        multi-label model.
    """
    if built.multilabel:
        raise WeightsError(
            f"distill.teacher: {name} is a multi-label model; choose a single-label teacher, or "
            "set distill.kind=features",
            code="weights.wrong_classes",
        )
    teacher_names, own = built.class_names, list(class_names)
    number = int(getattr(built.model, "num_classes", 0) or 0)
    if number == len(own) and teacher_names in (None, own):
        if teacher_names is None:
            warn_once(
                f"distill.teacher: {name} has no class names, so its outputs are taken in the "
                "order of the classes of the data"
            )
        return None
    if (
        teacher_names is not None
        and len(set(own)) == len(own)
        and sorted(teacher_names) == sorted(own)
    ):
        return [teacher_names.index(class_name) for class_name in own]
    unmatched = sorted(set(teacher_names or ()) ^ set(own))
    example = f"; only one side has '{unmatched[0]}'" if teacher_names and unmatched else ""
    raise WeightsError(
        f"distill.teacher: the classes of {name} ({number:,}) differ from those of the data "
        f"({len(own):,}){example}; choose a teacher with the same classes, or set "
        "distill.kind=features",
        code="weights.wrong_classes",
    )


def _recorded_accuracy(name: str, weights_sha256: str | None) -> dict[str, Any]:
    """Read the teacher's test accuracy, else its validation accuracy, from its results.json.

    Returns: a dict with keys "split", "top1" and "examples"; empty if no accuracy of these weights
        is recorded.
    Raises: WeightsError if results.json was changed.
    """
    folder = (
        locate_weights(name)
        if Path(name.removeprefix("local-dir:")).expanduser().is_dir()
        else None
    )
    with contextlib.suppress(CheckpointError):
        results = RunDir(folder).read_json("results.json") if folder is not None else None
        if folder is not None and results:
            checksums = read_checksums(folder, source=name)
            sha256 = file_sha256(folder / "results.json")
            verify_checksum("results.json", sha256, checksums, source=name)
            if results.get("model_sha256", weights_sha256) != weights_sha256:
                return {}
        for split in ("test", "val"):
            metrics = (results or {}).get(split) or {}
            if metrics.keys() >= {"top1", "examples"}:
                return {"split": split, **{key: metrics[key] for key in ("top1", "examples")}}
    return {}
