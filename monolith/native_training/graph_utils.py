"""Helpers that inspect or amend the default graph."""

import tensorflow as tf


def add_batch_norm_into_update_ops() -> None:
  """Adds the moving-average updates of batch normalisation to `GraphKeys.UPDATE_OPS`.

  Keras layers do not register them in a v1 graph, so a train op that depends on the collection
  would leave the averages untouched. Ops that are already in the collection are not added again.
  """
  graph = tf.compat.v1.get_default_graph()
  known = set(graph.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS))
  for op in graph.get_operations():
    if "AssignMovingAvg" in op.name and op.type == "AssignSubVariableOp" and op not in known:
      graph.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, op)
