"""Threads that look up, write, save, restore and page at the same time, through one session.

Promises: a row is never seen torn, no update is lost, a save holds each row exactly once, and a
restore is all or nothing for every thread.
"""

import os
import threading
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from monolith.native_training import hash_filter_ops, hash_table_ops, multi_hash_table_ops
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb
from tests.hash_table_testing import config_of, make_table, read_entries, segment

tf.compat.v1.disable_eager_execution()

_DIM = 16


def _run_threads(*works: Callable[[], None]) -> None:
  """Runs all at once; raises the first error."""
  errors = []

  def guarded(work):
    try:
      work()
    except BaseException as e:
      errors.append(e)

  threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  if errors:
    raise errors[0]


class ConcurrencyTest(tf.test.TestCase):
  def run(self, result=None):
    with tf.Graph().as_default():
      return super().run(result)

  def setUp(self):
    super().setUp()
    self.base = os.path.join(os.environ["TEST_TMPDIR"], "table")
    self.ids = tf.compat.v1.placeholder(tf.int64, [None])
    self.values = tf.compat.v1.placeholder(tf.float32, [None, _DIM])

  def _session(self) -> tf.compat.v1.Session:
    config = tf.compat.v1.ConfigProto(
      intra_op_parallelism_threads=4, inter_op_parallelism_threads=8
    )
    return tf.compat.v1.Session(config=config)

  def test_no_update_is_lost_and_no_row_is_torn(self):
    table = make_table(segment(_DIM))
    add = table.assign_add(self.ids, self.values).as_op()
    optimize = table.apply_gradients(
      self.ids, self.values, tf.constant(0, tf.int64), use_multi_threads=True
    ).as_op()
    lookup = table.lookup(self.ids)
    threaded_lookup = table.lookup(self.ids, use_multi_threads=True)
    size = table.size()
    ids = np.arange(3000)
    ones = np.ones((3000, _DIM), np.float32)
    rounds = 15
    stop = threading.Event()
    with self._session() as sess:

      def write(fetch, rows):
        def work():
          rng = np.random.default_rng(threading.get_ident())
          for _ in range(rounds):
            sess.run(fetch, {self.ids: rng.permutation(ids), self.values: rows})

        return work

      def read(fetch):
        def work():
          while not stop.is_set():
            rows = sess.run(fetch, {self.ids: ids})
            np.testing.assert_array_equal(rows, rows[:, :1].repeat(_DIM, axis=1))
            self.assertLessEqual(sess.run(size), 3000)

        return work

      def save():
        save_op = table_save
        while not stop.is_set():
          sess.run(save_op)
          for dump in read_entries(self.base + "-00000-of-00001").values():
            self.assertLen(set(dump.num), 1)

      table_save = table.save(self.base).as_op()

      def writers():
        try:
          _run_threads(*[write(add, ones)] * 3, *[write(optimize, -ones)] * 3)
        finally:
          stop.set()

      _run_threads(writers, read(lookup), read(threaded_lookup), save)
      self.assertAllEqual(sess.run(lookup, {self.ids: ids}), ones * 6 * rounds)

  def test_saves_during_growth_hold_each_row_once(self):
    table = make_table(segment(_DIM), saver_parallel=3)
    assign = table.assign(self.ids, self.values).as_op()
    save = table.save(self.base).as_op()
    page = table.save_as_tensor(0, 1, 10**9, 0)[1]
    old = np.arange(20000)
    with self._session() as sess:
      sess.run(assign, {self.ids: old, self.values: np.ones((20000, _DIM))})
      stop = threading.Event()

      def grow():
        try:
          for i in range(20):
            new = np.arange(10000) + 10**6 + i * 10**5
            sess.run(assign, {self.ids: new, self.values: np.ones((10000, _DIM))})
        finally:
          stop.set()

      def keep_saving():
        while not stop.is_set():
          sess.run(save)
          # read_entries fails on an id that is there twice.
          entries = read_entries(*[f"{self.base}-{i:05d}-of-00003" for i in range(3)])
          self.assertContainsSubset(old.tolist(), entries)

      def keep_paging():
        while not stop.is_set():
          found = [pb.EntryDump.FromString(e).id for e in sess.run(page)]
          self.assertLen(set(found), len(found))
          self.assertContainsSubset(old.tolist(), found)

      _run_threads(grow, keep_saving, keep_paging)
      self.assertEqual(sess.run(table.size()), 220000)

  def test_restore_is_all_or_nothing(self):
    table = make_table(segment(_DIM), saver_parallel=2)
    assign = table.assign(self.ids, self.values).as_op()
    ids = np.arange(5000)
    names = [self.base + str(i) for i in range(2)]
    with self._session() as sess:
      for i, name in enumerate(names):
        values = np.full((5000, _DIM), i + 1.0, np.float32)
        sess.run(assign, {self.ids: ids, self.values: values})
        sess.run(table.save(name).as_op())
      restores = [table.restore(name).as_op() for name in names]
      lookup, size = table.lookup(self.ids, use_multi_threads=True), table.size()
      stop = threading.Event()

      def restore():
        try:
          for i in range(30):
            sess.run(restores[i % 2])
        finally:
          stop.set()

      def read():
        while not stop.is_set():
          rows = sess.run(lookup, {self.ids: ids})
          # A batch may straddle the swap, a row may not, and never is there an empty table.
          self.assertContainsSubset(np.unique(rows), [1, 2])
          np.testing.assert_array_equal(rows, rows[:, :1].repeat(_DIM, axis=1))
          self.assertEqual(sess.run(size), 5000)

      _run_threads(restore, read, read)
      self.assertAllEqual(np.unique(sess.run(lookup, {self.ids: ids})), [2])

  def test_everything_at_once(self):
    thresholds = pb.SlotOccurrenceThresholdConfig(default_occurrence_threshold=1)
    handle = hash_filter_ops.create_hash_filter(100000, 7, thresholds.SerializeToString())
    table = make_table(segment(_DIM), hash_filter=handle)
    step = tf.constant(0, tf.int64)
    filter_base = self.base + "_filter"
    updates = [
      table.assign(self.ids, self.values).as_op(),
      table.assign_add(self.ids, self.values).as_op(),
      table.apply_gradients(self.ids, self.values, step, True, True).as_op(),
      table.apply_gradients(self.ids, self.values, step).as_op(),
      hash_table_ops.fused_apply_gradient(
        [table],
        self.ids,
        self.ids,
        tf.reshape(tf.size(self.ids), [1]),
        tf.reshape(self.values, [-1]),
        tf.stack([0, tf.size(self.ids)]),
        tf.stack([0, tf.size(self.values)]),
        [1.0],
        None,
        step,
        1,
      ),
    ]
    reads = [
      table.lookup(self.ids),
      table.lookup(self.ids, use_multi_threads=True),
      table.lookup_entry(self.ids),
      hash_table_ops.fused_lookup([table], self.ids, tf.reshape(tf.size(self.ids), [1]), 1)[0],
    ]
    others = [
      table.save(self.base).as_op(),
      table.restore(self.base).as_op(),
      table.size(),
      table.save_as_tensor(0, 2, 100, 0),
      hash_filter_ops.save_hash_filter(handle, filter_base, True),
      hash_filter_ops.restore_hash_filter(handle, filter_base, True),
    ]
    with self._session() as sess:
      sess.run([others[0], others[4]])

      def repeat(fetches, n, seed):
        def work():
          rng = np.random.default_rng(seed)
          for _ in range(n):
            ids = rng.integers(0, 20000, 2000)
            feed = {self.ids: ids, self.values: np.ones((2000, _DIM), np.float32)}
            sess.run(fetches[rng.integers(len(fetches))], feed)

        return work

      _run_threads(
        *[repeat(updates, 40, i) for i in range(4)],
        *[repeat(reads, 40, 10 + i) for i in range(4)],
        *[repeat(others, 15, 20 + i) for i in range(2)],
      )
      # Still consistent with itself.
      sess.run(others[0])
      size = sess.run(table.size())
      self.assertLen(read_entries(self.base + "-00000-of-00001"), size)
      sess.run(others[1])
      self.assertEqual(sess.run(table.size()), size)

  def test_two_saves_of_one_name(self):
    table = make_table(segment(_DIM), saver_parallel=2)
    assign = table.assign(self.ids, self.values).as_op()
    save = table.save(self.base).as_op()
    with self._session() as sess:
      sess.run(assign, {self.ids: np.arange(5000), self.values: np.ones((5000, _DIM))})

      def work():
        for _ in range(10):
          sess.run(save)

      _run_threads(*[work] * 4)
      self.assertLen(read_entries(*[f"{self.base}-0000{i}-of-00002" for i in range(2)]), 5000)
      self.assertCountEqual(
        [name for name in os.listdir(os.path.dirname(self.base)) if "-tmp-" in name], []
      )

  def test_creating_one_table_from_many_threads(self):
    # Kernels of one node, and of several sessions on one server, find the same table.
    server = tf.distribute.Server.create_local_server()
    table = hash_table_ops.test_hash_table(1, name_suffix="x")
    add = table.assign_add([7], [[1.0]]).as_op()
    sessions = [tf.compat.v1.Session(server.target) for _ in range(8)]
    _run_threads(*[lambda sess=sess: sess.run(add) for sess in sessions])
    self.assertAllEqual(sessions[0].run(table.lookup([7])), [[8]])
    for sess in sessions:
      sess.close()

  def test_groups(self):
    configs = {name: config_of(segment(_DIM)) for name in "abc"}
    group = multi_hash_table_ops.MultiHashTable.from_configs(configs)
    update = group.apply_gradients(
      {name: (self.ids, self.values) for name in "abc"}, tf.constant(0, tf.int64)
    ).as_op()
    lookup = group.lookup({name: self.ids for name in "abc"})
    save, restore = group.save(self.base).as_op(), group.restore(self.base).as_op()
    ids = np.arange(2000)
    with self._session() as sess:
      sess.run(group.initializer)
      stop = threading.Event()

      def write():
        for _ in range(15):
          sess.run(update, {self.ids: ids, self.values: -np.ones((2000, _DIM))})

      def read():
        while not stop.is_set():
          for rows in sess.run(lookup, {self.ids: ids}).values():
            np.testing.assert_array_equal(rows, rows[:, :1].repeat(_DIM, axis=1))

      def keep_saving():
        while not stop.is_set():
          sess.run(save)

      def writers():
        try:
          _run_threads(write, write, write)
        finally:
          stop.set()

      _run_threads(writers, read, keep_saving)
      for rows in sess.run(lookup, {self.ids: ids}).values():
        self.assertAllEqual(np.unique(rows), [45])
      sess.run(save)
      sess.run(restore)
      for rows in sess.run(lookup, {self.ids: ids}).values():
        self.assertAllEqual(np.unique(rows), [45])


if __name__ == "__main__":
  tf.test.main()
