"""Hugging Face Hub client: retries, downloads and checksum verification."""
