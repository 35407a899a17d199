"""Networks and their weights; importing it registers our own networks with timm."""

from finetune.models import (
    google_hybrid,
    representation,
    shiftvit,
    transformers_adapter,
    vit_scratch,
)

__all__ = ["google_hybrid", "representation", "shiftvit", "transformers_adapter", "vit_scratch"]
