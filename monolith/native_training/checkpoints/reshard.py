"""Moves the rows of a checkpoint to their places for another number of parameter servers.

The id of a row determines its server (signed floor modulo), and the server's index is part of the
names of table files, so a checkpoint can only be restored on the number of servers it was saved on.
`reshard_checkpoint` rewrites it for another number. Names, with `i` the server:

    single table   <table>             without servers, <table>_<i>                 with them
    group          MonolithMultiHashTable_             MonolithMultiHashTable_<i>
    hash filter    hash_filter_0                       hash_filter_<i>

Variables do not depend on the number of servers. The cells of a filter belong to no id: a
server takes the filter that held most of its ids (all of them, if the new number is a multiple of
the old one), so that some counts may start anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections import defaultdict
from collections.abc import Iterator

import tensorflow as tf
from absl import logging
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.lib.io import _pywrap_record_io

from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints.state import SaveHelper
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

_FILE = re.compile(r"^(.*?)(\.meta)?-(\d{5})-of-\d{5}$")
# Name of a table on a server.
_SERVER = re.compile(r"^(.*)_(\d{1,5})$")
_GROUP = "MonolithMultiHashTable"
_FILTER = "hash_filter"
_SNAPPY = "SNAPPY"
# Tag of `EntryDump.id`, a fixed64, which is written first.
_ID_TAG = 0x09

# Names of files by table or filter.
_Files = dict[str, list[str]]


def reshard_checkpoint(
  checkpoint: str, old_num_ps: int, new_num_ps: int, directory: str | None = None
) -> str:
  """Writes a checkpoint again for another number of servers, and names it in the state file.

  The old checkpoint stays, as the one before the newest.

  Args:
    checkpoint: prefix of the checkpoint, `<model_dir>/model.ckpt-<step>`.
    old_num_ps: the number of servers it was saved on; 0 for none.
    new_num_ps: the number of servers it will be restored on; 0 for none.
    directory: where the new checkpoint and the state file go, beside the old one by default.

  Returns:
    The prefix of the new checkpoint.

  Raises:
    ValueError: a number is negative, or the checkpoint is not one of `old_num_ps` servers.
    tf.errors.DataLossError: one of the checkpoint's files is damaged.
  """
  for name, number in (("old_num_ps", old_num_ps), ("new_num_ps", new_num_ps)):
    if number < 0:
      raise ValueError(f"{name} is {number}, want 0 or more")
  damage = checkpoint_files.find_missing_file(checkpoint) or checkpoint_files.find_wrong_size(
    checkpoint
  )
  if damage is not None:
    raise tf.errors.DataLossError(None, None, f"Cannot reshard {checkpoint}: {damage}")
  directory = os.path.dirname(checkpoint) if directory is None else directory
  target = checkpoint_files.resharded_name(os.path.join(directory, os.path.basename(checkpoint)))
  checkpoint_files.delete_checkpoint(target)
  checkpoint_files.mark_unfinished(target)
  old_assets = SaveHelper.get_ckpt_asset_dir(checkpoint)
  new_assets = SaveHelper.get_ckpt_asset_dir(target)
  tf.io.gfile.makedirs(new_assets)
  files = _list_files(old_assets)
  for family, names in _group_by_family(files, old_num_ps).items():
    logging.info("Resharding %s of %s, %d files of tables", family, checkpoint, len(names))
    if family == _FILTER:
      _copy_filters(old_assets, new_assets, files, names, max(1, new_num_ps))
      continue
    writers = _Writers(new_assets, family, new_num_ps)
    if family == _GROUP:
      _reshard_group(old_assets, [files[name] for name in names], writers)
    else:
      _reshard_table(old_assets, [files[name] for name in names], writers)
  checkpoint_files.write_manifest(target)
  checkpoint_files.link_variables(checkpoint, target)
  _record(directory, checkpoint, target)
  checkpoint_files.mark_finished(target)
  return target


def count_servers(checkpoint: str) -> int:
  """Returns the number of servers a checkpoint was saved on, 0 for none.

  Raises:
    ValueError: its files do not say.
  """
  names = list(_list_files(SaveHelper.get_ckpt_asset_dir(checkpoint)))
  # A filter has the index 0 without servers too.
  counts = {_count_parts(name, names) for name in names if not name.startswith(_FILTER + "_")}
  if len(counts) > 1:
    raise ValueError(f"the tables in {checkpoint} are not all on as many servers: {sorted(names)}")
  return counts.pop() if counts else 0


def fits(checkpoint: str, num_ps: int) -> bool:
  """Returns whether a checkpoint can be restored as it is on `num_ps` servers.

  Raises:
    ValueError: its files do not say how many it was saved on.
  """
  saved_on = count_servers(checkpoint)
  if saved_on == num_ps:
    return True
  # `MultiHashTableCheckpointRestorerListener` restores one group under either name.
  names = _list_files(SaveHelper.get_ckpt_asset_dir(checkpoint))
  is_group = all(name.startswith((_GROUP + "_", _FILTER + "_")) for name in names)
  return is_group and {saved_on, num_ps} == {0, 1}


def _count_parts(name: str, names: list[str]) -> int:
  match = _SERVER.match(name)
  if match is None:
    return 0
  part = re.compile(re.escape(match.group(1)) + r"_(\d{1,5})$")
  return 1 + max(int(other.group(1)) for other in map(part.match, names) if other)


def _list_files(assets: str) -> _Files:
  """Returns the data files in a folder, sorted, by the table or filter that they belong to."""
  files: _Files = defaultdict(list)
  for name in sorted(checkpoint_files.list_dir(assets)):
    match = _FILE.match(name)
    if match and not match.group(2):
      files[match.group(1)].append(name)
  return files


def _group_by_family(files: _Files, num_ps: int) -> dict[str, list[str]]:
  """Returns the names that are parts of one table, or of all filters, in the order of servers."""
  families: dict[str, list[str]] = {}
  for name in files:
    family = _family(name, num_ps)
    parts = [_name(family, i, num_ps) for i in range(max(1, num_ps))]
    missing = [part for part in parts if part not in files]
    extra = _name(family, len(parts), num_ps)
    if name not in parts or missing or (num_ps and extra in files):
      raise ValueError(
        f"{name} does not look like a table on {num_ps} servers: want {parts[0]} to {parts[-1]}, "
        f"found {sorted(n for n in files if n.startswith(family))}"
      )
    families[family] = parts
  return families


def _family(name: str, num_ps: int) -> str:
  if name.startswith(_GROUP + "_"):
    return _GROUP
  if name.startswith(_FILTER + "_"):
    return _FILTER
  return re.sub(r"_\d+$", "", name) if num_ps else name


def _name(family: str, server: int, num_ps: int) -> str:
  """Returns the name of one server's part of a table."""
  if num_ps or family == _FILTER:
    return f"{family}_{server}"
  return f"{family}_" if family == _GROUP else family


