"""Thin wrappers of ops. Layer: ops."""
