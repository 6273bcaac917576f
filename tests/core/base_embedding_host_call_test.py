"""Tests of the host calls: `base_host_call`, `base_embedding_host_call` and `host_call`."""

import glob
import os
import tempfile
import unittest

import numpy as np
import tensorflow as tf

if not hasattr(tf, "estimator"):
  raise unittest.SkipTest("TPUEstimator ended with TensorFlow 2.15")

from tensorflow.python.ops import summary_ops_v2

from monolith.core import base_host_call, host_call
from monolith.core.base_embedding_host_call import BaseEmbeddingHostCall, TPUVariableRestoreHook

tf.compat.v1.disable_v2_behavior()


def read_summaries(folder):
  """Returns {tag: {step: value}} of all event files in a folder; texts are bytes."""
  result = {}
  for path in sorted(glob.glob(os.path.join(folder, "events.out.tfevents.*"))):
    for event in tf.compat.v1.train.summary_iterator(path):
      for value in event.summary.value:
        if value.HasField("tensor"):
          number = tf.make_ndarray(value.tensor)
          number = number.item() if number.ndim == 0 else number[0]
        else:
          number = value.simple_value
        result.setdefault(value.tag, {})[event.step] = number
  return result


class _GraphTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    graph = tf.Graph().as_default()
    graph.__enter__()
    self.addCleanup(graph.__exit__, None, None, None)
    self.global_step = tf.compat.v1.train.get_or_create_global_step()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = folder.name

  def run_host_call(self, hook, steps, before_step=None, session_hooks=()):
    """Runs a host call as TPUEstimator does on CPU, once per step, starting at step 1."""
    function, tensors = hook
    ops = function(*tensors)
    step = tf.compat.v1.placeholder(tf.int64, [])
    set_step = self.global_step.assign(step)
    with tf.compat.v1.Session() as session:
      session.run(
        [tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()]
      )
      initializers = summary_ops_v2.summary_writer_initializer_op()
      session.run(initializers)
      for session_hook in session_hooks:
        session_hook.after_create_session(session, None)
      for i in range(1, steps + 1):
        session.run(set_step, {step: i})
        if before_step:
          before_step(session, i)
        session.run(ops)
      session.run([summary_ops_v2.legacy_raw_flush(writer=op.inputs[0]) for op in initializers])


class BaseHostCallTest(_GraphTest):
  def test_needs_a_global_step(self):
    with tf.Graph().as_default(), self.assertRaisesRegex(ValueError, "global step"):
      base_host_call.BaseHostCall("", True)

  def _worked_example(self):
    call = base_host_call.BaseHostCall("", True)
    call.record_summary_tensor("a", tf.constant([1.0, 2.0]))
    call.record_summary_tensor("b", tf.constant(7, tf.int64))
    call.record_summary_tensor("c", tf.constant(3.0))
    return call

  def test_compress(self):
    call = self._worked_example()
    self.assertEqual(call._tensor_names[0], "global_step")
    tensors = call.compress_tensors()
    self.assertEqual(call._tensor_names, ["global_step", "b", "a", "c"])
    self.assertEqual(call._lists_tensor_sizes, [[1, 1], [2, 1]])
    self.assertEqual([t.shape.as_list() for t in tensors], [[1, 2], [1, 3]])
    self.assertEqual([t.dtype for t in tensors], [tf.int64, tf.float32])

  def test_decompress(self):
    call = self._worked_example()
    call.compress_tensors()
    for cores in (2, 1):
      step, tensors = call.decompress_tensors(
        [
          tf.constant([[5, 7], [5, 8]][:cores], tf.int64),
          tf.constant([[1.0, 2, 3], [4, 5, 6]][:cores]),
        ]
      )
      with tf.compat.v1.Session() as session:
        step, tensors = session.run([step, tensors])
      self.assertEqual(step, 5)
      by_name = dict(zip(call._tensor_names, tensors))
      self.assertAllEqual(by_name["b"], [7, 8][:cores])
      self.assertAllEqual(by_name["a"], [[1, 2], [4, 5]][:cores])
      self.assertAllEqual(by_name["c"], [3, 6][:cores])

  def test_bad_tensors(self):
    call = self._worked_example()
    with self.assertRaisesRegex(AssertionError, "a has been recorded"):
      call.record_summary_tensor("a", tf.constant(1.0))
    with self.assertRaisesRegex(
      AssertionError, r"^Now we only support tensor with shape \(k, \) or \(\)"
    ):
      call.record_summary_tensor("m", tf.ones([2, 2]))
    with self.assertRaisesRegex(ValueError, "want a static shape"):
      call.record_summary_tensor("p", tf.compat.v1.placeholder(tf.float32, [None]))

  def test_disabled(self):
    call = base_host_call.BaseHostCall("", False)
    call.record_summary_tensor("m", tf.ones([2, 2]))
    self.assertEqual(call._tensor_names, ["global_step"])
    self.assertIsNone(call.generate_host_call_hook())


