"""Self-contained HTML pages: one for a run, and one that compares runs."""
