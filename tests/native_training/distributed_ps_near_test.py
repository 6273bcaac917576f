"""The tables of a server on this machine do what tables in this process do, and no more is sent."""

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.ops import resources

from monolith.native_training import (
  distributed_ps_factory,
  distributed_ps_near,
  learning_rate_functions,
  test_utils,
)
from monolith.native_training.driver import pooled_steps
from monolith.native_training.tables import pooling, ps_transfer
from tests.hash_table_testing import config_of, segment

tf.compat.v1.disable_eager_execution()

_DIMS = {"a": 16, "b": 3}
_EXAMPLES = 3000
_STEPS = 4


def _batches():
  """Returns ids that repeat within and between examples, enough for shared memory."""
  rng = np.random.default_rng(3)
  lengths = rng.integers(0, 3, [_STEPS, _EXAMPLES])
  splits = [np.concatenate([[0], np.cumsum(row)]) for row in lengths]
  return [
    {
      "a": (rng.integers(0, 2000, _EXAMPLES), np.arange(_EXAMPLES + 1)),
      "b": (rng.integers(-50, 50, splits[step][-1]), splits[step]),
    }
    for step in range(_STEPS)
  ]


class NearServerHashTableTest(tf.test.TestCase, parameterized.TestCase):
  def session(self):
    """Returns one on a server of its own, whose tables are empty."""
    self.servers, config = test_utils.create_test_ps_cluster(1)
    config.share_cluster_devices_in_session = True
    config.experimental.share_session_state_in_clusterspec_propagation = True
    session = tf.compat.v1.Session(self.servers[0].target, config=config)
    self.addCleanup(session.close)
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(resources.initialize_resources(resources.shared_resources()))
    return session

  def make_tables(self, num_ps, near):
    configs = {slot: config_of(segment(dim)) for slot, dim in _DIMS.items()}
    configs["a"].learning_rate_fns[:] = [
      learning_rate_functions.PolynomialDecay(0.5, 10, end_learning_rate=0.1)
    ]
    with ps_transfer.servers_on_this_machine(near):
      return distributed_ps_factory.create_native_multi_hash_table(num_ps, configs, [None] * 2)

  def inputs(self):
    return {slot: tf.compat.v1.ragged.placeholder(tf.int64, 1, []) for slot in _DIMS}

  def feed(self, inputs, batch):
    return {inputs[slot]: tf.compat.v1.ragged.RaggedTensorValue(*batch[slot]) for slot in batch}

  def results(self, num_ps, near, pooled):
    """Returns what was looked up before and after each of several updates."""
    with tf.Graph().as_default():
      step = tf.compat.v1.train.create_global_step()
      tables = self.make_tables(num_ps, near)
      self.assertEqual(isinstance(tables, distributed_ps_near.NearServerHashTable), near)
      inputs = self.inputs()
      rate = tf.constant(7, tf.int64)
      if pooled:
        parts = [
          pooling.PooledPart("b", 0, 2, 0, 0),
          pooling.PooledPart("a", 0, 16, 0, 2),
          pooling.PooledPart("b", 2, 1, 0, 18),
        ]
        rows = tables.lookup_pooled(inputs, [19], parts)
        gradients = [tf.sin(row) + tf.range(19, dtype=tf.float32) for row in rows]
        update = tables.apply_pooled_gradients(inputs, gradients, parts, step, rate)
      else:
        slot_to_id = {slot: ids.values for slot, ids in inputs.items()}
        looked_up = tables.lookup(slot_to_id)
        rows = [looked_up[slot] for slot in _DIMS]
        update = tables.apply_gradients(
          {
            slot: (ids, tf.sin(looked_up[slot]) + tf.range(_DIMS[slot], dtype=tf.float32))
            for slot, ids in slot_to_id.items()
          },
          step,
          rate,
        )
      with tf.control_dependencies([update.as_op()]):
        next_step = tf.compat.v1.assign_add(step, 1).op
      session = self.session()
      found = []
      for batch in _batches() * 2:
        found.append(session.run([rows, next_step], self.feed(inputs, batch))[0])
      return found

  @parameterized.parameters(False, True)
  def test_results_are_those_of_tables_in_this_process(self, pooled):
    want = self.results(0, False, pooled)
    found = self.results(1, True, pooled)
    self.assertGreater(np.abs(want[-1][0]).sum(), 0)
    for want_rows, found_rows in zip(want, found):
      for want_row, found_row in zip(want_rows, found_rows):
        np.testing.assert_array_equal(found_row, want_row)

  def test_results_are_those_of_a_server_elsewhere(self):
    for want_rows, found_rows in zip(
      self.results(1, False, pooled=False), self.results(1, True, pooled=False)
    ):
      for want_row, found_row in zip(want_rows, found_rows):
        np.testing.assert_array_equal(found_row, want_row)

  @parameterized.parameters(False, True)
  def test_nothing_is_written_without_the_condition(self, pooled):
    with tf.Graph().as_default():
      tables, inputs = self.make_tables(1, True), self.inputs()
      condition = tf.compat.v1.placeholder(tf.bool, [])
      step = tf.constant(0, tf.int64)
      parts = [pooling.PooledPart("a", 0, 16, 0, 0), pooling.PooledPart("b", 0, 3, 0, 16)]
      with ps_transfer.write_only_if([condition]):
        if pooled:
          update = tables.apply_pooled_gradients(inputs, [tf.ones([_EXAMPLES, 19])], parts, step)
        else:
          update = tables.apply_gradients(
            {
              slot: (ids.values, tf.ones([tf.size(ids.values), _DIMS[slot]]))
              for slot, ids in inputs.items()
            },
            step,
          )
      [rows] = tables.lookup_pooled(inputs, [19], parts)
      update = update.as_op()
      session, feed = self.session(), self.feed(inputs, _batches()[0])
      before = session.run(rows, feed)
      session.run(update, {**feed, condition: False})
      np.testing.assert_array_equal(session.run(rows, feed), before)
      session.run(update, {**feed, condition: True})
      changed = np.any(session.run(rows, feed) != before, axis=0)
      self.assertTrue(changed.all())

  @parameterized.parameters(False, True)
  def test_steps_are_pooled_ahead(self, near):
    with tf.Graph().as_default():
      tables = self.make_tables(1, near)
      rows = tables.lookup({"a": tf.constant([4], tf.int64)})
      self.assertEqual(pooled_steps.can_pool(tables, rows), near)

  def test_slots_without_a_table_and_updates_of_none(self):
    with tf.Graph().as_default():
      tables = self.make_tables(1, True)
      ids = tf.constant([4, 4], tf.int64)
      update = tables.apply_gradients({"x": (ids, tf.ones([2, 1]))}, tf.constant(0, tf.int64))
      with tf.control_dependencies([update.as_op()]):
        rows = update.lookup({"a": ids, "x": ids})
      self.assertEqual(list(rows), ["a"])
      self.assertIsNone(tables.get_id_split({"a": ids}))
      self.assertAllEqual(self.session().run(rows["a"]), np.zeros([2, 16]))

  def test_where_it_is_not_used(self):
    with tf.Graph().as_default():
      self.assertNotIsInstance(self.make_tables(2, False), distributed_ps_near.NearServerHashTable)
    with tf.Graph().as_default():
      configs = {"a": config_of(segment(2))}
      with ps_transfer.servers_on_this_machine(True):
        tables = distributed_ps_factory.create_native_multi_hash_table(2, configs, [None] * 2)
      self.assertNotIsInstance(tables, distributed_ps_near.NearServerHashTable)
    with tf.Graph().as_default(), self.env("MONOLITH_SHARED_MEMORY", "0"):
      self.assertNotIsInstance(self.make_tables(1, True), distributed_ps_near.NearServerHashTable)
    with tf.Graph().as_default(), self.env("MONOLITH_UPDATE_PER_OCCURRENCE", "1"):
      self.assertNotIsInstance(self.make_tables(1, True), distributed_ps_near.NearServerHashTable)

  def env(self, name, value):
    return mock.patch.dict("os.environ", {name: value})


if __name__ == "__main__":
  tf.test.main()
