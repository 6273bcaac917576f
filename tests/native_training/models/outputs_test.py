"""Everything that a model function may return, in one form."""

import tensorflow as tf
from absl.testing import absltest, parameterized

from monolith.native_training.models import outputs
from monolith.native_training.models.spec import EstimatorSpec

tf.compat.v1.disable_eager_execution()


class NormaliseTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self._a, self._b = tf.constant([0.25]), tf.constant([0.5])
    self._loss = tf.constant(1.0)

  def _normalise(self, result, target=None):
    return outputs.normalise(result, target, "default")

  def test_one_head(self):
    result = self._normalise(EstimatorSpec(self._a, self._b, "ctr", self._loss, "adam", False))

    self.assertEqual((result.heads, result.classification), (["ctr"], [False]))
    self.assertEqual((result.loss, result.optimizer), (self._loss, "adam"))
    self.assertTrue(result.is_single)
    self.assertIs(result.predictions, self._b)

  def test_triple_takes_head_and_optimizer_from_the_task(self):
    result = self._normalise((self._a, self._loss, self._b), "ctr")

    self.assertEqual((result.heads, result.optimizer), (["ctr"], "default"))
    self.assertEqual(result.classification, [True])

  def test_head_names_of_the_task(self):
    spec = EstimatorSpec([self._a, None], [self._b, self._a], loss=self._loss)

    result = self._normalise(spec, "ctr,cvr")

    self.assertEqual(result.heads, ["ctr", "cvr"])
    self.assertIsNone(result.labels[1])
    self.assertEqual(result.predictions, {"ctr": self._b, "cvr": self._a})
    self.assertFalse(result.is_dict)

  def test_dicts_by_head(self):
    spec = EstimatorSpec(
      {"cvr": self._b, "ctr": self._a},
      {"ctr": self._a, "cvr": self._b},
      classification={"cvr": False, "ctr": True},
    )

    result = self._normalise(spec)

    self.assertEqual((result.heads, result.classification), (["ctr", "cvr"], [True, False]))
    self.assertTrue(result.is_dict)
    self.assertIn("label_", result.labels[0].op.name)

  def test_prediction_has_no_labels(self):
    result = self._normalise(EstimatorSpec(None, {"ctr": self._a}))

    self.assertEqual(result.labels, [None])

  def test_errors(self):
    a = self._a
    for result, error, message in (
      ("text", Exception, "EstimatorSpec Error!"),
      ((a, a), Exception, "EstimatorSpec Error!"),
      (EstimatorSpec(a, {"ctr": a}), AssertionError, "want a dict or None"),
      (EstimatorSpec([a], [a], "ctr"), AssertionError, "head_name is 'ctr', want a list"),
      (EstimatorSpec(a, a), AssertionError, "head_name is None, want a string"),
      (EstimatorSpec([a], [a, a], ["x", "y"]), AssertionError, "2 heads, 1 labels, 2 predictions"),
      (
        EstimatorSpec([a], [a], ["x"], classification=[True, False]),
        AssertionError,
        "classification has 2 entries, want 1",
      ),
    ):
      with self.subTest(message), self.assertRaisesRegex(error, message):
        self._normalise(result)


class TextTest(tf.test.TestCase):
  def test_several_values_are_separated_by_commas(self):
    with self.session():
      ragged = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
      self.assertAllEqual(outputs.as_text(ragged), [b"1,2", b"", b"3"])
      self.assertAllEqual(outputs.as_text(tf.constant([[1, 2], [3, 4]])), [b"1,2", b"3,4"])
      self.assertAllEqual(outputs.as_text(tf.constant(["x", "y"])), [b"x", b"y"])

  def test_missing_floats_are_zeros(self):
    with self.session():
      like = tf.constant([[1.0], [2.0]])
      self.assertAllEqual(outputs.flat_floats(None, like), [0.0, 0.0])
      self.assertAllEqual(outputs.flat_floats(tf.constant([[3], [4]]), like), [3.0, 4.0])


if __name__ == "__main__":
  absltest.main()
