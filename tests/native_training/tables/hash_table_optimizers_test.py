"""Every optimizer, initializer, compressor and retriever through the ops, with worked numbers."""

import os
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  distributed_serving_ops,
  entry,
  hash_filter_ops,
  hash_table_ops,
)
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.hash_table_testing import config_of, make_table, segment

tf.compat.v1.disable_eager_execution()


def _one_bit(**kwargs):
  config = pb.FloatCompressorConfig()
  config.one_bit.SetInParent()
  for name, value in kwargs.items():
    setattr(config.one_bit, name, value)
  return config


def _dynamic_wd(decouple):
  return entry.DynamicWdAdagradOptimizer(
    initial_accumulator_value=0.1,
    weight_decay_factor=0.1,
    decouple_weight_decay=decouple,
    enable_dynamic_wd=False,
  )


class TableTest(tf.test.TestCase, parameterized.TestCase):
  def run(self, result=None):
    with tf.Graph().as_default():
      return super().run(result)

  def assert_creation_fails(self, config, message):
    table = hash_table_ops.hash_table_from_config(config)
    with self.session() as sess:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        sess.run(table.size())


# name, optimizer, learning rate, gradients of each step, vectors after each step.
_STEPS = [
  ("sgd", entry.SgdOptimizer(), 0.1, [[1.0]], [[-0.1]]),
  (
    "adagrad",
    entry.AdagradOptimizer(initial_accumulator_value=1.0),
    0.1,
    [[1.0, 2.0], [1.0, 1.0]],
    [[-0.07071068, -0.08944272], [-0.12844571, -0.13026755]],
  ),
  (
    "adagrad_weight_decay",
    entry.AdagradOptimizer(initial_accumulator_value=1.0, weight_decay_factor=0.1),
    0.1,
    [[1.0, 2.0], [1.0, 2.0]],
    [[-0.07071068, -0.08944272], [-0.128173, -0.155943]],
  ),
  (
    "adagrad_default",
    entry.AdagradOptimizer(),
    1.0,
    [[1.0], [1.0]],
    [[-0.9534626], [-1.6435282]],
  ),
  (
    "adadelta",
    entry.AdadeltaOptimizer(),
    0.01,
    [[10.0, 1.0], [10.0, 1.0]],
    [[-0.0031607, -0.0030151], [-0.0064035, -0.0061047]],
  ),
  (
    "adam",
    entry.AdamOptimizer(),
    0.01,
    [[10.0, 1.0], [10.0, 1.0]],
    [[-0.00990099, -0.00909091], [-0.0198306, -0.01842895]],
  ),
  (
    "adam_nesterov",
    entry.AdamOptimizer(use_nesterov=True),
    0.01,
    [[10.0, 1.0]],
    [[-0.01881188, -0.01727273]],
  ),
  (
    "amsgrad",
    entry.AmsgradOptimizer(),
    0.01,
    [[10.0, 1.0], [10.0, 1.0], [0.0, 0.0]],
    [[-0.00990099, -0.00909091], [-0.0198306, -0.01842895], [-0.02748511, -0.02562744]],
  ),
  (
    "momentum",
    entry.MomentumOptimizer(),
    0.01,
    [[10.0, 1.0], [10.0, 1.0]],
    [[-0.1, -0.01], [-0.29, -0.029]],
  ),
  (
    "momentum_nesterov",
    entry.MomentumOptimizer(use_nesterov=True),
    0.01,
    [[10.0, 1.0], [10.0, 1.0]],
    [[-0.19, -0.019], [-0.461, -0.0461]],
  ),
  (
    "moving_average",
    entry.MovingAverageOptimizer(),
    123.0,
    [[10.0, 1.0], [10.0, 1.0]],
    [[1.0, 0.1], [1.9, 0.19]],
  ),
  (
    "ftrl",
    entry.FtrlOptimizer(),
    0.01,
    [[10.0, 1.0], [10.0, 1.0]],
    [[-0.009995, -0.00953463], [-0.0170643, -0.0164353]],
  ),
  (
    "ftrl_regularized",
    entry.FtrlOptimizer(
      beta=1.0, initial_accumulator_value=0.1, l1_regularization=1.0, l2_regularization=2.0
    ),
    0.01,
    [[10.0, -10.0, 0.5]],
    [[-0.00816327, 0.00816327, 0.0]],
  ),
  (
    "group_ftrl",
    entry.FTRLWithGroupSparsityOptimizer(),
    0.01,
    [[10.0, 1.0], [10.0, 1.0]],
    [[-0.00909091, -0.005], [-0.015695, -0.00914214]],
  ),
  (
    "group_ftrl_regularized",
    entry.FTRLWithGroupSparsityOptimizer(l1_regularization=1.0, l2_regularization=0.5),
    0.01,
    [[10.0, 1.0]],
    [[-0.00818261, -0.00449125]],
  ),
  (
    "group_ftrl_sparse",
    entry.FTRLWithGroupSparsityOptimizer(l1_regularization=1.0),
    0.01,
    [[0.3, 0.4]],
    [[0.0, 0.0]],
  ),
  (
    "group_adagrad_one",
    entry.AdaGradWithGroupLassoOptimizer(
      beta=1.0, initial_accumulator_value=0.0, l2_regularization=1.0
    ),
    0.01,
    [[10.0], [10.0]],
    [[-0.00818182], [-0.0141255]],
  ),
  (
    "group_adagrad_two",
    entry.AdaGradWithGroupLassoOptimizer(
      beta=1.0, initial_accumulator_value=0.0, l2_regularization=0.5
    ),
    0.01,
    [[10.0, 1.0], [1.0, 5.0]],
    [[-0.00863862, -0.00086386], [-0.0090962, -0.00477795]],
  ),
  (
    "group_adagrad_free",
    entry.AdaGradWithGroupLassoOptimizer(
      beta=1.0, initial_accumulator_value=0.0, l2_regularization=0.0
    ),
    0.01,
    [[10.0, 1.0]],
    [[-0.00909091, -0.00090909]],
  ),
  (
    "group_adagrad_sparse",
    entry.AdaGradWithGroupLassoOptimizer(
      beta=1.0, initial_accumulator_value=0.0, l2_regularization=1000.0
    ),
    0.01,
    [[10.0, 1.0]],
    [[0.0, 0.0]],
  ),
  ("rmsprop", entry.RmspropOptimizer(0.01), 0.01, [[10.0], [10.0]], [[-0.0240253], [-0.0426859]]),
  (
    "rmspropv2",
    entry.RmspropV2Optimizer(),
    0.01,
    [[10.0, 1.0], [10.0, 1.0]],
    [[-0.0090909, -0.005], [-0.0158550, -0.0092045]],
  ),
  (
    "dynamic_wd_coupled",
    _dynamic_wd(False),
    0.1,
    [[1.0, 2.0], [1.0, 2.0]],
    [[0.40424824, -0.59871048], [0.3354196, -0.66877997]],
    [0.5, -0.5],
  ),
  (
    "dynamic_wd_decoupled",
    _dynamic_wd(True),
    0.1,
    [[1.0, 2.0], [1.0, 2.0]],
    [[0.39965373, -0.59377295], [0.32665065, -0.65810806]],
    [0.5, -0.5],
  ),
]


