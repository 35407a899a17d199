"""Measure how fast a recipe trains here, compared with hardware limits and other libraries."""
