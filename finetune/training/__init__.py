"""Setup, state, loop, finalize: the only package that touches Accelerate."""
