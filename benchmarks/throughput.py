"""Training images/s of our loop, of transformers' Trainer, and of a plain loop with timm.

    python benchmarks/throughput.py recipes/cifar10/nano_32.yaml data.source=parquet:DATA/cifar10

The recipe sets network, batch size, loss, optimizer and augmentation; everything else is the other
library's default. The other two loops get images that were decoded to PIL beforehand, so they do
not pay for reading and decoding files. Every measurement has its own process; the loops take turns.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LOOPS = ("finetune", "timm", "trainer")
NUM_DECODED_IMAGES = 1024  # or one batch, if that is larger; the loops repeat them


def main() -> None:
    """Measure every loop in turn, and print a table."""
    parser = argparse.ArgumentParser(description="Compare the speed of training loops.")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--precisions", nargs="+", default=("bf16",), help="fp32, bf16, fp16")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a measurement")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps at the start")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="loading processes of other loops")
    parser.add_argument("--measure", choices=LOOPS, help=argparse.SUPPRESS)  # in a new process
    arguments = parser.parse_intermixed_args()
    if arguments.measure:
        print(json.dumps(measure(arguments)))
        return
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for turn in range(arguments.repeats):
        for precision in arguments.precisions:
            for loop in arguments.loops:
                print(f"turn {turn + 1}: {loop}, {precision}", file=sys.stderr)
                command = [sys.executable, __file__, arguments.recipe, *arguments.overrides]
                command += ["--measure", loop, "--precisions", precision]
                for option in ("steps", "warmup", "workers"):
                    command += [f"--{option}", str(getattr(arguments, option))]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                measured = json.loads(done.stdout.splitlines()[-1])
                results.setdefault((loop, precision), []).append(measured)
    print("| loop | precision | images/s | min–max | first step | host |")
    print("|---|---|--:|--:|--:|--:|")
    for (loop, precision), turns in results.items():
        rates = [turn["images_per_second"] for turn in turns]
        first = statistics.median(turn["seconds_to_first_step"] for turn in turns)
        host = max(turn["host_bytes"] for turn in turns) / 2**20
        print(
            f"| {loop} | {precision} | {statistics.median(rates):.1f} | {min(rates):.1f}–"
            f"{max(rates):.1f} | {first:.1f} s | {host:,.0f} MiB |"
        )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one loop in this process."""
    from finetune.bench.timer import peak_host_bytes
    from finetune.recipe.load import load_recipe

    (precision,) = arguments.precisions
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, f"run.precision={precision}"])
    with TemporaryDirectory(prefix="throughput-") as folder:
        if arguments.measure == "finetune":
            from finetune.bench.training_loop import TrainingLoop

            loop = TrainingLoop(recipe, Path(folder))
            first = loop.one_step()
            clock = loop.train(warmup=arguments.warmup, steps=arguments.steps)
            clock.seconds_to_first_step = first.seconds_to_first_step
            loop.close()
        else:
            clock = measure_other(recipe, arguments, Path(folder))
    return {
        "images_per_second": recipe.data.batch_size * arguments.steps / clock.seconds,
        "seconds_to_first_step": clock.seconds_to_first_step,
        "host_bytes": peak_host_bytes(),
    }


def measure_other(recipe: Any, arguments: argparse.Namespace, folder: Path) -> Any:
    """Train the recipe's network in another library's loop. Returns: the `StepTimer`."""
    import torch
    from torchvision_transforms import to_torchvision

    from finetune.bench.timer import StepTimer
    from finetune.models.freeze import set_train_mode
    from finetune.training.setup import build_setup

    if recipe.run.threads is not None:
        torch.set_num_threads(recipe.run.threads)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    setup = build_setup(recipe, device=device, show_progress=False)
    set_train_mode(setup.built.model.to(device))
    augment = to_torchvision(
        setup.train_pipeline.transform_spec,
        image_size=setup.preprocessing.image_size,
        interpolation=setup.preprocessing.interpolation,
    )
    # workers load batches during the first steps, which would make the timed steps look faster
    warmup = arguments.warmup + 2 * arguments.workers
    clock = StepTimer(device, warmup=warmup, steps=arguments.steps, tick=lambda: None)
    num_steps = warmup + arguments.steps
    images = decode_images(setup, num_samples=recipe.data.batch_size * num_steps)
    train = {"trainer": train_with_trainer, "timm": train_with_timm}[arguments.measure]
    train(setup, images, augment, num_steps, arguments.workers, clock.step, folder)
    return clock


