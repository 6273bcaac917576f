"""Tests of logit correction."""

import tensorflow as tf

from monolith.native_training.layers.logit_correction import LogitCorrection
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


class LogitCorrectionTest(LayerTestCase):
  def test_values(self):
    x, rate = tf.constant([0.0, 1.0]), tf.constant([0.5, 0.25])
    plain = self.round_trip(self.from_template(LogitCorrection))
    biased = LogitCorrection(sample_bias=True)
    self.assertAllClose(self.value(plain((x, rate))), [0.693147, 2.386294])
    self.assertAllClose(self.value(biased((x, rate))), [0, 1.073033], atol=1e-5)
    self.assertAllClose(self.value(plain(x, rate)), [0.693147, 2.386294])
    self.assertAllClose(self.value(plain(x)), [0, 1])
    self.assertAllClose(
      self.value(LogitCorrection.get_sample_logits(x, None, True)), [-0.693147, -0.313262]
    )
    self.assertAllClose(self.value(LogitCorrection.get_sample_logits(x, None, False)), [0, 1])
    self.assertAllClose(
      self.value(LogitCorrection.safe_log_sigmoid(tf.constant([-1e4, 1e4]))), [-1e4, 0]
    )


if __name__ == "__main__":
  tf.test.main()
