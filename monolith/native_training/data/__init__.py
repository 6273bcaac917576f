"""Training data: reading, filtering and parsing samples.

Names are imported when first used, so that importing a `_pb2` module below this package loads
neither TensorFlow nor the op library.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
  "BadRows": "bad_rows",
  "Buckets": "columns",
  "Ids": "columns",
  "LogBuckets": "columns",
  "Number": "columns",
  "Text": "columns",
  "bucketize": "columns",
  "criteo": "text_files",
  "csv": "text_files",
  "hash_strings": "string_hash",
  "tfrecord": "tfrecord_files",
  "PBDataset": "datasets",
  "InstanceReweightDataset": "datasets",
  "NegativeGenDataset": "datasets",
  "PbType": "datasets",
  "parse_examples": "parsers",
  "parse_instances": "parsers",
  "parse_example_batch": "parsers",
  "filter_by_fids": "feature_utils",
  "filter_by_feature_value": "feature_utils",
  "filter_by_value": "feature_utils",
  "feature_combine": "feature_utils",
  "negative_sample": "feature_utils",
  "switch_slot": "feature_utils",
  "special_strategy": "feature_utils",
}
_MODULES = ("datasets", "feature_list", "feature_utils", "item_pool_hook", "parsers", "utils")

__all__ = [
  "BadRows",
  "Buckets",
  "Ids",
  "InstanceReweightDataset",
  "LogBuckets",
  "NegativeGenDataset",
  "Number",
  "PBDataset",
  "PbType",
  "Text",
  "bucketize",
  "criteo",
  "csv",
  "datasets",
  "feature_combine",
  "filter_by_feature_value",
  "filter_by_fids",
  "filter_by_value",
  "hash_strings",
  "negative_sample",
  "parse_example_batch",
  "parse_examples",
  "parse_instances",
  "special_strategy",
  "switch_slot",
  "tfrecord",
]


def __getattr__(name: str) -> Any:
  if name in _MODULES:
    return importlib.import_module(f"{__name__}.{name}")
  if name in _EXPORTS:
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
