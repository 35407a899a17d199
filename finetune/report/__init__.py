"""Self-contained HTML pages: a report of one run, and a comparison of several runs."""
