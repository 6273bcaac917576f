"""A training program for a cluster: every process runs it, and TF_CONFIG says which one it is.

The data is planted, so that there is something to see without a file: a user clicks on every fourth
item, and a tenth of the clicks is noise. Put your own model in the place of this one.
"""

import json
import os

import numpy as np
import tensorflow as tf
from absl import app, flags

from monolith.base_model import (
  AdagradOptimizer,
  EstimatorSpec,
  MonolithModel,
  get_sigmoid_loss_and_pred,
)
from monolith.estimator import Estimator, RunnerConfig, ServingInputReceiver
from monolith.native_training import native_task_context
from monolith.native_training.service_discovery import ServiceDiscoveryType

_BATCH_SIZE = 1000

flags.DEFINE_integer("steps", 2000, "the global step to stop at")


class ClickModel(MonolithModel):
  def input_fn(self, mode):
    # Every worker has examples of its own.
    rng = np.random.default_rng(native_task_context.get().worker_index)

    def draw():
      while True:
        user, item = rng.integers(1000, size=[2, _BATCH_SIZE])
        clicked = ((user + item) % 4 == 0) ^ (rng.random(_BATCH_SIZE) < 0.1)
        yield user[:, None], item[:, None], clicked.astype(np.float32)

    def to_features(user, item, clicked):
      user, item = (tf.RaggedTensor.from_tensor(ids) for ids in (user, item))
      return {"user": user, "item": item, "clicked": clicked}

    ids = tf.TensorSpec([None, 1], tf.int64)
    signature = (ids, ids, tf.TensorSpec([None], tf.float32))
    return tf.data.Dataset.from_generator(draw, output_signature=signature).map(to_features)

  def model_fn(self, features, mode):
    for name in ("user", "item"):
      self.create_embedding_feature_column(name)
    user, item = self.lookup_embedding_slice(
      ["user", "item"], "vec", 8, optimizer=AdagradOptimizer(0.3)
    )
    bias = tf.compat.v1.get_variable("bias", [], initializer=tf.constant_initializer(-2.0))
    logits = 10 * tf.reduce_sum(user * item, axis=1) + bias
    label = features.get("clicked")
    loss, pred = get_sigmoid_loss_and_pred("click", logits, label, None, mode=mode)
    return EstimatorSpec(label, pred, "click", loss, tf.compat.v1.train.AdagradOptimizer(0.01))

  def serving_input_receiver_fn(self):
    fed = {name: tf.compat.v1.placeholder(tf.int64, [None], name) for name in ("user", "item")}
    ids = {name: tf.RaggedTensor.from_tensor(values[:, None]) for name, values in fed.items()}
    return ServingInputReceiver(ids, fed)


def main(_):
  tf.compat.v1.disable_eager_execution()
  text = os.environ["TF_CONFIG"]
  cluster = json.loads(text)["cluster"]
  config = RunnerConfig(
    tf_config=text,
    discovery_type=ServiceDiscoveryType.PRIMUS,
    num_ps=len(cluster.get("ps", [])),
    num_workers=len(cluster.get("chief", [])) + len(cluster.get("worker", [])),
    model_dir=os.environ.get("MODEL_DIR", "model"),
    save_checkpoints_steps=500,
  )
  Estimator(ClickModel(), config).train(max_steps=flags.FLAGS.steps)


if __name__ == "__main__":
  app.run(main)
