"""Pretrained weights: find, read, rename, resize and load them."""
