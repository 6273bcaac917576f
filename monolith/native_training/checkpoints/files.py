"""The files of a checkpoint on disk: list, delete, set aside, sweep and examine them.

A checkpoint is everything named `<prefix>.*`: `.index`, `.data-?????-of-?????`, `.meta`, and the
folder `.assets` of tables and filters with its `.manifest` and `.slices`. It counts once the state
file names it.

While a checkpoint is written, and again before it is deleted, it has a file `.unfinished`. A
checkpoint that has this mark and is not in the state file was left by a killed process: complete or
not, it is deleted when training starts again (`remove_leftovers`).
"""

from __future__ import annotations

import concurrent.futures
import difflib
import json
import os
import re
from collections.abc import Iterable, Sequence

import tensorflow as tf
from absl import logging
from tensorflow.python.lib.io import _pywrap_record_io, file_io
from tensorflow.python.training import py_checkpoint_reader

_DELETE_THREADS = 16
# Leftovers of an atomic write of TensorFlow (`x.tmp<uuid>`) or of its bundle writer
# (`x.tempstate<number>`) that was killed.
_TEMPORARY_FILE = re.compile(r"\.tmp[0-9a-f]{32}$|\.tempstate\d+$")
# Files that saver hooks write beside the checkpoints.
_STATE_FILES = ("checkpoint", "monolith_checkpoint", "graph.pbtxt", "meta_graph_for_debugging.pb")
_ASSETS = ".assets"
# Beside the assets: the sizes of their files, as JSON.
_MANIFEST = ".manifest"
_UNFINISHED = ".unfinished"
_TWIN = "previous."
_RESHARDED = "resharded."
# Errors that TensorFlow's readers raise for a damaged file: some of them become Python's.
_READ_ERRORS = (tf.errors.OpError, RuntimeError, ValueError, IndexError)
_RECORD_FILE = re.compile(r"-\d{5}-of-(\d{5})$")
# The names under which this package saves, and those under which it keeps copies, are such ones.
_INDEX_FILE = re.compile(r"(?P<name>model\.ckpt-(?P<step>\d+))\.index")
# How many names of a folder a message lists.
_MAX_SHOWN_NAMES = 10


def list_dir(path: str) -> list[str]:
  """Returns the names in a folder, without trailing slashes; none if it does not exist."""
  try:
    return [name.rstrip("/") for name in tf.io.gfile.listdir(path or ".")]
  except tf.errors.NotFoundError:
    return []


def mark_unfinished(prefix: str) -> None:
  """Marks a checkpoint as discardable unless the state file names it."""
  with tf.io.gfile.GFile(prefix + _UNFINISHED, "w") as f:
    f.write("")


def mark_finished(prefix: str) -> None:
  """Takes back `mark_unfinished`."""
  _delete(prefix + _UNFINISHED)


def is_marked_unfinished(prefix: str) -> bool:
  """Tells whether a checkpoint has the mark that `mark_unfinished` writes."""
  return tf.io.gfile.exists(prefix + _UNFINISHED)


def delete_checkpoint(prefix: str) -> None:
  """Deletes everything named `<prefix>.*`, folders included, the mark of an unfinished one last.

  Raises:
    tf.errors.OpError: something could not be deleted; the rest is.
  """
  directory, base = os.path.split(prefix)
  paths = [
    os.path.join(directory, name) for name in list_dir(directory) if name.startswith(base + ".")
  ]
  mark = prefix + _UNFINISHED
  _delete_all([path for path in paths if path != mark])
  if mark in paths:
    _delete(mark)


def _delete_all(paths: list[str]) -> None:
  if not paths:
    return
  with concurrent.futures.ThreadPoolExecutor(min(_DELETE_THREADS, len(paths))) as pool:
    futures = [pool.submit(_delete, path) for path in paths]
  for future in futures:
    future.result()


def _delete(path: str) -> None:
  try:
    if tf.io.gfile.isdir(path):
      tf.io.gfile.rmtree(path)
    else:
      tf.io.gfile.remove(path)
  except tf.errors.NotFoundError:
    # Another process has done it already.
    pass


def twin_of(prefix: str) -> str:
  """Returns the second name that `set_aside` gives a checkpoint."""
  directory, base = os.path.split(prefix)
  return os.path.join(directory, _TWIN + base)


