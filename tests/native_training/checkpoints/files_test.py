"""Tests of the second names of checkpoints."""

import os

import tensorflow as tf

from monolith.native_training.checkpoints import files as checkpoint_files


class SetAsideTest(tf.test.TestCase):
  def test_twin_outlives_an_overwriting_in_place(self):
    prefix = os.path.join(self.create_tempdir().full_path, "model.ckpt-7")
    for suffix in (".index", ".data-00000-of-00001"):
      with open(prefix + suffix, "w") as file:
        file.write("old")

    checkpoint_files.set_aside(prefix)
    with open(prefix + ".index", "w"):  # TensorFlow does so when it merges shards.
      pass

    twin = checkpoint_files.twin_of(prefix)
    with open(twin + ".index") as file:
      self.assertEqual(file.read(), "old")
    with open(twin + ".data-00000-of-00001") as file:
      self.assertEqual(file.read(), "old")


if __name__ == "__main__":
  tf.test.main()
