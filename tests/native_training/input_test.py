"""Generated examples of the FFM model."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import input as ffm_input


class InputTest(absltest.TestCase):
  def _parse(self, serialized):
    return tf.train.Example.FromString(serialized).features.feature

  def test_slot_to_key(self):
    self.assertEqual(ffm_input.slot_to_key(3), "feature_3")

  def test_example(self):
    np.random.seed(0)
    for _ in range(20):
      parsed = self._parse(ffm_input.generate_ffm_example([5, 3], length=4))
      self.assertEqual(list(parsed["label"].float_list.value), [0.0])
      for slot, vocab_size in enumerate((5, 3)):
        ids = list(parsed[f"feature_{slot}"].int64_list.value)
        self.assertBetween(len(ids), 1, 4)
        for i in ids:
          self.assertBetween(i, 5 * slot, 5 * slot + vocab_size - 1)

  def test_draw_order(self):
    np.random.seed(1)
    serialized = ffm_input.generate_ffm_example([4, 4], length=3)
    np.random.seed(1)
    np.random.randint(1)
    expected = []
    for slot in range(2):
      count = np.random.randint(3) + 1
      expected.append(np.random.randint(4 * slot, 4 * slot + 4, size=count).tolist())

    parsed = self._parse(serialized)

    for slot in range(2):
      self.assertEqual(list(parsed[f"feature_{slot}"].int64_list.value), expected[slot])

  def test_labels_worth_learning(self):
    np.random.seed(2)
    labels = {
      self._parse(ffm_input.generate_ffm_example([2], num_labels=2))["label"].float_list.value[0]
      for _ in range(30)
    }
    self.assertEqual(labels, {0.0, 1.0})


if __name__ == "__main__":
  absltest.main()
