"""Test-time augmentation: average the logits of an image and its mirror image."""

# B batch, C channels, H W pixels, K classes

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["FlipTTA"]


class FlipTTA(nn.Module):
    """A network whose logits are averaged over each image and its horizontal flip.

    Args:
        network: network from images (B, C, H, W) to logits (B, K).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Compute averaged logits (B, K), float32."""
        logits_BK: Tensor = self.network(images_BCHW).float()
        flipped_BK: Tensor = self.network(images_BCHW.flip(3)).float()
        return (logits_BK + flipped_BK) / 2
