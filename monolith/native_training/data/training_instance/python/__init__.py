"""Datasets and parsers of `Instance` samples, as scripts import them. Layer: data."""