def decode_images(setup: Any, *, num_samples: int) -> Any:
    """Decode the images that our training reads first, as a dataset that repeats them."""
    from PIL import Image
    from torch.utils.data import Dataset

    split = setup.source.splits["train"]
    number = min(setup.num_samples, max(setup.recipe.data.batch_size, NUM_DECODED_IMAGES))
    order = setup.sampler.epoch_order(0)[:number].tolist()

    class RepeatedImages(Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.images = [Image.fromarray(split.decode(index)) for index in order]
            self.labels = [int(split.labels[index]) for index in order]
            self.transform: Callable[[Any], Any] | None = None  # set by the loop

        def __len__(self) -> int:
            return num_samples

        def __getitem__(self, index: int) -> tuple[Any, int]:
            image = self.images[index % number]
            label = self.labels[index % number]
            return image if self.transform is None else self.transform(image), label

    return RepeatedImages()


def train_with_trainer(
    setup: Any,
    images: Any,
    augment: list[Any],
    num_steps: int,
    workers: int,
    on_step: Callable[[], None],
    folder: Path,
) -> None:
    """Train with transformers' Trainer: settings from the recipe, else the Trainer's defaults."""
    import torch
    from torch import nn
    from torchvision.transforms import v2
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    recipe, preprocessing = setup.recipe, setup.preprocessing
    images.transform = v2.Compose(
        [
            *augment,
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(preprocessing.mean, preprocessing.std),
        ]
    )

    class ModelWithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = setup.built.model
            self.loss = nn.CrossEntropyLoss(label_smoothing=recipe.optim.label_smoothing)

        def forward(self, pixel_values: Any, labels: Any) -> dict[str, Any]:
            logits_BK = self.network(pixel_values)
            return {"loss": self.loss(logits_BK.float(), labels), "logits": logits_BK}

    def collate(items: list[tuple[Any, int]]) -> dict[str, Any]:
        images_BCHW = torch.stack([image for image, _ in items])
        return {"pixel_values": images_BCHW, "labels": torch.tensor([label for _, label in items])}

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            on_step()

    micro_batch, accumulation = micro_batches(recipe)
    settings = TrainingArguments(
        **training_arguments(recipe, setup.device, workers),
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
    )
    # for AdamW keep the Trainer's default, which is fused
    optimizer = None if recipe.optim.name == "adamw" else timm_optimizer(setup)
    trainer = Trainer(
        model=ModelWithLoss(),
        args=settings,
        train_dataset=images,
        data_collator=collate,
        optimizers=(optimizer, None),
        callbacks=[Steps()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def training_arguments(recipe: Any, device: Any, workers: int) -> dict[str, Any]:
    """Return TrainingArguments that set the Trainer's AdamW and data loader as in the recipe."""
    optim, on_cpu = recipe.optim, device.type == "cpu"
    betas = optim.betas or (0.9, 0.999)
    return {
        "learning_rate": optim.lr,
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.clip_norm or 0.0,
        "bf16": recipe.run.precision == "bf16",
        "fp16": recipe.run.precision == "fp16",
        "torch_compile": recipe.model.compile is True,
        "use_cpu": on_cpu,
        "dataloader_num_workers": workers,
        "dataloader_pin_memory": not on_cpu,
        "remove_unused_columns": False,
        "report_to": "none",
        "disable_tqdm": True,
    }


def train_with_timm(
    setup: Any,
    images: Any,
    augment: list[Any],
    num_steps: int,
    workers: int,
    on_step: Callable[[], None],
    folder: Path,
) -> None:
    """Train with timm's loader and optimizer in a plain loop under torch's autocast."""
    import torch
    from timm.data import create_loader
    from timm.data.transforms import ToNumpy
    from timm.utils import ModelEmaV3
    from torch import nn
    from torchvision.transforms import v2

    from finetune.precision import DTYPES

    recipe, optim, device, network = (
        setup.recipe,
        setup.recipe.optim,
        setup.device,
        setup.built.model,
    )
    precision = recipe.run.precision
    micro_batch, accumulation = micro_batches(recipe)
    loader = create_loader(
        images,
        input_size=(3, *setup.preprocessing.image_size),
        batch_size=micro_batch,
        is_training=True,
        mean=tuple(setup.preprocessing.mean),
        std=tuple(setup.preprocessing.std),
        num_workers=workers,
        device=device,
        pin_memory=device.type != "cpu",
        persistent_workers=False,
    )
    # after create_loader, which sets its own transform; the loader normalizes on the device
    images.transform = v2.Compose([*augment, ToNumpy()])
    optimizer = timm_optimizer(setup)
    loss = nn.CrossEntropyLoss(label_smoothing=optim.label_smoothing)
    average = ModelEmaV3(network, decay=optim.ema_decay) if optim.ema_decay else None
    model = torch.compile(network) if recipe.model.compile is True else network
    autocast = torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    for number, (images_BCHW, labels_B) in enumerate(loader, start=1):
        with autocast:
            part = loss(model(images_BCHW), labels_B) / accumulation
        scaler.scale(part).backward()
        if number % accumulation:
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


def timm_optimizer(setup: Any) -> Any:
    """Return timm's optimizer for the recipe; timm's `momentum` is SGD without Nesterov."""
    from timm.optim import create_optimizer_v2

    optim = setup.recipe.optim
    betas = {} if optim.betas is None else {"betas": tuple(optim.betas)}
    return create_optimizer_v2(
        setup.built.model,
        opt="momentum" if optim.name == "sgd" else optim.name,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        layer_decay=optim.layer_decay,
        **optim.args,
        **betas,
    )


def micro_batches(recipe: Any) -> tuple[int, int]:
    """Return images per micro-batch, and micro-batches per step."""
    batch_size = recipe.data.batch_size
    size = recipe.data.micro_batch or batch_size
    if size == "auto" or batch_size % size:
        raise SystemExit(f"data.micro_batch: {size}; give a divisor of {batch_size}")
    return size, batch_size // size


if __name__ == "__main__":
    main()
