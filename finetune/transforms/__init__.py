"""Image transforms: spec parser, per-sample random numbers, geometry, color; no file access."""
