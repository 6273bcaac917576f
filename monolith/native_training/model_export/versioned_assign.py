"""A signature that assigns rows only if the call is newer than the last one.

A parameter server that was replaced may live on for a while and push old rows. Each process that
pushes has an epoch, and numbers its calls; the served model remembers the newest pair and refuses
the others with an error that names both, so the sender keeps its rows. What it remembers begins
anew with every load of the model.
"""

from __future__ import annotations

import tensorflow as tf

from monolith.native_training import multi_hash_table_ops
from monolith.native_training.graph import export_context
from monolith.native_training.serving import push_versions


def add_signature(
  export_ctx: export_context.ExportContext,
  graph: tf.Graph,
  group: multi_hash_table_ops.MultiHashTable,
) -> None:
  """Adds `<group>/versioned_assign` beside `<group>/raw_assign`.

  A signature of its own, since a server wants all inputs of a signature and older senders have no
  numbers.

  Args:
    export_ctx: collects signatures.
    graph: the default graph.
    group: the tables.
  """
  name = push_versions.versioned_name(f"{group.shared_name}/raw_assign")
  ids = tf.compat.v1.placeholder(tf.int64, [None])
  splits = tf.compat.v1.placeholder(tf.int64, [None])
  values = tf.compat.v1.placeholder(tf.float32, [None])
  epoch = tf.compat.v1.placeholder(tf.int64, [])
  seq = tf.compat.v1.placeholder(tf.int64, [])
  # A variable that no saver knows, as a checkpoint has none: it begins with the first call. The
  # lock keeps calls that come together from passing the check together.
  state = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[2], shared_name=f"{name}/newest")
  lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2(shared_name=f"{name}/lock"))
  with tf.control_dependencies([lock]):
    is_there = tf.raw_ops.VarIsInitializedOp(resource=state)
    newest = tf.cond(
      is_there,
      lambda: tf.raw_ops.ReadVariableOp(resource=state, dtype=tf.int64),
      lambda: tf.constant([-1, -1], tf.int64),
    )
    is_newer = (epoch > newest[0]) | (tf.equal(epoch, newest[0]) & (seq > newest[1]))
    check = tf.debugging.Assert(
      is_newer,
      ["epoch and seq of the rows are not newer than the newest here:", epoch, seq, newest],
    )
  with tf.control_dependencies([check]):
    ragged_ids = tf.RaggedTensor.from_row_splits(
      tf.identity(ids), tf.identity(splits), validate=False
    )
    written = group.raw_assign(ragged_ids, tf.identity(values)).as_op()
  with tf.control_dependencies([written]):
    noted = tf.raw_ops.AssignVariableOp(resource=state, value=tf.stack([epoch, seq]))
  with tf.control_dependencies([noted]):
    released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
  with tf.control_dependencies([released]):
    result = tf.constant(0)
  export_ctx.add_signature(
    graph,
    name,
    {
      "id": ids,
      "id_split": splits,
      "flat_value": values,
      push_versions.EPOCH: epoch,
      push_versions.SEQ: seq,
    },
    {"result": result},
  )
