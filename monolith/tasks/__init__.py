"""Registered tasks. `parity_example` is the template for one's own."""
