"""Tests of the hook that dumps parsed features."""

import os
import struct

import numpy as np
import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.native_training.hooks import feature_engineering_hooks
from monolith.native_training.settings.training_config import DistributedCpuTrainingConfig

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1


def _read(path):
  """Returns the batches of a file, and checks its framing."""
  batches = []
  with open(path, "rb") as stream:
    content = stream.read()
  while content:
    zero, size = struct.unpack_from("<QQ", content)
    assert zero == 0 and len(content) >= 16 + size
    batches.append(example_pb2.ExampleBatch.FromString(content[16 : 16 + size]))
    content = content[16 + size :]
  return batches


class ToExampleBatchTest(tf.test.TestCase):
  def test_columns(self):
    ids = v1.ragged.constant_value([[1, -1], [], [7]], dtype=np.int64)

    batch = feature_engineering_hooks.to_example_batch(
      {"ids": ids, "dense": np.array([[0.5, 1.5], [2, 3], [4, 5]], np.float32)}
    )

    self.assertEqual(batch.batch_size, 3)
    columns = {column.name: column for column in batch.named_feature_list}
    self.assertEqual(columns["ids"].type, example_pb2.INDIVIDUAL)
    rows = [list(feature.fid_v2_list.value) for feature in columns["ids"].feature]
    # Ids are unsigned in the proto.
    self.assertEqual(rows, [[1, 2**64 - 1], [], [7]])
    rows = [list(feature.float_list.value) for feature in columns["dense"].feature]
    self.assertEqual(rows, [[0.5, 1.5], [2, 3], [4, 5]])


class FeatureEngineeringSaveHookTest(tf.test.TestCase):
  def _run(self, index, steps, cap, server_type="worker"):
    """Runs this number of steps and returns folder and names of the files."""
    model_dir = self.create_tempdir().full_path
    config = DistributedCpuTrainingConfig(model_dir=model_dir, index=index, server_type=server_type)
    with tf.Graph().as_default():
      step = v1.train.get_or_create_global_step()
      batch = {"ids": tf.ragged.stack([tf.reshape(step, [1])])}
      hook = feature_engineering_hooks.FeatureEngineeringSaveHook(config, batch, cap=cap)
      train_op = v1.assign_add(step, 1)
      with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
        for _ in range(steps):
          sess.run(train_op)
    folder = os.path.join(model_dir, "features")
    return folder, sorted(os.listdir(folder)) if os.path.exists(folder) else []

  def test_a_file_has_so_many_batches(self):
    folder, names = self._run(index=1, steps=6, cap=2)

    sizes = [len(_read(os.path.join(folder, name))) for name in names]
    # The first run, which initializes the iterator, fetches nothing.
    self.assertCountEqual(sizes, [2, 2, 1])
    self.assertTrue(all(name.startswith("worker1_") and name.endswith(".pb") for name in names))

  def test_the_chief_has_its_own_name(self):
    _, names = self._run(index=0, steps=2, cap=10)

    self.assertLen(names, 1)
    self.assertStartsWith(names[0], "chief_")

  def test_no_batch_no_file(self):
    self.assertEqual(self._run(index=1, steps=1, cap=10)[1], [])


if __name__ == "__main__":
  tf.test.main()
