"""A folder with a model in it is trained further: on other data, with other features."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf

from monolith.native_training import entry, estimator, native_model

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_BATCH = 4


class _Model(native_model.MonolithModel):
  """Reads numbers from a text file; `features` and the tower are what a run may change."""

  def __init__(self, path, features=("user",), units=0):
    super().__init__()
    self._path = path
    self._features = features
    self._units = units

  def input_fn(self, mode):
    def parse(lines):
      numbers = tf.strings.to_number(lines, tf.int64)
      ids = tf.RaggedTensor.from_tensor(numbers[:, None])
      label = tf.cast(numbers % 2, tf.float32)
      return {"label": label, **{name: ids for name in ("user", "item")}}

    return tf.data.TextLineDataset(self._path).batch(_BATCH).map(parse)

  def model_fn(self, features, mode):
    vectors = self.lookup_embedding_slice(
      list(self._features), "vec", 4, out_type="concat",
      optimizer=entry.AdagradOptimizer(learning_rate=0.5, initial_accumulator_value=1.0),
    )  # fmt: skip
    if self._units:
      shape = [vectors.shape[1], self._units]
      vectors = tf.matmul(vectors, tf.compat.v1.get_variable("tower", shape))
    for name in self._features:
      bias = tf.compat.v1.get_variable(f"bias_{name}", [], initializer=tf.ones_initializer())
      vectors += bias
    logits = tf.reduce_sum(vectors, axis=1)
    loss, pred = native_model.get_sigmoid_loss_and_pred(
      "ctr", logits, features.get("label"), None, mode=mode
    )
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.01)
    return native_model.EstimatorSpec(features.get("label"), pred, "ctr", loss, optimizer)


class ResumeTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self._folder = self.create_tempdir().full_path
    self._dir = os.path.join(self._folder, "model")

  def _write(self, name, numbers):
    path = os.path.join(self._folder, name)
    np.savetxt(path, numbers, "%d")
    return path

  def _train(self, model, steps=None, conf=None, **kwargs):
    """Returns the step after a training run."""
    conf = estimator.RunConfig(is_local=True, model_dir=self._dir, **(conf or {}))
    est = estimator.Estimator(model, conf)
    est.train(steps=steps, **kwargs)
    return int(est.get_variable_value("global_step"))

  def test_new_data_is_trained_and_the_rest_of_old_data(self):
    old = self._write("old", range(8 * _BATCH))
    self.assertEqual(self._train(_Model(old), steps=2), 2)
    # The rest, but for what had been looked up ahead; then from the start again.
    step = self._train(_Model(old))
    self.assertBetween(step, 6, 8)
    self.assertEqual(self._train(_Model(old)), step + 8)
    # As much as there is, whatever its name; and a file that has got other content.
    new = self._write("new", range(3 * _BATCH))
    self.assertEqual(self._train(_Model(new)), step + 11)
    self.assertEqual(self._train(_Model(new), steps=1), step + 12)
    self._write("new", range(100, 100 + 4 * _BATCH))
    self.assertEqual(self._train(_Model(new)), step + 16)
    self.assertEqual(self._train(_Model(new), steps=1), step + 17)
    self.assertEqual(self._train(_Model(new), resume_data=False), step + 21)

  def test_a_run_without_steps_says_why(self):
    path = self._write("data", range(2 * _BATCH))
    self.assertEqual(self._train(_Model(path)), 2)

    with self.assertLogs("absl", "WARNING") as logs:
      self.assertEqual(self._train(_Model(path), resume_data=True), 2)
    self.assertIn("No step was trained: its position in the data was restored", str(logs.output))
    with self.assertLogs("absl", "WARNING") as logs:
      self.assertEqual(self._train(_Model(self._write("empty", []))), 2)
    self.assertIn("No step was trained: the input function gave no batch", str(logs.output))
    with self.assertLogs("absl", "WARNING") as logs:
      self.assertEqual(self._train(_Model(path), max_steps=1), 2)
    self.assertIn("is at step 2 and max_steps is 1", str(logs.output))

  def test_features_come_and_go(self):
    path = self._write("data", range(8 * _BATCH))
    self._train(_Model(path))
    before = tf.train.load_variable(self._dir, "bias_user")
    both = _Model(path, ("user", "item"))
    with self.assertLogs("absl", "WARNING") as logs:
      self.assertEqual(self._train(both, steps=1), 9)
    self.assertIn("bias_item", str(logs.output))
    after = tf.train.load_variable(self._dir, "bias_user")
    self.assertNotEqual(before, 1.0)
    self.assertAllClose(before, after, atol=0.02)
    self.assertEqual(self._train(_Model(path), steps=1), 10)

  def test_a_variable_of_another_shape_is_named_with_the_remedy(self):
    path = self._write("data", range(2 * _BATCH))
    self._train(_Model(path, units=3))
    wider = _Model(path, ("user", "item"), units=3)
    with self.assertRaisesRegex(ValueError, r"tower.*\(4, 3\).*\(8, 3\).*clear_nn=True"):
      self._train(wider)
    conf = {"clear_nn": True, "continue_training": True}
    self.assertEqual(self._train(wider, conf=conf), 4)


if __name__ == "__main__":
  tf.test.main()
