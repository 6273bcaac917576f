"""Item pools, their files and the hook that saves them."""

import json
import os

import tensorflow as tf

from monolith.native_training.data import datasets, feature_utils, item_pool_hook

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
    self.assertEqual(
      sorted(os.listdir(self.path)), [f"model.ckpt-100_item_pool_0_{i}_1" for i in range(3)]
    )
    # The newest step that is not later than the one asked for.
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
    self.assertEqual(os.listdir(self.path), ["model.ckpt-7_item_pool_2_0_3"])

  def test_bad_attributes(self):
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "nshards is 0"):
      self.run_op(self.save(1, nshards=0))
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      pool = feature_utils.create_item_pool(-1, 5)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "start_num is -1"):
        sess.run(pool.op)


class ItemPoolHookTest(tf.test.TestCase):
  def train(self, model_dir, steps, mode="train", fill=False):
    with tf.Graph().as_default():
      step = tf.compat.v1.train.get_or_create_global_step()
      pool = feature_utils.create_item_pool(10, 50)
      tf.compat.v1.add_to_collection(datasets.POOL_KEY, pool)
      train_op = tf.compat.v1.assign_add(step, 1)
      fill_op = feature_utils.item_pool_random_fill(pool).op
      check_op = feature_utils.item_pool_check(pool, model_dir, step).op
      hook = item_pool_hook.ItemPoolSaveRestoreHook(model_dir, save_steps=2, mode=mode)
      with tf.compat.v1.train.MonitoredTrainingSession(
        checkpoint_dir=model_dir, hooks=[hook], save_checkpoint_steps=100
      ) as sess:
        if fill:
          sess.run_step_fn(lambda step_context: step_context.session.run(fill_op))
        else:
          # Fails unless the pool is the saved one.
          sess.run_step_fn(lambda step_context: step_context.session.run(check_op))
        for _ in range(steps):
          sess.run(train_op)

  def test_saves_and_restores(self):
    model_dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    self.train(model_dir, 4, fill=True)
    pools = [name for name in os.listdir(model_dir) if "item_pool" in name]
    # Step 3 is more than 2 steps after 0, step 4 is the end.
    self.assertEqual(
      sorted(pools), ["model.ckpt-3_item_pool_0_0_1", "model.ckpt-4_item_pool_0_0_1"]
    )
    self.train(model_dir, 1)

  def test_evaluation_saves_nothing(self):
    model_dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    self.train(model_dir, 4, mode="eval", fill=True)
    self.assertEqual([name for name in os.listdir(model_dir) if "item_pool" in name], [])


if __name__ == "__main__":
  tf.test.main()
