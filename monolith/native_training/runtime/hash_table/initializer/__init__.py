"""Configuration of initializers, as messages. Layer: ops."""
