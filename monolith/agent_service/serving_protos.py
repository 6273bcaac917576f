"""Builds messages of TensorFlow Serving, from `tensorflow-serving-api`.

That package loads TensorFlow, so it is imported by the first call: training processes import this
module too, and do not need it. Processes that need the messages alone call
`load_without_tensorflow` first.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monolith import _install

if TYPE_CHECKING:
  from tensorflow.core.framework import tensor_pb2
  from tensorflow_serving.apis import get_model_status_pb2, model_pb2, status_pb2
  from tensorflow_serving.config import model_server_config_pb2

# All that the processes of this package use.
_MESSAGES = (
  "tensorflow.core.framework.tensor_pb2",
  "tensorflow.core.framework.types_pb2",
  "tensorflow.core.protobuf.saved_model_pb2",
  "tensorflow_serving.apis.get_model_metadata_pb2",
  "tensorflow_serving.apis.get_model_status_pb2",
  "tensorflow_serving.apis.model_management_pb2",
  "tensorflow_serving.apis.model_pb2",
  "tensorflow_serving.apis.model_service_pb2_grpc",
  "tensorflow_serving.apis.predict_pb2",
  "tensorflow_serving.apis.prediction_service_pb2_grpc",
  "tensorflow_serving.apis.status_pb2",
  "tensorflow_serving.config.model_server_config_pb2",
)


def load_without_tensorflow() -> None:
  """Loads the messages alone, for programs that start often and compute nothing.

  Messages are plain protobuf modules, but to import one from `tensorflow.core` runs
  `tensorflow/__init__.py` first: four seconds of a core and 370 MB, just when the server beside an
  agent starts and needs the core itself. So a bare package stands in for it meanwhile. TensorFlow
  can be imported as usual afterwards. Call it before there are other threads; it does nothing if
  TensorFlow is loaded or not installed.

  Raises:
    ImportError: `tensorflow-serving-api` is not installed.
  """
  spec = None if "tensorflow" in sys.modules else importlib.util.find_spec("tensorflow")
  if spec is None or spec.submodule_search_locations is None:
    return
  package = types.ModuleType("tensorflow")
  package.__path__ = list(spec.submodule_search_locations)
  sys.modules["tensorflow"] = package
  try:
    with _install.naming_extra("serving"):
      for name in _MESSAGES:
        importlib.import_module(name)
  finally:
    del sys.modules["tensorflow"]


def gen_model_config(
  name: str,
  base_path: str,
  version_policy: str = "latest",
  version_data: int | Sequence[int] = 1,
  model_platform: str = "tensorflow",
  version_labels: Mapping[str, int] | None = None,
) -> model_server_config_pb2.ModelConfig:
  """Returns how a server shall serve a model.

  Args:
    name: the name in requests.
    base_path: the folder of its versions.
    version_policy: `latest`, `all` or `specific`.
    version_data: for `latest` how many versions, for `specific` which one or which ones.
    model_platform: `tensorflow` for a SavedModel.
    version_labels: label -> version.

  Raises:
    ValueError: another policy, or no number of versions.
  """
  with _install.naming_extra("serving"):
    from tensorflow_serving.config import model_server_config_pb2

  config = model_server_config_pb2.ModelConfig(
    name=name, base_path=base_path, model_platform=model_platform
  )
  policy = config.model_version_policy
  versions = [version_data] if isinstance(version_data, int) else list(version_data)
  if version_policy == "latest":
    if len(versions) != 1 or versions[0] < 1:
      raise ValueError(f"version_data is {version_data!r}, want the number of versions to serve")
    policy.latest.num_versions = versions[0]
  elif version_policy == "all":
    policy.all.SetInParent()
  elif version_policy == "specific":
    policy.specific.versions.extend(versions)
  else:
    raise ValueError(f"version_policy is {version_policy!r}, want latest, all or specific")
  for label, version in (version_labels or {}).items():
    config.version_labels[label] = version
  return config


def gen_model_server_config(
  models: Sequence[model_server_config_pb2.ModelConfig],
) -> model_server_config_pb2.ModelServerConfig:
  """Returns what a model configuration file says; its text for no model at all is accepted too."""
  from tensorflow_serving.config import model_server_config_pb2

  config = model_server_config_pb2.ModelServerConfig()
  config.model_config_list.SetInParent()
  config.model_config_list.config.extend(models)
  return config


def gen_model_spec(
  name: str, version: int | str | None = None, signature_name: str | None = None
) -> model_pb2.ModelSpec:
  """Returns which model is meant.

  Args:
    name: its name.
    version: a version, or the label of one; the newest by default.
    signature_name: which signature.
  """
  from tensorflow_serving.apis import model_pb2

  spec = model_pb2.ModelSpec(name=name)
  if isinstance(version, str):
    spec.version_label = version
  elif version is not None:
    spec.version.value = version
  if signature_name is not None:
    spec.signature_name = signature_name
  return spec


def gen_status_proto(
  error_code: int = 0, error_message: str | None = None
) -> status_pb2.StatusProto:
  """Returns a status; code 0 is OK."""
  from tensorflow_serving.apis import status_pb2

  return status_pb2.StatusProto(error_code=error_code, error_message=error_message or "")


def gen_model_version_status(
  version: int, state: int, error_code: int = 0, error_message: str | None = None
) -> get_model_status_pb2.ModelVersionStatus:
  """Returns the state of one version of a model; `state` is a `ModelState`."""
  from tensorflow_serving.apis import get_model_status_pb2

  return get_model_status_pb2.ModelVersionStatus(
    version=version, state=int(state), status=gen_status_proto(error_code, error_message)
  )


def make_tensor_proto(strings: Sequence[str | bytes]) -> tensor_pb2.TensorProto:
  """Returns a vector of strings, as inputs of serialized samples are."""
  from tensorflow.core.framework import tensor_pb2, types_pb2

  values = [s.encode() if isinstance(s, str) else s for s in strings]
  proto = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=values)
  proto.tensor_shape.dim.add(size=len(values))
  return proto


def newest_version_status(
  statuses: Sequence[get_model_status_pb2.ModelVersionStatus],
) -> Any:
  """Returns the newest AVAILABLE version's status, else the newest one's, `None` without any."""
  from tensorflow_serving.apis import get_model_status_pb2

  available = get_model_status_pb2.ModelVersionStatus.AVAILABLE
  return max(statuses, key=lambda s: (s.state == available, s.version), default=None)