def set_aside(prefix: str) -> None:
  """Gives a complete checkpoint a second name, under which it survives when the first is rewritten.

  Links local files, except the index, and copies others.
  """
  twin = twin_of(prefix)
  delete_checkpoint(twin)
  directory, base = os.path.split(prefix)
  mark_unfinished(twin)
  for name in list_dir(directory):
    if name.startswith(base + ".") and name != base + _UNFINISHED:
      _link_tree(os.path.join(directory, name), twin + name[len(base) :])


def copy_checkpoint(prefix: str, directory: str) -> None:
  """Copies a complete checkpoint to another folder, by links where the file system has them."""
  source_dir, base = os.path.split(prefix)
  for name in list_dir(source_dir):
    if name.startswith(base + ".") and name != base + _UNFINISHED:
      _link_tree(os.path.join(source_dir, name), os.path.join(directory, name))


def resharded_name(prefix: str) -> str:
  """Returns the prefix under which `reshard` writes a checkpoint again."""
  directory, base = os.path.split(prefix)
  return os.path.join(directory, _RESHARDED + base)


def link_variables(source: str, target: str) -> None:
  """Gives a checkpoint the variables of another one, linked where the file system has links.

  It also gets the other files that do not depend on the number of servers: the meta graph and the
  record of slices.
  """
  directory, base = os.path.split(source)
  for name in list_dir(directory):
    if name.startswith(tuple(base + end for end in (".data-", ".index", ".meta", ".slices"))):
      _link_tree(os.path.join(directory, name), target + name[len(base) :])


def link_assets(source: str, target: str) -> None:
  """Adds the assets of a checkpoint to those of another one, linked where possible.

  Raises:
    ValueError: both have a file of the same name.
  """
  common = set(list_dir(source + _ASSETS)) & set(list_dir(target + _ASSETS))
  if common:
    raise ValueError(f"{source} and {target} both have {sorted(common)}")
  _link_tree(source + _ASSETS, target + _ASSETS)


def _link_tree(source: str, target: str) -> None:
  if tf.io.gfile.isdir(source):
    tf.io.gfile.makedirs(target)
    for name in list_dir(source):
      _link_tree(os.path.join(source, name), os.path.join(target, name))
    return
  # TensorFlow rewrites an index in place: a link would lose its content with it.
  if source.endswith(".index"):
    tf.io.gfile.copy(source, target, overwrite=True)
    return
  try:
    os.link(source, target)
  except OSError:
    tf.io.gfile.copy(source, target, overwrite=True)


def discard_unfinished(prefix: str) -> None:
  """Deletes a checkpoint whose save failed; logs errors, for the disk may be the problem."""
  directory, base = os.path.split(prefix)
  unfinished = [
    name
    for name in list_dir(directory)
    if name == base + "_temp" or (name.startswith(base + ".") and _TEMPORARY_FILE.search(name))
  ]
  try:
    _delete_all([os.path.join(directory, name) for name in unfinished])
    delete_checkpoint(prefix)
  except tf.errors.OpError as e:
    logging.warning("Cannot delete what the failed save of %s left: %s", prefix, e.message)


def remove_leftovers(directory: str, basename: str, recorded: Iterable[str]) -> list[str]:
  """Deletes the leftovers of killed savers in a folder in which no process saves now.

  Args:
    directory: the folder of the checkpoints.
    basename: the checkpoints' base name, as in `<basename>-<step>`.
    recorded: prefixes or base names of the checkpoints that the state file names.

  Returns:
    The names of the deleted files.
  """
  recorded = {os.path.basename(path) for path in recorded}
  names = list_dir(directory)
  twin = f"(?:{re.escape(_TWIN)}|{re.escape(_RESHARDED)})*"
  checkpoint = re.compile(f"{twin}{re.escape(basename)}-\\d+(?=\\.|_temp$)")
  unfinished = {name[: -len(_UNFINISHED)] for name in names if name.endswith(_UNFINISHED)}
  leftovers = []
  for name in names:
    match = checkpoint.match(name)
    temporary = _TEMPORARY_FILE.search(name)
    if temporary and (match or name[: temporary.start()] in _STATE_FILES):
      leftovers.append(name)
    elif match and name == match.group() + "_temp":
      leftovers.append(name)
  _delete_all([os.path.join(directory, name) for name in leftovers])
  for name in sorted(unfinished):
    if checkpoint.match(name + "."):
      if name in recorded:
        mark_finished(os.path.join(directory, name))
      else:
        delete_checkpoint(os.path.join(directory, name))
        leftovers.append(name)
  if leftovers:
    logging.info("Deleted what unfinished saves left in %s: %s", directory, leftovers)
  return leftovers


