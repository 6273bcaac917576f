"""`monolith.table.groups`: what the driver has trained goes on in NumPy, and goes back."""

import os
import pathlib
import subprocess
import sys
import unittest
from unittest import mock

import numpy as np

from monolith import table as tables
from monolith.table import groups

_IDS = np.array([1, 2, (1 << 62) + 5, -7])

# Trains one batch of ids, each example with label 1, in the group of a model of the driver.
_DRIVER = """
import sys
import tensorflow as tf
from monolith.native_training import entry, estimator, native_model

tf.compat.v1.disable_eager_execution()

class Model(native_model.MonolithModel):
  def input_fn(self, mode):
    def batch(ids):
      ids = tf.RaggedTensor.from_tensor(ids[:, None])
      return {"user": ids, "item": ids, "label": tf.ones([ids.nrows()])}
    ids = tf.constant([[int(i) for i in sys.argv[2:]]], tf.int64)
    return tf.data.Dataset.from_tensor_slices(ids).map(batch)

  def model_fn(self, features, mode):
    for name in ("user", "item"):
      self.create_embedding_feature_column(name)
    vectors = self.lookup_embedding_slice(
      ["user", "item"], "vec", 2, out_type="concat",
      initializer=entry.ConstantsInitializer(0.5), optimizer=entry.AdagradOptimizer(0.1))
    logits = tf.reduce_sum(vectors, axis=1)
    label = features["label"]
    loss, pred = native_model.get_sigmoid_loss_and_pred("ctr", logits, label, None, mode=mode)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    return native_model.EstimatorSpec(label, pred, "ctr", loss, optimizer)

conf = estimator.RunConfig(is_local=True, model_dir=sys.argv[1])
estimator.Estimator(Model(), conf).train()
print("CHECKPOINT", tf.train.latest_checkpoint(sys.argv[1]))
"""


def _make():
  return {
    name: tables.HashTable(dim, "adagrad", "zeros", learning_rate=0.1)
    for name, dim in (("user", 2), ("item", 3))
  }


