"""The engine in C++, its ops and its messages. Layer: ops."""
