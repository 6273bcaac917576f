"""Agreement of synchronous processes. Layer: ranks."""
