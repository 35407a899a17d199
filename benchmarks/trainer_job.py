"""Train with transformers' Trainer on a folder of images; `whole_job.py` runs this as a command.

    python benchmarks/trainer_job.py JOB.json

This is what a user of the Trainer would write: settings from the recipe, and the Trainer's defaults
for everything else. JOB.json has the keys "model" (a folder in timm's hub format), "data"
(a folder with train/ and val/), "transforms" (the spec of the training transforms), "interpolation"
and "arguments" (for TrainingArguments).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision_transforms import to_torchvision
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

FIRST_STEP = "first step done"


class FirstStep(TrainerCallback):  # type: ignore[misc]
    """Prints a line after the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the line."""
        if state.global_step == 1:
            print(FIRST_STEP, flush=True)


def collate(items: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """Stack images and labels."""
    images_BCHW = torch.stack([image for image, _ in items])
    return {"pixel_values": images_BCHW, "labels": torch.tensor([label for _, label in items])}


def accuracy(found: Any) -> dict[str, float]:
    """Return the accuracy of the predictions."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def main() -> None:
    """Train, validate after each epoch, and save the model."""
    job = json.loads(Path(sys.argv[1]).read_text())
    processor = AutoImageProcessor.from_pretrained(job["model"])
    config = processor.data_config
    size = tuple(config["input_size"][1:])
    augment = to_torchvision(job["transforms"], image_size=size, interpolation=job["interpolation"])
    normalize = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(config["mean"], config["std"]),
    ]
    transforms = {"train": v2.Compose([*augment, *normalize]), "val": processor.val_transforms}
    images = {
        split: ImageFolder(Path(job["data"]) / split, transform, allow_empty=True)
        for split, transform in transforms.items()
    }
    trainer = Trainer(
        model=AutoModelForImageClassification.from_pretrained(job["model"]),
        args=TrainingArguments(**job["arguments"]),
        train_dataset=images["train"],
        eval_dataset=images["val"],
        data_collator=collate,
        compute_metrics=accuracy,
        callbacks=[FirstStep()],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
