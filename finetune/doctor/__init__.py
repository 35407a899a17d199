"""Find wrong labels, near-duplicates, leaks and outliers in a dataset."""
