"""The JSON of TensorFlow Serving's REST API to arrays, and back.

    {"signature_name": "...", "instances": [...]}   a list of examples; answer {"predictions": ...}
    {"signature_name": "...", "inputs": ...}        a tensor per input; answer {"outputs": ...}

Bytes are `{"b64": "<base64>"}`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from monolith.serving.errors import invalid
from monolith.serving.servable import Servable, Signature

_KEYS = {"signature_name", "instances", "inputs"}
# An output of this suffix holds bytes, not text.
_BYTES_SUFFIX = "_bytes"


class JsonRequest:
  """A parsed request.

  Attributes:
    signature: what it calls.
    inputs: array by name.
    rows: how many instances it has; None if it names `inputs`.
  """

  def __init__(self, body: bytes, servable: Servable):
    """Parses `body`.

    Raises:
      ServingError: INVALID_ARGUMENT, it is not such JSON, or does not fit the signature.
    """
    document = _parse(body)
    self.signature = servable.signature(get_signature_name(document))
    self.rows: int | None = None
    if "instances" in document:
      instances = document["instances"]
      if not isinstance(instances, list) or not instances:
        raise invalid(f"instances is {_show(instances)}, want a list with elements")
      self.rows = len(instances)
      values = _columns(instances, self.signature)
    else:
      values = document["inputs"]
      if not isinstance(values, dict) or _is_bytes(values):
        values = {_only_input(self.signature): values}
    self.signature.check_names(values)
    self.inputs = {
      key: _to_array(key, value, self.signature.dtype(key)) for key, value in values.items()
    }

  def answer(self, outputs: Mapping[str, np.ndarray]) -> bytes:
    """Returns the JSON of an answer.

    Raises:
      ServingError: INVALID_ARGUMENT, instances were sent to a signature that does not answer one
        by one.
    """
    if self.rows is not None:
      for key, array in outputs.items():
        if array.ndim == 0 or len(array) != self.rows:
          raise invalid(
            f"output {key!r} has shape {list(array.shape)} for {self.rows} instances: send inputs "
            "instead of instances"
          )
    values = {key: to_json(key, array) for key, array in outputs.items()}
    if self.rows is None:
      answer = {"outputs": values.popitem()[1] if len(values) == 1 else values}
    elif len(values) == 1:
      answer = {"predictions": values.popitem()[1]}
    else:
      rows = zip(*values.values())
      answer = {"predictions": [dict(zip(values, row)) for row in rows]}
    return json.dumps(answer, indent=1).encode()


def parse_object(body: bytes) -> dict[str, Any]:
  """Returns a body that is a JSON object.

  Raises:
    ServingError: INVALID_ARGUMENT, it is not.
  """
  try:
    document = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise invalid(f"the body is not JSON: {error}") from error
  if not isinstance(document, dict):
    raise invalid("the body is not a JSON object")
  return document


def get_signature_name(document: dict[str, Any]) -> str:
  """Returns the signature that a request names, empty for the default one.

  Raises:
    ServingError: INVALID_ARGUMENT, it is not a string.
  """
  name = document.get("signature_name", "")
  if not isinstance(name, str):
    raise invalid(f"signature_name is {_show(name)}, want a string")
  return name


def _parse(body: bytes) -> dict[str, Any]:
  document = parse_object(body)
  unknown = sorted(set(document) - _KEYS)
  if unknown:
    raise invalid(f"unknown keys {_show(unknown)}, want some of {sorted(_KEYS)}")
  if ("instances" in document) == ("inputs" in document):
    raise invalid("want either instances or inputs")
  return document


def _columns(instances: list, signature: Signature) -> dict[str, list]:
  """Turns a list of examples into a list per input."""
  if not isinstance(instances[0], dict) or _is_bytes(instances[0]):
    return {_only_input(signature): instances}
  columns: dict[str, list] = {key: [] for key in instances[0]}
  for number, instance in enumerate(instances):
    if not isinstance(instance, dict) or instance.keys() != columns.keys():
      raise invalid(
        f"instance {number} is {_show(instance)}, want an object with the keys of the first, "
        f"{_show(sorted(columns))}"
      )
    for key, value in instance.items():
      columns[key].append(value)
  return columns


def _only_input(signature: Signature) -> str:
  if len(signature.inputs) != 1:
    raise invalid(
      f"signature {signature.name!r} takes {sorted(signature.inputs)}: name them, as keys of an "
      "object"
    )
  return next(iter(signature.inputs))


def _to_array(name: str, value: Any, dtype: tf.DType) -> np.ndarray:
  """Returns nested lists as an array of exactly this type: nothing is rounded or cut off."""
  try:
    leaves = np.array(value, object)
  except ValueError as error:
    raise invalid(f"input {name!r} is ragged: {error}") from error
  flat = leaves.ravel()
  if any(isinstance(leaf, list) for leaf in flat):
    raise invalid(f"input {name!r} is ragged, or has more than 32 dimensions")
  if dtype == tf.string:
    converted = np.empty(flat.shape, object)
    converted[:] = [to_bytes(name, leaf) for leaf in flat]
    return converted.reshape(leaves.shape)
  if dtype.is_integer:
    wanted: tuple[type, ...] = (int,)
  elif dtype.is_floating:
    wanted = (int, float)
  elif dtype.is_bool:
    wanted = (bool,)
  else:
    raise invalid(f"input {name!r} is {dtype.name}, which JSON cannot hold")
  # A bool is an int to isinstance.
  odd = next((leaf for leaf in flat if type(leaf) not in wanted), None)
  if odd is not None or any(leaf is None for leaf in flat):
    raise invalid(f"input {name!r} has {_show(odd)}, want {dtype.name}")
  if dtype.is_integer and flat.size and not dtype.min <= min(flat) <= max(flat) <= dtype.max:
    raise invalid(f"input {name!r} has a number outside of {dtype.name}")
  try:
    return leaves.astype(dtype.as_numpy_dtype)
  except (OverflowError, ValueError) as error:
    raise invalid(f"input {name!r}: {error}") from error


def to_bytes(name: str, leaf: Any) -> bytes:
  """Returns a string, or an object with `b64`, as bytes.

  Raises:
    ServingError: INVALID_ARGUMENT, it is something else.
  """
  if isinstance(leaf, str):
    try:
      return leaf.encode()
    except UnicodeEncodeError as error:
      raise invalid(f"input {name!r} has half of a character: {error}") from error
  if _is_bytes(leaf):
    try:
      return base64.b64decode(leaf["b64"], validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
      raise invalid(f"input {name!r} has b64 that is not base64: {error}") from error
  raise invalid(f"input {name!r} has {_show(leaf)}, want a string or an object with b64")


def _is_bytes(value: Any) -> bool:
  return isinstance(value, dict) and value.keys() == {"b64"}


def to_json(name: str, array: np.ndarray) -> Any:
  """Returns nested lists of what JSON can hold.

  Args:
    name: the output's name; if it ends with `_bytes`, strings are bytes.
    array: any output of a session.
  """
  if array.dtype == object:
    values = [_from_bytes(name, value) for value in array.ravel()]
    return _nest(values, array.shape)
  if array.dtype.kind == "f" and array.dtype.itemsize < 8:
    # The shortest text that reads back as the same float, not that of the double beside it.
    return _nest([float(text) for text in array.ravel().astype("U32")], array.shape)
  if array.dtype.kind not in "fiub":  # bfloat16 is of kind V
    array = array.astype(np.float64)
  return array.tolist()


def _nest(values: list, shape: tuple[int, ...]) -> Any:
  boxed = np.empty(len(values), object)
  boxed[:] = values
  return boxed.reshape(shape).tolist()


def _from_bytes(name: str, value: bytes) -> Any:
  if not name.endswith(_BYTES_SUFFIX):
    try:
      return value.decode()
    except UnicodeDecodeError:
      pass
  return {"b64": base64.b64encode(value).decode()}


def _show(value: Any) -> str:
  return repr(value)[:100]
