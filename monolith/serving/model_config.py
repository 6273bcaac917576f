"""Which models a server has: `ModelServerConfig`, from flags, a text file or a request."""

from __future__ import annotations

import os

import tensorflow as tf
from google.protobuf import text_format
from tensorflow_serving.config import model_server_config_pb2
from tensorflow_serving.config.model_server_config_pb2 import ModelConfig

from monolith.serving.errors import invalid

_PLATFORM = "tensorflow"


def from_flags(model_name: str, model_base_path: str) -> dict[str, ModelConfig]:
  """Returns the configuration of a server of one model, newest version only."""
  if "://" not in model_base_path:
    model_base_path = os.path.abspath(model_base_path)
  config = ModelConfig(name=model_name, base_path=model_base_path, model_platform=_PLATFORM)
  return {model_name: config}


def from_file(path: str) -> dict[str, ModelConfig]:
  """Reads a `ModelServerConfig` in text format.

  Raises:
    ServingError: INVALID_ARGUMENT, it cannot be read, or says what cannot be.
  """
  try:
    with tf.io.gfile.GFile(path) as stream:
      text = stream.read()
    config = text_format.Parse(text, model_server_config_pb2.ModelServerConfig())
  except (tf.errors.OpError, text_format.ParseError, UnicodeDecodeError) as error:
    raise invalid(f"cannot read the model configuration {path}: {error}") from error
  return from_proto(config, path)


def from_proto(
  config: model_server_config_pb2.ModelServerConfig, source: str
) -> dict[str, ModelConfig]:
  """Returns the models of a message by name.

  Args:
    config: a message of any origin.
    source: what an error calls it.

  Raises:
    ServingError: INVALID_ARGUMENT, it says what cannot be.
  """
  if config.WhichOneof("config") == "custom_model_config":
    raise invalid(f"{source}: custom_model_config is not supported, want model_config_list")
  models: dict[str, ModelConfig] = {}
  for model in config.model_config_list.config:
    if not model.name or "/" in model.name:
      raise invalid(f"{source}: a model is called {model.name!r}")
    if model.name in models:
      raise invalid(f"{source}: there are two models {model.name!r}")
    if "://" not in model.base_path and not os.path.isabs(model.base_path):
      raise invalid(
        f"{source}: base_path of model {model.name!r} is {model.base_path!r}, want an absolute path"
      )
    if model.model_platform not in ("", _PLATFORM) or model.model_type not in (0, 1):
      raise invalid(
        f"{source}: model {model.name!r} is of platform {model.model_platform!r}, type "
        f"{model.model_type}, want {_PLATFORM!r}"
      )
    policy = model.model_version_policy
    if policy.WhichOneof("policy_choice") == "specific" and not policy.specific.versions:
      raise invalid(f"{source}: model {model.name!r} has a specific policy without versions")
    models[model.name] = model
  return models
