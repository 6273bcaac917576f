"""Tests of `monolith.core.mixed_emb_op_comb_nws`."""

import unittest

import numpy as np
import tensorflow as tf

from monolith import _tensorflow
from monolith.core.mixed_emb_op_comb_nws import MixedEmbedOpComb, TeacherEmbeddingTransform

keras = _tensorflow.import_keras()

tf.compat.v1.disable_v2_behavior()


class MixedEmbedOpCombTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    keras.backend.clear_session()
    # The draws are the same in every run: one of four outcomes may be missing among fifty.
    tf.compat.v1.set_random_seed(1)
    self.global_step = tf.compat.v1.train.get_or_create_global_step()

  def _layer(self, choices=((2, 3), (1, 4)), pretraining_steps=10):
    return MixedEmbedOpComb([f"s{i}" for i in range(len(choices))], choices, 0, pretraining_steps)

  def _session(self):
    session = tf.compat.v1.Session()
    self.addCleanup(session.close)
    session.run(tf.compat.v1.global_variables_initializer())
    return session

  def test_worked_example(self):
    layer = self._layer()
    output = layer(tf.ones([2, 10]))
    summaries = layer.get_summaries()
    session = self._session()
    entropy, dims = session.run([summaries.arch_entropy, summaries.expected_emb_dims])
    self.assertAlmostEqual(entropy, 1.3862944, places=4)
    self.assertAlmostEqual(dims, 5.0, places=2)
    names = [name for name, _ in summaries.arch_weights_after_softmax_list]
    prefix = "arch_embedding_weights_after_softmax/"
    self.assertEqual(names, [prefix + n for n in ("s0_2", "s0_3", "s1_1", "s1_4")])
    self.assertEqual(layer.get_arch_embedding_weights().shape, [4])
    sizes = set()
    for _ in range(50):
      value = session.run(output)
      self.assertAllEqual(value[0], value[1])
      first, second = value[0][:5], value[0][5:]
      self.assertIn(first.tolist(), ([1, 1, 0, 0, 0], [0, 0, 1, 1, 1]))
      self.assertIn(second.tolist(), ([1, 0, 0, 0, 0], [0, 1, 1, 1, 1]))
      sizes.add((int(first.sum()), int(second.sum())))
    self.assertEqual(sizes, {(2, 1), (2, 4), (3, 1), (3, 4)})

  def test_sampling_after_pretraining_follows_the_weights(self):
    layer = self._layer(choices=[(1, 2, 0)], pretraining_steps=10)
    output = layer(tf.ones([1, 3]))
    session = self._session()
    session.run(layer.get_arch_embedding_weights().assign([0.0, 30.0, 0.0]))
    seen = {tuple(session.run(output)[0]) for _ in range(60)}
    self.assertEqual(seen, {(1, 0, 0), (0, 1, 1), (0, 0, 0)})
    session.run(self.global_step.assign(10))
    seen = {tuple(session.run(output)[0]) for _ in range(60)}
    self.assertEqual(seen, {(0, 1, 1)})

  def test_gradient_reaches_the_weights(self):
    layer = self._layer(choices=[(1, 2)])
    output = layer(tf.ones([1, 3]))
    gradient = tf.gradients(output, layer.get_arch_embedding_weights())[0]
    session = self._session()
    gradients = [session.run(gradient) for _ in range(20)]
    self.assertTrue(any(np.abs(g).max() > 0.1 for g in gradients))

  def test_errors(self):
    with self.assertRaisesRegex(AssertionError, "9 columns, the embedding sizes add up to 10"):
      self._layer()(tf.ones([2, 9]))
    with self.assertRaisesRegex(ValueError, "1 slot_names, but 2"):
      MixedEmbedOpComb(["a"], [[1], [2]], 0, 0)
    with self.assertRaisesRegex(ValueError, "Slot a has embedding sizes"):
      MixedEmbedOpComb(["a"], [[]], 0, 0)
    with self.assertRaises(NotImplementedError):
      MixedEmbedOpComb(["a"], [[1]], 0, 0, teacher_embedding_sizes_list=[1])

  def test_teacher_transform(self):
    layer = TeacherEmbeddingTransform([3, 4], [2, 5])
    output = layer(tf.ones([6, 7]))
    self.assertEqual([w.shape.as_list() for w in layer.trainable_weights], [[2, 3], [5, 4]])
    session = self._session()
    value, kernels = session.run([output, layer.trainable_weights])
    self.assertAllClose(value[0], np.concatenate([k.sum(axis=0) for k in kernels]), rtol=1e-5)
    with self.assertRaises(ValueError):
      TeacherEmbeddingTransform([3], [2, 5])


if __name__ == "__main__":
  unittest.main()
