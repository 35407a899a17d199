"""Stream shards: read them one row group at a time, without a local copy."""
