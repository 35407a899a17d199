"""Networks and their weights; importing it registers our own networks with timm."""

from finetune.models.architectures import google_hybrid, shiftvit, transformers_adapter, vit_scratch
from finetune.models.architectures import vit_representation as representation

__all__ = ["google_hybrid", "representation", "shiftvit", "transformers_adapter", "vit_scratch"]
