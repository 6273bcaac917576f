"""Shampoo: an optimizer that preconditions the gradient of a tensor along each of its dimensions.

For a gradient G of rank k, dimension i has a statistic S_i, the sum over steps of G contracted with
itself over all other dimensions. Once warmed up, G is multiplied along every dimension by
S_i^(-1/(2k)), and the result is given the length of a diagonal AdaGrad step (grafting). Only `head
+ tail` eigenvectors of a statistic are kept; the others share one value, the offset:

  P = V diag(values) V^T + offset * I

As specified, that offset is the mean of the dropped eigenvalues themselves, not of their inverse
roots. It matters only for dimensions larger than `eigen_head + eigen_tail`.
"""

from typing import Any, Callable, Union

import tensorflow as tf

_EIGEN_DTYPE = tf.float32


@tf.function
def eigen_inverse_root(
  mat: tf.Tensor, p: int, head: int, tail: int, damping: float = 1e-3
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Computes `mat^(-1/p)` from its largest and its smallest eigenvalues.

  Args:
    mat: `[dim, dim]`, symmetric, of static shape.
    p: the root.
    head: how many of the smallest eigenvalues above `damping` to keep.
    tail: how many of the largest eigenvalues to keep.
    damping: smaller eigenvalues count as this one.

  Returns:
    `(vectors [dim, n], values [n], offset [])` with n = min(dim, head + tail): the root is
    `vectors @ diag(values) @ vectors^T + offset * I`.
  """
  eigenvalues, eigenvectors = tf.linalg.eigh(mat)  # in ascending order
  dim = mat.shape[0]
  roots = tf.pow(tf.maximum(eigenvalues, damping), -1.0 / p)
  if head + tail > dim:
    zeros, head, tail = tf.constant(0), dim, 0
  else:
    # The first eigenvalue above damping, 0 without any, and early enough to leave `head + tail`.
    first = tf.argmax(tf.cast(eigenvalues > damping, tf.int32), output_type=tf.int32)
    zeros = tf.minimum(first, dim - head - tail)
  kept_roots = tf.concat([roots[zeros : zeros + head], roots[dim - tail :]], axis=0)
  kept_vectors = tf.concat(
    [eigenvectors[:, zeros : zeros + head], eigenvectors[:, dim - tail :]], axis=1
  )
  num_dropped = dim - tail - head - zeros
  # The mean of nothing is 0.
  offset = tf.math.divide_no_nan(
    tf.reduce_sum(eigenvalues[zeros + head : dim - tail]), tf.cast(num_dropped, mat.dtype)
  )
  return kept_vectors, kept_roots - offset, offset


def apply_sparse_precond(
  tensor: tf.Tensor, pvec: tf.Tensor, pval: tf.Tensor, offset: tf.Tensor
) -> tf.Tensor:
  """Multiplies the first dimension by a preconditioner and makes it the last one.

  Applied once per dimension, this preconditions all of them and restores their order.

  Args:
    tensor: `[d0, d1, ...]`.
    pvec: `[d0, n]`, the vectors that `eigen_inverse_root` returns.
    pval: `[n]`.
    offset: scalar.

  Returns:
    `[d1, ..., d0]`.
  """
  projected = tf.tensordot(tensor, pvec, axes=[[0], [0]]) * pval
  rotated = tf.transpose(tensor, perm=list(range(1, tensor.shape.rank)) + [0])
  return tf.tensordot(projected, pvec, axes=[[-1], [-1]]) + rotated * offset


class ShampooOptimizer(tf.compat.v1.train.Optimizer):
  """Shampoo for dense gradients.

  Needs the global step in the graph. Up to step `warmup` it is a diagonal AdaGrad with momentum;
  until step `2 * warmup` the preconditioned step replaces that one gradually.
  """

  def __init__(
    self,
    learning_rate: Union[float, tf.Tensor, Callable[[], Any]] = 0.03,
    beta_1: float = 0.9,
    beta_2: float = 1.0,
    warmup: int = 5000,
    tau_1: int = 200,
    tau_2: int = 20,
    eigen_head: int = 100,
    eigen_tail: int = 100,
    damping_epsilon: float = 1e-3,
    use_locking: bool = False,
    name: str = "Shampoo",
    **kwargs: Any,
  ):
    """Constructs the optimizer.

    Args:
      learning_rate: a number, a scalar tensor, or a function that returns one.
      beta_1: decay of the momentum.
      beta_2: decay of the statistics; 1 sums them up instead.
      warmup: step after which preconditioners are used.
      tau_1: steps between two computations of the preconditioners.
      tau_2: steps between two computations of the statistics' increment.
      eigen_head: how many small eigenvalues of a statistic to keep.
      eigen_tail: how many large ones.
      damping_epsilon: eigenvalues below count as this one.
      use_locking: whether updates take a lock.
      name: prefix of the slots.
      **kwargs: arguments of the base class.
    """
    super().__init__(use_locking, name, **kwargs)
    for arg, value, least in (("warmup", warmup, 0), ("tau_1", tau_1, 1), ("tau_2", tau_2, 1)):
      if value < least:
        raise ValueError(f"{arg} is {value}, want at least {least}")
    self._learning_rate = learning_rate
    self._beta_1 = beta_1
    self._beta_2 = beta_2
    self._warmup = warmup
    self._tau_1 = tau_1
    self._tau_2 = tau_2
    self._eigen_head = eigen_head
    self._eigen_tail = eigen_tail
    self._damping_epsilon = damping_epsilon
    self._lr_tensor = None

  def _create_slots(self, var_list: list[tf.Variable]) -> None:
    for var in var_list:
      for i, dim in enumerate(var.shape.as_list()):
        eigens = min(dim, self._eigen_head + self._eigen_tail)
        for slot, shape in (
          (f"s{i}", [dim, dim]),
          (f"g{i}", [dim, dim]),
          (f"pvec{i}", [dim, eigens]),
          (f"pval{i}", [eigens]),
          (f"o{i}", []),
        ):
          zeros = tf.zeros(shape, _EIGEN_DTYPE)
          self._get_or_make_slot(var, zeros, slot, f"{self._name}/{slot}")
      for slot in ("d", "m", "pm"):
        self._zeros_slot(var, slot, f"{self._name}/{slot}")

  def _prepare(self) -> None:
    self._lr_tensor = tf.convert_to_tensor(
      self._call_if_callable(self._learning_rate), name="learning_rate"
    )

  def _resource_apply_dense(self, grad: tf.Tensor, var: tf.Variable) -> tf.Operation:
    global_step = tf.compat.v1.train.get_global_step()
    if global_step is None:
      raise ValueError("ShampooOptimizer needs a global step: create it before the train op")
    step = tf.cast(global_step, tf.int32)
    warmed_up = step > self._warmup
    ops = []

    update_precond = tf.logical_and(warmed_up, tf.equal(step % self._tau_1, 0))
    eigen_grad = precond = tf.cast(grad, _EIGEN_DTYPE)
    for i in range(var.shape.rank):
      statistic = self._update_statistic(eigen_grad, var, i, step)
      pvec, pval, offset = self._update_preconditioner(statistic, var, i, update_precond)
      precond = apply_sparse_precond(precond, pvec, pval, offset)
      ops += [statistic, pvec, pval, offset]

    lr = tf.cast(self._lr_tensor, var.dtype)
    beta_1 = tf.cast(self._beta_1, var.dtype)
    d, m, pm = (self.get_slot(var, slot) for slot in ("d", "m", "pm"))
    d_t = d.assign_add(grad * grad)
    m_t = m.assign(beta_1 * m + (1.0 - beta_1) * grad * tf.math.rsqrt(d_t + 1e-30))
    pm_t = pm.assign(beta_1 * pm + (1.0 - beta_1) * tf.cast(precond, var.dtype))

    update_diag = lr * m_t
    update_second = lr * tf.norm(m_t) / (tf.norm(pm_t) + 1e-10) * pm_t
    rate = tf.cast(self._warmup_rate(step), var.dtype)
    update = tf.cond(
      warmed_up,
      lambda: (1.0 - rate) * update_diag + rate * update_second,
      lambda: tf.identity(update_diag),
    )
    return tf.group(var.assign_sub(update, use_locking=self._use_locking), pm_t, *ops)

  def _resource_apply_sparse(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor):
    raise TypeError("ShampooOptimizer does not support sparse gradients, want a dense one")

  def _update_statistic(
    self, grad: tf.Tensor, var: tf.Variable, i: int, step: tf.Tensor
  ) -> tf.Tensor:
    """Returns the new statistic of dimension `i`, whose increment is renewed every `tau_2`
    steps."""
    g, s = self.get_slot(var, f"g{i}"), self.get_slot(var, f"s{i}")
    axes = [axis for axis in range(grad.shape.rank) if axis != i]
    g_t = tf.cond(
      tf.equal(step % self._tau_2, 0),
      lambda: tf.identity(g.assign(tf.tensordot(grad, grad, axes=[axes, axes]))),
      lambda: tf.identity(g),
    )
    if self._beta_2 < 1.0 - 1e-10:
      return s.assign(self._beta_2 * s + (1.0 - self._beta_2) * g_t)
    return s.assign_add(g_t)

  def _update_preconditioner(
    self, statistic: tf.Tensor, var: tf.Variable, i: int, update: tf.Tensor
  ) -> tuple[tf.Tensor, ...]:
    """Returns the preconditioner of dimension `i`, computed anew when `update` is true."""
    slots = [self.get_slot(var, f"{slot}{i}") for slot in ("pvec", "pval", "o")]

    def compute():
      values = eigen_inverse_root(
        tf.convert_to_tensor(statistic),
        2 * var.shape.rank,
        self._eigen_head,
        self._eigen_tail,
        self._damping_epsilon,
      )
      return tuple(tf.identity(slot.assign(value)) for slot, value in zip(slots, values))

    return tf.cond(update, compute, lambda: tuple(tf.identity(slot) for slot in slots))

  def _warmup_rate(self, step: tf.Tensor) -> tf.Tensor:
    """Returns the weight of the preconditioned step, from 0 at step `warmup` to 1 at its double."""
    if self._warmup == 0:
      return tf.constant(1.0)
    return tf.clip_by_value(tf.cast(step, tf.float32) / self._warmup - 1.0, 0.0, 1.0)
