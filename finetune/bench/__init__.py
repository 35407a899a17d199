"""Measure how fast a recipe trains on this machine, beside its limits and other libraries."""
