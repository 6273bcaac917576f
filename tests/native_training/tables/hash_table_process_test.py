"""Tests the cost of tables for their process: threads, address space; and a lack of memory."""

import os
import subprocess
import sys
import threading

import pytest
import tensorflow as tf

from monolith.native_training import entry, hash_table_ops, multi_hash_table_ops
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from tests.hash_table_testing import GraphTest, temp_dir

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

GIB = 2**30


def status_number(name: str) -> int:
  with open("/proc/self/status", encoding="utf-8") as lines:
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def config(**fields) -> entry.HashTableConfigInstance:
  result = embedding_hash_table_pb2.EmbeddingHashTableConfig(**fields)
  result.cuckoo.SetInParent()
  segment = result.entry_config.segments.add()
  segment.dim_size = 8
  segment.opt_config.adagrad.SetInParent()
  segment.init_config.zeros.SetInParent()
  segment.comp_config.fp32.SetInParent()
  return entry.HashTableConfigInstance(result, [1.0])


class ThreadsTest(GraphTest):
  def test_eviction_takes_one_thread_for_all_tables(self):
    evicting = config(enable_feature_eviction=True, feature_evict_every_n_hours=1)
    with self.session() as sess:
      sess.run(tf.constant(1))
      plain = multi_hash_table_ops.MultiHashTable.from_configs(
        {f"t{i}": config() for i in range(100)}, name_suffix="plain"
      )
      sess.run(plain.initializer)
      before = status_number("Threads")

      tables = multi_hash_table_ops.MultiHashTable.from_configs(
        {f"t{i}": evicting for i in range(100)}, name_suffix="evicting"
      )
      sess.run(tables.initializer)

      self.assertLessEqual(status_number("Threads"), before + 1)

  def test_absurd_eviction_period_is_a_long_one(self):
    tables = multi_hash_table_ops.MultiHashTable.from_configs(
      {"t": config(enable_feature_eviction=True, feature_evict_every_n_hours=2**31 - 1)},
      name_suffix="long",
    )
    with self.session() as sess:
      sess.run(tables.initializer)
      sess.run(tables.assign({"t": (tf.constant([1], tf.int64), tf.ones([1, 8]))}).as_op())
      self.assertEqual(sess.run(tables.sizes()), [1])

  def test_saves_at_the_same_time_share_a_few_threads(self):
    num_tables = 40
    folder = temp_dir()
    tables = [hash_table_ops.test_hash_table(4, name_suffix=str(i)) for i in range(num_tables)]
    filled = [table.assign([1, 2, 3], [[float(i)] * 4] * 3) for i, table in enumerate(tables)]
    for table in filled:
      table._saver_parallel = 4
    save = tf.group(
      *[table.save(f"{folder}/t{i}", random_sleep_ms=300).as_op() for i, table in enumerate(filled)]
    )
    restored = [
      hash_table_ops.test_hash_table(4, name_suffix=f"r{i}").restore(f"{folder}/t{i}")
      for i in range(num_tables)
    ]
    found = [table.lookup([1, 2, 3]) for table in restored]
    with self.session() as sess:
      sess.run([table.as_op() for table in filled])
      before = peak = status_number("Threads")
      done = threading.Event()

      def watch():
        nonlocal peak
        while not done.wait(0.002):
          peak = max(peak, status_number("Threads"))

      watcher = threading.Thread(target=watch)
      watcher.start()
      sess.run(save)
      values = sess.run(found)
      done.set()
      watcher.join()

    # The pool, the watcher, and threads that TensorFlow may start late.
    self.assertLess(peak - before, 8 + 1 + 4)
    for i, value in enumerate(values):
      self.assertAllEqual(value, [[float(i)] * 4] * 3)


def run_limited(program: str, room: int) -> subprocess.CompletedProcess:
  """Runs `program` with `limit()` at hand, which leaves it `room` more bytes."""
  prelude = f"""
import resource
import tensorflow as tf
from monolith.native_training import hash_table_ops
tf.compat.v1.disable_eager_execution()

def limit():
  with open("/proc/self/statm") as fields:
    used = int(fields.read().split()[0]) * resource.getpagesize()
  resource.setrlimit(resource.RLIMIT_AS, (used + {room}, resource.RLIM_INFINITY))
"""
  return subprocess.run(
    [sys.executable, "-c", prelude + program],
    capture_output=True,
    text=True,
    env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    timeout=300,
  )


class AddressSpaceTest(tf.test.TestCase):
  def test_hundreds_of_tables_under_a_limit(self):
    done = run_limited(
      """
with tf.compat.v1.Session() as sess:
  ones = tf.ones([100, 100])  # all sums are exact in floats
  product = tf.reduce_sum(tf.matmul(ones, ones))
  sess.run(product)
  limit()
  tables = [hash_table_ops.test_hash_table(4, name_suffix=str(i)) for i in range(200)]
  assign = tf.group(*[table.assign([1, 2, 3], [[1.0] * 4] * 3).as_op() for table in tables])
  sess.run(assign)
  print("product", int(sess.run(product)))
""",
      2 * GIB,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn("product 1000000", done.stdout)

  def test_table_without_memory_says_so_and_goes_on(self):
    done = run_limited(
      """
with tf.compat.v1.Session() as sess:
  table = hash_table_ops.test_hash_table(64)
  ids = tf.compat.v1.placeholder(tf.int64, [None])
  add = table.assign(ids, tf.ones([tf.size(ids), 64])).as_op()
  found = table.lookup([3])
  sess.run(add, {ids: range(10000)})
  limit()
  begin = 0
  try:
    while begin < 50_000_000:
      begin += 10000
      sess.run(add, {ids: range(begin, begin + 10000)})
    print("no error")
  except tf.errors.ResourceExhaustedError as error:
    print("exhausted:", "memory" in str(error))
  resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
  sess.run(add, {ids: range(begin, begin + 10000)})
  print("values", sess.run(found).sum())
""",
      GIB // 2,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn("exhausted: True", done.stdout)
    self.assertIn("values 64.0", done.stdout)


class CapacityTest(GraphTest):
  def test_capacity_that_cannot_be_is_refused(self):
    for rows in (2**32, 2**62):
      tables = multi_hash_table_ops.MultiHashTable.from_configs(
        {"t": config(initial_capacity=rows)}, name_suffix=str(rows)
      )
      with self.session() as sess:
        with self.assertRaisesRegex(
          tf.errors.InvalidArgumentError, f"table t: initial_capacity is {rows}"
        ):
          sess.run(tables.initializer)


if __name__ == "__main__":
  tf.test.main()
