"""A task with a fused layout, for tests in one process, on ranks and on a GPU."""

from __future__ import annotations

import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.native_training import entry, feature, graph_estimator, native_task
from monolith.native_training.data import parsers

_TRAIN = graph_estimator.ModeKeys.TRAIN
_PREDICT = graph_estimator.ModeKeys.PREDICT

# Ids of two examples.
_ROWS = {"user": [[1], [2]], "item": [[7, 8], [8]]}
DIMS = (1, 4)


def _serialized(feature_rows):
  examples = []
  for i in range(2):
    example = example_pb2.Example()
    for name, rows in feature_rows.items():
      example.named_feature.add(name=name).feature.fid_v2_list.value.extend(rows[i])
    label = example.named_feature.add(name="label").feature.float_list
    label.value.append(float(i))
    examples.append(example.SerializeToString())
  return examples


class LayoutTask(native_task.NativeTask):
  """A bias and a vector per feature; a row's columns fall by the learning rate times its uses."""

  weight = 2.0
  rows = _ROWS
  # The features of each slot.
  slots = {name: [name] for name in _ROWS}

  def __init__(self, params):
    super().__init__(params)
    self.layout_dict = {}
    for name in ("bias", "vec"):
      config = example_pb2.OutConfig(out_type=example_pb2.OutType.CONCAT)
      width = 0
      for slot, feature_names in self.slots.items():
        bias, vec = self.dims(slot)
        start, end = (0, bias) if name == "bias" else (bias, bias + vec)
        for feature_name in feature_names:
          config.slice_configs.add(feature_name=feature_name, start=start, end=end)
          width += end - start
      config.shape.add(dims=[-1, width])
      self.layout_dict[name] = config

  def dims(self, slot):
    return DIMS

  def create_input_fn(self, mode):
    def input_fn():
      def parse(examples):
        return parsers.parse_examples(
          examples,
          sparse_features=list(self.rows),
          dense_features=["label"],
          dense_feature_shapes=[1],
          dense_feature_types=[tf.float32],
        )

      dataset = tf.data.Dataset.from_tensors(_serialized(self.rows)).map(parse)
      return dataset.repeat() if mode == _TRAIN else dataset

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      parts = {"bias": [], "vec": []}
      for name, feature_names in self.slots.items():
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=name,
            default_vec_initializer=entry.ZerosInitializer(),
            default_vec_optimizer=entry.SgdOptimizer(learning_rate=0.5),
            default_vec_compressor=entry.Fp32Compressor(),
          )
        )
        slices = [slot.add_feature_slice(dim) for dim in self.dims(name)]
        for feature_name in feature_names:
          column = feature.FeatureColumn(slot, feature_name)
          for part, feature_slice in zip(parts.values(), slices):
            part.append(column.embedding_lookup(feature_slice))
      factory = self.ctx.layout_factory
      if factory is None:  # the dry run
        layouts = {name: tf.concat(part, axis=1) for name, part in parts.items()}
        variables = list(layouts.values())
      else:
        layouts = {name: factory.get_layout(name) for name in parts}
        variables = factory.flattened_layout()
      if mode == _PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=layouts)
      loss = tf.reduce_sum(layouts["bias"]) + self.weight * tf.reduce_sum(layouts["vec"])
      loss += 0 * tf.reduce_sum(features["label"])
      apply_op = self.ctx.apply_embedding_gradients(zip(tf.gradients(loss, variables), variables))
      with tf.control_dependencies([apply_op]):
        step_op = tf.compat.v1.assign_add(tf.compat.v1.train.get_or_create_global_step(), 1)
      # Not the loss itself, which would stop training when it is NaN.
      return graph_estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=step_op)

    return model_fn
