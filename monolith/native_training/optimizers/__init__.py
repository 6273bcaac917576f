"""Optimizers of dense variables. Layer: models."""
