"""The parts behind `gpu_table`: the library by ctypes, arrays, tables. Layer: ops."""
