"""Promise: saving while lookups and updates run neither blocks lookups nor saves torn rows."""

import glob
import os
import threading

import numpy as np
import pytest
import tensorflow as tf

from monolith.native_training import hash_table_ops
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_IDS = 20000
_BATCH = 500
_DIM = 32
_SAVES = 3
# A busy machine may give the thread that looks up no turn during a few saves.
_MAX_SAVES = 100


class ConcurrentTrainingTest(tf.test.TestCase):
  def test_saves_are_not_torn_and_do_not_block_lookups(self):
    folder = os.environ["TEST_TMPDIR"]
    table = hash_table_ops.test_hash_table(_DIM, use_adagrad=True)
    all_ids = np.arange(_IDS)
    ids = tf.compat.v1.placeholder(tf.int64, [None])
    path = tf.compat.v1.placeholder(tf.string, [])
    # Every update adds one number to a whole row, so that the numbers of a row always agree.
    add = table.assign_add(ids, tf.ones([tf.size(ids), _DIM])).as_op()
    step = tf.constant(0, tf.int64)
    optimize = table.apply_gradients(ids, -tf.ones([tf.size(ids), _DIM]), step).as_op()
    lookup = table.lookup(ids)
    save = table.save(path).as_op()
    stopped, saving = threading.Event(), threading.Event()
    lookups_during_saves, torn, errors = [0], [0], []

    with self.session() as sess:
      sess.run(add, {ids: all_ids})

      def loop(function):
        rng = np.random.default_rng(threading.get_ident())
        try:
          while not stopped.is_set():
            function(rng.choice(_IDS, _BATCH))
        except Exception as e:
          errors.append(e)

      def look_up(batch):
        was_saving = saving.is_set()
        rows = sess.run(lookup, {ids: batch})
        torn[0] += int(np.any(rows != rows[:, :1]))
        lookups_during_saves[0] += was_saving and saving.is_set()

      threads = [
        threading.Thread(target=loop, args=(function,))
        for function in (
          look_up,
          lambda batch: sess.run(add, {ids: batch}),
          lambda batch: sess.run(optimize, {ids: batch}),
        )
      ]
      for thread in threads:
        thread.start()
      num_saves = 0
      while num_saves < _SAVES or (not lookups_during_saves[0] and num_saves < _MAX_SAVES):
        saving.set()
        sess.run(save, {path: os.path.join(folder, f"table{num_saves % _SAVES}")})
        saving.clear()
        num_saves += 1
      stopped.set()
      for thread in threads:
        thread.join()

    self.assertEqual(errors, [])
    self.assertEqual(torn[0], 0)
    self.assertGreater(lookups_during_saves[0], 0)
    for i in range(_SAVES):
      self._check_file(glob.glob(os.path.join(folder, f"table{i}-*")))

  def _check_file(self, paths):
    ids = []
    for path in paths:
      for record in tf.compat.v1.io.tf_record_iterator(path):
        dump = embedding_hash_table_pb2.EntryDump.FromString(record)
        ids.append(dump.id)
        self.assertLen(set(dump.num), 1)
        self.assertLen(set(dump.opt.dump[0].adagrad.norm), 1)
    self.assertCountEqual(ids, range(_IDS))


if __name__ == "__main__":
  tf.test.main()
