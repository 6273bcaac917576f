"""Small helpers shared by the whole library: devices, gradients, shapes, `params()`,
collections."""

import copy
import inspect
import os
import platform
import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import (
  Any,
  Callable,
  Optional,
  TypeVar,
  Union,
)

import tensorflow as tf
from absl import logging

from monolith.core.base_layer import get_uname
from monolith.core.hyperparams import InstantiableParams, Params, allowed_kwargs

PS_JOB_NAME = "ps"

_METRIC_PREFIX_ENV = "MONOLITH_METRIC_PREFIX"
_DEFAULT_METRIC_PREFIX = "monolith.training"
_SCALAR_TYPES = (bool, int, float, str)

T = TypeVar("T")


def ps_device(index: int) -> str:
  """Returns the device string of the CPU of parameter server `index`."""
  return f"/job:{PS_JOB_NAME}/task:{index}/device:CPU:0"


def propagate_back_gradients(
  grads_and_vars: Iterable[tuple[tf.Tensor, tf.Tensor]],
  xs: Iterable[tf.Tensor],
  valid_var_set: Optional[set[tf.Tensor]] = None,
) -> list[Optional[tf.Tensor]]:
  """Carries gradients with respect to intermediate tensors back to `xs`.

  Args:
    grads_and_vars: pairs of a gradient and the tensor it belongs to.
    xs: the tensors to differentiate with respect to.
    valid_var_set: if not empty, the tensors that may occur in `grads_and_vars`.

  Returns:
    One gradient per element of `xs`, `None` where nothing depends on it.

  Raises:
    RuntimeError: a tensor of `grads_and_vars` is not in `valid_var_set`.
  """
  valid_ids = {id(var) for var in valid_var_set or ()}
  combined_vars, combined_grads = [], []
  for grad, var in grads_and_vars:
    if valid_ids and id(var) not in valid_ids:
      raise RuntimeError("Invalid variables in the input", var, valid_var_set)
    combined_vars.append(var)
    combined_grads.append(grad)
  return tf.gradients(combined_vars, list(xs), combined_grads)


def propagate_back_dict_gradients(
  grads_and_vars: Iterable[tuple[tf.Tensor, tf.Tensor]],
  x_to_key: dict[tf.Tensor, Any],
  valid_var_set: Optional[set[tf.Tensor]] = None,
) -> dict[Any, list[tuple[Optional[tf.Tensor], tf.Tensor]]]:
  """Does what `propagate_back_gradients` does, and groups the results.

  Args:
    grads_and_vars: pairs of a gradient and the tensor that it belongs to.
    x_to_key: the tensors to differentiate with respect to, each with the key of its group.
    valid_var_set: the tensors that `grads_and_vars` may hold; any if empty.

  Returns:
    key -> list of `(gradient, x)`, in the order of `x_to_key`.
  """
  dxs = propagate_back_gradients(grads_and_vars, x_to_key.keys(), valid_var_set)
  grouped = defaultdict(list)
  for dx, (x, key) in zip(dxs, x_to_key.items()):
    grouped[key].append((dx, x))
  return grouped


def get_ndim(x: tf.Tensor) -> Optional[int]:
  """Returns the static rank of `x`, `None` if it is unknown."""
  return x.get_shape().rank


def int_shape(x: tf.Tensor) -> Optional[list[int]]:
  """Returns the static shape of `x` with -1 for unknown dimensions, `None` if the rank is
  unknown."""
  try:
    return [int_dim(dim) for dim in x.get_shape().as_list()]
  except ValueError:
    return None


def int_dim(dim: Any) -> int:
  """Returns a dimension of a shape as an int, -1 if it is unknown.

  Raises:
    ValueError: neither an int nor a dimension.
  """
  if isinstance(dim, tf.compat.v1.Dimension):
    dim = dim.value
  if dim is None:
    return -1
  if isinstance(dim, int):
    return dim
  raise ValueError(f"dimension {dim!r} is not an int")