class StepsTest(TableTest):
  @parameterized.named_parameters(*[(s[0], *s[1:5], s[5] if len(s) > 5 else None) for s in _STEPS])
  def test_worked_numbers(self, optimizer, rate, gradients, want, start):
    dim = len(gradients[0])
    table = make_table(segment(dim, optimizer), learning_rates=[rate])
    grad = tf.compat.v1.placeholder(tf.float32, [1, dim])
    with self.session() as sess:
      if start:
        sess.run(table.assign([1], [start]).as_op())
      update = table.apply_gradients([1], grad, tf.constant(0, tf.int64)).as_op()
      for gradient, vector in zip(gradients, want):
        sess.run(update, {grad: [gradient]})
        self.assertAllClose(sess.run(table.lookup([1])), [vector], atol=1e-6, rtol=1e-6)

  @parameterized.named_parameters(*[(s[0], *s[1:4]) for s in _STEPS])
  def test_two_equal_segments_in_a_wide_batch_agree_with_one(self, optimizer, rate, gradients):
    dim = len(gradients[0])
    single = make_table(segment(dim, optimizer), learning_rates=[rate])
    double = make_table(
      segment(dim, optimizer), segment(3), segment(dim, optimizer), learning_rates=[rate, 1.0, rate]
    )
    ids = np.arange(1000)
    with self.session() as sess:
      for gradient in gradients:
        rows = np.tile(np.float32(gradient), (1000, 1))
        wide = np.concatenate([rows, np.zeros((1000, 3), np.float32), rows], axis=1)
        step = tf.constant(0, tf.int64)
        sess.run(single.apply_gradients(ids, rows, step).as_op())
        sess.run(double.apply_gradients(ids, wide, step, use_multi_threads=True).as_op())
      one, two = sess.run([single.lookup(ids), double.lookup(ids)])

      self.assertAllClose(two[:, :dim], one, atol=1e-7, rtol=1e-6)
      self.assertAllClose(two[:, dim + 3 :], one, atol=1e-7, rtol=1e-6)

  def test_state_after_two_steps(self):
    def state(optimizer, rate, gradients):
      table = make_table(segment(len(gradients[0]), optimizer), learning_rates=[rate])
      with self.session() as sess:
        for gradient in gradients:
          sess.run(table.apply_gradients([1], [gradient], tf.constant(0, tf.int64)).as_op())
        dump = pb.EntryDump.FromString(sess.run(table.lookup_entry([1]))[0]).opt.dump[0]
      return getattr(dump, dump.WhichOneof("type"))

    adagrad = state(
      entry.AdagradOptimizer(initial_accumulator_value=1.0, weight_decay_factor=0.1),
      0.1,
      [[1.0, 2.0]] * 2,
    )
    self.assertAllClose(adagrad.norm, [2.985908, 8.964303])
    adadelta = state(entry.AdadeltaOptimizer(), 0.01, [[10.0, 1.0]])
    self.assertAllClose(adadelta.accum, [10, 0.1])
    self.assertAllClose(adadelta.accum_update, [0.00999, 0.0090909], atol=1e-6)
    adam = state(entry.AdamOptimizer(), 0.01, [[10.0, 1.0]])
    self.assertAllClose(adam.m, [1, 0.1])
    self.assertAllClose(adam.v, [1, 0.01])
    self.assertAllClose([adam.beta1_power, adam.beta2_power], [0.81, 0.9801])
    amsgrad = state(entry.AmsgradOptimizer(), 0.01, [[10.0, 1.0], [10.0, 1.0], [0.0, 0.0]])
    self.assertAllClose(amsgrad.vhat, [1.989998, 0.01989998])
    ftrl = state(entry.FtrlOptimizer(), 0.01, [[10.0, 1.0]])
    self.assertAllClose(ftrl.norm, [100.1, 1.1])
    self.assertAllClose(ftrl.zero, [10, 1])
    group_ftrl = state(
      entry.FTRLWithGroupSparsityOptimizer(l1_regularization=1.0), 0.01, [[0.3, 0.4]]
    )
    self.assertAllClose(group_ftrl.zero, [0.3, 0.4])
    lasso = entry.AdaGradWithGroupLassoOptimizer(
      beta=1.0, initial_accumulator_value=0.0, l2_regularization=0.5
    )
    self.assertAllClose(state(lasso, 0.01, [[10.0, 1.0], [1.0, 5.0]]).grad_square_sum, 125)
    self.assertAllClose(state(entry.RmspropOptimizer(), 0.01, [[10.0]]).n, [10])
    self.assertAllClose(state(entry.RmspropV2Optimizer(), 0.01, [[10.0, 1.0]]).n, [100, 1])
    self.assertAllClose(state(entry.MomentumOptimizer(), 0.01, [[10.0, 1.0]]).n, [-0.1, -0.01])

  def test_guards(self):
    zero_step = tf.constant(0, tf.int64)
    with self.session() as sess:
      # 0/0 leaves the vector alone.
      table = make_table(segment(1, entry.AdagradOptimizer(initial_accumulator_value=0.0)))
      updated = table.apply_gradients([1], [[0.0]], zero_step)
      self.assertAllEqual(sess.run(updated.lookup([1])), [[0]])
      lasso = entry.AdaGradWithGroupLassoOptimizer(l2_regularization=0.0)
      table = make_table(segment(2, lasso))
      updated = table.apply_gradients([1], [[0.0, 0.0]], zero_step)
      self.assertAllEqual(sess.run(updated.lookup([1])), [[0, 0]])
      # FTRL with rate 0 changes neither state nor vector.
      table = make_table(segment(1, entry.FtrlOptimizer()), learning_rates=[0.0])
      sess.run(table.assign([1], [[3.0]]).as_op())
      before = sess.run(table.lookup_entry([1]))
      sess.run(table.apply_gradients([1], [[5.0]], zero_step).as_op())
      self.assertAllEqual(sess.run(table.lookup_entry([1])), before)
      # Group Adagrad with rate 0 keeps the vector.
      table = make_table(segment(1, entry.AdaGradWithGroupLassoOptimizer()), learning_rates=[0.0])
      sess.run(table.assign([1], [[3.0]]).as_op())
      updated = table.apply_gradients([1], [[5.0]], zero_step)
      self.assertAllEqual(sess.run(updated.lookup([1])), [[3]])

  def test_batch_softmax(self):
    table = make_table(segment(1, entry.BatchSoftmaxOptimizer()), learning_rates=[0.1])
    with self.session() as sess:
      step = tf.compat.v1.placeholder(tf.int64, [])
      updated = table.apply_gradients([1], [[5.0]], step).lookup([1])
      self.assertAllClose(sess.run(updated, {step: 1}), [[0.1]])
      self.assertAllClose(sess.run(updated, {step: 0}), [[-0.01]])
      with self.assertRaises(tf.errors.InvalidArgumentError):
        sess.run(updated, {step: -1})
      self.assertAllClose(sess.run(table.lookup([1])), [[-0.01]])

  def test_stochastic_rounding_is_unbiased(self):
    optimizer = entry.StochasticRoundingFloat16OptimizerWrapper(entry.SgdOptimizer())
    table = make_table(segment(1, optimizer), segment(1), learning_rates=[1.0, 1.0])
    n = 100000
    with self.session() as sess:
      grads = np.tile(np.float32([[-0.1, -0.1]]), (n, 1))
      updated = table.apply_gradients(np.arange(n), grads, tf.constant(0, tf.int64))
      values = sess.run(updated.lookup(np.arange(n)))

    low, high = np.float32(0.0999755859375), np.float32(0.10003662109375)
    self.assertCountEqual(np.unique(values[:, 0]), [low, high])
    self.assertAllClose(np.mean(values[:, 0] == high), 0.4000244, atol=0.01)
    # The other segment stays as it is.
    self.assertAllEqual(np.unique(values[:, 1]), np.float32([0.1]))

  def test_stochastic_rounding_clamps(self):
    optimizer = entry.StochasticRoundingFloat16OptimizerWrapper(entry.SgdOptimizer())
    table = make_table(segment(3, optimizer))
    with self.session() as sess:
      updated = table.apply_gradients([1], [[-1e6, 1e6, -0.5]], tf.constant(0, tf.int64))
      self.assertAllEqual(sess.run(updated.lookup([1])), [[65504, -65504, 0.5]])

  def test_nan_gradients_are_refused_or_stay_in_their_row(self):
    table = make_table(segment(2, entry.AdagradOptimizer()))
    with self.session() as sess:
      grads = [[1.0, 1.0], [np.nan, 1.0], [1.0, np.inf]]
      rows = table.apply_gradients([1, 2, 3], grads, tf.constant(0, tf.int64)).lookup([1, 2, 3])
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "of 2 rows: ids 2, 3"):
        sess.run(rows)
      self.assertAllEqual(sess.run(table.lookup([2, 3])), np.zeros([2, 2]))
      with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="skip"):
        self.assertAllEqual(np.abs(sess.run(rows)).sum(1) > 0, [True, False, False])
      self.assertEqual(sess.run(table.size()), 1)
      self.assertEqual(sess.run(table.stats())[4], 4)
      with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="ignore"):
        self.assertAllEqual(np.isfinite(sess.run(rows)), [[1, 1], [0, 1], [1, 0]])


