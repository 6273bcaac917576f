"""Tests of `entry`: optimizers, initializers, compressors and table configurations."""

import dataclasses
import inspect

import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import entry
from monolith.native_training.learning_rate_functions import PolynomialDecay
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

tf.compat.v1.disable_eager_execution()

_OPTIMIZERS = {
  "sgd": entry.SgdOptimizer,
  "adagrad": entry.AdagradOptimizer,
  "adadelta": entry.AdadeltaOptimizer,
  "adam": entry.AdamOptimizer,
  "amsgrad": entry.AmsgradOptimizer,
  "batch_softmax": entry.BatchSoftmaxOptimizer,
  "momentum": entry.MomentumOptimizer,
  "moving_average": entry.MovingAverageOptimizer,
  "rmsprop": entry.RmspropOptimizer,
  "rmspropv2": entry.RmspropV2Optimizer,
  "ftrl": entry.FtrlOptimizer,
  "group_ftrl": entry.FTRLWithGroupSparsityOptimizer,
  "group_adagrad": entry.AdaGradWithGroupLassoOptimizer,
  "dynamic_wd_adagrad": entry.DynamicWdAdagradOptimizer,
}
_FIELD_OF_ARGUMENT = {
  "l1_regularization": "l1_regularization_strength",
  "l2_regularization": "l2_regularization_strength",
}


class EntryTest(parameterized.TestCase, tf.test.TestCase):
  @parameterized.named_parameters((name, name) for name in _OPTIMIZERS)
  def test_optimizer_arguments_reach_the_proto(self, member):
    cls = _OPTIMIZERS[member]
    parameters = inspect.signature(cls).parameters.values()
    arguments = {p.name: not p.default if "bool" in str(p.annotation) else 7 for p in parameters}

    config = cls(**arguments).as_proto()

    self.assertEqual(config.WhichOneof("type"), member)
    for name, value in arguments.items():
      field = _FIELD_OF_ARGUMENT.get(name, name)
      self.assertEqual(getattr(getattr(config, member), field), value, name)

  @parameterized.named_parameters((name, name) for name in _OPTIMIZERS)
  def test_unset_optimizer_argument_leaves_the_proto_default(self, member):
    cls = _OPTIMIZERS[member]

    proto = getattr(cls().as_proto(), member)

    for parameter in inspect.signature(cls).parameters.values():
      field = _FIELD_OF_ARGUMENT.get(parameter.name, parameter.name)
      self.assertEqual(proto.HasField(field), parameter.default is not None, field)

  @parameterized.named_parameters((name, name) for name in _OPTIMIZERS)
  def test_optimizer_arguments_are_attributes(self, member):
    cls = _OPTIMIZERS[member]
    names = list(inspect.signature(cls).parameters)

    optimizer = cls(*range(1, len(names) + 1))

    self.assertEqual([getattr(optimizer, name) for name in names], list(range(1, len(names) + 1)))
    self.assertEqual(
      repr(optimizer),
      f"{cls.__name__}({', '.join(f'{name}={i + 1}' for i, name in enumerate(names))})",
    )

  def test_equal_settings_are_different_objects(self):
    for cls in (*_OPTIMIZERS.values(), entry.ZerosInitializer, entry.Fp16Compressor):
      first, second = cls(), cls()
      self.assertNotEqual(first, second)
      self.assertLen({first, second}, 2)

  def test_a_subclass_may_bring_its_own_constructor(self):
    class Slow(entry.AdagradOptimizer):
      def __init__(self, factor: float):
        super().__init__(learning_rate=0.5 * factor)

    self.assertEqual(Slow(0.5).as_proto().adagrad.learning_rate, 0.25)

  def test_all_is_what_the_module_defines(self):
    defined = {
      name
      for name, value in vars(entry).items()
      if getattr(value, "__module__", None) == entry.__name__ and not name.startswith("_")
    }
    self.assertEqual(set(entry.__all__), defined | {"LearningRate"})

  def test_stochastic_rounding_wrapper(self):
    proto = entry.StochasticRoundingFloat16OptimizerWrapper(entry.AdagradOptimizer()).as_proto()

    self.assertTrue(proto.stochastic_rounding_float16)
    self.assertEqual(proto.WhichOneof("type"), "adagrad")

  def test_initializers(self):
    self.assertEqual(entry.ZerosInitializer().as_proto().WhichOneof("type"), "zeros")
    self.assertEqual(entry.ConstantsInitializer(2.5).as_proto().constants.constant, 2.5)
    uniform = entry.RandomUniformInitializer(-0.5, 0.25).as_proto().random_uniform
    self.assertEqual((uniform.minval, uniform.maxval), (-0.5, 0.25))
    uniform = entry.RandomUniformInitializer().as_proto().random_uniform
    self.assertAllClose((uniform.minval, uniform.maxval), (-0.05, 0.05))

  def test_batch_softmax_initializer(self):
    self.assertEqual(entry.BatchSoftmaxInitializer(3).as_proto().constants.constant, 3)
    with self.assertRaisesRegex(ValueError, "init_step_interval should be >= 1, while got 0.5"):
      entry.BatchSoftmaxInitializer(0.5)

  def test_compressors(self):
    one_bit = entry.OneBitCompressor().as_proto().one_bit
    self.assertEqual(one_bit.step_size, 200)
    self.assertAllClose(one_bit.amplitude, 0.05)
    self.assertEqual(entry.FixedR8Compressor(2.0).as_proto().fixed_r8.r, 2.0)
    self.assertEqual(entry.Fp16Compressor().as_proto().WhichOneof("type"), "fp16")
    self.assertEqual(entry.Fp32Compressor().as_proto().WhichOneof("type"), "fp32")

  def test_cuckoo_hash_table_config(self):
    config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
    entry.CuckooHashTableConfig(initial_capacity=12).mutate_table(config)
    self.assertEqual(config.WhichOneof("type"), "cuckoo")
    self.assertEqual(config.initial_capacity, 12)
    self.assertFalse(config.enable_feature_eviction)

    entry.CuckooHashTableConfig(feature_evict_every_n_hours=24).mutate_table(config)
    self.assertTrue(config.enable_feature_eviction)
    self.assertEqual(config.feature_evict_every_n_hours, 24)

  def test_canonical_bytes(self):
    config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
    segment = embedding_hash_table_pb2.EntryConfig.Segment(dim_size=1)
    segment.init_config.zeros.SetInParent()
    segment.opt_config.sgd.SetInParent()
    segment.comp_config.fp32.SetInParent()
    config.entry_config.segments.append(segment)
    config.cuckoo.SetInParent()
    self.assertEqual(config.SerializeToString().hex(), "0a100a0e0a020a00120212001a020a0038012a00")

    combined = entry.CombineAsSegment(
      1, entry.ZerosInitializer(), entry.SgdOptimizer(), entry.Fp32Compressor()
    )
    self.assertEqual(combined, segment)

  def test_combine_as_segment_takes_protos_and_copies_them(self):
    optimizer = entry.SgdOptimizer(0.5).as_proto()

    segment = entry.CombineAsSegment(
      3, entry.ZerosInitializer().as_proto(), optimizer, entry.Fp16Compressor()
    )
    optimizer.sgd.learning_rate = 1.0

    self.assertEqual(segment.dim_size, 3)
    self.assertEqual(segment.opt_config.sgd.learning_rate, 0.5)

  def test_objects_can_be_dataclass_defaults(self):
    @dataclasses.dataclass
    class Config:
      initializer: entry.Initializer = entry.ZerosInitializer()
      optimizer: entry.Optimizer = entry.FtrlOptimizer()
      compressor: entry.Compressor = entry.Fp16Compressor()
      table: entry.HashTableConfig = entry.CuckooHashTableConfig()

    self.assertIs(Config().optimizer, Config().optimizer)