def extend_as_list(x: Any, n: int) -> Union[list, tuple]:
  """Returns `x` as a list of at least `n` elements.

  Args:
    x: a list or tuple is padded with `None` (and returned as it is when long enough); anything else
      is repeated, deep-copied where it can be.
    n: the wanted length.
  """
  if isinstance(x, (list, tuple)):
    return x if len(x) >= n else list(x) + [None] * (n - len(x))
  try:
    return [x if i == 0 else copy.deepcopy(x) for i in range(n)]
  except Exception:  # pylint: disable=broad-except
    # Objects that refuse to be copied (locks, tensors, modules) raise whatever they like.
    return [x] * n


def check_list(
  candidate: Optional[list], length_checker: Callable[[int], bool], could_be_none: bool = False
) -> Optional[list]:
  """Returns `candidate` if it is a list of an allowed length.

  Args:
    candidate: what to check.
    length_checker: tells whether a length is allowed.
    could_be_none: whether `None` is allowed.

  Raises:
    TypeError: neither a list nor an allowed `None`.
    ValueError: the length is not allowed.
  """
  if candidate is None:
    if not could_be_none:
      raise TypeError("ListChecker cannot accept None candidate")
  elif not isinstance(candidate, list):
    raise TypeError(f"ListChecker got candidate in the wrong type[{type(candidate)}]")
  elif not length_checker(len(candidate)):
    raise ValueError("ListChecker got candidate beyonds the range")
  return candidate


def to_snake_case(name: str) -> str:
  """Turns `DeepFMLayer` into `deep_fm_layer`; a leading underscore gets `private` before it."""
  separated = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", name)
  snake = re.sub(r"([a-z])([A-Z])", r"\1_\2", separated).lower()
  return "private" + snake if snake.startswith("_") else snake


def to_list(x: Any) -> list:
  """Returns `x` itself if it is a list, else a list with `x` as its only element."""
  return x if isinstance(x, list) else [x]


def _get_parameters(cls: type, parameters: dict[str, inspect.Parameter]) -> None:
  """Adds the parameters of `cls.__init__`, without `self` and variadic ones, to `parameters`."""
  for name, parameter in inspect.signature(cls.__init__).parameters.items():
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if name not in ("self", "cls") and not variadic:
      parameters[name] = parameter


def _get_all_parameters(cls: type, parameters: dict[str, inspect.Parameter]) -> None:
  """Adds the constructor parameters of all bases of `cls`, then its own; later ones win."""
  for base in cls.__bases__:
    if base is not object:
      _get_all_parameters(base, parameters)
  _get_parameters(cls, parameters)


def _inverted_index(ips: Params, idx_dict: dict[str, Params]) -> None:
  """Adds name -> the bag that defines it, for `ips` and the bags nested in it; outer ones win."""
  nested = []
  for name, value in ips.iter_params():
    idx_dict.setdefault(name, ips)
    if isinstance(value, Params):
      nested.append(value)
  for value in nested:
    _inverted_index(value, idx_dict)


def params(cls: type) -> InstantiableParams:
  """Derives the configuration of a class from its constructor.

  Starts from the `params()` of the nearest base that has one, and adds `name` (the name of the
  class), every constructor parameter of the class and its bases with its default (`None` without
  one), and the keywords that Keras layers accept.

  Args:
    cls: the class, the receiver of the class method that `with_params` adds.

  Returns:
    A new bag whose `instantiate()` builds `cls`.
  """
  ips = _base_params(cls)
  ips.cls = cls
  index = {}
  _inverted_index(ips, index)
  parameters = {}
  _get_all_parameters(cls, parameters)
  for name, parameter in parameters.items():
    has_default = parameter.default is not inspect.Parameter.empty
    if name in index:
      # `name=None` of Keras layers must not take the name away.
      if has_default and not (name == "name" and parameter.default is None):
        index[name][name] = parameter.default
    elif re.match(r"^[a-z][a-z0-9_]*$", name):
      # Other names (`_x`, `K`) cannot be configured: the constructor's own default applies.
      ips.define(name, parameter.default if has_default else None, name)
  for name in sorted(allowed_kwargs):
    if name not in ips:
      ips.define(name, None, name)
  return ips


