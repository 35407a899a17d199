"""Other libraries' training loops: transformers' Trainer, and a plain one over timm's own parts.

The network, the batch size, the loss, the kind of optimiser and the augmentation are the recipe's;
what it does not say is as the library has it by default.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from finetune.data.source import Split
from finetune.recipe.load import Recipe
from finetune.run.environment import DTYPES
from finetune.training.setup import TrainingSetup

__all__ = ["LOOPS", "Images", "Setting", "trainer_arguments"]


class Images(Dataset[tuple[Any, int]]):
    """Decoded images, over and over, each time through the transforms.

    Args:
        split: to decode from.
        places: which of its images.
    Attributes:
        length: how many there seem to be.
        transform: of one PIL image; the loop sets it.
    """

    def __init__(self, split: Split, places: Sequence[int]) -> None:
        self.images = [Image.fromarray(split.read(place)) for place in places]
        self.labels = [int(split.labels[place]) for place in places]
        self.length = len(self.images)
        self.transform: Callable[..., Any] | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = index % len(self.images)
        image = self.images[place]
        return image if self.transform is None else self.transform(image), self.labels[place]


@dataclass
class Setting:
    """The settings of a loop.

    Attributes:
        setup: of the recipe; its network is on the device, in training mode.
        images: decoded.
        augment: from PIL image to PIL image, not yet normalised.
        precision: fp32, bf16 or fp16.
        device: that computes.
        parts: micro-batches of a step, of equal size.
        folder: for what a library insists on writing.
        workers: processes that load, 0 for none.
    """

    setup: TrainingSetup
    images: Images
    augment: list[Any]
    precision: str
    device: torch.device
    parts: int
    folder: str
    workers: int = 0

    @property
    def network(self) -> nn.Module:
        """The network that is trained."""
        return self.setup.built.model

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.setup.recipe

    @property
    def compiled(self) -> bool:
        """True if the recipe asks for compilation; "auto" decides for our own loop alone."""
        return self.recipe.model.compile is True

    @property
    def micro_batch(self) -> int:
        """Images at once."""
        return self.recipe.data.batch_size // self.parts

    def loss(self) -> nn.Module:
        """The mean over a batch."""
        return nn.CrossEntropyLoss(label_smoothing=self.recipe.optim.label_smoothing)


class _WithLoss(nn.Module):
    """A network that answers as the Trainer expects it: with its loss."""

    def __init__(self, network: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits_BK = self.network(pixel_values)
        return {"loss": self.loss(logits_BK.float(), labels), "logits": logits_BK}


def _with_transformers(setting: Setting, steps: int, on_step: Callable[[], None]) -> None:
    """transformers.Trainer with its defaults, but for what the recipe says."""
    from torchvision.transforms import v2
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    preprocessing = setting.setup.preprocessing
    setting.images.transform = v2.Compose(
        [
            *setting.augment,
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(preprocessing.mean, preprocessing.std),
        ]
    )

    def collate(items: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        images_BCHW = torch.stack([image for image, _ in items])
        return {"pixel_values": images_BCHW, "labels": torch.tensor([label for _, label in items])}

    class Steps(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            on_step()

    arguments = TrainingArguments(
        **trainer_arguments(setting.recipe, setting.precision, setting.device, setting.workers),
        output_dir=setting.folder,
        max_steps=steps,
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=setting.parts,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
    )
    theirs = setting.recipe.optim.name == "adamw"  # their default is a fused one
    trainer = Trainer(
        model=_WithLoss(setting.network, setting.loss()),
        args=arguments,
        train_dataset=setting.images,
        data_collator=collate,
        optimizers=(None, None) if theirs else (_timms_optimizer(setting), None),
        callbacks=[Steps()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def trainer_arguments(
    recipe: Recipe, precision: str, device: torch.device, workers: int
) -> dict[str, Any]:
    """The TrainingArguments by which the Trainer's AdamW and its loaders are the recipe's."""
    optim, on_cpu = recipe.optim, device.type == "cpu"
    betas = optim.betas or (0.9, 0.999)
    return {
        "learning_rate": optim.lr,
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.clip_norm or 0.0,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "torch_compile": recipe.model.compile is True,
        "use_cpu": on_cpu,
        "dataloader_num_workers": workers,
        "dataloader_pin_memory": not on_cpu,
        "remove_unused_columns": False,
        "report_to": "none",
        "disable_tqdm": True,
    }


def _with_timm(setting: Setting, steps: int, on_step: Callable[[], None]) -> None:
    """A plain loop over timm's loader and optimiser, under torch's autocast."""
    from timm.data import create_loader
    from timm.data.transforms import ToNumpy
    from timm.utils import ModelEmaV3
    from torchvision.transforms import v2

    network, device, optim = setting.network, setting.device, setting.recipe.optim
    preprocessing = setting.setup.preprocessing
    images: Any = setting.images
    loader = create_loader(
        images,
        input_size=(3, *preprocessing.image_size),
        batch_size=setting.micro_batch,
        is_training=True,
        mean=tuple(preprocessing.mean),
        std=tuple(preprocessing.std),
        num_workers=setting.workers,
        device=device,
        pin_memory=device.type != "cpu",
        persistent_workers=False,
    )
    # after the call, which sets its own; the loader normalises on the device
    images.transform = v2.Compose([*setting.augment, ToNumpy()])
    optimizer, loss = _timms_optimizer(setting), setting.loss()
    average = ModelEmaV3(network, decay=optim.ema_decay) if optim.ema_decay else None
    model = torch.compile(network) if setting.compiled else network
    autocast = torch.autocast(
        device.type, DTYPES[setting.precision], enabled=setting.precision != "fp32"
    )
    scaler = torch.amp.GradScaler(device.type, enabled=setting.precision == "fp16")
    for number, (images_BCHW, labels_B) in enumerate(loader, start=1):
        with autocast:
            part = loss(model(images_BCHW), labels_B) / setting.parts
        scaler.scale(part).backward()
        if number % setting.parts:
            continue
        if optim.clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(network.parameters(), optim.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if average is not None:
            average.update(network)
        on_step()


def _timms_optimizer(setting: Setting) -> torch.optim.Optimizer:
    """timm's optimiser of the recipe's kind; its `momentum` is the SGD without Nesterov's."""
    from timm.optim import create_optimizer_v2

    optim = setting.recipe.optim
    settings: dict[str, Any] = dict(optim.args)
    if optim.betas is not None:
        settings["betas"] = tuple(optim.betas)
    optimizer: torch.optim.Optimizer = create_optimizer_v2(
        setting.network,
        opt="momentum" if optim.name == "sgd" else optim.name,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        layer_decay=optim.layer_decay,
        **settings,
    )
    return optimizer


LOOPS: dict[str, Callable[[Setting, int, Callable[[], None]], None]] = {
    "transformers": _with_transformers,
    "timm-loop": _with_timm,
}
