"""Tests that a model function returns one type, whatever module it is taken from."""

import pickle

from absl.testing import absltest

from monolith.native_training import estimator, native_model
from monolith.native_training.models import outputs, spec


class EstimatorSpecTest(absltest.TestCase):
  def test_published_names_are_one_type(self):
    self.assertIs(estimator.EstimatorSpec, spec.EstimatorSpec)
    self.assertIs(native_model.EstimatorSpec, spec.EstimatorSpec)
    self.assertIs(outputs.EstimatorSpec, spec.EstimatorSpec)

  def test_defaults(self):
    value = spec.EstimatorSpec("label", "pred")
    self.assertEqual(tuple(value), ("label", "pred", None, None, None, True))

  def test_replace_and_pickle(self):
    value = spec.EstimatorSpec("label", "pred")._replace(head_name="ctr")
    self.assertEqual(pickle.loads(pickle.dumps(value)), value)
    self.assertEqual(value.head_name, "ctr")


if __name__ == "__main__":
  absltest.main()
