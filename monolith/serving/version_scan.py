"""Which versions of a model lie in its folder, and which of them are wanted."""

from __future__ import annotations

import os
import re

import tensorflow as tf
from tensorflow_serving.config.file_system_storage_path_source_pb2 import (
  FileSystemStoragePathSourceConfig,
)

_VERSION = re.compile(r"[0-9]{1,18}")
_GRAPH_FILES = ("saved_model.pb", "saved_model.pbtxt")


def list_versions(base_path: str) -> dict[int, str]:
  """Returns folder by version of the numbered folders in `base_path`; empty if it is missing."""
  versions = {}
  try:
    names = tf.io.gfile.listdir(base_path)
  except tf.errors.OpError:
    return {}
  for name in names:
    name = name.rstrip("/")  # listdir of some file systems ends folders with a slash
    path = os.path.join(base_path, name)
    if _VERSION.fullmatch(name) and tf.io.gfile.isdir(path):
      versions[int(name)] = path
  return versions


def select_versions(
  policy: FileSystemStoragePathSourceConfig.ServableVersionPolicy, available: dict[int, str]
) -> dict[int, str]:
  """Returns the versions that a policy wants, of those there are.

  Args:
    policy: latest (the newest one, or as many as it says), all, or specific; none is latest.
    available: folder by version.
  """
  kind = policy.WhichOneof("policy_choice")
  if kind == "all":
    return dict(available)
  if kind == "specific":
    return {
      version: available[version] for version in policy.specific.versions if version in available
    }
  count = policy.latest.num_versions or 1
  return {version: available[version] for version in sorted(available)[-count:]}


def fingerprint(path: str) -> tuple:
  """Returns something that changes when a model's files are written again or completed."""
  found = []
  for name in (*_GRAPH_FILES, "variables", "assets"):
    try:
      stat = tf.io.gfile.stat(os.path.join(path, name))
    except tf.errors.OpError:
      continue
    found.append((name, stat.length, stat.mtime_nsec))
  return tuple(found)
