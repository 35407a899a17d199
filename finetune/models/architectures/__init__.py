"""Networks that finetune adds to timm's model registry."""
