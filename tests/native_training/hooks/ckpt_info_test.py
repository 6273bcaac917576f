"""Tests the counts of ids per slot."""

import os

import tensorflow as tf
from google.protobuf import text_format

from monolith.native_training import hash_table_ops
from monolith.native_training.hooks import ckpt_info
from monolith.native_training.proto import ckpt_info_pb2

tf.compat.v1.disable_eager_execution()


class FidCountListenerTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    tf.compat.v1.reset_default_graph()
    self.dir = os.path.join(os.environ["TEST_TMPDIR"], "model")

  def _count(self, *ids_of_tables):
    adds = []
    for ids in ids_of_tables:
      table = hash_table_ops.test_hash_table(1)
      adds.append(table.assign_add(tf.constant(ids, tf.int64), tf.ones([len(ids), 1])).as_op())
    listener = ckpt_info.FidSlotCountSaverListener(self.dir)
    with self.session() as sess:
      tf.compat.v1.get_default_graph().finalize()
      sess.run(adds)
      for step in (1, 2):
        listener.before_save(sess, step)
    with open(os.path.join(self.dir, "ckpt.info-2")) as f:
      return dict(text_format.Parse(f.read(), ckpt_info_pb2.CkptInfo()).slot_counts)

  def test_basic(self):
    self.assertEqual(self._count([1]), {0: 1})

  def test_several_tables_and_pages(self):
    with tf.compat.v1.test.mock.patch.object(ckpt_info, "_ENTRIES_PER_PAGE", 7):
      counts = self._count(list(range(100)), [(3 << 48) + i for i in range(20)] + [5 << 48, 1])

    self.assertEqual(counts, {0: 101, 3: 20, 5: 1})

  def test_no_table(self):
    with self.assertRaisesRegex(ValueError, "no hash table"):
      ckpt_info.FidSlotCountSaverListener(self.dir)


if __name__ == "__main__":
  tf.test.main()
