"""Losses of models. Layer: models."""
