"""Keeps data that a program holds in arrays out of the files that describe its graph.

`tf.data.Dataset.from_tensor_slices(array)` makes a constant of the array. Every description of the
graph would have a copy of it: `graph.pbtxt`, the events, and the `.meta` of each checkpoint.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_MAX_CONSTANT_BYTES = 1 << 20


def leave_out_large_constants(graph: tf.Graph) -> None:
  """Lets descriptions of a graph have placeholders for its constants of 1 MiB and more.

  What sessions run does not change: they do not read descriptions.
  """
  describe = graph.as_graph_def

  def as_graph_def(*args: Any, **kwargs: Any) -> Any:
    graph_def = describe(*args, **kwargs)
    for node in graph_def.node:
      if node.op == "Const" and node.attr["value"].ByteSize() >= _MAX_CONSTANT_BYTES:
        shape = node.attr["value"].tensor.tensor_shape
        node.op = "Placeholder"
        node.attr["shape"].shape.CopyFrom(shape)
        del node.attr["value"]
    return graph_def

  graph.as_graph_def = as_graph_def
