"""Shards that are read where they are, a row group at a time."""
