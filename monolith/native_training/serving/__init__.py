"""Asks served models for embeddings and answers. Layer: cluster."""
