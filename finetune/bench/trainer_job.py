"""Train with transformers' Trainer on a folder of images; `end_to_end` runs this as a command.

`python -m finetune.bench.trainer_job JOB.json` is what a user of the Trainer would write: it uses
the settings of the recipe, and the Trainer's defaults for everything else.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["FIRST_STEP", "train"]

FIRST_STEP = "first step done"


def train(job: dict[str, Any]) -> None:
    """Train, validate after each epoch, and save the model.

    Args:
        job: a dict with keys "model" (a folder in timm's Hub format), "data" (a folder with train/
            and val/), "sentence" (the training transform spec), "interpolation" (its default) and
            "arguments" (for TrainingArguments).
    """
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2
    from transformers import (
        AutoImageProcessor,
        AutoModelForImageClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from finetune.bench.torchvision_transforms import to_torchvision

    class FirstStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                print(FIRST_STEP, flush=True)

    def collate(items: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        images_BCHW = torch.stack([image for image, _ in items])
        return {"pixel_values": images_BCHW, "labels": torch.tensor([label for _, label in items])}

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    model = AutoModelForImageClassification.from_pretrained(job["model"])
    processor = AutoImageProcessor.from_pretrained(job["model"])
    config = processor.data_config
    size, interpolation = tuple(config["input_size"][1:]), job["interpolation"]
    augment = [
        *to_torchvision(job["sentence"], image_size=size, interpolation=interpolation),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(config["mean"], config["std"]),
    ]
    transforms = {"train": v2.Compose(augment), "val": processor.val_transforms}
    images = {
        split: ImageFolder(Path(job["data"]) / split, transform, allow_empty=True)
        for split, transform in transforms.items()
    }
    trainer = Trainer(
        model=model,
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
    train(json.loads(Path(sys.argv[1]).read_text()))
