"""Evaluation: exact metrics, calibration, frozen features and probes, and checks of claims."""
