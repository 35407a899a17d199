"""Distillation: a frozen teacher sees the pixels that the network sees, and is a part of the loss.

The teacher is no part of the network: checkpoints, EMA and the published model do not have it.
Where nothing in `data.train` is random, what it says of each image is computed once and kept like
features (`evaluation.features`); else beside each step.
"""

# B batch, N images, K classes, D width of the teacher's features, C channels, H W pixels

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
from finetune.evaluation.features import identity_of
from finetune.models.build import build
from finetune.models.features import last_layers, pre_logits
from finetune.models.saved import Built
from finetune.models.weights.resolve import locate
from finetune.recipe.load import DistillSection
from finetune.run.directory import RunDir
from finetune.run.environment import dtype_of
from finetune.training.compile import choose_kernels
from finetune.training.frozen_backbone import feature_loader
from finetune.training.memory import NO_NEED, Need, need_of, num_bytes
from finetune.training.setup import TrainingSetup
from finetune.transforms.preprocessing import Preprocessing

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Distillation", "Teacher", "distillation_loss"]

_PROJECTION = "distill_projection"  # a layer of the network, as long as it is trained


def distillation_loss(
    student_BN: Tensor, teacher_BN: Tensor, *, kind: str, temperature: float
) -> Tensor:
    """Return what a teacher adds to the loss, summed over the images of a batch.

    Args:
        student_BN, teacher_BN: float32; logits, or features of one width.
        kind: "logits": the Kullback-Leibler divergence of the softened probabilities, times the
            temperature squared; "features": 1 - the cosine of the angle between the vectors, which
            is half the squared distance of the normalised ones.
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
    """A frozen network that takes another network's pixels, and gives logits or features.

    Args:
        built: with its own head; its network is used.
        sees: the preprocessing of the pixels that it will be given.
        kind: "logits" or "features".
        order: the place of each class of the data among the teacher's; None: its own order.
    """

    def __init__(
        self, built: Built, *, sees: Preprocessing, kind: str, order: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        own = built.preprocessing
        self.network = built.model.requires_grad_(False).eval()
        self.kind = kind
        self._size = None if own.image_size == sees.image_size else own.image_size
        kernels = ("bilinear", "bicubic")  # those that torch filters
        self._kernel = own.interpolation if own.interpolation in kernels else "bicubic"
        mean, std, own_mean, own_std = (
            torch.tensor(values).view(1, 3, 1, 1)
            for values in (sees.mean, sees.std, own.mean, own.std)
        )
        self.scale = nn.Buffer(std / own_std)
        self.shift = nn.Buffer((mean - own_mean) / own_std)
        self.order = None if order is None else nn.Buffer(torch.tensor(order))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits (B, K) or features (B, D), float32."""
        pixels_BCHW = images_BCHW.float() * self.scale + self.shift
        if self._size is not None:
            pixels_BCHW = functional.interpolate(
                pixels_BCHW, self._size, mode=self._kernel, antialias=True
            )
        if self.kind == "features":
            return pre_logits(self.network, pixels_BCHW)
        logits_BK: Tensor = self.network(pixels_BCHW).float()
        return logits_BK if self.order is None else logits_BK[:, self.order]

    forward_features = forward  # so that its answers are computed and kept as features are

    def forward_head(self, values_BN: Tensor, *, pre_logits: bool) -> Tensor:
        """Return what there is already."""
        return values_BN


