"""A model whose rows count how often each sample was trained, fed by a Kafka stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.native_training import entry, feature, graph_estimator, native_task
from monolith.native_training.data import parsers
from monolith.realtime import stream_model

_SLOT = 7


def fid(number: int) -> int:
  return (_SLOT << 48) | number


def make_sample(number: int, sample_id: str | None = None) -> bytes:
  """Returns a serialized Example; by default its id is its number."""
  example = example_pb2.Example(label=[1.0])
  example.line_id.req_id = f"0:{number}:p" if sample_id is None else sample_id
  example.line_id.req_time = 1700000000 + number
  example.named_feature.add(name="id").feature.fid_v2_list.value.append(fid(number))
  return example.SerializeToString()


class CountingTask(native_task.NativeTask):
  """Adds 1 to the row of a sample's id whenever it is trained."""

  @classmethod
  def params(cls) -> Any:
    p = super().params()
    stream_model.define_stream(p)
    p.define("ids", [], "What to predict.")
    p.metrics.enable_tf2_profiler_hook = False
    p.serving.export_when_saving = False
    return p

  def create_input_fn(self, mode: str) -> Any:
    p = self.p

    def input_fn() -> tf.data.Dataset:
      if mode == graph_estimator.ModeKeys.PREDICT:
        ids = tf.ragged.constant([[fid(i)] for i in p.ids], dtype=tf.int64)
        return tf.data.Dataset.from_tensors({"id": ids})
      return stream_model.read_stream(
        p.stream, lambda samples: parsers.parse_examples(samples, ["id"])
      )

    return input_fn

  def create_model_fn(self) -> Any:
    def model_fn(features: Any, mode: str, config: Any) -> graph_estimator.EstimatorSpec:
      slot = self.ctx.create_feature_slot(
        feature.FeatureSlotConfig(
          name="id",
          slot_id=_SLOT,
          default_vec_initializer=entry.ZerosInitializer(),
          default_vec_optimizer=entry.SgdOptimizer(learning_rate=1.0),
          default_vec_compressor=entry.Fp32Compressor(),
        )
      )
      column = feature.FeatureColumn(slot, "id")
      vectors = column.embedding_lookup(slot.add_feature_slice(1))
      if mode == graph_estimator.ModeKeys.PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions={"count": tf.reshape(vectors, [-1])})
      loss = -tf.reduce_sum(vectors)
      embeddings = column.get_all_embeddings_concat()
      push = self.ctx.apply_embedding_gradients([(tf.gradients(loss, embeddings)[0], embeddings)])
      step = tf.compat.v1.train.get_or_create_global_step()
      # As many as there are, or an empty batch was trained.
      checked = tf.debugging.assert_positive(tf.shape(vectors)[0])
      with tf.control_dependencies([checked]):
        train_op = tf.group(push, tf.compat.v1.assign_add(step, 1))
      return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def read_counts(params: Any, config: Any, model_dir: str, ids: list[int]) -> np.ndarray:
  """Returns how often each of the ids was trained, as the newest checkpoint knows."""
  from monolith.native_training.driver.graph import CpuTraining

  params = params.copy()
  params.ids = ids
  training = CpuTraining(config, params.instantiate())
  estimator = graph_estimator.Estimator(
    training.create_model_fn(), config=graph_estimator.RunConfig(model_dir=model_dir)
  )
  predictions = estimator.predict(training.create_input_fn(graph_estimator.ModeKeys.PREDICT))
  return np.array([prediction["count"] for prediction in predictions]).round().astype(int)