def complete_checkpoints(directory: str, basename: str) -> list[str]:
  """Returns the prefixes of all checkpoints `<basename>-<step>` with an index, by step."""
  pattern = re.compile(f"{re.escape(basename)}-(\\d+)\\.index")
  found = [match for match in map(pattern.fullmatch, list_dir(directory)) if match]
  found.sort(key=lambda match: int(match.group(1)))
  return [os.path.join(directory, match.group()[: -len(".index")]) for match in found]


def require_newest(directory: str) -> str:
  """Returns the prefix of the newest checkpoint of a folder.

  Raises:
    ValueError: there is none; the message lists the content of the folder.
  """
  newest = tf.train.latest_checkpoint(directory)
  if newest is not None:
    return newest
  raise ValueError(f"There is no checkpoint in {directory}: {describe(directory)}")


def describe(directory: str) -> str:
  """Returns a sentence about a folder in which no checkpoint was found."""
  if not tf.io.gfile.exists(directory):
    return f"the folder does not exist.{_nearest_names(directory)}"
  names = list_dir(directory)
  if not names:
    return "the folder is empty."
  shown = ", ".join(sorted(names)[:_MAX_SHOWN_NAMES])
  more = len(names) - _MAX_SHOWN_NAMES
  text = f"it has {shown}{f' and {more} more' if more > 0 else ''}."
  lost = unrecorded_checkpoints(directory)
  return f"{text} {how_to_record(directory, lost)}" if lost else text


def _nearest_names(path: str) -> str:
  parent = os.path.dirname(os.path.normpath(path)) or "."
  near = difflib.get_close_matches(os.path.basename(os.path.normpath(path)), list_dir(parent))
  return f" Beside it there is {', '.join(near)}." if near else ""


def unrecorded_checkpoints(directory: str) -> list[str]:
  """Returns complete checkpoints, oldest first, of a folder that has lost its state file.

  Leftovers of a killed save do not count: they have the mark.
  """
  if tf.io.gfile.exists(os.path.join(directory, _STATE_FILES[0])):
    return []
  names = list_dir(directory)
  found = [match for match in map(_INDEX_FILE.fullmatch, names) if match]
  found.sort(key=lambda match: int(match["step"]))
  prefixes = [os.path.join(directory, match["name"]) for match in found]
  return [
    prefix
    for prefix in prefixes
    if not is_marked_unfinished(prefix) and find_missing_file(prefix) is None
  ]


def how_to_record(directory: str, prefixes: Sequence[str]) -> str:
  """Returns a sentence that says how `unrecorded_checkpoints` are found again."""
  names = [os.path.basename(prefix) for prefix in prefixes]
  return (
    f"The checkpoints {', '.join(names)} are there, but the file "
    f"{os.path.join(directory, _STATE_FILES[0])}, which says which one counts, is missing. Write "
    f"it again with tf.compat.v1.train.update_checkpoint_state({directory!r}, {names[-1]!r}, "
    f"{names!r}), or move the files away to start from nothing."
  )


def write_manifest(prefix: str) -> None:
  """Records the sizes of a checkpoint's assets; does nothing if it has none.

  Files of tables have no end mark: one truncated between two records looks like a smaller table.
  """
  if tf.io.gfile.isdir(prefix + _ASSETS):
    sizes = json.dumps(_asset_sizes(prefix), indent=0, sort_keys=True)
    file_io.atomic_write_string_to_file(prefix + _MANIFEST, sizes)


def _asset_sizes(prefix: str) -> dict[str, int]:
  sizes = {}
  for folder, _, names in tf.io.gfile.walk(prefix + _ASSETS):
    for name in names:
      path = os.path.join(folder, name)
      sizes[os.path.relpath(path, prefix + _ASSETS)] = tf.io.gfile.stat(path).length
  return sizes


def find_wrong_size(prefix: str) -> str | None:
  """Returns the first asset whose size differs from the manifest, in the form of `find_damage`.

  Checkpoints without a manifest, which other programs wrote, pass.
  """
  manifest = prefix + _MANIFEST
  if not tf.io.gfile.exists(manifest):
    return None
  try:
    with tf.io.gfile.GFile(manifest) as f:
      wanted = json.loads(f.read())
    wanted = {str(name): int(size) for name, size in wanted.items()}
  except (ValueError, AttributeError, TypeError) as e:
    return f"{manifest}: {_first_line(e)}"
  sizes = _asset_sizes(prefix)
  for name, size in sorted(wanted.items()):
    path = os.path.join(prefix + _ASSETS, name)
    if name not in sizes:
      return f"{path}: the file does not exist, but {manifest} names it"
    if sizes[name] != size:
      return f"{path}: it has {sizes[name]} bytes, {manifest} says {size}"
  return None


