"""Helpers of tests: table configuration, servers in this process, profiler."""

import glob
import os

import tensorflow as tf

from monolith.native_training import learning_rate_functions, test_utils, utils

tf.compat.v1.disable_eager_execution()


class TestUtilsTest(tf.test.TestCase):
  def test_config(self):
    config = test_utils.generate_test_hash_table_config()
    (segment,) = config.table_config.entry_config.segments

    self.assertEqual(config.table_config.WhichOneof("type"), "cuckoo")
    self.assertEqual(segment.dim_size, 2)
    self.assertEqual(segment.opt_config.WhichOneof("type"), "sgd")
    self.assertTrue(segment.opt_config.HasField("stochastic_rounding_float16"))
    self.assertFalse(segment.opt_config.stochastic_rounding_float16)
    self.assertEqual(segment.init_config.WhichOneof("type"), "zeros")
    self.assertEqual(segment.comp_config.WhichOneof("type"), "fp32")
    self.assertEqual(config.learning_rate_fns, [1.0])

  def test_config_arguments(self):
    rate = learning_rate_functions.PolynomialDecay(1.0, 10)
    config = test_utils.generate_test_hash_table_config(4, use_float16=True, learning_rate=rate)
    (segment,) = config.table_config.entry_config.segments

    self.assertEqual(segment.dim_size, 4)
    self.assertTrue(segment.opt_config.stochastic_rounding_float16)
    self.assertEqual(config.learning_rate_fns, [rate])

  def test_cluster(self):
    servers, config = test_utils.create_test_ps_cluster(2)

    self.assertLen(servers, 2)
    (job,) = config.cluster_def.job
    self.assertEqual(job.name, utils.PS_JOB_NAME)
    self.assertEqual(
      dict(job.tasks), {i: s.target[len("grpc://") :] for i, s in enumerate(servers)}
    )
    self.assertEqual([field.name for field, _ in config.ListFields()], ["cluster_def"])
    with tf.Graph().as_default():
      parts = []
      for i in range(2):
        with tf.device(utils.ps_device(i)):
          parts.append(tf.random.uniform([1]) * 0 + i)
      with tf.compat.v1.Session(servers[0].target, config=config) as session:
        self.assertAllEqual(session.run(tf.concat(parts, 0)), [0, 1])

  def test_profile_it(self):
    @test_utils.profile_it
    def add(a, b=1):
      """Adds."""
      return a + b

    self.assertEqual(add(2, b=3), 5)
    self.assertEqual((add.__name__, add.__doc__), ("add", "Adds."))
    files = glob.glob(os.environ["TEST_TMPDIR"] + "/tests_profile/**/*.pb", recursive=True)
    self.assertNotEmpty(files)

    @test_utils.profile_it
    def fail():
      raise KeyError("x")

    for _ in range(2):  # A failure must not leave the profiler running.
      with self.assertRaises(KeyError):
        fail()


if __name__ == "__main__":
  tf.test.main()
