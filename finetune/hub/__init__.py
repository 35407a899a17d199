"""The client of the Hugging Face hub: retries, verification, download."""
