"""Pretrained weights: found, read, renamed, resized."""
