"""Networks and their weights; importing this package registers finetune's networks with timm."""

from finetune.models.architectures import (
    google_hybrid,
    shiftvit,
    transformers_classifier,
    vit_representation,
    vit_scratch,
)

__all__ = [
    "google_hybrid",
    "shiftvit",
    "transformers_classifier",
    "vit_representation",
    "vit_scratch",
]
