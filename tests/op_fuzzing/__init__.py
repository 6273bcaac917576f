"""Random calls of every op of the library, made in processes that may die.

  python -m tests.op_fuzzing.worker OP SEED      one call, printed before it is made

`cases` makes the calls, `worker` is the process that runs them, `driver` starts workers, watches
them and says which call ended or stopped one.
"""
