"""Measure how fast a recipe trains here, compared with what the hardware can reach."""
