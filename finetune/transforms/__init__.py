"""The image pipeline: grammar, keyed draws, geometry, colour; it knows nothing of files."""
