"""Places ops: rules that turn the device an author asked for into one that may be used.

GPU placement is a switch of the process, off at first: while it is off, whatever asks for a GPU
goes to the CPU of the same task. The device functions read flags that the runner defines (`num_ps`,
`enable_gpu_training`, `enable_sync_training`, `is_local`); in a program without the runner their
defaults apply.
"""

from contextlib import AbstractContextManager
from typing import Callable, Optional, Union

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.training import device_setter

from monolith.native_training.gflags_utils import read_flag as _flag
from monolith.native_training.settings import rank_environment as mpi_utils

_GPU_PLACEMENT_ALLOWED = False

_CPU = "/device:CPU:0"

DeviceFn = Callable[[tf.Operation], str]


def enable_gpu_training() -> None:
  """Allows placement on GPUs in this process."""
  global _GPU_PLACEMENT_ALLOWED
  _GPU_PLACEMENT_ALLOWED = True


def disable_gpu_training() -> None:
  """Forbids placement on GPUs in this process."""
  global _GPU_PLACEMENT_ALLOWED
  _GPU_PLACEMENT_ALLOWED = False


def is_gpu_training() -> bool:
  """Tells whether placement on GPUs is allowed."""
  return _GPU_PLACEMENT_ALLOWED


def get_visible_gpus(local_rank: int, processes_per_gpu: int = 1) -> str:
  """Returns the GPU of a process, as text for `visible_device_list`.

  Args:
    local_rank: rank of the process on its host.
    processes_per_gpu: how many processes share one, at least 1.
  """
  assert (
    isinstance(processes_per_gpu, int) and processes_per_gpu >= 1
  ), f"processes_per_gpu is {processes_per_gpu!r}, want an int of at least 1"
  return str(local_rank // processes_per_gpu)


def _device_rule(device_name: str) -> str:
  """Returns the device to use when `device_name` is asked for."""
  if not device_name:
    return _CPU
  spec = tf.DeviceSpec.from_string(device_name)
  if spec.device_type is None or (spec.device_type == "GPU" and not _GPU_PLACEMENT_ALLOWED):
    spec = spec.replace(device_type="CPU", device_index=0)
  return spec.to_string()


def skip_device(op: tf.Operation) -> bool:
  """Tells whether `op` (a summary, or a string constant) belongs on a CPU whatever is asked for."""
  if op.type.startswith("Write") or op.type.endswith("Summary"):
    return True
  return op.type == "Const" and op.get_attr("dtype") == tf.string


def default_device_fn(op: tf.Operation) -> str:
  """Returns the device of an op: a GPU only when GPUs are allowed."""
  return _CPU if skip_device(op) else _device_rule(op.device)


def host_scalars_device_fn(op: tf.Operation) -> str:
  """Returns the device of an op where TensorFlow places what names none, on a GPU if it can.

  Counters and times stay on the host, which asks for them in every step: a copy from a GPU waits
  until that has done everything before.
  """
  if op.device:
    return op.device
  # A variable is said to be where it is itself.
  if _is_colocated(op) and op.colocation_groups() != [b"loc:@" + op.name.encode()]:
    return ""
  if op.type == "VarHandleOp":
    is_scalar = not op.get_attr("shape").dim and not op.get_attr("shape").unknown_rank
    return _CPU if is_scalar and tf.as_dtype(op.get_attr("dtype")) == tf.int64 else ""
  counts = op.outputs and all(tensor.dtype == tf.int64 for tensor in op.outputs)
  of_scalars = all(tensor.shape.rank == 0 for tensor in [*op.inputs, *op.outputs])
  return _CPU if counts and of_scalars else ""


def maybe_device_if_allowed(device_name: str) -> AbstractContextManager:
  """Returns a device scope for `device_name`, or for the CPU in its place if it may not be used."""
  return tf.device(_device_rule(device_name))


class _Probe:
  """Stands for an op that is about to be created, to ask the device stack where it would go.

  The private protocol between `Graph._apply_device_functions` and an op in TensorFlow 2.15.
  """

  def __init__(self):
    self.type = "NoOp"
    self.name = "device_probe"
    self.device = ""
    self.node_def = tf.compat.v1.NodeDef(op="NoOp", name=self.name)

  def get_attr(self, name: str):
    raise ValueError(f"Operation '{self.name}' has no attr named '{name}'.")

  def _set_device_from_string(self, device: str) -> None:
    self.device = device


def _current_device() -> str:
  """Returns the device that an op created now would get."""
  if tf.executing_eagerly():
    return context.context().device_name or ""
  probe = _Probe()
  tf.compat.v1.get_default_graph()._apply_device_functions(probe)
  return probe.device


def within_placement_context_of(device_name: str) -> bool:
  """Tells whether an op created now would be placed on a device of this type.

  Args:
    device_name: a device type, `CPU` or `GPU` in any case.

  Returns:
    Whether the device scopes say so; false when they name no type.
  """
  device_type = tf.DeviceSpec.from_string(_current_device()).device_type
  return device_type is not None and device_type.upper() == device_name.upper()


def get_sync_worker_device() -> str:
  """Returns job and task of this process in synchronous training with parameter servers."""
  rank = mpi_utils.get_mpi_rank()
  if rank == 0:
    return "/job:chief/replica:0/task:0"
  return f"/job:worker/replica:0/task:{rank - 1}"


def _is_sync_with_ps() -> bool:
  return (
    mpi_utils.is_under_mpi()
    and bool(_flag("enable_sync_training", False))
    and _flag("num_ps", 0) > 0
  )


def _merge(default: str, asked_for: str) -> str:
  """Returns `default` with the parts that `asked_for` names put in their place."""
  return (
    tf.DeviceSpec.from_string(default)
    .make_merged_spec(tf.DeviceSpec.from_string(asked_for))
    .to_string()
  )


def _is_colocated(op: tf.Operation) -> bool:
  return "_class" in op.node_def.attr


def _sync_worker_device_fn(op: tf.Operation) -> str:
  """Pins `op` to this process, except where it has to follow another op."""
  if not op.device and _is_colocated(op):
    return op.device
  return _merge(get_sync_worker_device(), op.device)


def get_device_fn(
  cluster: Optional[tf.train.ClusterSpec] = None, task: Optional[dict] = None
) -> Optional[Union[DeviceFn, Callable]]:
  """Returns the device function of a training process.

  Args:
    cluster: the cluster, for asynchronous training.
    task: `type` and `index` of this process in it.

  Returns:
    In synchronous training a function that pins ops to this process when there are parameter
    servers, else `default_device_fn`. In asynchronous training `None` if it is local or `cluster`
    or `task` is missing, else a function that puts variables on parameter servers in turn and
    everything else on this process.
  """
  if _flag("enable_sync_training", False):
    assert mpi_utils.is_under_mpi(), "sync training must running under mpi mode"
    return _sync_worker_device_fn if _flag("num_ps", 0) > 0 else default_device_fn
  if _flag("is_local", False) or cluster is None or task is None:
    return None
  job = task.get("type")
  return tf.compat.v1.train.replica_device_setter(
    ps_tasks=_flag("num_ps", 0),
    worker_device=f"/job:{job}/task:{task.get('index')}" if job else "/job:worker",
    merge_devices=True,
    ps_ops=list(device_setter.STANDARD_PS_OPS),
    cluster=cluster,
  )


def input_device_fn(op: tf.Operation) -> str:
  """Returns the device of an op of an input pipeline: the CPU of this process."""
  del op
  return get_sync_worker_device() + _CPU if _is_sync_with_ps() else _CPU


def model_device_fn(op: tf.Operation) -> str:
  """Returns the device of a model's op: the GPU if it may be used, else the CPU, unless the op
  says more."""
  if skip_device(op):
    return _CPU
  if _is_colocated(op):
    return op.device
  use_gpu = _flag("enable_gpu_training", False) or _GPU_PLACEMENT_ALLOWED
  return _merge("/device:GPU:0" if use_gpu else _CPU, op.device)


def serving_input_device_fn(op: tf.Operation) -> str:
  """Returns the device of an input of an exported model: as asked for, the CPU by default."""
  return op.device or _CPU
