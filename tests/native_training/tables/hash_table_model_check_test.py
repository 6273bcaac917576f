"""A table against a plain dict: 100,000 random operations on ids, the same answers throughout.

An operation is one id in a lookup, assign, assign_add, optimize or restore; ids come in batches.
Time passes, so that rows expire at a save; saves go to several names, and any of them may be
restored.
"""

import os

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import entry
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb
from tests.hash_table_testing import INT64_MAX, INT64_MIN, make_table, segment

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_DAY = 86400
_OPERATIONS = 100_000
_DIM = 10
_RATES = [0.5, 0.1, 0.05, 0.01, 0.2]
_EXPIRE_DAYS = {1: 1, 2: 0}
_DEFAULT_EXPIRE_DAYS = 3
_F = np.float32


def _segments():
  return [
    segment(1, entry.SgdOptimizer(), entry.ConstantsInitializer(0.25)),
    segment(3, entry.AdagradOptimizer(initial_accumulator_value=0.3, weight_decay_factor=0.01)),
    segment(2, entry.MomentumOptimizer(), entry.ConstantsInitializer(-1.0)),
    segment(2, entry.AdamOptimizer()),
    segment(2, entry.FtrlOptimizer(beta=1.0, l1_regularization=0.01, l2_regularization=0.1)),
  ]


class Row:
  """Vector, state and time of one id; `optimize` is the formulas, in float32."""

  __slots__ = ("ada", "ftrl_n", "ftrl_z", "m", "mom", "powers", "time", "v", "w")

  def __init__(self):
    self.w = np.array([0.25, 0, 0, 0, -1, -1, 0, 0, 0, 0], _F)
    self.ada = np.full(3, 0.3, _F)
    self.mom = np.zeros(2, _F)
    self.m, self.v = np.zeros(2, _F), np.zeros(2, _F)
    self.powers = (_F(0.9), _F(0.99))
    self.ftrl_n, self.ftrl_z = np.full(2, 0.1, _F), np.zeros(2, _F)
    self.time = 0

  def copy(self) -> "Row":
    other = Row.__new__(Row)
    for name in self.__slots__:
      value = getattr(self, name)
      setattr(other, name, value.copy() if isinstance(value, np.ndarray) else value)
    return other

  def optimize(self, g: np.ndarray) -> None:
    w, rate = self.w, _F(_RATES)
    w[0] -= rate[0] * g[0]

    decayed = g[1:4] + _F(0.01) * w[1:4]
    self.ada += decayed * decayed
    w[1:4] -= rate[1] / np.sqrt(self.ada) * decayed

    self.mom = _F(0.9) * self.mom - rate[2] * g[4:6]
    w[4:6] += self.mom

    alpha = rate[3] * np.sqrt(1 - self.powers[1]) / (1 - self.powers[0])
    self.m += (g[6:8] - self.m) * _F(1 - 0.9)
    self.v += (g[6:8] * g[6:8] - self.v) * _F(1 - 0.99)
    w[6:8] -= self.m * alpha / (np.sqrt(self.v) + _F(0.01))
    self.powers = (self.powers[0] * _F(0.9), self.powers[1] * _F(0.99))

    n = self.ftrl_n + g[8:10] * g[8:10]
    self.ftrl_z += g[8:10] - (np.sqrt(n) - np.sqrt(self.ftrl_n)) / rate[4] * w[8:10]
    self.ftrl_n = n
    shrunk = np.sign(self.ftrl_z) * _F(0.01) - self.ftrl_z
    regular = rate[4] * shrunk / (np.sqrt(n) + _F(1.0) + _F(0.1) * rate[4])
    w[8:10] = np.where(np.abs(self.ftrl_z) <= _F(0.01), _F(0), regular)


