"""One page of a run, and one that compares runs: self-contained HTML."""
