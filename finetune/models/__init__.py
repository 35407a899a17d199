"""Networks and their weights; importing it registers our own networks with timm."""

from finetune.models.architectures import (
    google_hybrid,
    shiftvit,
    transformers_adapter,
    vit_representation,
    vit_scratch,
)

__all__ = ["google_hybrid", "shiftvit", "transformers_adapter", "vit_representation", "vit_scratch"]
