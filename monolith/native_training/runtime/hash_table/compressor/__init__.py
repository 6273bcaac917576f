"""Configuration of compressors, as messages. Layer: ops."""
