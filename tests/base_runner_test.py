"""Tests of `monolith.base_runner`."""

import glob
import tempfile
import unittest

import tensorflow as tf

from monolith.base_runner import BaseRunner

tf.compat.v1.disable_v2_behavior()


class BaseRunnerTest(unittest.TestCase):
  def test_arguments_are_ignored(self):
    with self.assertRaises(NotImplementedError):
      BaseRunner(1, x=2).run()

  def test_write_summary(self):
    with tempfile.TemporaryDirectory() as folder:
      graph = tf.compat.v1.get_default_graph()
      count = len(graph.get_operations())
      writer = tf.compat.v1.summary.FileWriter(folder)
      BaseRunner().write_summary({"auc": 0.5, "loss": 2, "global_step": 7}, writer, 7)
      BaseRunner().write_summary({}, writer, 8)
      writer.close()
      (path,) = glob.glob(f"{folder}/*")
      events = [e for e in tf.compat.v1.train.summary_iterator(path) if e.HasField("summary")]
      self.assertEqual([event.step for event in events], [7, 8])
      self.assertEqual(
        {value.tag: value.simple_value for value in events[0].summary.value},
        {"auc": 0.5, "loss": 2.0, "global_step": 7.0},
      )
      self.assertEqual(len(graph.get_operations()), count)


if __name__ == "__main__":
  unittest.main()