class InitializersTest(TableTest):
  def test_constants_and_combination(self):
    ones = pb.InitializerConfig()
    ones.ones.SetInParent()
    table = make_table(
      segment(1, initializer=entry.ConstantsInitializer(3.0)),
      segment(2, initializer=entry.ConstantsInitializer(4.0)),
      segment(1, initializer=ones),
      segment(1),
    )
    with self.session() as sess:
      added = table.assign_add([1], [[0.0] * 5])
      self.assertAllEqual(sess.run(added.lookup([1])), [[3, 4, 4, 1, 0]])

  def test_random_uniform(self):
    table = make_table(segment(4, initializer=entry.RandomUniformInitializer(-1.0, 1.0)))
    n = 1000
    with self.session() as sess:
      added = table.assign_add(np.arange(n), np.zeros((n, 4), np.float32))
      values = sess.run(added.lookup(np.arange(n)))
      self.assertGreater(values.max(), 0.9)
      self.assertLess(values.min(), -0.9)
      self.assertLess(values.max(), 1.0)
      self.assertGreaterEqual(values.min(), -1.0)
      # Some of the 2^24 values may be drawn twice; half a pair is to be expected.
      self.assertGreater(len(np.unique(values)), 4 * n - 12)
      self.assertAllClose(values.mean(), 0, atol=0.05)

  def test_random_values_depend_on_the_seed_and_id_only(self):
    os.environ["MONOLITH_TABLE_SEED"] = "7"
    self.addCleanup(os.environ.pop, "MONOLITH_TABLE_SEED")
    initializer = entry.RandomUniformInitializer()
    tables = [make_table(segment(2, initializer=initializer)) for _ in range(2)]
    ids = np.arange(100)
    zeros = np.zeros((100, 2), np.float32)
    with self.session() as sess:
      forward = tables[0].assign_add(ids, zeros).lookup(ids)
      backward = tables[1].assign_add(ids[::-1].copy(), zeros).lookup(ids)
      self.assertAllEqual(*sess.run([forward, backward]))


