"""Servers on this machine: which requests they accept."""
