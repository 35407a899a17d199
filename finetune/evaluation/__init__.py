"""Exact metrics, calibration, features, and the answers to claims."""