class CompressorsTest(TableTest):
  @parameterized.named_parameters(
    ("fp32", entry.Fp32Compressor(), [0.1, -7.5], [0.1, -7.5]),
    (
      "fp16",
      entry.Fp16Compressor(),
      [0.1, 0.2, 10000, 70000, -70000],
      [0.0999755859, 0.1999511719, 10000, 65504, -65504],
    ),
    (
      "fixed_r8",
      entry.FixedR8Compressor(5.0),
      [100, -7, 3.5, 1.4 * 5 / 128, 1.6 * 5 / 128, -1.4 * 5 / 128, -1.6 * 5 / 128, np.nan, np.inf],
      [4.9609375, -5, 3.515625, 5 / 128, 10 / 128, -5 / 128, -10 / 128, 0, 4.9609375],
    ),
    (
      "fixed_r8_of_one",
      entry.FixedR8Compressor(1.0),
      [1.0, -1.0, 0.5, 0.003, 0.004],
      [0.9921875, -1.0, 0.5, 0, 0.0078125],
    ),
    (
      "one_bit",
      entry.OneBitCompressor(amplitude=1.0),
      [100, 0.1, 1e-5, 0, -1e-5, -0.1, -100],
      [1, 1, 1, -1, -1, -1, -1],
    ),
  )
  def test_serving_rows(self, compressor, values, want):
    table = make_table(segment(len(values), compressor=compressor), serving=True)
    ignore = mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="ignore")
    with ignore, self.session() as sess:
      looked_up = table.assign([1], [values]).lookup([1, 2])
      self.assertAllClose(sess.run(looked_up), [want, [0] * len(want)], atol=1e-9)

  def test_serving_segments(self):
    table = make_table(
      segment(1, compressor=entry.Fp16Compressor()),
      segment(3, compressor=entry.OneBitCompressor(amplitude=0.5)),
      segment(2, compressor=entry.FixedR8Compressor()),
      segment(1, compressor=entry.Fp32Compressor()),
      serving=True,
    )
    with self.session() as sess:
      looked_up = table.assign([1], [[0.1, 1, -1, 2, 0.5, -1.0, 0.3]]).lookup([1])
      self.assertAllClose(
        sess.run(looked_up), [[0.0999755859, 0.5, -0.5, 0.5, 0.5, -1.0, 0.3]], atol=1e-9
      )

  def test_serving_assign_add_starts_from_zero(self):
    table = make_table(segment(2, compressor=entry.Fp16Compressor()), serving=True)
    with self.session() as sess:
      add = table.assign_add([1], [[1.0, -2.0]])
      self.assertAllEqual(sess.run(add.lookup([1])), [[1, -2]])
      self.assertAllEqual(sess.run(add.lookup([1])), [[2, -4]])

  def test_serving_rows_have_no_state_to_optimize(self):
    table = make_table(segment(1), serving=True)
    with self.session() as sess:
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError, "ServingEntryAccessor doesn't support"
      ):
        sess.run(table.apply_gradients([1], [[1.0]], tf.constant(0, tf.int64)).as_op())
      self.assertEqual(sess.run(table.size()), 0)


