"""A model of clicks, from data to something that can be served.

    python examples/serving/clicks.py train /tmp/clicks
    python examples/serving/clicks.py export /tmp/clicks
    python -m monolith.serving.model_server --model_name=clicks \
        --model_base_path=/tmp/clicks/exported_models/entry --rest_api_port=8501
    curl -d '{"instances": [{"user": 3, "item": 1}]}' localhost:8501/v1/models/clicks:predict

A user clicks on every fourth item. `train DIR 2` and `export DIR 2` put the tables on two servers.
"""

import sys

from absl import flags
from monolith.base_model import (
  AdagradOptimizer,
  EstimatorSpec,
  MonolithModel,
  get_sigmoid_loss_and_pred,
)
from monolith.estimator import Estimator, RunConfig, ServingInputReceiver
import numpy as np
import tensorflow as tf

NUM_IDS = 1000  # users, and items


def draw(seed, size=200_000):
  """Returns users, items and whether they clicked; a tenth of it is noise."""
  rng = np.random.default_rng(seed)
  user, item = rng.integers(NUM_IDS, size=[2, size])
  return user, item, ((user + item) % 4 == 0) ^ (rng.random(size) < 0.1)


def to_ragged(ids):
  """Returns one id per example as a list of one id."""
  return tf.RaggedTensor.from_tensor(ids[:, None])


class ClickModel(MonolithModel):
  def input_fn(self, mode):
    def to_features(user, item, clicked):
      clicked = tf.cast(clicked, tf.float32)
      return {"user": to_ragged(user), "item": to_ragged(item), "clicked": clicked}

    data = tf.data.Dataset.from_tensor_slices(draw(1 if mode == "train" else 2))
    return data.batch(1000).map(to_features)

  def model_fn(self, features, mode):
    for name in ("user", "item"):
      self.create_embedding_feature_column(name)
    optimizer = AdagradOptimizer(0.3)
    user, item = self.lookup_embedding_slice(["user", "item"], "vec", 8, optimizer=optimizer)
    bias = tf.compat.v1.get_variable("bias", initializer=-2.0)
    logits = 10 * tf.reduce_sum(user * item, axis=1) + bias
    clicked = features.get("clicked")  # a model that is served is not told
    loss, pred = get_sigmoid_loss_and_pred("click", logits, clicked, None, mode=mode)
    dense_optimizer = tf.compat.v1.train.AdagradOptimizer(0.01)
    return EstimatorSpec(clicked, pred, "click", loss, dense_optimizer)

  def serving_input_receiver_fn(self):
    inputs = {
      name: tf.compat.v1.placeholder(tf.int64, [None], name=name) for name in ("user", "item")
    }
    features = {name: to_ragged(ids) for name, ids in inputs.items()}
    return ServingInputReceiver(features, inputs)


def make_estimator(model_dir, num_ps=0):
  """Returns what trains and exports the model in this process."""
  config = RunConfig(is_local=True, model_dir=model_dir, num_ps=num_ps).to_runner_config()
  config.model_name = "clicks"
  return Estimator(ClickModel(), config)


def main(command, model_dir, num_ps="0"):
  tf.compat.v1.disable_eager_execution()
  flags.FLAGS(sys.argv[:1])
  estimator = make_estimator(model_dir, int(num_ps))
  if command == "train":
    estimator.train(steps=200)
  elif command == "export":
    for name, folder in estimator.export_saved_model().items():
      print(name, tf.compat.as_str(folder))
  else:
    sys.exit(f"the command is {command!r}, want train or export")


if __name__ == "__main__":
  main(*sys.argv[1:])
