"""The hub: reading with retries and verification, and publishing in one commit."""