def _base_params(cls: type) -> InstantiableParams:
  """Returns the bag that `params(cls)` starts from, with `name` set to the name of `cls`."""
  uname = get_uname(cls.__name__)
  for base in cls.__mro__[1:]:
    # A bound method is what a class method looks like from outside.
    if inspect.ismethod(getattr(base, "params", None)):
      ips = base.params()
      if "name" not in ips:
        ips.define("name", uname, "name")
      elif ips.name is None or ips.name == get_uname(base.__name__):
        ips.name = uname
      return ips
  ips = InstantiableParams(cls)
  ips.define("name", uname, "name")
  return ips


def with_params(cls: T) -> T:
  """Decorates a class: adds `params` as a class method."""
  cls.params = classmethod(params)
  return cls


def get_needed_ops(ops: Iterable[tf.Operation]) -> set[tf.Operation]:
  """Returns `ops` and all that they need: inputs and control inputs, directly or indirectly."""
  pending = list(ops)
  needed = set(pending)
  while pending:
    op = pending.pop()
    for dependency in [tensor.op for tensor in op.inputs] + list(op.control_inputs):
      if dependency not in needed:
        needed.add(dependency)
        pending.append(dependency)
  return needed


def check_ops_dependence(
  op_names_1: Union[str, Sequence[str]], op_names_2: Union[str, Sequence[str]]
) -> None:
  """Makes sure that no op of the first group needs an op of the second one.

  Args:
    op_names_1: name or names of ops in the default graph.
    op_names_2: name or names of the ops that must not be reachable from them.

  Raises:
    Exception: one is reachable through inputs or control inputs.
    KeyError: an op of the first group is not in the graph.
  """
  names_1 = [op_names_1] if isinstance(op_names_1, str) else list(op_names_1)
  names_2 = [op_names_2] if isinstance(op_names_2, str) else list(op_names_2)
  graph = tf.compat.v1.get_default_graph()
  needed = get_needed_ops(graph.get_operation_by_name(name) for name in names_1)
  if not {op.name for op in needed}.isdisjoint(names_2):
    first, second = ", ".join(names_1), ", ".join(names_2)
    raise Exception(
      f"Checking ops dependence, the ops [{first}] depend on ops [{second}], "
      f"which may cause ops [{second}] to be run twice."
    )


def get_local_host() -> str:
  """Returns the address that the name of this host resolves to."""
  host_name = socket.gethostname()
  if platform.system() not in ("Windows", "Linux"):
    host_name += ".local"
  return socket.gethostbyname(host_name)


def get_test_tmp_dir() -> str:
  """Returns the folder that tests may write to."""
  return os.environ.get("TEST_TMPDIR", "/tmp")


def get_debugging_info_file_name(model_dir: str) -> str:
  return os.path.join(model_dir, "debugging_info.pb")


def get_meta_graph_file_name(model_dir: str) -> str:
  return os.path.join(model_dir, "meta_graph_for_debugging.pb")


def add_to_collections(names: Union[str, Sequence[str]], value: Any) -> None:
  """Adds `value` to collections of the default graph; `None` and empty containers are skipped.

  Args:
    names: name or names of collections.
    value: numbers, booleans and strings are always added, others when they are true.
  """
  if isinstance(value, _SCALAR_TYPES) or _is_truthy(value):
    tf.compat.v1.add_to_collections(names, value)
  else:
    logging.info("value is %s, skip", value)


def _is_truthy(value: Any) -> bool:
  # A graph tensor has no truth value; it is there, so it counts.
  return True if isinstance(value, (tf.Tensor, tf.Variable)) else bool(value)


def get_collection(name: str) -> Optional[list]:
  """Returns the collection of the default graph, `None` when it is empty."""
  return tf.compat.v1.get_collection(name) or None


def set_metric_prefix(prefix: str) -> None:
  """Sets the prefix of all metric names, for this process and those it starts."""
  os.environ[_METRIC_PREFIX_ENV] = prefix


def get_metric_prefix() -> str:
  return os.environ.get(_METRIC_PREFIX_ENV, _DEFAULT_METRIC_PREFIX)
