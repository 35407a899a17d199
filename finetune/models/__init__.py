"""Networks and their weights; importing it registers our own networks with timm."""

from finetune.models import representation

__all__ = ["representation"]
