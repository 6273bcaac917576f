"""Runs a task: in this process, on parameter servers, on ranks. Layer: driver."""