class GroupsTest(unittest.TestCase):
  def setUp(self):
    self.folder = pathlib.Path(os.environ["TEST_TMPDIR"]) / self.id().rpartition(".")[2]
    self.folder.mkdir()
    self.path = self.folder / "group"

  def test_both_ways(self):
    before = _make()
    rng = np.random.default_rng(1)
    ids = rng.integers(-(2**63), 2**63 - 1, 5000)
    for table in before.values():
      table.update(ids, rng.normal(size=[5000, table.dim]))
    rows = {"user": 5000, "item": 5000}
    self.assertEqual(tables.save_group(before, self.path), rows)
    # Over an earlier save, too.
    self.assertEqual(tables.save_group(before, self.path), rows)
    after = _make()
    self.assertEqual(tables.load_group(after, self.path), rows)
    (alone,) = ({"item": after["item"]},)
    tables.load_group(alone, self.path)
    for name, table in after.items():
      np.testing.assert_array_equal(table.lookup(ids), before[name].lookup(ids))
      gradients = rng.normal(size=[5000, table.dim])
      for one in (table, before[name]):
        one.update(ids, gradients)
      np.testing.assert_array_equal(table.lookup(ids), before[name].lookup(ids))
    self.assertEqual(
      sorted(file.name for file in self.folder.iterdir()),
      ["group-00000-of-00001", "group.meta-00000-of-00001"],
    )

  def test_bad_input(self):
    some = _make()
    some["user"].assign([1, 2, 3], np.ones([3, 2]))
    tables.save_group(some, self.path)
    for names, error, text in (
      ({}, ValueError, "tables is empty"),
      ({"usr": some["user"]}, ValueError, "has no table usr; it has: item user"),
      ({"user": some["user"], "item": some["user"]}, ValueError, "want every table once"),
      ({"user": some["item"]}, ValueError, "dim"),
      ([some["user"]], TypeError, "want a mapping of names to tables"),
      ({"user": 3}, TypeError, "want a mapping of names to tables"),
    ):
      with self.subTest(text), self.assertRaisesRegex(error, text):
        tables.load_group(names, self.path)
    with self.assertRaisesRegex(FileNotFoundError, "nowhere.meta-00000"):
      tables.load_group(some, self.folder / "nowhere")
    with self.assertRaisesRegex(ValueError, "files of a group of tables: load it with"):
      some["user"].load(self.path)
    some["user"].save(self.folder / "one")
    with self.assertRaisesRegex(FileNotFoundError, "has the files of one table"):
      tables.load_group(some, self.folder / "one")
    data = pathlib.Path(f"{self.path}-00000-of-00001")
    meta = pathlib.Path(f"{self.path}.meta-00000-of-00001")
    for file, damaged, text in (
      (data, data.read_bytes()[:-1], "ends in a block"),
      (data, b"", "lacks 3 rows"),
      (data, data.read_bytes() * 2, "more than"),
      (meta, meta.read_bytes()[:-1] + b"\0", "checksum is wrong"),
      (meta, meta.read_bytes()[:5], "meta-00000-of-00001 is damaged"),
    ):
      right = file.read_bytes()
      file.write_bytes(damaged)
      with self.subTest(text), self.assertRaisesRegex(tables.TableError, text):
        tables.load_group(some, self.path)
      file.write_bytes(right)
    manifest = self.folder / ".group.manifest"
    manifest.write_text("monolith file set 1\ntoken 5\nfile -00000-of-00001 3 3 00000000\n")
    with self.assertRaisesRegex(tables.TableError, "its manifest says 3"):
      tables.load_group(some, self.path)
    manifest.unlink()
    data.rename(self.folder / "gone")
    with self.assertRaisesRegex(tables.TableError, "is missing"):
      tables.load_group(some, self.path)
    self.assertEqual(len(some["user"]), 3)

  def test_blocks_of_snappy_are_unpacked_without_other_packages(self):
    for block, right in (
      (b"\x00", b""),
      (b"\x03\x08abc", b"abc"),
      # A copy that repeats itself, with an offset of one byte, of two and of four.
      (b"\x0c\x08abc\x15\x03", b"abcabcabcabc"),
      (b"\x0c\x08abc\x22\x03\x00", b"abcabcabcabc"),
      (b"\x0c\x08abc\x23\x03\x00\x00\x00", b"abcabcabcabc"),
      (b"\x3d\xf0\x3c" + b"x" * 61, b"x" * 61),
    ):
      with self.subTest(right):
        self.assertEqual(groups._inflate(block), right)
    for block in (b"\x04\x08abc", b"\x07\x08abc\x01\x04", b"\x80"):
      with self.subTest(block), self.assertRaises((ValueError, IndexError)):
        groups._inflate(block)

  def test_the_driver_and_numpy_take_turns(self):
    try:
      import tensorflow  # noqa: F401
    except ImportError:
      self.skipTest("needs TensorFlow")
    program = self.folder / "driver.py"
    program.write_text(_DRIVER)
    ids = [str(i) for i in _IDS]

    def train():
      done = subprocess.run(
        [sys.executable, program, self.folder / "model", *ids],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
      )
      self.assertEqual(done.returncode, 0, done.stderr[-3000:])
      return done.stdout.split("CHECKPOINT ")[1].strip() + ".assets/MonolithMultiHashTable_"

    def step(some):
      """Does what the driver does: the loss is the sum of the logs of 1 + exp(-logit)."""
      logits = sum(table.lookup(_IDS).sum(1) for table in some.values())
      slope = -1 / (1 + np.exp(logits))
      for table in some.values():
        table.update(_IDS, np.repeat(slope[:, None], 2, 1))

    def make():
      optimizer = tables.Optimizer("adagrad", learning_rate=0.1)
      return {name: tables.HashTable(2, optimizer, 0.5) for name in ("user", "item")}

    first = train()
    some = make()
    # pyarrow, or the way without it.
    with mock.patch.object(groups, "_inflater", lambda: groups._inflate):
      self.assertEqual(tables.load_group(some, first), {"user": 4, "item": 4})
    trained = some["user"].lookup(_IDS)
    tables.load_group(some, first)
    np.testing.assert_array_equal(some["user"].lookup(_IDS), trained)
    step(some)
    tables.save_group(some, first)
    # It lists the files as the driver wrote them.
    pathlib.Path(first.partition(".assets/")[0] + ".manifest").unlink()
    # The driver goes on where NumPy has stopped, in values and in the state of the optimizer.
    second = train()
    self.assertNotEqual(first, second)
    step(some)
    after = make()
    tables.load_group(after, second)
    for name, table in after.items():
      np.testing.assert_allclose(table.lookup(_IDS), some[name].lookup(_IDS), rtol=1e-5)
      self.assertTrue((table.lookup(_IDS) > trained + 0.01).all())


if __name__ == "__main__":
  unittest.main()
