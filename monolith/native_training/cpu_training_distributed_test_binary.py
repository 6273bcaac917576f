"""One process of a small cluster, for tests of the driver: parameter server, chief or worker.

The launcher of the same name without extension, beside this file, runs it:

    cpu_training_distributed_test_binary --test_case=0 --test_dir=DIR --uuid=U \
      --server_type=worker --index=0 --num_ps=2 --num_workers=1

Processes find one another through files in the test's folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import app, flags

from monolith.core import hyperparams
from monolith.native_training import (
  cluster_manager,
  cpu_training,
  entry,
  feature,
  graph_estimator,
  native_task,
)
from monolith.native_training.service_discovery import HostServiceDiscovery

FLAGS = flags.FLAGS

flags.DEFINE_integer("test_case", 0, "which of the functions test0, test1 and test2 to run", 0, 2)
flags.DEFINE_string("test_dir", "", "folder of discovery and checkpoints")
flags.DEFINE_enum("server_type", "worker", ["ps", "worker"], "role of this process")
flags.DEFINE_integer("index", 0, "index inside the role")
flags.DEFINE_integer("num_ps", 1, "parameter servers to train on")
flags.DEFINE_integer("num_workers", 1, "workers, the chief included")
flags.DEFINE_integer("num_extra_ps", 0, "parameter servers that the benchmark removes")
flags.DEFINE_integer("num_redundant_ps", 0, "parameter servers that come too late")
flags.DEFINE_string("uuid", "test_uuid", "id of the job")
flags.DEFINE_bool("use_native_multi_hash_table", False, "whether tables are one resource")

_POLL_SECS = 0.1
_SYNC_POLL_SECS = 0.2


def _sleep_short() -> None:
  time.sleep(_POLL_SECS)


cluster_manager._cluster_query_failure_handler = _sleep_short
cpu_training._EXTRA_PS_BENCHMARK_SECS = 0.5


class SyncHook(tf.compat.v1.train.SessionRunHook):
  """Lets the chief wait until every worker has a session, so that none comes too late.

  Args:
    num_workers: workers, the chief included.
    index: this worker's index.
  """

  def __init__(self, num_workers: int, index: int):
    self._num_workers = num_workers
    self._index = index
    keys = tf.compat.v1.GraphKeys
    # Initialised by the chief: the others wait for it.
    collection = keys.LOCAL_VARIABLES if index == 0 else keys.GLOBAL_VARIABLES
    with tf.device("/job:chief/task:0"):
      # Not `get_variable`: the driver's partitioner applies inside a model function.
      created = tf.compat.v1.Variable(
        tf.zeros([num_workers], tf.bool),
        name="sync_hook_created",
        trainable=False,
        use_resource=True,
        collections=[collection],
      )
      self._created = created.read_value()
      self._set = tf.compat.v1.scatter_update(created, index, True).op

  def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
    session.run(self._set)
    while self._index == 0 and not all(session.run(self._created)):
      time.sleep(_SYNC_POLL_SECS)


class FeatureTask(native_task.NativeTask):
  """One feature with two ids, five columns."""

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("training_hooks", [], "Hooks of the model.")
    return p

  def create_input_fn(self, mode: str) -> Callable[[], tf.data.Dataset]:
    def input_fn() -> tf.data.Dataset:
      ids = tf.RaggedTensor.from_row_splits(
        tf.constant([0, 1], tf.int64), tf.constant([0, 2], tf.int64)
      )
      return tf.data.Dataset.from_tensors({"feature": ids})

    return input_fn

  def create_model_fn(self) -> Callable[..., graph_estimator.EstimatorSpec]:
    def model_fn(
      features: dict[str, tf.Tensor], mode: str, config: Any
    ) -> graph_estimator.EstimatorSpec:
      slot = self.ctx.create_feature_slot(
        feature.FeatureSlotConfig(
          name="slot",
          default_vec_initializer=entry.ZerosInitializer(),
          default_vec_optimizer=entry.AdagradOptimizer(
            learning_rate=0.1, initial_accumulator_value=1.0
          ),
        )
      )
      column = feature.FeatureColumn(slot, "feature")
      embedding = column.embedding_lookup(slot.add_feature_slice(5))
      loss = tf.reduce_sum(embedding)
      all_embeddings = column.get_all_embeddings_concat()
      gradients = tf.gradients(loss, all_embeddings)
      global_step = tf.compat.v1.train.get_or_create_global_step()
      # Only steps that had data count: the step that finds the end of the data may still run this.
      with tf.control_dependencies([loss]):
        step_op = tf.compat.v1.assign_add(global_step, 1)
      with tf.control_dependencies([step_op]):
        train_op = self.ctx.apply_embedding_gradients(zip(gradients, [all_embeddings]))
      hooks = []
      if not hasattr(tf.compat.v1.get_default_graph(), "dry_run"):
        hooks.append(SyncHook(FLAGS.num_workers, FLAGS.index))
      return graph_estimator.EstimatorSpec(
        mode,
        loss=loss,
        train_op=train_op,
        training_hooks=[*hooks, *self.p.training_hooks],
      )

    return model_fn


def test_run(params: hyperparams.InstantiableParams) -> None:
  """Plays the role that the flags say."""
  config = cpu_training.DistributedCpuTrainingConfig(
    server_type=FLAGS.server_type,
    index=FLAGS.index,
    num_ps=FLAGS.num_ps,
    num_workers=FLAGS.num_workers,
    num_extra_ps=FLAGS.num_extra_ps,
    num_redundant_ps=FLAGS.num_redundant_ps,
    uuid=FLAGS.uuid,
    model_dir=os.path.join(FLAGS.test_dir, FLAGS.uuid, "model"),
    enable_model_ckpt_info=True,
    use_native_multi_hash_table=FLAGS.use_native_multi_hash_table,
    retry_wait_in_secs=1,
  )
  params.name = "test_task"
  params.train.max_pending_seconds_for_barrier = 2
  discovery = HostServiceDiscovery(os.path.join(FLAGS.test_dir, FLAGS.uuid, "service_discovery"))
  cpu_training.distributed_train(config, discovery, params)


def test0() -> None:
  """Trains."""
  test_run(FeatureTask.params())


def test1() -> None:
  """Trains, and keeps servers and chief alive afterwards."""

  def never_return(*args: Any) -> None:
    while True:
      time.sleep(_POLL_SECS)

  cpu_training._shutdown_ps = never_return
  test_run(FeatureTask.params())


class RaiseErrorHook(tf.compat.v1.train.SessionRunHook):
  """Fails once, in the way of a server that does not answer in time."""

  def __init__(self):
    self._raised = False

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    if not self._raised:
      self._raised = True
      raise tf.errors.DeadlineExceededError(None, None, "Test error")


def test2() -> None:
  """Trains with a failure in the first attempt."""
  params = FeatureTask.params()
  params.training_hooks = [RaiseErrorHook()]
  test_run(params)


def main(unused_argv: list[str]) -> None:
  (test0, test1, test2)[FLAGS.test_case]()


if __name__ == "__main__":
  app.run(main)
