"""Datasets and parsers of `Instance` samples. Layer: data."""
