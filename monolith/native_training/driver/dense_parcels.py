"""Sends the dense variables of a model, and their gradients, in one tensor per server and way.

A model on servers reads each of its variables from one of them, and sends each a gradient: two
messages for a variable in every step, most of them small. Once its graph is built, `combine` lets
the reads of a server's variables, as far as the step computes with them, come as one parcel, and
what its optimizers take from this process go as another one. What is computed is the same. A
variable is read when the step begins, as before, and all of them before the first is used. Hooks
that ask for the global step with every step get it from the parcel that has it for the step.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.python.training import training_util

from monolith.native_training import utils
from monolith.native_training.tables import parcels

# Other kinds of optimizers' ops work on parts of a variable.
_UPDATE_PREFIXES = ("ResourceApply", "ResourceSparseApply")


def combine(train_op: tf.Operation | tf.Tensor) -> None:
  """Combines the messages of a step about dense variables; to be called before the graph is run.

  Args:
    train_op: what makes a step.
  """
  op = train_op.op if isinstance(train_op, tf.Tensor) else train_op
  with op.graph.as_default():
    _combine_reads(utils.get_needed_ops([op]))
    _combine_updates(utils.get_needed_ops([op]))


def _server_of(op: tf.Operation) -> str | None:
  """Returns the device of a parameter server; `None` for an op that is elsewhere."""
  device = tf.DeviceSpec.from_string(op.device) if op.device else tf.DeviceSpec()
  return op.device if device.job == utils.PS_JOB_NAME else None


def _is_plain(op: tf.Operation) -> bool:
  """Tells whether an op is neither in a loop nor in a branch."""
  return op._get_control_flow_context() is None


def _can_travel(tensor: tf.Tensor) -> bool:
  dtype = tensor.dtype
  return dtype.is_floating or dtype.is_integer or dtype.is_bool


def _combine_reads(step: set[tf.Operation]) -> None:
  # Variables may begin with what another one holds, before all of them have begun.
  initializers = utils.get_needed_ops(
    variable.initializer
    for variable in [*tf.compat.v1.global_variables(), *tf.compat.v1.local_variables()]
    if getattr(variable, "initializer", None) is not None
  )
  server_to_reads: dict[str, list[tf.Tensor]] = collections.defaultdict(list)
  for op in _in_order(step):
    if op.type != "ReadVariableOp" or op.inputs[0].op.type != "VarHandleOp":
      continue
    server = _server_of(op.inputs[0].op)  # TensorFlow will place the read there, too
    if (
      server is not None
      and not op.control_inputs
      and _is_plain(op)
      and _can_travel(op.outputs[0])
      and _consumers(op.outputs[0], step - initializers)
    ):
      server_to_reads[server].append(op.outputs[0])
  for server, reads in server_to_reads.items():
    if len(reads) > 1:
      here = _host_of(_consumers(reads[0], step - initializers)[0])
      received = _send(reads, server, here, name="dense_variables")
      for read, tensor in zip(reads, received):
        for consumer in _consumers(read, step - initializers):
          _replace_input(consumer, read, tensor)
        _tell_hooks(read, tensor)


def _tell_hooks(read: tf.Tensor, tensor: tf.Tensor) -> None:
  """Lets hooks have the global step from a parcel, if `read` is its value."""
  for told in tf.compat.v1.get_collection(training_util.GLOBAL_STEP_READ_KEY):
    source = told.op.inputs[0] if told.op.type == "Identity" else None
    if (
      source is not None
      and source.op.type == "ReadVariableOp"
      and source.op.inputs[0] is read.op.inputs[0]
    ):
      _replace_input(told.op, source, tensor)


def _consumers(read: tf.Tensor, ops: set[tf.Operation]) -> list[tf.Operation]:
  """Returns those of `ops` that use a server's tensor in this process."""
  return [op for op in read.consumers() if op in ops and _server_of(op) is None and _is_plain(op)]


def _combine_updates(step: set[tf.Operation]) -> None:
  server_to_updates: dict[str, list[tf.Operation]] = collections.defaultdict(list)
  for op in _in_order(step):
    server = _server_of(op)
    if server is not None and op.type.startswith(_UPDATE_PREFIXES) and _is_plain(op):
      server_to_updates[server].append(op)
  for server, updates in server_to_updates.items():
    arguments = [tensor for op in updates for tensor in op.inputs if _is_argument(tensor)]
    arguments = list({tensor.ref(): tensor for tensor in arguments}.values())
    if len(arguments) < 2:
      continue
    # An optimizer may wait for what another one has written.
    if not utils.get_needed_ops(tensor.op for tensor in arguments).isdisjoint(updates):
      continue
    received = _send(arguments, _host_of(arguments[0].op), server, name="dense_gradients")
    for argument, tensor in zip(arguments, received):
      for op in updates:
        _replace_input(op, argument, tensor)


def _is_argument(tensor: tf.Tensor) -> bool:
  return _server_of(tensor.op) is None and _is_plain(tensor.op) and _can_travel(tensor)


def _host_of(op: tf.Operation) -> str:
  """Returns the CPU of the process that runs an op of the worker."""
  if not op.device:
    return "/device:CPU:0"
  return tf.DeviceSpec.from_string(op.device).replace(device_type="CPU", device_index=0).to_string()


def _send(tensors: Sequence[tf.Tensor], source: str, to: str, name: str) -> list[tf.Tensor]:
  """Returns tensors of one device as another one has them."""
  graph = tf.compat.v1.get_default_graph()
  # Without what the caller waits for, or is in.
  with graph.control_dependencies(None), graph.colocate_with(None, ignore_existing=True):
    with tf.device(source):
      parcel = parcels.pack(tensors, name=f"{name}_packed")
    with tf.device(to):
      return parcels.unpack(parcel, tensors, name=name)


def _replace_input(op: tf.Operation, before: tf.Tensor, after: tf.Tensor) -> None:
  for index, tensor in enumerate(op.inputs):
    if tensor is before:
      op._update_input(index, after)


def _in_order(ops: Iterable[tf.Operation]) -> list[tf.Operation]:
  """Returns ops in the order of their creation, so that all runs of a program send alike."""
  return sorted(ops, key=lambda op: op._id)