def _copy_filters(
  old_assets: str, new_assets: str, files: _Files, names: list[str], num_new: int
) -> None:
  for server in range(num_new):
    source = names[server % len(names)]
    for file in files[source]:
      target = f"{_FILTER}_{server}" + file[len(source) :]
      tf.io.gfile.copy(old_assets + file, new_assets + target, overwrite=True)
    # The manifest leaves out the filter's name, so that it can be copied.
    manifest = f"{old_assets}.{source}.manifest"
    if tf.io.gfile.exists(manifest):
      target = f"{new_assets}.{_FILTER}_{server}.manifest"
      tf.io.gfile.copy(manifest, target, overwrite=True)


def _read(path: str, compression: str = "") -> Iterator[bytes]:
  try:
    yield from _pywrap_record_io.RecordIterator(path, compression)
  except (tf.errors.OpError, RuntimeError) as e:
    raise tf.errors.DataLossError(None, None, f"{path}: {e}") from e


def _id_of(record: bytes) -> int:
  if record[:1] == bytes([_ID_TAG]):
    return struct.unpack_from("<q", record, 1)[0]
  return embedding_hash_table_pb2.EntryDump.FromString(record).id


class _Writers:
  """Opens the files of one table on the new servers.

  Args:
    folder: where to write, with a slash at its end.
    family: the table's name without server.
    num_ps: the new number of servers.
  """

  def __init__(self, folder: str, family: str, num_ps: int):
    self._names = [folder + _name(family, i, num_ps) for i in range(max(1, num_ps))]
    self.num_servers = len(self._names)

  @contextlib.contextmanager
  def open(
    self, shard: int, num_shards: int, suffix: str = "", compression: str = ""
  ) -> Iterator[list]:
    """Opens one file per server."""
    paths = [f"{name}{suffix}-{shard:05d}-of-{num_shards:05d}" for name in self._names]
    options = _pywrap_record_io.RecordWriterOptions(compression)
    writers = [_pywrap_record_io.RecordWriter(path, options) for path in paths]
    yield writers
    for writer in writers:
      writer.close()


