"""Configuration of tables, as messages. Layer: ops."""
