"""RMSProp with momentum and weight decay, for dense variables."""

from typing import Callable, Union

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as training_ops


class RmspropOptimizer(tf.compat.v1.train.Optimizer):
  """One fused step per variable. With `g = weight_decay * w + grad`:

    v <- v + (g^2 - v) * (1 - beta2)
    m <- beta1 * m + learning_rate * g / sqrt(v + epsilon)
    w <- w - m

  With `use_v2`:

    v <- beta2 * v + g^2
    m <- beta1 * m + learning_rate * g / (sqrt(v) + epsilon)

  Sparse gradients are not supported.
  """

  def __init__(
    self,
    learning_rate: Union[float, tf.Tensor, Callable[[], object]] = 5e-6,
    beta1: float = 0.99,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    use_locking: bool = False,
    use_v2: bool = False,
    name: str = "Rmsprop",
  ):
    super().__init__(use_locking, name)
    self._learning_rate = learning_rate
    self._beta1 = beta1
    self._beta2 = beta2
    self._epsilon = epsilon
    self._weight_decay = weight_decay
    self._use_v2 = use_v2
    self._learning_rate_tensor = None

  def _create_slots(self, var_list):
    for var in var_list:
      for slot in ("m", "v"):
        self._zeros_slot(var, slot, f"{self._name}/{slot}")

  def _prepare(self):
    learning_rate = self._call_if_callable(self._learning_rate)
    self._learning_rate_tensor = tf.convert_to_tensor(learning_rate, name="learning_rate")

  def _apply_dense(self, grad, var):
    raise NotImplementedError(
      "Please use tf.compat.v1.disable_eager_execution() instead of "
      "tf.compat.v1.disable_v2_behavior()"
    )

  def _resource_apply_dense(self, grad, var):
    return training_ops.resource_apply_rmsprop(
      var.handle,
      self.get_slot(var, "m").handle,
      self.get_slot(var, "v").handle,
      tf.cast(self._learning_rate_tensor, grad.dtype.base_dtype),
      self._beta1,
      self._beta2,
      self._epsilon,
      self._weight_decay,
      grad,
      use_locking=self._use_locking,
      use_v2=self._use_v2,
    )
