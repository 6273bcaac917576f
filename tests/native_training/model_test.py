"""The FFM model as a complete task."""

import os

import numpy as np
import tensorflow as tf

from monolith.native_training import cpu_training, graph_estimator, model, utils

tf.compat.v1.disable_eager_execution()


class FFMModelTest(tf.test.TestCase):
  def _params(self):
    params = model.FFMParams().task()
    params.name = "ffm"
    return params

  def test_params(self):
    self.assertEqual(self._params().train.per_replica_batch_size, 64)

  def test_tables(self):
    training = cpu_training.CpuTraining(
      cpu_training.CpuTrainingConfig(), self._params().instantiate()
    )
    dims = training.feature_configs.unmerged_slice_dims

    # Slots 0 and 2 take part in two products, 3 and 5 too; slots up to 3 have a bias.
    self.assertEqual(dims["feature_0"], [1, 16, 16])
    self.assertEqual(dims["feature_1"], [1, 16])
    self.assertEqual(dims["feature_2"], [1, 16, 16])
    self.assertEqual(dims["feature_3"], [1, 16, 16])
    self.assertEqual(dims["feature_4"], [16])
    self.assertEqual(dims["feature_5"], [16, 16])

  def test_learns_that_labels_are_zero(self):
    params = self._params()
    model_dir = os.path.join(utils.get_test_tmp_dir(), self.id())

    estimator = cpu_training.local_train(params, model_dir=model_dir, steps=100)

    training = cpu_training.CpuTraining(
      cpu_training.CpuTrainingConfig(), self._params().instantiate()
    )
    estimator = graph_estimator.Estimator(training.create_model_fn(), model_dir)
    predictions = estimator.predict(
      training.create_input_fn(graph_estimator.ModeKeys.PREDICT), yield_single_examples=False
    )
    self.assertLess(np.mean(next(predictions)), 0.2)


if __name__ == "__main__":
  tf.test.main()