class RetrieversTest(TableTest):
  def test_fake_quantisation(self):
    table = make_table(segment(2, compressor=entry.FixedR8Compressor(1.0)))
    with self.session() as sess:
      table = table.assign([1], [[0.004, 2.0]])
      self.assertAllEqual(sess.run(table.lookup([1])), [[0.0078125, 0.9921875]])
      # Stored values and gradients are exact.
      updated = table.apply_gradients([1], [[0.001, 1.5]], tf.constant(0, tf.int64))
      dump = pb.EntryDump.FromString(sess.run(updated.lookup_entry([1]))[0])
      self.assertAllClose(dump.num, [0.003, 0.5])

  def test_hash_net(self):
    compressor = _one_bit(step_size=1000, amplitude=0.1)
    table = make_table(segment(1, compressor=compressor), learning_rates=[1.0])
    step = tf.compat.v1.placeholder(tf.int64, [])
    grad = tf.compat.v1.placeholder(tf.float32, [1, 1])
    with self.session() as sess:
      reset = table.assign([1], [[2.0]]).as_op()
      update = table.apply_gradients([1], grad, step).as_op()

      def stored():
        return pb.EntryDump.FromString(sess.run(table.lookup_entry([1]))[0]).num[0]

      sess.run(table.assign([2], [[1.0]]).as_op())
      sess.run(reset)
      self.assertAllClose(sess.run(table.lookup([2, 1])), [[0.07615941], [0.09640275]])
      for at, gradient, want in ((0, 1.0, 0.00706508), (999, 2.0, 0.01413016)):
        sess.run(reset)
        sess.run(update, {step: at, grad: [[gradient]]})
        self.assertAllClose(2.0 - stored(), want, atol=3e-7)
      sess.run(reset)
      fed = np.float32([[100.0]])
      sess.run(update, {step: 1000, grad: fed})
      self.assertAllClose(2.0 - stored(), 0.0054426, rtol=1e-3)
      self.assertAllEqual(fed, [[100]])
      sess.run(reset)
      self.assertAllClose(sess.run(table.lookup([1])), [[0.0999889]])

  def test_hash_net_does_not_change_the_gradient_tensor(self):
    table = make_table(segment(1, compressor=entry.OneBitCompressor()))
    with self.session() as sess:
      gradient = tf.random.stateless_uniform([1, 1], [1, 2]) + 1.0
      update = table.apply_gradients([1], gradient, tf.constant(0, tf.int64))
      with tf.control_dependencies([update.as_op()]):
        after = tf.identity(gradient)
      self.assertAllEqual(sess.run(after), sess.run(gradient))