class HashTableConfigInstanceTest(tf.test.TestCase):
  def _table_config(self, dim=1):
    config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
    config.entry_config.segments.add(dim_size=dim)
    return config

  def test_str_is_a_function_of_config_and_rates(self):
    first = entry.HashTableConfigInstance(self._table_config(), [1.0, PolynomialDecay(0.1, 10)])
    same = entry.HashTableConfigInstance(
      self._table_config(), [1.0, PolynomialDecay(0.1, 10)], extra_restore_names=["x"]
    )
    self.assertEqual(str(first), str(same))
    self.assertEqual(
      str(entry.HashTableConfigInstance(self._table_config(), [1.0, 0.5])),
      f"TableConfigPB: {self._table_config().SerializeToString()}, LearningRateFns: [1.0, 0.5]",
    )
    other_rate = entry.HashTableConfigInstance(
      self._table_config(), [1.0, PolynomialDecay(0.2, 10)]
    )
    other_config = entry.HashTableConfigInstance(
      self._table_config(2), [1.0, PolynomialDecay(0.1, 10)]
    )
    self.assertLen({str(first), str(other_rate), str(other_config)}, 3)

  def test_extra_restore_names_are_copied(self):
    names = ["a"]
    instance = entry.HashTableConfigInstance(self._table_config(), [1.0], names)
    names.append("b")
    self.assertEqual(instance.extra_restore_names, ["a"])
    self.assertEqual(entry.HashTableConfigInstance(None, []).extra_restore_names, [])

  def test_learning_rates(self):
    instance = entry.HashTableConfigInstance(self._table_config(), [0.5, lambda: tf.constant(2.0)])
    with self.session() as sess:
      rates = instance.call_learning_rate_fns()
      self.assertEqual(rates.dtype, tf.float32)
      self.assertAllClose(sess.run(rates), [0.5, 2.0])
      fewer = instance.call_learning_rate_fns_fewer_ops()
      self.assertEqual(fewer[0], 0.5)
      self.assertAllClose(sess.run(fewer[1]), 2.0)

  def test_no_learning_rate(self):
    instance = entry.HashTableConfigInstance(self._table_config(), [])
    for call in (instance.call_learning_rate_fns, instance.call_learning_rate_fns_fewer_ops):
      with self.assertRaisesRegex(Exception, "Learning_rate_fns must be not empty."):
        call()

  def test_learning_rate_tensor(self):
    instance = entry.HashTableConfigInstance(self._table_config(), [0.5])
    self.assertIsNone(instance.learning_rate_tensor)
    tensor = tf.constant([1.0])
    instance.set_learning_rate_tensor(tensor)
    self.assertIs(instance.learning_rate_tensor, tensor)


if __name__ == "__main__":
  tf.test.main()
