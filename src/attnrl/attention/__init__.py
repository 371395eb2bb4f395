"""Attention over pages of keys and values: where they lie, and the kernels that read them."""
