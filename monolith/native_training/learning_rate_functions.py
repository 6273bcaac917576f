"""Learning rates as objects: called when a graph is built, compared by their text."""

import abc

import tensorflow as tf

from monolith.native_training.monolith_export import monolith_export


class LearningRateFunction:
  """A learning rate that is computed in the graph.

  Two objects of the same class with equal attributes have equal `str()`; tables merge the columns
  whose learning rates read alike.
  """

  @abc.abstractmethod
  def __call__(self) -> tf.Tensor:
    """Returns the current learning rate, a float32 scalar."""
    raise NotImplementedError("Learning rate function must override __call__")

  def __str__(self) -> str:
    params = ",".join(f"{key}={value}" for key, value in sorted(vars(self).items()))
    return f'LearningRateFunction("{type(self).__name__}",Params:{params})'


@monolith_export
class PolynomialDecay(LearningRateFunction):
  """Goes from one learning rate to another in `decay_steps` steps of the global step.

  With step s and D = `decay_steps`:

    lr(s) = (initial - end) * (1 - min(s, D) / D) ** power + end

  With `cycle`, D becomes the smallest multiple of itself that is not below s (D itself at s = 0),
  and s is not clipped. A warm-up is a decay whose end is above its start.
  """

  def __init__(
    self,
    initial_learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    name: str = None,
  ):
    """Args:
      initial_learning_rate: the rate at step 0.
      decay_steps: number of steps, positive.
      end_learning_rate: the rate from step `decay_steps` on.
      power: the exponent.
      cycle: whether to start over when the end is reached.
      name: name scope of the ops, `PolynomialDecay` by default.

    Raises:
      ValueError: `decay_steps` is not positive.
    """
    if decay_steps <= 0:
      raise ValueError(f"decay_steps is {decay_steps}, want a positive number")
    self.initial_learning_rate = initial_learning_rate
    self.decay_steps = decay_steps
    self.end_learning_rate = end_learning_rate
    self.power = power
    self.cycle = cycle
    self.name = name

  def __call__(self) -> tf.Tensor:
    global_step = tf.compat.v1.train.get_or_create_global_step()
    with tf.name_scope(self.name or "PolynomialDecay"):
      step = tf.cast(global_step, tf.float32)
      decay_steps = tf.constant(self.decay_steps, tf.float32)
      if self.cycle:
        decay_steps *= tf.maximum(tf.math.ceil(step / decay_steps), 1.0)
      else:
        step = tf.minimum(step, decay_steps)
      initial = tf.cast(self.initial_learning_rate, tf.float32)
      end = tf.cast(self.end_learning_rate, tf.float32)
      remaining = tf.pow(1.0 - step / decay_steps, tf.cast(self.power, tf.float32))
      return (initial - end) * remaining + end