def _reshard_table(assets: str, files_of_servers: list[list[str]], writers: _Writers) -> None:
  """Writes file k of every new server from the files k of all old ones."""
  num_shards = max(map(len, files_of_servers))
  for shard in range(num_shards):
    with writers.open(shard, num_shards) as targets:
      for files in files_of_servers:
        for file in files[shard : shard + 1]:
          for record in _read(assets + file):
            targets[_id_of(record) % writers.num_servers].write(record)


def _reshard_group(assets: str, files_of_servers: list[list[str]], writers: _Writers) -> None:
  """Reshards a group, whose files hold one table after another, counted in a file of metadata."""
  num_shards = max(map(len, files_of_servers))
  for shard in range(num_shards):
    data = writers.open(shard, num_shards, compression=_SNAPPY)
    with data as targets, writers.open(shard, num_shards, suffix=".meta") as metas:
      sources = [
        _GroupFile(assets, files[shard]) for files in files_of_servers if shard < len(files)
      ]
      names = sorted({name for source in sources for name in source.counts})
      for name in names:
        counts = [0] * writers.num_servers
        for source in sources:
          for record in source.read(name):
            server = _id_of(record) % writers.num_servers
            counts[server] += 1
            targets[server].write(record)
        for meta, count in zip(metas, counts):
          dump = embedding_hash_table_pb2.MultiHashTableMetadata(table_name=name, num_entries=count)
          meta.write(dump.SerializeToString())


class _GroupFile:
  """One file of a group, read table by table, in the order of their names, as it was written."""

  def __init__(self, assets: str, file: str):
    self._path = assets + file
    self._records = _read(self._path, _SNAPPY)
    self.counts: dict[str, int] = {}
    for record in _read(re.sub(r"(?=-\d{5}-of-\d{5}$)", ".meta", self._path)):
      metadata = embedding_hash_table_pb2.MultiHashTableMetadata.FromString(record)
      self.counts[metadata.table_name] = metadata.num_entries
    if list(self.counts) != sorted(self.counts):
      raise ValueError(f"the tables in {self._path} are not in the order of their names")

  def read(self, name: str) -> Iterator[bytes]:
    for i in range(self.counts.get(name, 0)):
      record = next(self._records, None)
      if record is None:
        raise tf.errors.DataLossError(
          None, None, f"{self._path}: {i} entries of {name}, want {self.counts[name]}"
        )
      yield record


def _record(directory: str, checkpoint: str, target: str) -> None:
  state = tf.train.get_checkpoint_state(directory)
  paths = list(state.all_model_checkpoint_paths) if state else [checkpoint]
  checkpoint_management.update_checkpoint_state_internal(
    save_dir=directory,
    model_checkpoint_path=target,
    all_model_checkpoint_paths=[path for path in paths if path != target] + [target],
  )
