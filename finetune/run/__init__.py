"""The run directory: its records and checkpoints, which are verified when read."""
