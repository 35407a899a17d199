"""The training loop and everything around it: the only package that uses Accelerate."""
