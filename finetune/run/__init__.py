"""The run directory: records and checkpoints, each verified when it is read."""
