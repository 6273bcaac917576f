"""Adamom: momentum with Adagrad-like scaling by a decayed mean of squares, for dense variables."""

from typing import Callable, Union

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as training_ops


class AdamomOptimizer(tf.compat.v1.train.Optimizer):
  """One fused step per variable. With `g = weight_decay * w + grad`:

    m <- mom_decay * m + (1 - mom_decay) * g
    v <- ada_decay * v + g^2
    c <- ada_decay * c + 1
    w <- w - learning_rate * m / sqrt(v / c + epsilon)

  Sparse gradients are not supported.
  """

  def __init__(
    self,
    learning_rate: Union[float, tf.Tensor, Callable[[], object]] = 5e-6,
    ada_decay: float = 0.9999,
    mom_decay: float = 0.99,
    epsilon: float = 1e-6,
    weight_decay: float = 0.0,
    use_locking: bool = False,
    name: str = "Adamom",
  ):
    super().__init__(use_locking, name)
    self._learning_rate = learning_rate
    self._ada_decay = ada_decay
    self._mom_decay = mom_decay
    self._epsilon = epsilon
    self._weight_decay = weight_decay
    self._learning_rate_tensor = None

  def _create_slots(self, var_list):
    for var in var_list:
      for slot in ("m", "v", "c"):
        self._zeros_slot(var, slot, f"{self._name}/{slot}")

  def _prepare(self):
    learning_rate = self._call_if_callable(self._learning_rate)
    self._learning_rate_tensor = tf.convert_to_tensor(learning_rate, name="learning_rate")

  def _resource_apply_dense(self, grad, var):
    return training_ops.resource_apply_adamom(
      var.handle,
      self.get_slot(var, "m").handle,
      self.get_slot(var, "v").handle,
      self.get_slot(var, "c").handle,
      tf.cast(self._learning_rate_tensor, grad.dtype.base_dtype),
      self._ada_decay,
      self._mom_decay,
      self._epsilon,
      self._weight_decay,
      grad,
      use_locking=self._use_locking,
    )
