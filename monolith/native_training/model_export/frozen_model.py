"""Writes a SavedModel whose variables are constants."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2


def save_frozen(
  sess: tf.compat.v1.Session,
  export_dir: str,
  signature_defs: dict[str, meta_graph_pb2.SignatureDef],
) -> None:
  """Writes what the signatures need, with variables turned into constants.

  Args:
    sess: holds the variables.
    export_dir: where to.
    signature_defs: signatures by name.
  """
  outputs = sorted(
    {
      info.name.split(":")[0]
      for signature in signature_defs.values()
      for info in signature.outputs.values()
    }
  )
  graph_def = tf.compat.v1.graph_util.convert_variables_to_constants(
    sess, sess.graph.as_graph_def(), outputs
  )
  with tf.Graph().as_default() as graph:
    # Inputs that no output needs are still part of the signature.
    known = {node.name for node in graph_def.node}
    for signature in signature_defs.values():
      for info in signature.inputs.values():
        name = info.name.split(":")[0]
        if name not in known:
          graph_def.node.add().CopyFrom(sess.graph.get_operation_by_name(name).node_def)
          known.add(name)
    tf.import_graph_def(graph_def, name="")
    config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    with tf.compat.v1.Session(graph=graph, config=config) as frozen_sess:
      builder = tf.compat.v1.saved_model.Builder(export_dir)
      builder.add_meta_graph_and_variables(
        frozen_sess,
        [tf.compat.v1.saved_model.tag_constants.SERVING],
        signature_def_map=signature_defs,
        strip_default_attrs=True,
      )
      builder.save()
