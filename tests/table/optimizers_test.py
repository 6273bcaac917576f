"""`monolith.table.optimizers`: the same optimizers and first values as in TensorFlow's tables."""

import dataclasses
import os
import pathlib
import unittest

import numpy as np
import tensorflow as tf

import monolith
from monolith import table as tables
from monolith.keras import following, settings
from monolith.native_training import entry
from monolith.table import optimizers


class OptimizersTest(unittest.TestCase):
  def test_a_name_has_the_numbers_that_it_has_in_tensorflow(self):
    for name in optimizers.NAMED:
      self._check_same(optimizers.find(name), settings.optimizer(name))
    self._check_same(optimizers.DEFAULT, following.default_optimizer())

  def _check_same(self, named, of_entry):
    converted = optimizers.find(of_entry)
    self.assertEqual(named.kind, converted.kind)
    known = optimizers.find(of_entry).kind
    for field in dataclasses.fields(named)[1:]:
      self.assertAlmostEqual(
        getattr(named, field.name), getattr(converted, field.name), 6, (known, field.name)
      )

  def test_every_optimizer_of_entry_makes_the_same_step(self):
    ids = np.array([3, -4, 2**62])
    gradients = np.random.default_rng(1).normal(size=[3, 3, 4]).astype(np.float32)
    for one in (
      entry.SgdOptimizer(0.1),
      entry.AdagradOptimizer(0.1, 0.2, weight_decay_factor=0.01),
      entry.AdadeltaOptimizer(0.1),
      entry.AdamOptimizer(0.1, use_nesterov=True),
      entry.AdamOptimizer(0.1, decay_by_step=True),
      entry.AmsgradOptimizer(0.1),
      entry.MomentumOptimizer(0.1),
      entry.FtrlOptimizer(0.1, l1_regularization=0.01, l2_regularization=0.02),
      entry.RmspropOptimizer(0.1),
      entry.RmspropV2Optimizer(0.1),
      entry.FTRLWithGroupSparsityOptimizer(0.1, l1_regularization=0.01),
      entry.AdaGradWithGroupLassoOptimizer(0.1),
      entry.DynamicWdAdagradOptimizer(0.1, enable_dynamic_wd=False),
      entry.MovingAverageOptimizer(),
    ):
      with self.subTest(one):
        ours = tables.HashTable(4, one, 0.5)
        theirs = monolith.HashTable(4, one, 0.5)
        for batch in gradients:
          ours.update(ids, batch)
          theirs.update(ids, batch)
        np.testing.assert_array_equal(ours.lookup(ids), theirs.lookup(ids).numpy())

  def test_rows_go_to_tensorflow_and_come_back_bit_equal(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    ids = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 5000)
    gradients = np.random.default_rng(3).normal(size=[5000, 4])
    ours = tables.HashTable(4, "adam", "uniform")
    ours.update(ids, gradients)
    theirs = monolith.HashTable(4, "adam", "uniform")

    ours.save(folder / "ours")
    theirs.load(folder / "ours")
    np.testing.assert_array_equal(theirs.items()[1], ours.items()[1])
    theirs.save(folder / "theirs")
    records = [
      sorted(tf.data.TFRecordDataset(f"{folder}/{name}-00000-of-00001").as_numpy_iterator())
      for name in ("ours", "theirs")
    ]
    self.assertEqual(records[0], records[1])

    theirs.update(ids[:99], tf.ones([99, 4]))
    theirs.save(folder / "theirs")
    ours.load(folder / "theirs")
    ours_ids, rows = ours.items()
    np.testing.assert_array_equal(ours_ids, theirs.items()[0])
    np.testing.assert_array_equal(rows, theirs.items()[1])
    ours.update(ids[:99], np.ones([99, 4]))
    theirs.update(ids[:99], tf.ones([99, 4]))
    np.testing.assert_array_equal(ours.items()[1], theirs.items()[1])

  def test_numbers_are_those_of_a_segment(self):
    segment = {field.name: field.default for field in dataclasses.fields(optimizers.Segment)}
    for field in dataclasses.fields(optimizers.Optimizer):
      if field.name not in ("kind", "learning_rate"):
        self.assertEqual(field.default, segment[field.name], field.name)

  def test_initializers(self):
    for given, expected in (
      ("zeros", [0.0]),
      ("ones", [1.0]),
      (0.25, [0.25]),
      (entry.ConstantsInitializer(3.0), [3.0]),
    ):
      table = tables.HashTable(1, "sgd", given)
      table.update([1], [[0.0]])
      self.assertEqual(table.lookup([1])[0].tolist(), expected)
    for given, least, most in (
      ((2.0, 3.0), 2, 3),
      (entry.RandomUniformInitializer(-9.0, -8.0), -9, -8),
      ("uniform", -0.05, 0.05),
    ):
      table = tables.HashTable(8, "sgd", given)
      table.update(np.arange(100), np.zeros([100, 8]))
      rows = table.items()[1]
      self.assertTrue(((rows >= least) & (rows <= most)).all())
      self.assertGreater(len(np.unique(rows)), 700)

  def test_one_seed_gives_the_same_first_values(self):
    rows = []
    for seed in (5, 5, 6):
      table = tables.HashTable(4, "sgd", seed=seed)
      table.update([1], np.zeros([1, 4]))
      rows.append(table.lookup([1]).tolist())
    self.assertEqual(rows[0], rows[1])
    self.assertNotEqual(rows[0], rows[2])

  def test_other_objects_are_refused(self):
    for make in (
      lambda: optimizers.find(3),
      lambda: optimizers.find(tf.keras.optimizers.Adam()),
      lambda: optimizers.find(entry.ZerosInitializer()),
      lambda: optimizers.first_values(entry.SgdOptimizer()),
      lambda: optimizers.first_values(None),
      lambda: optimizers.days(1.5),
    ):
      self.assertRaises(TypeError, make)
    for make in (
      lambda: optimizers.find("dc"),
      lambda: optimizers.Optimizer("none"),
      lambda: optimizers.Optimizer("sgd", epsilon=float("nan")),
      lambda: optimizers.first_values((3.0, 2.0)),
      lambda: optimizers.days("0d"),
    ):
      self.assertRaises(ValueError, make)


if __name__ == "__main__":
  unittest.main()
