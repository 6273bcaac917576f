"""One process of a small training run that tests kill, stop and restart.

Workers read forever and train slowly until `--max_steps`. The rows of id i end at the number of
updates they got, because every gradient is -1 and the optimizer is SGD with rate 1.
"""

from __future__ import annotations

import json
import pathlib
import time

import tensorflow as tf
from absl import app, flags

from monolith.native_training import (
  cluster_manager,
  cpu_training,
  entry,
  feature,
  graph_estimator,
  native_task,
  service_discovery,
)
from monolith.native_training.driver import run_record as training_run
from tests.wait_until import wait_until

FLAGS = flags.FLAGS

flags.DEFINE_string("discovery_dir", None, "folder of the discovery")
flags.DEFINE_string("tf_config", None, "a fixed cluster instead")
flags.DEFINE_string("model_dir", None, "folder of checkpoints")
flags.DEFINE_string("server_type", None, "ps or worker")
flags.DEFINE_integer("index", 0, "index inside the role")
flags.DEFINE_integer("num_ps", 2, "parameter servers")
flags.DEFINE_integer("num_workers", 1, "workers")
flags.DEFINE_integer("max_steps", 100, "when training is over")
flags.DEFINE_integer("save_steps", 20, "steps between checkpoints")
flags.DEFINE_bool("partial_recovery", True, "restore only lost servers")
# Longer than any of them takes to start on a busy machine.
flags.DEFINE_integer("timeout_secs", 600, "how long to wait for others")
flags.DEFINE_float("step_secs", 0.05, "how long a step takes")
flags.DEFINE_bool("prefetch", False, "look embeddings up and push gradients in the background")
flags.DEFINE_float("retry_wait_secs", 1, "how long to wait before trying again")
flags.DEFINE_float("lost_servers_secs", 90, "how long a new process waits for servers that ended")


class SlowHook(tf.compat.v1.train.SessionRunHook):
  """Lets every step take some time, and the first one of the chief wait for all workers.

  A worker that comes when training is over finds no one to train with.
  """

  def after_create_session(self, session, coord):
    pathlib.Path(FLAGS.model_dir, f"worker_{FLAGS.index}_has_started").touch()

  def before_run(self, run_context):
    workers = [
      pathlib.Path(FLAGS.model_dir, f"worker_{i}_has_started") for i in range(FLAGS.num_workers)
    ]
    if FLAGS.index == 0:
      wait_until(lambda: all(path.exists() for path in workers), FLAGS.timeout_secs)

  def after_run(self, run_context, run_values):
    time.sleep(FLAGS.step_secs)


class Task(native_task.NativeTask):
  def create_input_fn(self, mode):
    def input_fn():
      ids = tf.RaggedTensor.from_row_splits(
        tf.constant([0, 1, 2, 3], tf.int64), tf.constant([0, 4], tf.int64)
      )
      return tf.data.Dataset.from_tensors({"feature": ids}).repeat()

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      slot = self.ctx.create_feature_slot(
        feature.FeatureSlotConfig(
          name="slot",
          default_vec_initializer=entry.ZerosInitializer(),
          default_vec_optimizer=entry.SgdOptimizer(learning_rate=1.0),
          default_vec_compressor=entry.Fp32Compressor(),
        )
      )
      column = feature.FeatureColumn(slot, "feature")
      embedding = column.embedding_lookup(slot.add_feature_slice(1))
      embeddings = column.get_all_embeddings_concat()
      if mode == graph_estimator.ModeKeys.PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=tf.reshape(embeddings, [1, -1]))
      loss = -tf.reduce_sum(embedding)
      (gradient,) = tf.gradients(loss, [embeddings])
      apply_op = self.ctx.apply_embedding_gradients([(gradient, embeddings)])
      global_step = tf.compat.v1.train.get_or_create_global_step()
      with tf.control_dependencies([apply_op]):
        train_op = tf.compat.v1.assign_add(global_step, 1)
      return graph_estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=[SlowHook()]
      )

    return model_fn


def create_params():
  params = Task.params()
  params.name = "faults"
  params.metrics.enable_tf2_profiler_hook = False
  params.train.max_pending_seconds_for_barrier = 2
  return params


def main(unused_argv):
  cluster_manager._cluster_query_failure_handler = lambda: time.sleep(0.1)
  training_run._LOST_SERVERS_SECS = FLAGS.lost_servers_secs
  params = create_params()
  params.train.max_steps = FLAGS.max_steps
  config = cpu_training.DistributedCpuTrainingConfig(
    server_type=FLAGS.server_type,
    index=FLAGS.index,
    num_ps=FLAGS.num_ps,
    num_workers=FLAGS.num_workers,
    model_dir=FLAGS.model_dir,
    save_checkpoints_steps=FLAGS.save_steps,
    partial_recovery=FLAGS.partial_recovery,
    embedding_prefetch_capacity=int(FLAGS.prefetch),
    enable_embedding_postpush=FLAGS.prefetch,
    max_retry_times=6,
    retry_wait_in_secs=FLAGS.retry_wait_secs,
    # At the end the chief waits for a worker that was killed until it is back.
    chief_timeout_secs=120,
    session_creation_timeout_secs=FLAGS.timeout_secs,
  )
  if FLAGS.tf_config:
    discovery = service_discovery.TfConfigServiceDiscovery(json.loads(FLAGS.tf_config))
  else:
    discovery = service_discovery.HostServiceDiscovery(FLAGS.discovery_dir)
  cpu_training.distributed_train(config, discovery, params)


if __name__ == "__main__":
  app.run(main)
