"""Another library's loop in the place of ours: the same network, on the images we begin with.

transformers' Trainer, and a plain loop over timm's own parts. The batch size, the loss, the kind of
optimiser and the augmentation are the recipe's; what it does not say is as the library has it by
default. The images are decoded to PIL before the clock starts, which spares these loops what a set
in files would cost them in every epoch.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from finetune.bench.timer import BATCHES_AHEAD, Clock, Loop
from finetune.bench.torchvision_transforms import translate
from finetune.console import say_nothing
from finetune.data.source import Split
from finetune.errors import RecipeError
from finetune.models.head import set_train_mode
from finetune.models.profile import count_operations
from finetune.processes import num_cores
from finetune.recipe.load import Recipe
from finetune.run.environment import DTYPES
from finetune.training.setup import TrainingSetup, open_setup

__all__ = ["LOOPS", "Images", "Peer", "trainer_arguments"]

_IMAGES = 1024  # that are decoded, or a batch where that is more
_TRIAL_STEPS = 3


class Peer(Loop):
    """Another library's loop on this process, a number of steps at a time.

    Args:
        line: told of steps and notices.
        recipe: of the training.
        loop: a name of LOOPS.
        precision: fp32, bf16 or fp16.
        device: its type.
        folder: for what a library insists on writing; whoever made it removes it.
    Attributes, once it is prepared:
        setup: of the recipe; its network is on the device, in training mode.
        images: decoded.
        augment: from PIL image to PIL image, not yet normalised.
        parts: micro-batches of a step, of equal size.
        workers: processes that load, 0 for none.
    """

    def __init__(
        self, line: Any, *, recipe: Recipe, loop: str, precision: str, device: str, folder: str
    ) -> None:
        self.line = line
        self.recipe = recipe
        self.loop = LOOPS[loop]
        self.precision = precision
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.folder = folder
        self.workers = 0

    @property
    def network(self) -> nn.Module:
        """The network that is trained."""
        return self.setup.built.model

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

    def prepare(self) -> dict[str, Any]:
        """Build the network, decode images, and find out how many workers serve the loop best.

        Returns: "seconds_to_first_step", "compiled", "workers" and "operations" of a step.
        Raises: RecipeError if the recipe asks for what these loops have not.
        """
        recipe = self.recipe
        if recipe.distill is not None:
            raise RecipeError(
                "distill: the loops that --against compares with have no teacher; give a recipe "
                "without that section",
                code="recipe.unsupported",
            )
        if recipe.run.threads is not None:
            torch.set_num_threads(recipe.run.threads)
        setup = open_setup(recipe, device=self.device, notice=say_nothing, progress=False)
        self.setup, self.parts, preprocessing = setup, _equal_parts(setup), setup.preprocessing
        set_train_mode(self.network.to(self.device))
        self.augment = translate(
            setup.train_pipeline.sentence,
            image_size=preprocessing.image_size,
            interpolation=preprocessing.interpolation,
        )
        self.images = _images(setup)
        clock = self._run(_TRIAL_STEPS)
        operations = count_operations(lambda: self._run(0))
        alone, self.workers = clock.seconds, num_cores()
        if self._run(_TRIAL_STEPS).seconds > alone:
            self.workers = 0
        return {
            "seconds_to_first_step": clock.alive,
            "compiled": self.compiled,
            "workers": self.workers,
            "operations": operations,
        }

    def train(self, *, warmup: int, steps: int) -> float:
        """Train on; see `Ours.train`. Returns: images a second."""
        return self.recipe.data.batch_size * steps / self._run(steps, warmup=warmup).seconds

    def _run(self, steps: int, *, warmup: int = 1) -> Clock:
        warmup += self.workers * BATCHES_AHEAD
        clock = Clock(self.device, warmup=warmup, steps=steps, tick=self.line.tick)
        self.images.length = self.recipe.data.batch_size * (warmup + steps)
        self.loop(self, warmup + steps, clock.step)
        return clock


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


def _images(setup: TrainingSetup) -> Images:
    """Decode the images that our own training begins with."""
    number = min(setup.num_samples, max(setup.recipe.data.batch_size, _IMAGES))
    return Images(setup.source.splits["train"], setup.sampler.order(0)[:number].tolist())


def _equal_parts(setup: TrainingSetup) -> int:
    """Micro-batches of a step. Raises: RecipeError if they are not of equal size."""
    data = setup.recipe.data
    assert data.micro_batch != "auto", "our own training has found it"
    parts = len(setup.sampler.micro_batches(0, micro_batch=data.micro_batch))
    if data.batch_size % parts:
        raise RecipeError(
            f"data.micro_batch: {data.micro_batch} cuts {data.batch_size} images into {parts} "
            "unequal parts, which the loops that --against compares with cannot; take a divisor",
            code="recipe.unsupported",
        )
    return parts


# --- the loops ---------------------------------------------------------------------------------


class _WithLoss(nn.Module):
    """A network that answers as the Trainer expects it: with its loss."""

    def __init__(self, network: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits_BK = self.network(pixel_values)
        return {"loss": self.loss(logits_BK.float(), labels), "logits": logits_BK}


def _with_transformers(peer: Peer, steps: int, on_step: Callable[[], None]) -> None:
    """transformers.Trainer with its defaults, but for what the recipe says."""
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
        **trainer_arguments(peer.recipe, peer.precision, peer.device, peer.workers),
        output_dir=peer.folder,
        max_steps=steps,
        per_device_train_batch_size=peer.micro_batch,
        gradient_accumulation_steps=peer.parts,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
    )
    theirs = peer.recipe.optim.name == "adamw"  # their default is a fused one
    trainer = Trainer(
        model=_WithLoss(peer.network, peer.loss()),
        args=arguments,
        train_dataset=peer.images,
        data_collator=collate,
        optimizers=(None, None) if theirs else (_timms_optimizer(peer), None),
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


def _with_timm(peer: Peer, steps: int, on_step: Callable[[], None]) -> None:
    """A plain loop over timm's loader and optimiser, under torch's autocast."""
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
        batch_size=peer.micro_batch,
        is_training=True,
        mean=tuple(preprocessing.mean),
        std=tuple(preprocessing.std),
        num_workers=peer.workers,
        device=device,
        pin_memory=device.type != "cpu",
        persistent_workers=False,
    )
    # after the call, which sets its own; the loader normalises on the device
    images.transform = v2.Compose([*peer.augment, ToNumpy()])
    optimizer, loss = _timms_optimizer(peer), peer.loss()
    average = ModelEmaV3(network, decay=optim.ema_decay) if optim.ema_decay else None
    model = torch.compile(network) if peer.compiled else network
    autocast = torch.autocast(device.type, DTYPES[peer.precision], enabled=peer.precision != "fp32")
    scaler = torch.amp.GradScaler(device.type, enabled=peer.precision == "fp16")
    for number, (images_BCHW, labels_B) in enumerate(loader, start=1):
        with autocast:
            part = loss(model(images_BCHW), labels_B) / peer.parts
        scaler.scale(part).backward()
        if number % peer.parts:
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


def _timms_optimizer(peer: Peer) -> torch.optim.Optimizer:
    """timm's optimiser of the recipe's kind; its `momentum` is the SGD without Nesterov's."""
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


LOOPS: dict[str, Callable[[Peer, int, Callable[[], None]], None]] = {
    "transformers": _with_transformers,
    "timm-loop": _with_timm,
}
