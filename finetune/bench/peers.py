"""Train the same network in another library's loop, on the first images of our training run.

The loops are transformers' Trainer and a plain loop with timm's components. The recipe sets batch
size, loss, optimizer and augmentation; everything else is the library's default. The images are
decoded to PIL before timing starts, so these loops do not pay for reading and decoding files.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from finetune.bench.timer import PREFETCH_FACTOR, MeasuredLoop, StepTimer
from finetune.bench.torchvision_transforms import to_torchvision
from finetune.data.source import Split
from finetune.errors import RecipeError
from finetune.host_resources import num_cores
from finetune.log import quiet
from finetune.models.freeze import set_train_mode
from finetune.models.summary import count_flops
from finetune.precision import DTYPES
from finetune.recipe.schema import Recipe
from finetune.training.setup import TrainingSetup, build_setup

__all__ = ["PEER_LOOPS", "DecodedImages", "PeerLoop", "training_arguments"]

_NUM_DECODED_IMAGES = 1024  # or one batch, if that is larger
_TRIAL_STEPS = 3


class PeerLoop(MeasuredLoop):
    """Runs another library's loop in this process, some steps per call.

    Args:
        progress: the `ProgressReporter` that receives steps and messages.
        recipe: the recipe.
        loop: a key of PEER_LOOPS.
        precision: fp32, bf16 or fp16.
        device: device type.
        folder: folder for files that a library always writes; the caller removes it.
    Attributes, after `prepare`:
        setup: setup of the recipe; its network is on the device, in training mode.
        images: the decoded images.
        augment: transforms from PIL image to PIL image, before normalization.
        accumulation_steps: micro-batches per step, of equal size.
        workers: number of loading processes, 0 for none.
    """

    def __init__(
        self, progress: Any, *, recipe: Recipe, loop: str, precision: str, device: str, folder: str
    ) -> None:
        self.progress = progress
        self.recipe = recipe
        self.loop = PEER_LOOPS[loop]
        self.precision = precision
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.folder = folder
        self.workers = 0

    @property
    def network(self) -> nn.Module:
        """The network."""
        return self.setup.built.model

    @property
    def compiled(self) -> bool:
        """True if the recipe sets compilation; "auto" applies to our own loop only."""
        return self.recipe.model.compile is True

    @property
    def micro_batch_size(self) -> int:
        """Images per micro-batch."""
        return self.recipe.data.batch_size // self.accumulation_steps

    def loss(self) -> nn.Module:
        """Return the loss, a mean over the batch."""
        return nn.CrossEntropyLoss(label_smoothing=self.recipe.optim.label_smoothing)

    def prepare(self) -> dict[str, Any]:
        """Build the network, decode images, and choose the faster number of workers.

        Returns: a dict with keys "seconds_to_first_step", "compiled", "workers" and "operations"
            (per step).
        Raises: RecipeError if these loops do not support the recipe.
        """
        recipe = self.recipe
        if recipe.distill is not None:
            raise RecipeError(
                "distill: the loops of --against do not support a teacher; use a recipe "
                "without that section",
                code="recipe.unsupported",
            )
        if recipe.run.threads is not None:
            torch.set_num_threads(recipe.run.threads)
        with quiet():
            setup = build_setup(recipe, device=self.device, show_progress=False)
        self.setup = setup
        self.accumulation_steps = _accumulation_steps(setup)
        preprocessing = setup.preprocessing
        set_train_mode(self.network.to(self.device))
        self.augment = to_torchvision(
            setup.train_pipeline.transform_spec,
            image_size=preprocessing.image_size,
            interpolation=preprocessing.interpolation,
        )
        self.images = _decode_images(setup)
        clock = self._run_timed(_TRIAL_STEPS)
        operations = count_flops(lambda: self._run_timed(0))
        alone, self.workers = clock.seconds, num_cores()
        if self._run_timed(_TRIAL_STEPS).seconds > alone:
            self.workers = 0
        return {
            "seconds_to_first_step": clock.seconds_to_first_step,
            "compiled": self.compiled,
            "workers": self.workers,
            "operations": operations,
        }

    def train(self, *, warmup: int, steps: int) -> float:
        """Continue training; see `FinetuneLoop.train`. Returns: images per second."""
        return self.recipe.data.batch_size * steps / self._run_timed(steps, warmup=warmup).seconds

    def _run_timed(self, steps: int, *, warmup: int = 1) -> StepTimer:
        warmup += self.workers * PREFETCH_FACTOR
        clock = StepTimer(self.device, warmup=warmup, steps=steps, tick=self.progress.tick)
        self.images.num_samples = self.recipe.data.batch_size * (warmup + steps)
        self.loop(self, warmup + steps, clock.step)
        return clock


class DecodedImages(Dataset[tuple[Any, int]]):
    """A dataset that repeats decoded images and transforms each repetition.

    Args:
        split: the split to decode from.
        indices: indices of the images in the split.
    Attributes:
        num_samples: length of the dataset, with repetitions.
        transform: the transform of a PIL image; set by the loop.
    """

    def __init__(self, split: Split, indices: Sequence[int]) -> None:
        self.images = [Image.fromarray(split.decode(place)) for place in indices]
        self.labels = [int(split.labels[place]) for place in indices]
        self.num_samples = len(self.images)
        self.transform: Callable[..., Any] | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = index % len(self.images)
        image = self.images[place]
        return image if self.transform is None else self.transform(image), self.labels[place]


def _decode_images(setup: TrainingSetup) -> DecodedImages:
    """Decode the images that our own training reads first."""
    number = min(setup.num_samples, max(setup.recipe.data.batch_size, _NUM_DECODED_IMAGES))
    return DecodedImages(
        setup.source.splits["train"], setup.sampler.epoch_order(0)[:number].tolist()
    )


def _accumulation_steps(setup: TrainingSetup) -> int:
    """Return the micro-batches per step. Raises: RecipeError if their sizes differ."""
    data = setup.recipe.data
    assert data.micro_batch != "auto", "our own loop has resolved it"
    parts = len(setup.sampler.micro_batches(0, micro_batch_size=data.micro_batch))
    if data.batch_size % parts:
        raise RecipeError(
            f"data.micro_batch: {data.micro_batch} divides {data.batch_size} images into {parts} "
            "micro-batches of different sizes, which the loops of --against do not support; use a "
            "divisor",
            code="recipe.unsupported",
        )
    return parts


# --- the loops ---------------------------------------------------------------------------------


class _ModelWithLoss(nn.Module):
    """A network whose output includes the loss, as the Trainer expects."""

    def __init__(self, network: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits_BK = self.network(pixel_values)
        return {"loss": self.loss(logits_BK.float(), labels), "logits": logits_BK}


def _train_with_transformers(peer: PeerLoop, steps: int, on_step: Callable[[], None]) -> None:
    """Train with transformers.Trainer: settings from the recipe, else the Trainer's defaults."""
    from torchvision.transforms import v2
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    preprocessing = peer.setup.preprocessing
    peer.images.transform = v2.Compose(
        [
            *peer.augment,
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
        **training_arguments(peer.recipe, peer.precision, peer.device, peer.workers),
        output_dir=peer.folder,
        max_steps=steps,
        per_device_train_batch_size=peer.micro_batch_size,
        gradient_accumulation_steps=peer.accumulation_steps,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
    )
    theirs = peer.recipe.optim.name == "adamw"  # keep the Trainer's default, fused AdamW
    trainer = Trainer(
        model=_ModelWithLoss(peer.network, peer.loss()),
        args=arguments,
        train_dataset=peer.images,
        data_collator=collate,
        optimizers=(None, None) if theirs else (_timm_optimizer(peer), None),
        callbacks=[Steps()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def training_arguments(
    recipe: Recipe, precision: str, device: torch.device, workers: int
) -> dict[str, Any]:
    """Return TrainingArguments that set the Trainer's AdamW and data loader as in the recipe."""
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


def _train_with_timm(peer: PeerLoop, steps: int, on_step: Callable[[], None]) -> None:
    """Train with timm's loader and optimizer in a plain loop under torch's autocast."""
    from timm.data import create_loader
    from timm.data.transforms import ToNumpy
    from timm.utils import ModelEmaV3
    from torchvision.transforms import v2

    network, device, optim = peer.network, peer.device, peer.recipe.optim
    preprocessing = peer.setup.preprocessing
    images: Any = peer.images
    loader = create_loader(
        images,
        input_size=(3, *preprocessing.image_size),
        batch_size=peer.micro_batch_size,
        is_training=True,
        mean=tuple(preprocessing.mean),
        std=tuple(preprocessing.std),
        num_workers=peer.workers,
        device=device,
        pin_memory=device.type != "cpu",
        persistent_workers=False,
    )
    # after create_loader, which sets its own transform; the loader normalizes on the device
    images.transform = v2.Compose([*peer.augment, ToNumpy()])
    optimizer, loss = _timm_optimizer(peer), peer.loss()
    average = ModelEmaV3(network, decay=optim.ema_decay) if optim.ema_decay else None
    model = torch.compile(network) if peer.compiled else network
    autocast = torch.autocast(device.type, DTYPES[peer.precision], enabled=peer.precision != "fp32")
    scaler = torch.amp.GradScaler(device.type, enabled=peer.precision == "fp16")
    for number, (images_BCHW, labels_B) in enumerate(loader, start=1):
        with autocast:
            part = loss(model(images_BCHW), labels_B) / peer.accumulation_steps
        scaler.scale(part).backward()
        if number % peer.accumulation_steps:
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


def _timm_optimizer(peer: PeerLoop) -> torch.optim.Optimizer:
    """Return timm's optimizer for the recipe; timm's `momentum` is SGD without Nesterov."""
    from timm.optim import create_optimizer_v2

    optim = peer.recipe.optim
    settings: dict[str, Any] = dict(optim.args)
    if optim.betas is not None:
        settings["betas"] = tuple(optim.betas)
    optimizer: torch.optim.Optimizer = create_optimizer_v2(
        peer.network,
        opt="momentum" if optim.name == "sgd" else optim.name,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        layer_decay=optim.layer_decay,
        **settings,
    )
    return optimizer


PEER_LOOPS: dict[str, Callable[[PeerLoop, int, Callable[[], None]], None]] = {
    "transformers": _train_with_transformers,
    "timm-loop": _train_with_timm,
}
