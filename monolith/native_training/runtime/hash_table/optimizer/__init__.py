"""Configuration of optimizers of rows, as messages. Layer: ops."""