def find_damage(prefix: str) -> str | None:
  """Reads a whole checkpoint and reports a damaged file.

  Compares the checksum of every variable and of every record of the assets. One tensor is in memory
  at a time.

  Args:
    prefix: the checkpoint's prefix.

  Returns:
    `<file>: <cause>`, or None if nothing is wrong.
  """
  return (
    find_wrong_size(prefix)
    or find_damaged_variables(prefix)
    or find_damaged_records(prefix + _ASSETS)
  )


def find_damaged_variables(prefix: str) -> str | None:
  """Like `find_damage`, for the variables of a checkpoint alone."""
  index = prefix + ".index"
  try:
    reader = py_checkpoint_reader.NewCheckpointReader(prefix)
    names_to_dtypes = reader.get_variable_to_dtype_map()
  except _READ_ERRORS as e:
    return f"{index}: {_first_line(e)}"
  damage = find_missing_file(prefix)
  if damage:
    return damage
  for name, dtype in sorted(names_to_dtypes.items()):
    if dtype in (tf.variant, tf.resource):
      continue
    try:
      reader.get_tensor(name)
    except _READ_ERRORS as e:
      cause = _first_line(e)
      return f"{_shard_of(prefix, cause)}: {cause} (variable {name})"
  return None


def find_missing_file(prefix: str) -> str | None:
  """Returns which file of a checkpoint's variables is missing, in the form of `find_damage`."""
  if not tf.io.gfile.exists(prefix + ".index"):
    return f"{prefix}.index: the file does not exist"
  directory, base = os.path.split(prefix)
  names = {name for name in list_dir(directory) if name.startswith(base + ".data-")}
  if not names:
    return f"{prefix}.data-?????-of-?????: no such file"
  num_shards = {int(m.group(1)) for m in map(_RECORD_FILE.search, names) if m}
  if len(num_shards) == 1:
    for shard in range(*num_shards):
      name = f"{base}.data-{shard:05d}-of-{max(num_shards):05d}"
      if name not in names:
        return f"{os.path.join(directory, name)}: the file does not exist"
  return None


def _shard_of(prefix: str, message: str) -> str:
  """Returns the data file that TensorFlow's error message is about."""
  directory, base = os.path.split(prefix)
  files = sorted(name for name in list_dir(directory) if name.startswith(base + ".data-"))
  for name in files:
    if name in message:
      return os.path.join(directory, name)
  shard = re.search(r"shard (\d+)", message)
  if shard and int(shard.group(1)) < len(files):
    return os.path.join(directory, files[int(shard.group(1))])
  return os.path.join(directory, files[0]) if len(files) == 1 else f"{prefix}.data-?????-of-?????"


def find_damaged_records(assets: str) -> str | None:
  """Like `find_damage`, for the files of tables and filters in their folder."""
  names = set(list_dir(assets))
  for name in sorted(names):
    match = _RECORD_FILE.search(name)
    if not match:
      continue
    # Groups of tables, which have a file of metadata, are compressed.
    is_group = f"{name[: match.start()]}.meta{match.group()}" in names
    path = os.path.join(assets, name)
    try:
      for _ in _pywrap_record_io.RecordIterator(path, "SNAPPY" if is_group else ""):
        pass
    except _READ_ERRORS as e:
      return f"{path}: {_first_line(e)}"
  return None


def newest_intact(prefixes: Iterable[str]) -> str | None:
  """Returns the last undamaged one of the checkpoints, which are given oldest first."""
  for prefix in reversed(list(prefixes)):
    if find_damage(prefix) is None:
      return prefix
  return None


def remedy(prefix: str) -> str:
  """Returns a sentence that names a checkpoint to use instead of a damaged one.

  Reads the candidates as a whole, newest first.
  """
  state = None
  try:
    state = tf.train.get_checkpoint_state(os.path.dirname(prefix))
  except ValueError:
    pass
  recorded = list(state.all_model_checkpoint_paths) if state else []
  bad = os.path.basename(prefix)
  intact = newest_intact(p for p in recorded if os.path.basename(p) != bad)
  if intact is None:
    return "There is no other intact checkpoint beside it."
  return f"The newest other checkpoint that is intact is {intact}."


def _first_line(error: Exception) -> str:
  message = getattr(error, "message", None) or str(error)
  return message.strip().split("\n")[0]
