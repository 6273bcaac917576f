"""`ReplicatedVariable`: one name for the copies of a variable on the cores of a TPU.

Differences from ByteDance's Monolith: the value that `assign_add` and `assign_sub` return depends
on the write.
"""

from collections.abc import Sequence
from typing import Any, Optional

import tensorflow as tf
from tensorflow.python.distribute import tpu_util
from tensorflow.python.ops import gen_resource_variable_ops


class ReplicatedVariable:
  """Acts as one variable: inside a TPU computation as each core's own copy, elsewhere as the first.

  It converts to a tensor, so ops accept it, and `tf.compat.v1.assign` works; it has no Python
  operators.
  """

  def __init__(self, name: str, variables: Sequence[tf.Variable]):
    """Args:
    name: common name of the copies.
    variables: resource variables of equal shape and dtype, one per core.
    """
    if not variables:
      raise ValueError(f"ReplicatedVariable {name} needs at least one variable")
    self._name = name
    self._vars = list(variables)
    self._primary_var = self._vars[0]
    self._dtype = self._primary_var.dtype

  @property
  def handle(self) -> tf.Tensor:
    """The replicated handle inside a TPU computation, the first copy's handle elsewhere."""
    context = tpu_util.enclosing_tpu_context()
    if context is None:
      return self._primary_var.handle
    # The id is the key under which the context keeps the handle: it must be unique.
    return context.get_replicated_var_handle(self._name, f"{self._name}_{id(self)}", self._vars)

  @property
  def initializer(self) -> tf.Operation:
    """Initializes all copies."""
    return tf.group([variable.initializer for variable in self._vars])

  @property
  def graph(self) -> tf.Graph:
    return self._primary_var.graph

  @property
  def _shared_name(self) -> str:
    return self._name

  @property
  def _unique_id(self) -> str:
    return self._primary_var._unique_id

  @property
  def name(self) -> str:
    return self._name

  @property
  def dtype(self) -> tf.DType:
    return self._dtype

  @property
  def shape(self) -> tf.TensorShape:
    return self._primary_var.shape

  def get_shape(self) -> tf.TensorShape:
    return self._primary_var.get_shape()

  @property
  def op(self) -> tf.Operation:
    return self._primary_var.op

  @property
  def constraint(self) -> None:
    return None

  def to_proto(self, export_scope: Optional[str] = None) -> Any:
    return self._primary_var.to_proto(export_scope=export_scope)

  def get(self) -> tf.Variable:
    """Returns the first copy."""
    return self._primary_var

  def read_value(self) -> tf.Tensor:
    return gen_resource_variable_ops.read_variable_op(self.handle, self._dtype)

  def assign(
    self,
    value: Any,
    use_locking: Optional[bool] = None,
    name: Optional[str] = None,
    read_value: bool = False,
  ) -> Any:
    """Assigns a value; returns the op, or the new value if `read_value`."""
    del use_locking
    return self._write(gen_resource_variable_ops.assign_variable_op, value, name, read_value)

  def assign_add(
    self,
    delta: Any,
    use_locking: Optional[bool] = None,
    name: Optional[str] = None,
    read_value: bool = True,
  ) -> Any:
    """Adds a value; returns the new value, or the op unless `read_value`."""
    del use_locking
    return self._write(gen_resource_variable_ops.assign_add_variable_op, delta, name, read_value)

  def assign_sub(
    self,
    delta: Any,
    use_locking: Optional[bool] = None,
    name: Optional[str] = None,
    read_value: bool = True,
  ) -> Any:
    """Subtracts a value; returns the new value, or the op unless `read_value`."""
    del use_locking
    return self._write(gen_resource_variable_ops.assign_sub_variable_op, delta, name, read_value)

  def _write(self, write_op: Any, value: Any, name: Optional[str], read_value: bool) -> Any:
    op = write_op(self.handle, tf.convert_to_tensor(value, dtype=self._dtype), name=name)
    if not read_value:
      return op
    with tf.control_dependencies([op]):
      return self.read_value()

  def _should_act_as_resource_variable(self) -> None:
    """Tells TensorFlow, by being there, to treat this as a resource variable."""

  def _dense_var_to_tensor(
    self, dtype: Optional[tf.DType] = None, name: Optional[str] = None, as_ref: bool = False
  ) -> Any:
    del name
    if dtype is not None and dtype != self._dtype:
      return NotImplemented
    return self.handle if as_ref else self.read_value()


def _tensor_conversion(
  variable: ReplicatedVariable,
  dtype: Optional[tf.DType] = None,
  name: Optional[str] = None,
  as_ref: bool = False,
) -> Any:
  return variable._dense_var_to_tensor(dtype=dtype, name=name, as_ref=as_ref)


tf.register_tensor_conversion_function(ReplicatedVariable, _tensor_conversion)