class BaseEmbeddingHostCallTest(_GraphTest):
  def _call(self, enable=True, scalars=True, caching=False, deepinsight=False, n=100, top_k=10):
    return BaseEmbeddingHostCall(
      self.folder,
      False,
      deepinsight,
      scalars,
      caching,
      top_k,
      {
        "enable_host_call": enable,
        "context": None,
        "cpu_test": True,
        "host_call_every_n_steps": n,
      },
    )

  def test_compute_new_value(self):
    call = BaseEmbeddingHostCall(
      "",
      False,
      False,
      False,
      False,
      10,
      {
        "enable_host_call": False,
        "context": None,
        "cpu_test": False,
        "host_call_every_n_steps": 100,
      },
    )
    base = tf.zeros([10])
    delta = tf.ones([2])
    values = []
    for offset in (1, 5, 6):
      base = call._compute_new_value(base, delta, offset)
      values.append(base)
    with tf.compat.v1.Session() as session:
      values = session.run(values)
    self.assertAllEqual(values[0], [0, 1, 1, 0, 0, 0, 0, 0, 0, 0])
    self.assertAllEqual(values[1], [0, 1, 1, 0, 0, 1, 1, 0, 0, 0])
    self.assertAllEqual(values[2], [0, 1, 1, 0, 0, 1, 2, 1, 0, 0])
    with self.assertRaises(AssertionError):
      call._compute_new_value(tf.zeros([10]), tf.ones([2], tf.int32), 0)
    with self.assertRaises(AssertionError):
      call._compute_new_value(tf.zeros([10]), tf.ones([2, 1]), 0)

  def test_params_decide_whether_enabled(self):
    call = self._call(enable=False)
    call.record_summary_tensor("x_avg", tf.constant(1.0))
    self.assertIsNone(call.generate_host_call_hook())

  def test_without_scalar_metrics_only_auc_inputs(self):
    call = self._call(scalars=False)
    for name in ("x_avg", "labels_for_auc_calculation", "sample_rate", "req_time"):
      call.record_summary_tensor(name, tf.constant([1.0]))
    self.assertEqual(
      call._tensor_names, ["global_step", "labels_for_auc_calculation", "sample_rate", "req_time"]
    )

  def test_reductions(self):
    call = self._call()
    for name in ("x_avg", "x_max", "x_sum", "x"):
      call.record_summary_tensor(name, tf.constant([4.0, 1.0, 10.0]))
    self.run_host_call(call.generate_host_call_hook(), steps=2)
    self.assertEqual(
      read_summaries(os.path.join(self.folder, "host_call")),
      {
        "x_avg": {1: 5.0, 2: 5.0},
        "x_max": {1: 10.0, 2: 10.0},
        "x_sum": {1: 15.0, 2: 15.0},
        "x": {1: 4.0, 2: 4.0},
      },
    )

  def _summaries_of_cores(self, call, names_and_values):
    """Feeds what several cores would send."""
    for name, value in names_and_values.items():
      call.record_summary_tensor(name, value[0])
    function, _ = call.generate_host_call_hook()
    groups = {}
    recorded = {
      "global_step": np.full([len(value), 1], 0, np.int64),
      **{name: np.asarray(v).reshape(len(v), -1) for name, v in names_and_values.items()},
    }
    for name in call._tensor_names:
      groups.setdefault(recorded[name].dtype, []).append(recorded[name])
    tensors = [tf.constant(np.concatenate(group, axis=1)) for group in groups.values()]
    self.run_host_call((function, tensors), steps=1)
    return {
      tag: values[0]
      for tag, values in read_summaries(os.path.join(self.folder, "host_call")).items()
    }

  def test_worked_example_of_two_cores(self):
    summaries = self._summaries_of_cores(
      self._call(),
      {
        "labels_for_auc_calculation": np.array([[1, 0], [1, 0]], np.float32),
        "y_pred_for_auc_calculation": np.array([[0.9, 0.2], [0.8, 0.1]], np.float32),
        "uid_bucket": np.array([[1, 50], [2, 3]], np.int32),
      },
    )
    self.assertAlmostEqual(summaries["sampled_labels_variable_avg"], 2 / 3, places=6)
    self.assertAlmostEqual(summaries["sampled_preds_variable_avg"], 0.6, places=6)
    self.assertAlmostEqual(summaries["auc"], 1.0, places=5)  # already at the first step

  def test_one_sample_and_none(self):
    for buckets, mean in (([[1], [50]], 1.0), ([[50], [50]], 0.0)):
      with tf.Graph().as_default():
        self.global_step = tf.compat.v1.train.get_or_create_global_step()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        summaries = self._summaries_of_cores(
          self._call(),
          {
            "labels_for_auc_calculation": np.array([[1], [0]], np.float32),
            "y_pred_for_auc_calculation": np.array([[0.9], [0.2]], np.float32),
            "uid_bucket": np.array(buckets, np.int32),
          },
        )
        self.assertEqual(summaries["sampled_labels_variable_avg"], mean)

  def test_missing_inputs_and_deepinsight(self):
    call = self._call(deepinsight=True)
    call.record_summary_tensor("req_time", tf.constant([10, 20], tf.int64))
    call.record_summary_tensor("sample_rate", tf.constant([0.5, 1.0]))
    self.run_host_call(call.generate_host_call_hook(), steps=1)
    summaries = read_summaries(os.path.join(self.folder, "host_call"))
    self.assertEqual(
      set(summaries),
      {
        "req_times_variable_avg",
        "sample_rates_variable_avg",
        "di_req_times",
        "di_example_sample_rates",
      },
    )
    self.assertEqual(summaries["req_times_variable_avg"][1], 15.0)
    text = summaries["di_req_times"][1]
    with tf.compat.v1.Session() as session:
      self.assertAllEqual(session.run(tf.io.parse_tensor(text, tf.int64)), [10, 20])

  def test_caching_needs_an_interval(self):
    with self.assertRaisesRegex(AssertionError, "host_call_every_n_steps > 1, got 1"):
      self._call(caching=True, n=1)

  def test_caching(self):
    n, top_k = 3, 2
    call = self._call(caching=True, n=n, top_k=top_k)
    step = tf.cast(self.global_step, tf.float32)
    call.record_summary_tensor("labels_for_auc_calculation", tf.stack([step, -1.0, step + 0.5]))
    call.record_summary_tensor("y_pred_for_auc_calculation", tf.stack([0.2, 0.9, step / 10]))
    call.record_summary_tensor("uid_bucket", tf.constant([2, 900, 1]))
    call.record_summary_tensor("req_time", tf.stack([self.global_step, self.global_step]))
    hook = call.generate_host_call_hook()
    names = dict(zip(call._tensor_names, range(99)))
    self.assertIn("labels_tpu_variable", names)
    self.assertIn("tpu_variables_accumulated_times", names)
    self.assertNotIn("labels_for_auc_calculation", names)
    self.assertEqual(tf.compat.v1.trainable_variables(), [])
    (restore,) = call.tpu_var_restore_hooks
    self.assertIsInstance(restore, TPUVariableRestoreHook)

    self.run_host_call(hook, steps=5, session_hooks=[restore])

    summaries = read_summaries(os.path.join(self.folder, "host_call"))
    # Samples of a step: its two smallest buckets, labels step + 0.5 and step. Cleared at step 4.
    want = {1: 1.25, 2: 1.75, 3: 2.25, 4: 4.25, 5: 4.75}
    self.assertEqual(summaries["sampled_labels_variable_avg"], want)
    self.assertEqual(summaries["req_times_variable_avg"], {1: 1.0, 2: 1.5, 3: 2.0, 4: 4.0, 5: 4.5})

  def test_caching_without_scalar_metrics_records_nothing(self):
    call = self._call(caching=True, scalars=False)
    call.record_summary_tensor("labels_for_auc_calculation", tf.constant([1.0]))
    call.generate_host_call_hook()
    self.assertEqual(call._tensor_names, ["global_step"])


class HostCallTest(_GraphTest):
  def test_write(self):
    call = host_call.HostCall(self.folder, True, True)
    call.record_summary_tensor("x_avg", tf.constant([1.0, 3.0]))
    self.run_host_call(call.generate_host_call_hook(), steps=1)
    summaries = read_summaries(os.path.join(self.folder, "host_call"))
    self.assertEqual(summaries["x_avg"], {1: 2.0})
    self.assertIn("di_x_avg", summaries)

  def test_records_although_disabled(self):
    call = host_call.HostCall(self.folder, False, False)
    call.record_summary_tensor("x", tf.constant(1.0))
    self.assertEqual(call._tensor_names, ["global_step", "x"])
    self.assertIsNone(call.generate_host_call_hook())


if __name__ == "__main__":
  unittest.main()
