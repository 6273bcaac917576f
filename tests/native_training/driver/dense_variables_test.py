"""Tests what a scaffold says about variables that are not initialised."""

from __future__ import annotations

import tensorflow as tf

from monolith.native_training.driver import dense_variables

tf.compat.v1.disable_eager_execution()


class ReportTest(tf.test.TestCase):
  def _finalize(self, is_quick, **kwargs):
    """Returns what the ops of a new graph's scaffold report, before and after initialisation."""
    with tf.Graph().as_default() as graph:
      for i in range(3):
        tf.compat.v1.get_variable(f"shared_{i}", initializer=float(i))
      tf.compat.v1.get_local_variable("own", initializer=1.0)
      table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, 0, -1, -2)
      tf.compat.v1.add_to_collection(
        tf.compat.v1.GraphKeys.RESOURCES, _Resource(table.resource_handle, graph)
      )
      scaffold = tf.compat.v1.train.Scaffold(
        **{name: make() for name, make in kwargs.items()},
        init_op=tf.compat.v1.global_variables_initializer(),
      )
      if is_quick:
        dense_variables.report_with_few_ops(scaffold)
      num_ops = len(graph.get_operations())
      scaffold.finalize()
      ready_ops = (scaffold.ready_for_local_init_op, scaffold.ready_op)
      with tf.compat.v1.Session() as sess:
        reports = [sorted(sess.run(op).tolist()) for op in ready_ops]
        sess.run((scaffold.init_op, scaffold.local_init_op))
        reports += [sorted(sess.run(op).tolist()) for op in ready_ops]
      return reports, len(graph.get_operations()) - num_ops

  def test_report_is_the_same(self):
    usual, usual_ops = self._finalize(False)
    quick, quick_ops = self._finalize(True)

    self.assertEqual(quick, usual)
    self.assertIn(b"shared_2", quick[0])
    self.assertIn(b"own", quick[1])
    self.assertLess(quick_ops, usual_ops / 2)

  def test_given_ops_stay(self):
    reports, _ = self._finalize(True, ready_op=lambda: tf.constant(["mine"]))

    self.assertEqual(reports[1], [b"mine"])

  def test_nothing_to_initialise(self):
    with tf.Graph().as_default():
      scaffold = tf.compat.v1.train.Scaffold()
      dense_variables.report_with_few_ops(scaffold)
      scaffold.finalize()
      with tf.compat.v1.Session() as sess:
        self.assertEmpty(sess.run(scaffold.ready_op))


class _Resource:
  """A resource that is not initialised, as TensorFlow keeps them in collections."""

  def __init__(self, handle, graph):
    self.handle = handle
    with graph.as_default():
      self.is_initialized = tf.constant(False)
      self.create = tf.no_op()


if __name__ == "__main__":
  tf.test.main()