class Model:
  """Does what a table does, without any of what makes it fast."""

  def __init__(self):
    self.rows: dict[int, Row] = {}
    self.max_time = 0
    self.files: dict[str, dict[int, Row]] = {}

  def _row(self, fid: int, time: int) -> Row:
    row = self.rows.get(fid)
    if row is None:
      row = self.rows[fid] = Row()
    row.time = time
    return row

  def lookup(self, ids) -> np.ndarray:
    out = np.zeros((len(ids), _DIM), _F)
    for i, fid in enumerate(ids):
      row = self.rows.get(fid)
      if row is not None:
        out[i] = row.w
    return out

  def assign(self, ids, values, time) -> None:
    self.max_time = max(self.max_time, time) if len(ids) else self.max_time
    for fid, value in zip(ids, values):
      self._row(fid, time).w[:] = value

  def assign_add(self, ids, values, time) -> None:
    self.max_time = max(self.max_time, time) if len(ids) else self.max_time
    for fid, value in zip(ids, values):
      self._row(fid, time).w += value

  def optimize(self, ids, grads, time, dedup) -> None:
    self.max_time = max(self.max_time, time) if len(ids) else self.max_time
    if dedup:
      sums: dict[int, np.ndarray] = {}
      for fid, grad in zip(ids, grads):
        sums[fid] = sums[fid] + grad if fid in sums else grad
      ids, grads = list(sums), list(sums.values())
    for fid, grad in zip(ids, grads):
      self._row(fid, time).optimize(grad)

  def save(self, name: str) -> None:
    self.files[name] = {
      fid: row.copy() for fid, row in self.rows.items() if not self._expired(fid, row)
    }

  def restore(self, name: str) -> None:
    self.rows = {fid: row.copy() for fid, row in self.files[name].items()}
    self.max_time = max([self.max_time, *(row.time for row in self.rows.values())])

  def _expired(self, fid: int, row: Row) -> bool:
    days = _EXPIRE_DAYS.get(fid >> 48 & 0x7FFF, _DEFAULT_EXPIRE_DAYS)
    return self.max_time - row.time >= days * _DAY


class Subject:
  """The table, with one placeholder per kind of argument."""

  def __init__(self, sess: tf.compat.v1.Session, folder: str, threads: bool):
    table = make_table(
      *_segments(),
      learning_rates=_RATES,
      default_expire_time=_DEFAULT_EXPIRE_DAYS,
      slot_expire_times=_EXPIRE_DAYS,
      saver_parallel=2,
    )
    self._sess, self._folder = sess, folder
    self._ids = tf.compat.v1.placeholder(tf.int64, [None])
    self._values = tf.compat.v1.placeholder(tf.float32, [None, _DIM])
    self._time = tf.compat.v1.placeholder(tf.int64, [])
    self._name = tf.compat.v1.placeholder(tf.string, [])
    self._lookup = table.lookup(self._ids, use_multi_threads=threads)
    self._entries = table.lookup_entry(self._ids)
    self._size = table.size()
    self._assign = table.assign(self._ids, self._values, self._time).as_op()
    self._add = table.assign_add(self._ids, self._values, self._time).as_op()
    step = tf.constant(1, tf.int64)
    self._optimize = {
      dedup: table.apply_gradients(
        self._ids, self._values, step, threads, dedup, req_time=self._time
      ).as_op()
      for dedup in (False, True)
    }
    self._save = table.save(self._name).as_op()
    self._restore = table.restore(self._name).as_op()

  def lookup(self, ids):
    return self._sess.run(self._lookup, {self._ids: ids})

  def entries(self, ids):
    return self._sess.run(self._entries, {self._ids: ids})

  def size(self):
    return self._sess.run(self._size)

  def assign(self, ids, values, time):
    self._sess.run(self._assign, {self._ids: ids, self._values: values, self._time: time})

  def assign_add(self, ids, values, time):
    self._sess.run(self._add, {self._ids: ids, self._values: values, self._time: time})

  def optimize(self, ids, grads, time, dedup):
    feed = {self._ids: ids, self._values: grads, self._time: time}
    self._sess.run(self._optimize[dedup], feed)

  def save(self, name):
    self._sess.run(self._save, {self._name: os.path.join(self._folder, name)})

  def restore(self, name):
    self._sess.run(self._restore, {self._name: os.path.join(self._folder, name)})


class ModelCheckTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(seed=(1, 2, 3), threads=(1, 4))
  def test_random_operations(self, seed, threads):
    config = tf.compat.v1.ConfigProto(
      intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads
    )
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as sess:
      subject = Subject(sess, os.environ["TEST_TMPDIR"], threads > 1)
      self._check(np.random.default_rng(seed), subject, Model())

  def _check(self, rng, subject, model):
    extremes = np.array([0, -1, INT64_MIN, INT64_MAX, 1 << 20, 1 << 32, 3 << 20])
    universe = np.concatenate([extremes, rng.integers(0, 3, 300) << 48 | np.arange(300)])
    time, done = 1000, 0
    while done < _OPERATIONS:
      kind = rng.choice(
        ["lookup", "assign", "add", "optimize", "time", "grow", "save", "restore", "entries"],
        p=[0.28, 0.14, 0.14, 0.32, 0.05, 0.01, 0.02, 0.01, 0.03],
      )
      n = int(rng.choice([0, 1, 5, 50, 200], p=[0.02, 0.08, 0.1, 0.4, 0.4]))
      ids = rng.choice(universe, n)
      values = rng.standard_normal((n, _DIM)).astype(_F)
      done += n
      if kind == "lookup":
        self.assertAllClose(
          subject.lookup(ids), model.lookup(ids.tolist()), rtol=1e-4, atol=1e-4, msg=f"at {done}"
        )
        self.assertEqual(subject.size(), len(model.rows))
      elif kind == "assign":
        subject.assign(ids, values, time)
        model.assign(ids.tolist(), values, time)
      elif kind == "add":
        subject.assign_add(ids, values, time)
        model.assign_add(ids.tolist(), values, time)
      elif kind == "optimize":
        dedup = bool(rng.integers(2))
        subject.optimize(ids, values, time, dedup)
        model.optimize(ids.tolist(), values, time, dedup)
      elif kind == "time":
        # 0 stands for no time: rows that have none count from their restore, by the clock.
        time = max(1, time + int(rng.integers(-_DAY // 2, 2 * _DAY)))
      elif kind == "grow":
        new = rng.integers(INT64_MIN, INT64_MAX, 1000)
        universe = np.concatenate([universe, rng.choice(new, 30)])
        grown = np.zeros((1000, _DIM), _F)
        subject.assign(new, grown, time)
        model.assign(new.tolist(), grown, time)
        done += 1000
      elif kind == "save":
        name = f"f{rng.integers(3)}"
        subject.save(name)
        model.save(name)
      elif kind == "restore" and model.files:
        name = rng.choice(sorted(model.files))
        subject.restore(name)
        model.restore(name)
        done += len(model.rows)
        self.assertEqual(subject.size(), len(model.rows))
      elif kind == "entries":
        self._check_entries(subject, model, ids.tolist())
    every = list(model.rows)
    self.assertAllClose(subject.lookup(every), model.lookup(every), rtol=1e-4, atol=1e-4)
    self._check_entries(subject, model, every[:1000])
    self.assertEqual(subject.size(), len(every))

  def _check_entries(self, subject, model, ids):
    for fid, serialized in zip(ids, subject.entries(ids)):
      row = model.rows.get(fid)
      if row is None:
        self.assertEqual(serialized, b"")
        continue
      dump = pb.EntryDump.FromString(serialized)
      _, adagrad, momentum, adam, ftrl = dump.opt.dump
      self.assertEqual(dump.last_update_ts_sec, row.time)
      actual = [
        *adagrad.adagrad.norm,
        *momentum.momentum.n,
        *adam.adam.m,
        *adam.adam.v,
        adam.adam.beta1_power,
        adam.adam.beta2_power,
        *ftrl.ftrl.norm,
        *ftrl.ftrl.zero,
      ]
      want = np.concatenate([row.ada, row.mom, row.m, row.v, row.powers, row.ftrl_n, row.ftrl_z])
      np.testing.assert_allclose(actual, want, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
  tf.test.main()
