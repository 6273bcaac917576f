"""Transforms of samples before they are parsed. Layer: data."""
