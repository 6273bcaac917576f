"""Files, dates and the resumption of TPU input pipelines.

Listing goes through `tf.io.gfile`, which understands `gs://` and local paths alike; only the
download helpers need the package `google-cloud-storage`, imported when they are called.

Differences from ByteDance's Monolith: sizes are integers and must divide evenly; the separator of
meta files is honoured; a shard's files are skipped only up to its first unfinished one; a bucket
may lack a path.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any, Optional

import tensorflow as tf
from absl import logging

_GS_PREFIX = "gs://"
_CORE_NUMBER_PER_HOST = 8
_DATE_LENGTH = 8
_CHECKPOINT_META = re.compile(r"model\.ckpt-(\d+)\.meta")


@dataclasses.dataclass(frozen=True)
class Blob:
  """An object in a bucket."""

  name: str  # path within the bucket


def get_bucket_name_and_relavite_path(gs_file_path: str) -> tuple[str, str]:
  """Splits `gs://bucket/a/b.txt` into `('bucket', 'a/b.txt')`.

  Raises:
    AssertionError: the path does not start with `gs://`.
  """
  assert gs_file_path.startswith(_GS_PREFIX), f"File name: {gs_file_path}"
  bucket_name, _, relative_path = gs_file_path[len(_GS_PREFIX) :].partition("/")
  return bucket_name, relative_path


def download_gcs_file(gs_file_path: str, local_file_name: str) -> None:
  """Downloads `gs://bucket/path` to a local file."""
  bucket_name, relative_path = get_bucket_name_and_relavite_path(gs_file_path)
  download_gcs_file_with_relative_path(bucket_name, relative_path, local_file_name)


def download_gcs_file_with_relative_path(
  bucket_name: str, gs_file_relative_path: str, local_file_name: str
) -> None:
  """Downloads an object of a bucket to a local file.

  Raises:
    ImportError: `google-cloud-storage` is not installed.
  """
  try:
    from google.cloud import storage
  except ImportError as error:
    raise ImportError(
      f"Downloading {_GS_PREFIX}{bucket_name}/{gs_file_relative_path} needs the package "
      "google-cloud-storage: pip install google-cloud-storage"
    ) from error
  bucket = storage.Client().bucket(bucket_name)
  bucket.blob(gs_file_relative_path).download_to_filename(local_file_name)


def list_gcs_files_with_prefix(gs_path_prefix: str) -> tuple[str, list[Blob]]:
  """Lists the objects whose path starts with a prefix, in all folders below.

  Returns:
    The bucket's name and the objects, sorted by name.
  """
  bucket_name, _ = get_bucket_name_and_relavite_path(gs_path_prefix)
  paths = _list_files_with_prefix(gs_path_prefix)
  return bucket_name, [Blob(get_bucket_name_and_relavite_path(path)[1]) for path in paths]


def parse_example_number_meta_file(meta_file: str, seperator: str) -> list[tuple[str, int]]:
  """Reads how many examples each file has.

  Args:
    meta_file: lines `file<seperator>count[<seperator>...]`; other lines are skipped.
    seperator: what separates the fields.

  Returns:
    `(file, count)` pairs.

  Raises:
    AssertionError: the file names do not ascend strictly.
  """
  result: list[tuple[str, int]] = []
  with tf.io.gfile.GFile(meta_file) as lines:
    for line in lines:
      fields = line.strip().split(seperator)
      if len(fields) < 2:
        continue
      name, count = fields[0], int(fields[1])
      if result:
        _assert_ascending(result[-1][0], name)
      result.append((name, count))
  return result


def calculate_shard_skip_file_number(
  file_example_number: Sequence[int],
  shard_num: int,
  completed_steps_number: int,
  batch_size_per_core: int,
) -> list[int]:
  """Computes how many files each shard had read completely.

  Args:
    file_example_number: examples of each file; file `i` belongs to shard `i % shard_num`.
    shard_num: number of hosts.
    completed_steps_number: steps trained so far.
    batch_size_per_core: examples of one core and step.

  Returns:
    For each shard, the length of the longest prefix of its files that hold no more examples than
    one host has processed.
  """
  done_per_host = batch_size_per_core * completed_steps_number * _CORE_NUMBER_PER_HOST
  skips = []
  for shard in range(shard_num):
    total = finished = 0
    for count in file_example_number[shard::shard_num]:
      total += count
      if total > done_per_host:
        break
      finished += 1
    skips.append(finished)
  return skips


def get_checkpoint_completed_step_number(checkpoint_path: str) -> int:
  """Returns the highest step among the files `model.ckpt-<step>.meta` of a folder, 0 if none."""
  if not tf.io.gfile.isdir(checkpoint_path):
    return 0
  matches = [_CHECKPOINT_META.fullmatch(name) for name in tf.io.gfile.listdir(checkpoint_path)]
  return max((int(match.group(1)) for match in matches if match), default=0)


def update_params(params: dict[str, Any], tpu_cluster_resolver: Any) -> None:
  """Completes the batch sizes, and where each shard of the input resumes, in a params dict.

  Args:
    params: sets `shard_num`, the missing one of `batch_size_per_core` and `global_batch_size` and,
      when there is a checkpoint under `model_dir`, `shard_skip_file_number`, from
      `train_dataset_path` and `gcs_file_example_number`.
    tpu_cluster_resolver: its `worker` tasks are the hosts.

  Raises:
    AssertionError: no batch size is given, or they do not fit together.
  """
  shard_num = tpu_cluster_resolver.cluster_spec().num_tasks("worker")
  core_number = shard_num * _CORE_NUMBER_PER_HOST
  per_core = params.get("batch_size_per_core")
  total = params.get("global_batch_size")
  assert (
    per_core is not None or total is not None
  ), "batch_size_per_core and global_batch_size can't be both None."
  if per_core is None:
    assert (
      total % core_number == 0
    ), f"global_batch_size {total} is not a multiple of the {core_number} cores"
    per_core = total // core_number
  elif total is None:
    total = per_core * core_number
  assert (
    per_core * core_number == total
  ), f"batch_size_per_core {per_core} x {core_number} cores is not global_batch_size {total}"
  params["shard_num"] = shard_num
  params["batch_size_per_core"] = per_core
  params["global_batch_size"] = total

  completed_steps = get_checkpoint_completed_step_number(params["model_dir"])
  if completed_steps > 0:
    example_numbers = get_per_file_example_numbers_for_checkpoint_reload(
      params["train_dataset_path"], params["gcs_file_example_number"], ","
    )
    params["shard_skip_file_number"] = calculate_shard_skip_file_number(
      example_numbers, shard_num, completed_steps, per_core
    )
    logging.info(
      "Resuming at step %d, files to skip: %s", completed_steps, params["shard_skip_file_number"]
    )


def get_per_file_example_numbers_for_checkpoint_reload(
  train_dataset_path: str,
  file_example_number_meta: str,
  file_example_number_meta_seperator: str,
) -> list[int]:
  """Returns the number of examples of each training file.

  Args:
    train_dataset_path: a pattern, or a folder.
    file_example_number_meta: a file with a line `file<seperator>count` per file.
    file_example_number_meta_seperator: its separator.

  Raises:
    AssertionError: there are no training files, or they are not a contiguous run of the meta file
      that starts at its first entry not smaller than the first training file.
  """
  if tf.io.gfile.isdir(train_dataset_path):
    train_dataset_path = os.path.join(train_dataset_path, "*")
  files = sorted(tf.io.gfile.glob(train_dataset_path))
  assert files, f"No training file matches {train_dataset_path}"
  meta = parse_example_number_meta_file(
    file_example_number_meta, file_example_number_meta_seperator
  )
  start = next((i for i, (name, _) in enumerate(meta) if name >= files[0]), len(meta))
  run = meta[start : start + len(files)]
  assert len(run) == len(
    files
  ), f"{file_example_number_meta} has {len(run)} entries from {files[0]} on, want {len(files)}"
  for name, (meta_name, _) in zip(files, run):
    assert (
      name == meta_name
    ), f"Training file {name} does not match {meta_name} of {file_example_number_meta}"
  return [count for _, count in run]


def range_dateset(
  dataset: tf.data.Dataset,
  root_path: str,
  start_date: Optional[str] = None,
  end_date: Optional[str] = None,
) -> tf.data.Dataset:
  """Keeps the paths `<root_path>YYYYMMDD...` whose date lies in a range.

  Args:
    dataset: scalar strings.
    root_path: ends with `/`: the date starts right after it.
    start_date: first date, `YYYYMMDD`; None for no limit.
    end_date: last date, inclusive; None for no limit.
  """
  # Python integers: a filter that captures a tensor cannot be used with one-shot iterators.
  first = int(start_date or "00000000")
  last = int(end_date or "99999999")

  def in_range(path: tf.Tensor) -> tf.Tensor:
    date = tf.strings.substr(path, len(root_path), _DATE_LENGTH)
    date = tf.strings.to_number(date, out_type=tf.int32)
    return tf.logical_and(date >= first, date <= last)

  return dataset.filter(in_range)


def _list_files_with_prefix(prefix: str) -> list[str]:
  paths = []
  for path in tf.io.gfile.glob(f"{prefix}*"):
    if not tf.io.gfile.isdir(path):
      paths.append(path)
      continue
    for folder, _, names in tf.io.gfile.walk(path):
      paths.extend(os.path.join(folder, name) for name in names)
  return sorted(paths)


def _assert_ascending(previous: str, name: str) -> None:
  assert (
    previous < name
  ), f"File name must be in dictionary ascending order. Previous: {previous}, current: {name}"
