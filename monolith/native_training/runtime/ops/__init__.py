"""The op library, and messages of its ops. Layer: ops."""
