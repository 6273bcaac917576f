"""Tests of `item_pools` and their files."""

import contextlib
import json
import os
import struct
from unittest import mock

import tensorflow as tf

from monolith.native_training.data import feature_utils
from tests.hash_table_testing import list_data

tf.compat.v1.disable_eager_execution()


class ItemPoolTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.path = os.path.join(os.environ["TEST_TMPDIR"], "model")

  def run_op(self, *fns):
    """Builds and runs the ops in one session, one after the other."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      pool = feature_utils.create_item_pool(10, 50)
      for fn in fns:
        sess.run(fn(pool).op)

  def save(self, step, nshards=1):
    return lambda pool: feature_utils.save_item_pool(pool, step, self.path, nshards)

  def restore(self, step):
    return lambda pool: feature_utils.restore_item_pool(pool, step, self.path)

  def check(self, step):
    return lambda pool: feature_utils.item_pool_check(pool, self.path, step)

  def test_save_and_restore(self):
    fill = feature_utils.item_pool_random_fill
    self.run_op(fill, self.save(100, nshards=3), self.check(100))
    self.assertEqual(list_data(self.path), [f"model.ckpt-100_item_pool_0_{i}_1" for i in range(3)])
    # Restores the newest step that is not later than the requested one.
    self.run_op(fill, self.save(50, nshards=3))
    self.run_op(self.restore(120), self.check(100))
    with self.assertRaisesRegex(tf.errors.DataLossError, "differs from the pool"):
      self.run_op(self.restore(120), self.check(99))

  def test_missing_files(self):
    self.run_op(self.restore(1))
    with self.assertRaises(tf.errors.NotFoundError):
      self.run_op(self.check(1))

  def test_corrupt_file(self):
    self.run_op(feature_utils.item_pool_random_fill, self.save(1))
    path = os.path.join(self.path, "model.ckpt-1_item_pool_0_0_1")
    with open(path, "rb") as stream:
      content = bytearray(stream.read())
    content[len(content) // 2] ^= 0xFF
    with open(path, "wb") as stream:
      stream.write(content)
    with self.assertRaises(tf.errors.DataLossError):
      self.run_op(self.restore(1))

  def test_workers_have_their_own_files(self):
    config = {
      "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]},
      "task": {"type": "worker", "index": 1},
    }
    os.environ["TF_CONFIG"] = json.dumps(config)
    try:
      self.run_op(feature_utils.item_pool_random_fill, self.save(7))
    finally:
      del os.environ["TF_CONFIG"]
    self.assertEqual(list_data(self.path), ["model.ckpt-7_item_pool_2_0_3"])

  @contextlib.contextmanager
  def as_worker(self, index, workers):
    task = {"type": "chief", "index": 0} if index == 0 else {"type": "worker", "index": index - 1}
    cluster = {"chief": ["a:1"], "worker": ["b:1"] * (workers - 1)}
    config = json.dumps({"cluster": cluster, "task": task})
    with mock.patch.dict(os.environ, {"TF_CONFIG": config}):
      yield

  def test_every_worker_restores_its_own_newest_files(self):
    fill = feature_utils.item_pool_random_fill
    for worker, step in ((0, 1001), (1, 1002), (0, 1003), (1, 1007), (1, 1020)):
      with self.as_worker(worker, 2):
        self.run_op(fill, self.save(step))
    for worker, step in ((0, 1003), (1, 1007)):
      with self.as_worker(worker, 2):
        self.run_op(self.restore(1010), self.check(step))
    # A third worker takes over the first one's pool as long as it has none itself.
    with self.as_worker(2, 3):
      self.run_op(self.restore(1010), self.check(1003))
      self.run_op(fill, self.save(1005))
      self.run_op(self.restore(1010), self.check(1005))

  def test_files_without_a_step_are_the_oldest(self):
    fill = feature_utils.item_pool_random_fill
    self.run_op(fill, self.save(5))
    for name in os.listdir(self.path):
      path = os.path.join(self.path, name)
      if name.endswith(".manifest"):
        os.remove(path)
      else:
        os.rename(path, os.path.join(self.path, "item_pool_0_0_1"))
    self.run_op(self.restore(1), self.check(1))
    self.run_op(fill, self.save(7))
    self.run_op(self.restore(8), self.check(8))

  def test_torn_files_are_refused(self):
    self.run_op(feature_utils.item_pool_random_fill, self.save(1))
    (manifest,) = (name for name in os.listdir(self.path) if name.endswith(".manifest"))
    path = os.path.join(self.path, "model.ckpt-1_item_pool_0_0_1")
    with open(path, "rb") as stream:
      content = stream.read()
    at = 0
    for _ in range(3):
      at += 16 + struct.unpack("<Q", content[at : at + 8])[0]
    for size in (at + 5, at, 0, len(content) - 1):
      with open(path, "wb") as stream:
        stream.write(content[:size])
      with self.assertRaisesRegex(
        tf.errors.DataLossError, f"{path} has {size} bytes, .*{manifest} says {len(content)}"
      ):
        self.run_op(self.restore(1))
    os.remove(path)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, f"{path} is missing"):
      self.run_op(self.restore(1))
    # Without a manifest, a file must not end inside a record or its header.
    os.remove(os.path.join(self.path, manifest))
    for size in (at + 5, len(content) - 1):
      with open(path, "wb") as stream:
        stream.write(content[:size])
      with self.assertRaisesRegex(tf.errors.DataLossError, "ends inside a record"):
        self.run_op(self.restore(1))

  def test_a_refused_file_leaves_the_pool_as_it_was(self):
    fill = feature_utils.item_pool_random_fill
    self.run_op(fill, self.save(1))
    path = os.path.join(self.path, "model.ckpt-1_item_pool_0_0_1")
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      pool = feature_utils.create_item_pool(10, 50)
      sess.run(self.restore(1)(pool).op)
      sess.run(self.save(2)(pool).op)
      os.truncate(path, os.path.getsize(path) // 2)
      with self.assertRaises(tf.errors.DataLossError):
        sess.run(self.restore(1)(pool).op)
      sess.run(self.check(2)(pool).op)

  def test_saving_again_at_one_step_leaves_nothing_of_the_old_files(self):
    fill = feature_utils.item_pool_random_fill
    self.run_op(fill, self.save(1, nshards=4))
    self.run_op(fill, self.save(1, nshards=2), self.check(1))
    self.assertEqual(list_data(self.path), [f"model.ckpt-1_item_pool_0_{i}_1" for i in range(2)])

  def test_bad_attributes(self):
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "nshards is 0"):
      self.run_op(self.save(1, nshards=0))
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      pool = feature_utils.create_item_pool(-1, 5)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "start_num is -1"):
        sess.run(pool.op)


if __name__ == "__main__":
  tf.test.main()
