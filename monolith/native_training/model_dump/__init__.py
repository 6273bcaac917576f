"""Records how a model is built. Layer: models."""
