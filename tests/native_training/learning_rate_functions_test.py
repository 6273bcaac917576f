import numpy as np
import tensorflow as tf

from monolith.native_training import entry, estimator, learning_rate_functions, native_model
from monolith.native_training.summary import report

tf.compat.v1.disable_eager_execution()


class PolynomialDecayTest(tf.test.TestCase):
  def _rates(self, fn, steps):
    global_step = tf.compat.v1.train.get_or_create_global_step()
    rate = fn()
    step_ph = tf.compat.v1.placeholder(tf.int64, [])
    assign = global_step.assign(step_ph)
    rates = []
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      for step in steps:
        sess.run(assign, {step_ph: step})
        rates.append(sess.run(rate))
    return rates

  def test_basic(self):
    global_step = tf.compat.v1.train.get_or_create_global_step()
    rate = learning_rate_functions.PolynomialDecay(
      initial_learning_rate=0.01, decay_steps=10, end_learning_rate=0.11
    )()
    increment = global_step.assign_add(1)

    self.assertEqual(rate.dtype, tf.float32)
    self.assertEqual(rate.shape.as_list(), [])
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(increment)
      self.assertAllClose(sess.run(rate), 0.02)
      sess.run(increment)
      self.assertAllClose(sess.run(rate), 0.03)

  def test_dense_optimizer(self):
    tf.compat.v1.train.get_or_create_global_step()
    var0 = tf.Variable([1.0, 2.0])
    var1 = tf.Variable([3.0, 4.0])
    grads0, grads1 = tf.constant([0.1, 0.1]), tf.constant([0.01, 0.01])
    rate = learning_rate_functions.PolynomialDecay(
      initial_learning_rate=3.0, decay_steps=10, end_learning_rate=11.0
    )
    optimizer = tf.compat.v1.train.AdagradOptimizer(rate, initial_accumulator_value=0.1)
    update = optimizer.apply_gradients([(grads0, var0), (grads1, var1)])

    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      for _ in range(3):
        sess.run(update)

      self.assertAllClose(sess.run(var0), [-1.60261, -0.60261])
      self.assertAllClose(sess.run(var1), [2.715679, 3.715679])

  def test_ends_at_the_end_rate(self):
    fn = learning_rate_functions.PolynomialDecay(1.0, 10, 0.5)

    self.assertAllClose(self._rates(fn, [0, 5, 10, 11, 2**40]), [1.0, 0.75, 0.5, 0.5, 0.5])

  def test_default_end_rate(self):
    self.assertAllClose(self._rates(learning_rate_functions.PolynomialDecay(1.0, 4), [4]), [0.0001])

  def test_power(self):
    fn = learning_rate_functions.PolynomialDecay(1.0, 10, 0.0, power=2.0)

    self.assertAllClose(self._rates(fn, [0, 5, 9, 10, 20]), [1.0, 0.25, 0.01, 0.0, 0.0])

  def test_cycle(self):
    fn = learning_rate_functions.PolynomialDecay(1.0, 10, 0.0, cycle=True)

    # After the first ten steps the decay is stretched over 20, then 30 steps.
    self.assertAllClose(
      self._rates(fn, [0, 5, 10, 11, 15, 20, 21, 30]), [1, 0.5, 0, 0.45, 0.25, 0, 0.3, 0], atol=1e-6
    )

  def test_integer_rates(self):
    fn = learning_rate_functions.PolynomialDecay(3, 2, 1)

    self.assertAllClose(self._rates(fn, [0, 1, 2]), [3.0, 2.0, 1.0])

  def test_name_is_used(self):
    rate = learning_rate_functions.PolynomialDecay(1.0, 10, name="my_decay")()

    self.assertStartsWith(rate.name, "my_decay/")

  def test_bad_decay_steps(self):
    for steps in (0, -1):
      with self.assertRaisesRegex(ValueError, f"decay_steps is {steps}"):
        learning_rate_functions.PolynomialDecay(1.0, steps)


class LearningRateFunctionTest(tf.test.TestCase):
  def test_base_class_cannot_be_called(self):
    fn = learning_rate_functions.LearningRateFunction()

    with self.assertRaisesWithLiteralMatch(
      NotImplementedError, "Learning rate function must override __call__"
    ):
      fn()
    self.assertEqual(str(fn), 'LearningRateFunction("LearningRateFunction",Params:)')

  def test_text_has_sorted_attributes(self):
    fn = learning_rate_functions.PolynomialDecay(0.01, 20, 0.05)

    self.assertEqual(
      str(fn),
      'LearningRateFunction("PolynomialDecay",Params:cycle=False,decay_steps=20,'
      "end_learning_rate=0.05,initial_learning_rate=0.01,name=None,power=1.0)",
    )

  def test_text_is_equal_for_equal_parameters_only(self):
    def text(*args):
      return str(learning_rate_functions.PolynomialDecay(*args))

    self.assertEqual(text(0.01, 20, 0.05), text(0.01, 20, 0.05))
    self.assertNotEqual(text(0.01, 20, 0.05), text(0.01, 20, 0.06))

    class Other(learning_rate_functions.PolynomialDecay):
      pass

    self.assertNotEqual(text(0.01, 20), str(Other(0.01, 20)))


class _Clicks(native_model.MonolithModel):
  """The rates of `user` fall to zero within two steps, those of `item` stay."""

  def input_fn(self, mode):
    ids = tf.RaggedTensor.from_tensor(tf.constant([[1], [2]], tf.int64))
    features = {"user": ids, "item": ids, "label": tf.ones([2])}
    return tf.data.Dataset.from_tensors(features).repeat()

  def model_fn(self, features, mode):
    optimizer = entry.SgdOptimizer(0.1)
    falling = learning_rate_functions.PolynomialDecay(0.1, 2, 0.0)
    [user] = self.lookup_embedding_slice(
      ["user"], "vec", 2, optimizer=optimizer, learning_rate_fn=falling
    )
    [item] = self.lookup_embedding_slice(["item"], "vec", 2, optimizer=optimizer)
    logits = tf.reduce_sum(user + item, axis=1)
    label = features["label"]
    loss, pred = native_model.get_sigmoid_loss_and_pred("ctr", logits, label, None, mode=mode)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    return native_model.EstimatorSpec(label, pred, "ctr", loss, optimizer)


class SlotScheduleTest(tf.test.TestCase):
  def test_each_slot_has_its_own_schedule(self):
    folder = self.create_tempdir().full_path
    conf = estimator.RunConfig(is_local=True, model_dir=folder)
    norms = []
    for _ in range(2):
      with tf.Graph().as_default():
        estimator.Estimator(_Clicks(), conf).train(steps=5)
      tables = report.read_tables(tf.train.latest_checkpoint(folder))
      norms.append({table.name: table.norms for table in tables})

    self.assertAllGreater(norms[0]["user"], 0)
    self.assertAllEqual(norms[0]["user"], norms[1]["user"])
    self.assertAllGreater(np.subtract(norms[1]["item"], norms[0]["item"]), 0.01)


if __name__ == "__main__":
  tf.test.main()