class Distillation:
    """The teacher of a run, and the part of the loss that comes from it; each rank has its own.

    It is made before the network is copied or wrapped. For kind features it adds the projection to
    the network, where it is trained, averaged and kept in checkpoints like any other layer.

    Args:
        setup: its network is on the accelerator's device.

    Attributes:
        facts: about the teacher, for run.json.
        caches: whether its answers are computed once, since no image changes from epoch to epoch.
        width: numbers that it answers to an image, K or D.
    Raises: RecipeError, WeightsError or SetupError for a teacher that cannot be this network's.
    """

    def __init__(
        self, section: DistillSection, setup: TrainingSetup, accelerator: Accelerator, run: RunDir
    ) -> None:
        self.section = section
        self._setup, self._accelerator = setup, accelerator
        sees, device = setup.preprocessing, accelerator.device
        built = _open(section.teacher, run)
        is_logits = section.kind == "logits"
        order = _order(section.teacher, built, setup.source.class_names) if is_logits else None
        self._teacher: Teacher | None = Teacher(built, sees=sees, kind=section.kind, order=order)
        choose_kernels(self._teacher.to(device).network, device=device, dtype=dtype_of(accelerator))
        self.caches = not setup.train_pipeline.random
        self._identity: dict[str, Any] = {}
        if self.caches and accelerator.is_main_process:
            own = {"sha256": built.provenance.get("sha256"), "kind": section.kind}
            own |= {"order": order, "sees": asdict(sees)}
            self._identity = identity_of(built, setup.train_pipeline.sentence) | {"teacher": own}
        self._answers: FeatureLoader | None = None
        self._read: list[Tensor] = []  # what the classifier has read in training
        black_BCHW = torch.zeros(2, 3, *sees.image_size, device=device)
        self.width = self._answer(black_BCHW).shape[1]
        if not is_logits:
            self._add_projection(setup.built.model, black_BCHW)
        names = ("architecture", "parameters", "sha256")
        self.facts = {
            "name": section.teacher,
            **{name: built.provenance.get(name) for name in names},
            **_accuracy(section.teacher),
        }

    def _add_projection(self, network: nn.Module, images_BCHW: Tensor) -> None:
        """Add the layer from the network's features to the teacher's, and note what it is to read.

        Raises: RecipeError for a network whose features are not one vector for its classifier.
        """
        names = last_layers(network)
        with torch.no_grad():
            width = pre_logits(network.eval(), images_BCHW).shape[1]
        layer = network.get_submodule(names[0]) if names else None
        if not isinstance(layer, nn.Linear) or layer.in_features != width or len(names) > 1:
            raise RecipeError(
                f"distill.kind: {type(network).__name__} has no single linear classifier whose "
                "input could be compared; set it to logits",
                code="recipe.unsupported",
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._setup.recipe.run.seed)
            projection = nn.Linear(width, self.width).to(images_BCHW.device)
        network.add_module(_PROJECTION, projection)
        read = self._read  # alone: whoever copies the network copies no teacher

        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if module is layer and module.training:  # a copy of the network has this hook, too
                read.clear()
                read.append(inputs[0])

        layer.register_forward_pre_hook(note)

    def prepare(self, split: Split) -> None:
        """Compute or read the answers to a training split, if they are always the same.

        Every rank must call it. The teacher is not needed any more then.

        Raises: DataError naming every image that cannot be read.
        """
        if not self.caches or self._teacher is None:
            return
        setup = self._setup
        answers, origin = feature_loader(
            split,
            network=self._teacher,
            pipeline=setup.train_pipeline,
            identity=self._identity,
            section=setup.recipe.data,
            accelerator=self._accelerator,
            num_classes=setup.num_classes,
            timeout_seconds=setup.recipe.run.timeout_seconds / 2,
        )
        self.keep(answers)
        setup.notice(f"distill: the teacher's answers to the training images were {origin}")

    def keep(self, answers: FeatureLoader) -> None:
        """Take the answers to all training images in the place of the teacher."""
        self._answers, self._teacher = answers, None

    def of_batch(self, loss_sum: Tensor, logits_BK: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the whole loss, and the teacher's part of it, each summed over the images.

        Args:
            logits_BK: float32, of the network in training, for this batch.
        """
        section, student_BN = self.section, logits_BK
        if section.kind == "features":
            projection = self._setup.built.model.get_submodule(_PROJECTION)
            student_BN = projection(self._read.pop().float())
        if self._answers is not None:
            teacher_BN = self._answers.rows(batch.indices)
        else:
            teacher_BN = self._answer(batch.images_BCHW)
        part = distillation_loss(
            student_BN, teacher_BN, kind=section.kind, temperature=section.softening
        )
        return (1 - section.weight) * loss_sum + section.weight * part, part

    def _answer(self, images_BCHW: Tensor) -> Tensor:
        assert self._teacher is not None, "its answers are not kept"
        with torch.no_grad(), self._accelerator.autocast():
            answers_BN: Tensor = self._teacher(images_BCHW)
        return answers_BN

    def need(self, images: int) -> Need:
        """Return the memory of a pass through the teacher, its weights not counted."""
        if self._teacher is None:
            return NO_NEED
        size, dtype = self._setup.preprocessing.image_size, dtype_of(self._accelerator)
        return need_of(self._teacher, image_size=size, dtype=dtype, images=images, train=False)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the teacher's weights in the device's memory."""
        return 0 if self._teacher is None else num_bytes(self._teacher.state_dict().values())

    @staticmethod
    def discard(weights: Mapping[str, Tensor], *networks: nn.Module) -> dict[str, Tensor]:
        """Take the projection out of networks. Returns: the weights without it."""
        for network in networks:
            if hasattr(network, _PROJECTION):
                delattr(network, _PROJECTION)
        return {name: t for name, t in weights.items() if not name.startswith(f"{_PROJECTION}.")}


def _open(name: str, run: RunDir) -> Built:
    """Build a teacher with its own head. Raises: as `Distillation`."""
    path = Path(name.removeprefix("local-dir:")).expanduser().absolute()
    if run.path.resolve() in (path.resolve(), path.parent.resolve()):
        raise RecipeError(
            f"distill.teacher: {name} is the directory of this very run; name another model, or "
            "choose another --out",
            code="recipe.conflict",
        )
    try:
        return build(name)
    except (RecipeError, SetupError, WeightsError) as error:
        text = str(error).removeprefix("model.name: ")
        raise type(error)(f"distill.teacher: {text}", code=error.code) from error


def _order(name: str, built: Built, class_names: Sequence[str]) -> list[int] | None:
    """The place of each class among a teacher's; None for the same order, or without names.

    Raises: WeightsError if the teacher knows other classes.
    """
    if built.multilabel:
        raise WeightsError(
            f"distill.teacher: {name} gives an image any number of labels; name a teacher of one "
            "class an image, or set distill.kind=features",
            code="weights.wrong_classes",
        )
    theirs, own = built.class_names, list(class_names)
    number = int(getattr(built.model, "num_classes", 0) or 0)
    if number == len(own) and theirs in (None, own):
        return None
    if theirs is not None and len(set(own)) == len(own) and sorted(theirs) == sorted(own):
        return [theirs.index(class_name) for class_name in own]
    strange = sorted(set(theirs or ()) ^ set(own))
    named = f"; only one side has '{strange[0]}'" if theirs and strange else ""
    raise WeightsError(
        f"distill.teacher: {name} knows other classes ({number:,}) than the data ({len(own):,})"
        f"{named}; name a teacher of the same classes, or set distill.kind=features",
        code="weights.wrong_classes",
    )


def _accuracy(name: str) -> dict[str, Any]:
    """The split, top1 and examples of a teacher that is a run, by its own results.json."""
    folder = locate(name) if Path(name.removeprefix("local-dir:")).expanduser().is_dir() else None
    with contextlib.suppress(CheckpointError):
        results = RunDir(folder).read_json("results.json") if folder is not None else None
        for split in ("test", "val"):
            figures = (results or {}).get(split) or {}
            if figures.keys() >= {"top1", "examples"}:
                return {"split": split, **{key: figures[key] for key in ("top1", "examples")}}
    return {}
