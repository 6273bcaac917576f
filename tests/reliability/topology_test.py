"""Promise: a checkpoint of some parameter servers can be restored on another number of them.

Every id has its row there, on the server where it belongs, with its optimizer state.
"""

import os
import shutil

import numpy as np
import tensorflow as tf

from monolith.native_training import (
  basic_restore_hook,
  hash_filter_ops,
  hash_table_ops,
  multi_hash_table_ops,
  save_utils,
)
from monolith.native_training.checkpoints import reshard as checkpoint_reshard
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from tests.reliability import trainer

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1

# Around zero and at both ends: negative ids have a home too.
_IDS = np.array([*range(-60, 60), 2**63 - 1, -(2**63), 2**48 + 5], np.int64)


class _Model:
  """A table and a group, spread over servers by id; all in this process, which is all the same.

  Args:
    model_dir: where the checkpoints are.
    num_ps: servers, 0 for none.
  """

  def __init__(self, model_dir: str, num_ps: int):
    self.graph = tf.Graph()
    self.num_servers = max(1, num_ps)
    basename = os.path.join(model_dir, "model.ckpt")
    suffixes = [f"_{i}" for i in range(num_ps)] or [""]
    self._updates, self._rows, self._entries, self.sizes = [], [], [], []
    with self.graph.as_default():
      self._step = v1.train.get_or_create_global_step()
      filters = [hash_filter_ops.create_hash_filter(1000, 7, name_suffix=s) for s in suffixes]
      for server, suffix in enumerate(suffixes):
        self._add_server(server, suffix)
      self.saver = save_utils.PartialRecoverySaver(sharded=True)
      self.saver_hook = save_utils.NoFirstSaveCheckpointSaverHook(
        model_dir,
        save_steps=1000000,
        saver=self.saver,
        listeners=[
          hash_table_ops.HashTableCheckpointSaverListener(basename),
          multi_hash_table_ops.MultiHashTableCheckpointSaverListener(basename, False),
          hash_filter_ops.HashFilterCheckpointSaverListener(basename, filters, True),
        ],
      )
      restore_hook = basic_restore_hook.CheckpointRestorerHook(
        [
          hash_table_ops.HashTableCheckpointRestorerListener(basename),
          multi_hash_table_ops.MultiHashTableCheckpointRestorerListener(basename),
          hash_filter_ops.HashFilterCheckpointRestorerListener(basename, filters, True),
        ]
      )
      self.train_op = tf.group(*self._updates, v1.assign_add(self._step, 1))
      self._session_args = {
        "hooks": [restore_hook, self.saver_hook],
        "scaffold": v1.train.Scaffold(saver=self.saver),
        "checkpoint_dir": model_dir,
      }

  def home(self, server: int) -> np.ndarray:
    return _IDS[_IDS % self.num_servers == server]

  def _add_server(self, server: int, suffix: str) -> None:
    ids = tf.constant(self.home(server), tf.int64)
    # The gradient depends on the id, so that rows differ.
    gradients = tf.tile(tf.cast(ids % 97, tf.float32)[:, None] + 1, [1, trainer.DIM])
    single = hash_table_ops.hash_table_from_config(
      trainer.table_config(trainer.DIM), name_suffix="embedding" + suffix
    )
    group = multi_hash_table_ops.MultiHashTable.from_configs(
      {name: trainer.table_config(trainer.DIM) for name in ("b", "a")}, name_suffix=suffix[1:]
    )
    both = {"a": ids, "b": ids}
    self._updates += [
      single.apply_gradients(ids, gradients, self._step).as_op(),
      group.apply_gradients({"a": (ids, gradients), "b": (ids, -gradients)}, self._step).as_op(),
    ]
    rows = group.lookup(both)
    self._rows.append([single.lookup(ids), rows["a"], rows["b"]])
    self._entries.append(single.lookup_entry(ids))
    self.sizes.append(single.size())

  def session(self) -> v1.train.SingularMonitoredSession:
    with self.graph.as_default():
      return v1.train.SingularMonitoredSession(**self._session_args)

  def state(self, sess: v1.train.SingularMonitoredSession) -> dict:
    """Returns what is known of each id, and how many rows there are."""
    rows, entries, sizes, step = sess.raw_session().run(
      [self._rows, self._entries, self.sizes, self._step]
    )
    state = {"rows": int(sum(sizes)), "step": int(step)}
    for server in range(self.num_servers):
      for i, row_id in enumerate(self.home(server)):
        dump = embedding_hash_table_pb2.EntryDump.FromString(entries[server][i])
        state[int(row_id)] = (
          [table[i].tolist() for table in rows[server]],
          list(dump.opt.dump[0].adagrad.norm),
        )
    return state


class TopologyTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = os.path.join(os.environ["TEST_TMPDIR"], "model")

  def _train(self, num_ps: int, steps: int = 2) -> dict:
    model = _Model(self.dir, num_ps)
    with model.session() as sess:
      for _ in range(steps):
        sess.run(model.train_op)
      return model.state(sess)

  def _check_restored_on(self, num_ps: int, saved: dict) -> None:
    model = _Model(self.dir, num_ps)
    with model.session() as sess:
      self.assertEqual(model.state(sess), saved)
      # Training goes on and saves with the new servers.
      sess.run(model.train_op)
      trained = model.state(sess)
    model = _Model(self.dir, num_ps)
    with model.session() as sess:
      self.assertEqual(model.state(sess), trained)

  def _check(self, old_num_ps: int, new_num_ps: int) -> None:
    with self.subTest(old=old_num_ps, new=new_num_ps):
      shutil.rmtree(self.dir, ignore_errors=True)
      saved = self._train(old_num_ps)
      self.assertEqual(saved["rows"], len(_IDS))
      newest = tf.train.latest_checkpoint(self.dir)

      target = checkpoint_reshard.reshard_checkpoint(newest, old_num_ps, new_num_ps)

      self.assertEqual(tf.train.latest_checkpoint(self.dir), target)
      self.assertEqual(save_utils.SaveHelper.get_global_step_value(target), 2)
      self._check_restored_on(new_num_ps, saved)

  def test_four_servers_become_1_2_and_7(self):
    for new_num_ps in (1, 2, 7):
      self._check(4, new_num_ps)

  def test_1_2_and_7_servers_become_four(self):
    for old_num_ps in (1, 2, 7):
      self._check(old_num_ps, 4)

  def test_from_and_to_training_without_servers(self):
    self._check(0, 3)
    self._check(3, 0)

  def test_wrong_number_of_servers(self):
    self._train(3)
    newest = tf.train.latest_checkpoint(self.dir)
    for wrong in (2, 4):
      with self.assertRaisesRegex(ValueError, f"does not look like a table on {wrong} servers"):
        checkpoint_reshard.reshard_checkpoint(newest, wrong, 5)
    with self.assertRaisesRegex(ValueError, "new_num_ps is -1"):
      checkpoint_reshard.reshard_checkpoint(newest, 3, -1)
    self.assertEqual(tf.train.latest_checkpoint(self.dir), newest)

  def test_damaged_checkpoint_is_not_resharded(self):
    self._train(2)
    newest = tf.train.latest_checkpoint(self.dir)
    path = f"{newest}.assets/MonolithHashTable_embedding_1-00000-of-00001"
    with open(path, "r+b") as f:
      f.seek(30)
      f.write(b"x")

    with self.assertRaisesRegex(tf.errors.DataLossError, path):
      checkpoint_reshard.reshard_checkpoint(newest, 2, 1)
    self.assertEqual(tf.train.latest_checkpoint(self.dir), newest)


if __name__ == "__main__":
  tf.test.main()
