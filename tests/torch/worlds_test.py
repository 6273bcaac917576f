"""One model, three worlds: rows go from PyTorch to TensorFlow and NumPy and back, bit-equal."""

import os
import pathlib
import unittest

try:
  import torch
except ImportError:
  raise unittest.SkipTest("needs PyTorch") from None

import numpy as np
import tensorflow as tf

import monolith
import monolith.torch as mt
from monolith import table as tables


class WorldsTest(unittest.TestCase):
  def test_training_goes_on_where_another_framework_has_stopped(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    rng = np.random.default_rng(5)
    ids = rng.integers(-(2**63), 2**63 - 1, 3000)
    gradients = rng.normal(size=[4, 3000, 8]).astype(np.float32)
    in_torch = mt.Embedding(8, "adagrad", learning_rate=0.1)
    in_tensorflow = monolith.HashTable(8, "adagrad", learning_rate=0.1)
    in_numpy = tables.HashTable(8, "adagrad", learning_rate=0.1)

    def step_torch(batch):
      (in_torch(torch.from_numpy(ids)) * torch.from_numpy(batch)).sum().backward()

    def rows():
      with torch.no_grad():
        return in_torch(torch.from_numpy(ids)).numpy()

    step_torch(gradients[0])
    in_torch.save(folder / "a")
    in_tensorflow.load(folder / "a")
    np.testing.assert_array_equal(in_tensorflow.lookup(ids).numpy(), rows())

    # The same step in both: the state of the optimizer came along.
    in_tensorflow.update(ids, tf.constant(gradients[1]))
    step_torch(gradients[1])
    np.testing.assert_array_equal(in_tensorflow.lookup(ids).numpy(), rows())

    in_tensorflow.update(ids, tf.constant(gradients[2]))
    in_tensorflow.save(folder / "b")
    in_torch.load(folder / "b")
    in_numpy.load(folder / "b")
    np.testing.assert_array_equal(in_tensorflow.lookup(ids).numpy(), rows())
    step_torch(gradients[3])
    in_tensorflow.update(ids, tf.constant(gradients[3]))
    in_numpy.update(ids, gradients[3])
    np.testing.assert_array_equal(in_tensorflow.lookup(ids).numpy(), rows())
    np.testing.assert_array_equal(in_numpy.lookup(ids), rows())


if __name__ == "__main__":
  unittest.main()
