"""One dictionary of Python objects per TensorFlow graph.

The dictionary is an attribute of the graph object and not a graph collection: exporting a meta
graph would warn about every collection it cannot serialise.
"""

from typing import Any, Callable

import tensorflow as tf

MetaFactory = Callable[[], Any]

_META_ATTRIBUTE = "_monolith_graph_meta"


def get_meta(key: str, factory: MetaFactory) -> Any:
  """Returns the object stored under `key` in the default graph, made by `factory()` on first use.

  Args:
    key: name of the object, unique in the program.
    factory: called without arguments when the default graph has no such object yet.
  """
  graph = tf.compat.v1.get_default_graph()
  meta = getattr(graph, _META_ATTRIBUTE, None)
  if meta is None:
    meta = {}
    setattr(graph, _META_ATTRIBUTE, meta)
  if key not in meta:
    meta[key] = factory()
  return meta[key]
