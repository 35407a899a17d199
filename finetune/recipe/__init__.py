"""Recipes: schema, YAML loading, validation and help. Does not import torch."""
