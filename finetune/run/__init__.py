"""What lies in a run directory: records, checkpoints; each proved when it is read."""
