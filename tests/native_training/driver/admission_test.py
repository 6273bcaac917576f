"""Ids get rows when they have been seen often enough, and lose them when they are old.

Both hold for every id of the column that declares them, with slot bits or without.
"""

from __future__ import annotations

import os
import re
import time

import tensorflow as tf

from monolith.native_training import entry, estimator, feature, hash_table_ops, native_model
from monolith.native_training.runtime.ops import gen_monolith_ops

tf.compat.v1.disable_eager_execution()

_DAY = 86400
_ROOT = os.path.dirname(
  os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
)
_DOCS = os.path.join(_ROOT, "docs")


class _Model(native_model.MonolithModel):
  def __init__(self, batches, req_time=None, **columns):
    super().__init__()
    self._batches = batches
    self._req_time = req_time
    self._columns = columns

  def input_fn(self, mode):
    def batch(ids):
      ids = tf.RaggedTensor.from_tensor(ids[:, None])
      features = {name: ids for name in self._columns}
      if self._req_time is not None:
        features["req_time"] = tf.fill([ids.nrows()], tf.constant(self._req_time, tf.int64))
      return {**features, "label": tf.ones([ids.nrows()])}

    ids = tf.constant(self._batches, tf.int64)
    return tf.data.Dataset.from_tensor_slices(ids).map(batch)

  def model_fn(self, features, mode):
    for name, options in self._columns.items():
      self.create_embedding_feature_column(name, **options)
    vectors = self.lookup_embedding_slice(
      list(self._columns), "vec", 2, out_type="concat", optimizer=entry.SgdOptimizer(0.1)
    )
    logits = tf.reduce_sum(vectors, axis=1)
    label = features["label"]
    loss, pred = native_model.get_sigmoid_loss_and_pred("ctr", logits, label, None, mode=mode)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    return native_model.EstimatorSpec(label, pred, "ctr", loss, optimizer)


class PictureTest(tf.test.TestCase):
  def test_the_picture_shows_what_the_threshold_means(self):
    path = os.path.join(_DOCS, "images", "admission_and_expiry.svg")
    with open(path, encoding="utf-8") as f:
      fills = re.findall(r'<circle [^>]*fill="(#[0-9a-f]+)"', f.read())

    # With admit_after=3 three occurrences are counted, and the fourth makes the row.
    self.assertEqual(fills[:3], ["#bbb"] * 3)
    self.assertNotIn("#bbb", fills[3:])


class AdmissionTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = self.create_tempdir().full_path

  def _train(self, model, **conf):
    """Returns the number of rows that the checkpoint has by table."""
    conf = estimator.RunConfig(is_local=True, model_dir=self._dir, **conf)
    estimator.Estimator(model, conf).train()
    assets = tf.train.latest_checkpoint(self._dir) + ".assets/"
    names = [name for name in tf.io.gfile.listdir(assets) if ".meta-00000" in name]
    basename = assets + names[0].split(".meta-")[0]
    with tf.Graph().as_default(), self.session() as sess:
      names, counts = sess.run(
        gen_monolith_ops.monolith_multi_hash_table_feature_stat(basename=basename)
      )
    return {name.decode(): int(count) for name, count in zip(names, counts)}

  def test_each_column_has_its_own_threshold(self):
    # Small ids and large ones; the last two come three times.
    large = (1 << 62) + 12345
    batches = [[1, 2, large], [3, 2, large], [4, 2, large]]
    columns = {"user": {"admit_after": 2}, "item": {"admit_after": 3}, "shop": {}}

    self.assertEqual(self._train(_Model(batches, **columns)), {"user": 2, "item": 0, "shop": 5})

    # Earlier occurrences count.
    more = _Model([[2, large, 1]], **columns)
    self.assertEqual(self._train(more), {"user": 2, "item": 2, "shop": 5})

  def test_rows_without_a_time_of_request_age_by_the_clock(self):
    columns = {"user": {"expire_after": "30d"}, "item": {}, "shop": {"expire_after": "8w"}}
    everything = {"user": 3, "item": 3, "shop": 3}
    self.assertEqual(self._train(_Model([[1, 2, 3]], **columns)), everything)

    def later(days):
      return self._train(_Model([[1, 1, 1]], req_time=int(time.time()) + days * _DAY, **columns))

    self.assertEqual(later(29), everything)
    self.assertEqual(later(31), {"user": 1, "item": 3, "shop": 3})

  def test_rows_that_were_saved_without_times_count_from_the_restore(self):
    before, after = (os.path.join(self._dir, name) for name in ("before", "after"))
    with tf.Graph().as_default(), self.session() as sess:
      table = hash_table_ops.test_hash_table(1, name_suffix="before")
      sess.run(table.assign([1, 2], [[1.0], [2.0]]).save(before).as_op())

    with tf.Graph().as_default(), self.session() as sess:
      table = hash_table_ops.test_hash_table(1, name_suffix="after", expire_time=1)
      sess.run(table.restore(before).as_op())
      now = tf.constant(int(time.time()), tf.int64)
      sess.run(table.assign([3], [[3.0]], req_time=now).save(after).as_op())
      # Two days later they have expired, like any other row.
      later = tf.constant(int(time.time()) + 2 * 86400, tf.int64)
      sess.run(table.assign([4], [[4.0]], req_time=later).save(after + "2").as_op())

    for basename, expected in ((after, [[1.0], [2.0], [3.0]]), (after + "2", [[0.0]] * 3)):
      with tf.Graph().as_default(), self.session() as sess:
        table = hash_table_ops.test_hash_table(1, name_suffix="read")
        self.assertAllEqual(sess.run(table.restore(basename).lookup([1, 2, 3])), expected)

  def test_a_table_tells_what_it_has_done(self):
    with tf.Graph().as_default(), self.session() as sess:
      table = hash_table_ops.test_hash_table(
        1, enable_hash_filter=True, occurrence_threshold=2, name_suffix="stats"
      )
      step = tf.constant(0, tf.int64)
      learn = table.apply_gradients([7, 8], [[1.0], [1.0]], global_step=step).as_op()
      stats = table.stats()
      seen = []
      for _ in range(3):
        sess.run(learn)
        rows, memory, expired, filtered, _ = sess.run(stats)
        seen.append((rows, expired, filtered))
    self.assertGreater(memory, 0)
    self.assertEqual(seen, [(0, 0, 2), (0, 0, 4), (2, 0, 4)])

  def test_bad_declarations(self):
    for options, message in (
      ({"admit_after": 16}, "user: the occurrence threshold .* is 16, want 0 to 15"),
      ({"admit_after": -1}, "is -1, want 0 to 15"),
      ({"admit_after": 1, "occurrence_threshold": 2}, "they mean the same"),
      ({"expire_after": "1d", "expire_time": 2}, "they mean the same"),
      ({"expire_after": "soon"}, "expire_after is 'soon', want a number of days"),
      ({"expire_after": -3}, "expire_after is -3, want a number of days"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        self._train(_Model([[1]], user=options))
    with self.assertRaisesRegex(ValueError, "slot 'user' were declared with 2 and 36500"):
      self._train(
        _Model([[1]], user={"admit_after": 2}, item={"admit_after": 3, "shared_name": "user"})
      )

  def test_slot_config(self):
    config = feature.FeatureSlotConfig(name="user", admit_after=3, expire_after="2w")
    self.assertEqual((config.occurrence_threshold, config.expire_time), (3, 14))


if __name__ == "__main__":
  tf.test.main()