class CreationErrorsTest(TableTest):
  def test_missing_parts(self):
    cases = [
      ("opt_config", False, "init or opt config is missing from entry config"),
      ("init_config", False, "init or opt config is missing from entry config"),
      ("comp_config", True, "comp config is missing form entry config"),
    ]
    for i, (field, serving, message) in enumerate(cases):
      with tf.Graph().as_default(), self.subTest(i):
        part = segment(1)
        part.ClearField(field)
        self.assert_creation_fails(config_of(part, serving=serving), message)

  def test_unset_types(self):
    for i, (field, message) in enumerate(
      [
        ("opt_config", "OptimizerConfig must be set type"),
        ("init_config", "InitializerConfig must be set type"),
      ]
    ):
      with tf.Graph().as_default(), self.subTest(i):
        part = segment(1)
        getattr(part, field).Clear()
        getattr(part, field).SetInParent()
        self.assert_creation_fails(config_of(part), message)
    part = segment(1)
    part.comp_config.Clear()
    part.comp_config.SetInParent()
    self.assert_creation_fails(config_of(part, serving=True), "ompressor")

  def test_optimizers_without_implementation(self):
    dc = pb.OptimizerConfig()
    dc.dc.SetInParent()
    for i, optimizer in enumerate([dc, entry.DynamicWdAdagradOptimizer()]):
      with tf.Graph().as_default(), self.subTest(i):
        self.assert_creation_fails(
          config_of(segment(1, optimizer)), "optimizer is not implemented yet. "
        )

  def test_unknown_entry_type(self):
    config = config_of(segment(1))
    config.table_config.entry_config.entry_type = pb.EntryConfig.UNKNOWN
    self.assert_creation_fails(config, "Unknown entry type: ")

  def test_bad_numbers(self):
    cases = [
      (config_of(segment(0)), "dim_size"),
      (config_of(segment(-3)), "dim_size"),
      (config_of(segment(1), segment(0)), "segment 1.*dim_size"),
      (config_of(segment(2, entry.BatchSoftmaxOptimizer())), "segment 0"),
      (config_of(segment(1, entry.AdamOptimizer(beta1=1.0))), "segment 0.*beta1"),
      (config_of(segment(1), segment(1, entry.AdamOptimizer(beta2=1.0))), "segment 1.*beta2"),
      (config_of(segment(1, entry.AdamOptimizer(epsilon=float("nan")))), "segment 0.*epsilon"),
      (
        config_of(segment(1, entry.AdagradOptimizer(initial_accumulator_value=-1.0))),
        "segment 0.*initial_accumulator_value",
      ),
      (
        config_of(segment(1, entry.AdagradOptimizer(weight_decay_factor=float("inf")))),
        "segment 0.*weight_decay",
      ),
      (config_of(segment(1, compressor=_one_bit(step_size=0))), "segment 0.*step_size"),
      (config_of(segment(1), slot_expire_times={32768: 1}), "32768"),
    ]
    for i, (config, message) in enumerate(cases):
      with tf.Graph().as_default(), self.subTest(i):
        self.assert_creation_fails(config, message)

  def test_no_segments(self):
    config = pb.EmbeddingHashTableConfig()
    config.cuckoo.SetInParent()
    table = gen_monolith_ops.monolith_hash_table(
      hash_filter_ops.create_dummy_hash_filter(),
      distributed_serving_ops.create_dummy_sync_client(),
      config=config.SerializeToString(),
    )
    with self.session() as sess:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "segment"):
        sess.run(table)


if __name__ == "__main__":
  tf.test.main()
