"""The model card, what goes with it, and the push."""
