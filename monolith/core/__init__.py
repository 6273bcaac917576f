"""Params of tasks, and the tasks of TPUs and GPUs. Layer: base."""
