"""Layers that turn looked-up embeddings into logits: those of Keras, and the library's own.

Each can also be made from a template: `p = Cls.params()`, change it, `p.instantiate()`. Modules are
imported when one of their names is used, so that the ops of `layer_ops` alone stay cheap.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from monolith import _tensorflow

_MODULE_TO_NAMES = {
  "add_bias": ("AddBias",),
  "advanced_activations": (
    "ELU",
    "Exponential",
    "Gelu",
    "HardSigmoid",
    "LeakyReLU",
    "Linear",
    "PReLU",
    "ReLU",
    "Selu",
    "Sigmoid",
    "Sigmoid2",
    "Softmax",
    "Softplus",
    "Softsign",
    "Swish",
    "Tanh",
    "ThresholdedReLU",
  ),
  "dense": ("Dense",),
  "feature_cross": ("AllInt", "CAN", "CDot", "CIN", "DCN", "FFM", "GroupInt"),
  "feature_seq": ("DIEN", "DIN", "DMR_U2I"),
  "feature_trans": ("AutoInt", "SeNet", "iRazor"),
  "lhuc": ("LHUCTower",),
  "logit_correction": ("LogitCorrection",),
  "mlp": ("MLP",),
  "multi_task": ("MMoE", "SNR"),
  "norms": ("GradNorm", "LayerNorm"),
  "pooling": ("AvgPooling", "MaxPooling", "SumPooling"),
  "utils": ("DCNType", "MergeType"),
}
_NAME_TO_MODULE = {name: module for module, names in _MODULE_TO_NAMES.items() for name in names}


def _load_keras_layers() -> dict[str, type]:
  """Returns all layers of Keras by name, after giving those that have none a `params()`."""
  from monolith.native_training import utils

  keras = _tensorflow.import_keras()
  layers = {}
  for name in dir(keras.layers):
    layer = getattr(keras.layers, name)
    if not inspect.isclass(layer) or not issubclass(layer, keras.layers.Layer):
      continue
    if layer is not keras.layers.Layer:
      layers[name] = utils.with_params(layer)
  return layers


def __getattr__(name: str) -> Any:
  if name.startswith("__") and name != "__all__":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  if name in _NAME_TO_MODULE:
    value = getattr(importlib.import_module(f"{__name__}.{_NAME_TO_MODULE[name]}"), name)
  elif name == "keras_layers":
    value = _load_keras_layers()
  elif name == "__all__":
    value = __dir__()
  else:
    layers = _tensorflow.import_keras().layers
    if not hasattr(layers, name):
      raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = __getattr__("keras_layers").get(name, getattr(layers, name))
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  layers = _tensorflow.import_keras().layers
  names = {name for name in dir(layers) if not name.startswith("_")}
  return sorted({*names, *_NAME_TO_MODULE, "keras_layers"})
