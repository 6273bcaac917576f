"""Parts of models: what authors derive from. Layer: models."""
