"""Writes the graph of a SavedModel for TensorBoard.

  python -m monolith.native_training.model_export.saved_model_visulizer MODEL LOG_DIR
  tensorboard --logdir=LOG_DIR

The model is only read: its ops need not be known, and nothing of it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.core.util import event_pb2


def read_graph(model_dir: str, tag: str = "serve") -> graph_pb2.GraphDef:
  """Returns the graph of a SavedModel.

  Args:
    model_dir: its folder.
    tag: which of its graphs.

  Raises:
    ValueError: the file is no SavedModel, or has no such graph.
    tf.errors.OpError: it cannot be read.
  """
  path = os.path.join(model_dir, "saved_model.pb")
  with tf.io.gfile.GFile(path, "rb") as stream:
    data = stream.read()
  try:
    model = saved_model_pb2.SavedModel.FromString(data)
  except Exception as error:  # protobuf's error is of another class in every implementation
    raise ValueError(f"{path} is not a SavedModel: {error}") from error
  for meta_graph in model.meta_graphs:
    if tag in meta_graph.meta_info_def.tags:
      return meta_graph.graph_def
  tags = [list(meta_graph.meta_info_def.tags) for meta_graph in model.meta_graphs]
  raise ValueError(f"{path} has graphs tagged {tags}, none of them {tag!r}")


def write_graph(graph: graph_pb2.GraphDef, log_dir: str) -> None:
  """Writes a graph to a new file of events in `log_dir`, which is made if missing."""
  with tf.Graph().as_default():  # a FileWriter refuses to be made in eager mode
    writer = tf.compat.v1.summary.FileWriter(log_dir)
    writer.add_event(event_pb2.Event(graph_def=graph.SerializeToString()))
    writer.close()


def main(arguments: Sequence[str] | None = None) -> int:
  """Writes the graph that the arguments name; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("model_dir", help="folder of the SavedModel")
  parser.add_argument("log_dir", help="folder that TensorBoard will read")
  parser.add_argument("--tag", default="serve", help="which graph of the model")
  flags = parser.parse_args(arguments)
  try:
    write_graph(read_graph(flags.model_dir, flags.tag), flags.log_dir)
  except (ValueError, tf.errors.OpError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
