"""Embeddings: in this process, on parameter servers, over ranks. Layer: tables."""
