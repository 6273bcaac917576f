"""Tests of the hook that saves item pools with checkpoints."""

import os

import tensorflow as tf

from monolith.native_training.data import datasets, feature_utils, item_pool_hook

tf.compat.v1.disable_eager_execution()


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
