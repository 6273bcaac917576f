"""Files that describe a graph: written fast, and without the data that a program holds in arrays.

`tf.data.Dataset.from_tensor_slices(array)` makes a constant of the array. Every description of the
graph would have a copy of it: `graph.pbtxt`, the events, and the `.meta` of each checkpoint.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf
from tensorflow.python.lib.io import file_io

_MAX_CONSTANT_BYTES = 1 << 20
_GRAPH_FILE_NAME = "graph.pbtxt"


def write_graph(graph: tf.Graph, folder: str) -> None:
  """Writes `graph.pbtxt`, as `tf.io.write_graph` does.

  That one prints messages in Python, which takes longer than to build a graph of some thousand ops;
  `str` does so in C.
  """
  tf.io.gfile.makedirs(folder)
  file_io.atomic_write_string_to_file(
    os.path.join(folder, _GRAPH_FILE_NAME), str(graph.as_graph_def(add_shapes=True))
  )


def leave_out_large_constants(graph: tf.Graph) -> None:
  """Lets descriptions of a graph have placeholders for its constants of 1 MiB and more.

  What sessions run does not change: they do not read descriptions. Half a dozen of the same graph
  are written when a run starts, so each is made from the last one while that is up to date.
  """
  describe = graph.as_graph_def
  last: list[Any] = []  # The description of the graph, of which version, in which way.

  def as_graph_def(*args: Any, **kwargs: Any) -> Any:
    key = (graph.version, args, kwargs)
    if not last or last[1] != key:
      last[:] = _replace_large_constants(describe(*args, **kwargs)), key
    graph_def = type(last[0])()
    graph_def.CopyFrom(last[0])  # Callers may change what they get.
    return graph_def

  graph.as_graph_def = as_graph_def


def _replace_large_constants(graph_def: Any) -> Any:
  for node in graph_def.node:
    if node.op == "Const" and node.attr["value"].ByteSize() >= _MAX_CONSTANT_BYTES:
      shape = node.attr["value"].tensor.tensor_shape
      node.op = "Placeholder"
      node.attr["shape"].shape.CopyFrom(shape)
      del node.attr["value"]
  return graph_def
