"""Listeners that save and restore the files of `<checkpoint>.assets/`: tables and filters.

`hash_table_ops`, `multi_hash_table_ops` and `hash_filter_ops` derive their listeners from these
and add only what differs: the names of the files, and where else to look for them.

All ops are built by constructors, so that the listeners work on a finalized graph.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf
from absl import logging

from monolith.native_training import basic_restore_hook
from monolith.native_training.checkpoints import restored, saver
from monolith.native_training.checkpoints import state as checkpoint_state

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Asset(Generic[Item]):
  """A table, group or filter that has its own files in a checkpoint, and an op on these files.

  Attributes:
    item: a table, a group of tables or a filter.
    device: the device where it lives.
    path: a placeholder for the base name of its files.
    op: when run, saves the item to `path`, restores it from there, or reads what was saved.
  """

  item: Item
  device: str
  path: tf.Tensor
  op: Any


def build_assets(
  items: Iterable[Item],
  device_of: Callable[[Item], str],
  make_op: Callable[[Item, tf.Tensor], Any],
) -> list[Asset[Item]]:
  """Returns an asset for each item, with the op that `make_op(item, path)` returns."""
  assets = []
  for item in items:
    path = tf.compat.v1.placeholder(tf.string, shape=[])
    assets.append(Asset(item, device_of(item), path, make_op(item, path)))
  return assets


class AssetSaverListener(tf.compat.v1.train.CheckpointSaverListener, abc.ABC, Generic[Item]):
  """Saves assets to `<basename>-<step>.assets/`, before the variables are saved.

  The order matters: the `checkpoint` file may name a checkpoint only once its assets are safe.

  Args:
    basename: the checkpoint's base name, `<folder>/model.ckpt`.
    kind: what the assets are, for the log.
    assets: assets whose ops save.
    timeout_in_ms: how long saving all of them may take.
    save_op_name: the name of the op that saves all of them.
  """

  def __init__(
    self,
    basename: str,
    kind: str,
    assets: Sequence[Asset[Item]],
    timeout_in_ms: int,
    save_op_name: str | None = None,
  ):
    super().__init__()
    self._helper = checkpoint_state.SaveHelper(basename)
    self._kind = kind
    self._assets = assets
    self._options = tf.compat.v1.RunOptions(timeout_in_ms=timeout_in_ms)
    self._save_op = tf.group([asset.op for asset in assets], name=save_op_name)

  def before_save(self, sess: tf.compat.v1.Session, global_step_value: int) -> None:
    """Saves every asset."""
    if not self._assets:
      return
    folder = self._asset_dir(global_step_value)
    logging.info("Saving %d %s to %s", len(self._assets), self._kind, folder)
    tf.io.gfile.makedirs(folder)
    sess.run(self._save_op, feed_dict=self._feed(self._assets, folder), options=self._options)

  @abc.abstractmethod
  def _name_of(self, item: Item) -> str:
    """Returns the name of the item's files in the folder of assets."""

  def _asset_dir(self, global_step_value: int) -> str:
    return self._helper.get_ckpt_asset_dir(self._helper.get_ckpt_prefix(global_step_value))

  def _feed(self, assets: Iterable[Asset[Item]], folder: str) -> dict[tf.Tensor, str]:
    return {asset.path: folder + self._name_of(asset.item) for asset in assets}


class AssetRestorerListener(basic_restore_hook.CheckpointRestorerListener, abc.ABC, Generic[Item]):
  """Restores what an `AssetSaverListener` saved.

  Args:
    basename: the checkpoint's base name, `<folder>/model.ckpt`.
    kind: what the assets are, for the log.
    assets: assets whose ops restore.
    timeout_in_ms: how long restoring all of them may take.
    ps_monitor: if given, only assets on servers that it calls uninitialized are restored.
  """

  def __init__(
    self,
    basename: str,
    kind: str,
    assets: Sequence[Asset[Item]],
    timeout_in_ms: int,
    ps_monitor: saver.PsMonitor | None = None,
  ):
    super().__init__()
    self._basename = basename
    self._kind = kind
    self._assets = assets
    self._options = tf.compat.v1.RunOptions(timeout_in_ms=timeout_in_ms)
    self._ps_monitor = ps_monitor
    ops_of_device: Mapping[str, list[Any]] = defaultdict(list)
    for asset in assets:
      ops_of_device[asset.device].append(asset.op)
    self._restore_op_of_device = {
      device: tf.group(device_ops) for device, device_ops in ops_of_device.items()
    }

  def before_restore(self, session: tf.compat.v1.Session) -> None:
    """Restores the assets from the checkpoint of the session's variables, if there is one.

    If no saver of this package restored the session's variables, the newest checkpoint is taken.

    Raises:
      ValueError: the checkpoint lacks a table.
      tf.errors.OpError: a file is missing or cannot be read; the asset keeps its content.
    """
    if not self._assets:
      return
    folder = os.path.dirname(self._basename)
    prefix = restored.find(session, folder)
    path_prefix = self._path_prefix_of(prefix) if prefix else self._find_without_checkpoint(folder)
    if path_prefix:
      self._restore_from_path_prefix(session, path_prefix)

  def _path_prefix_of(self, ckpt_prefix: str) -> str:
    """Returns the prefix of the paths of a checkpoint's assets."""
    return checkpoint_state.SaveHelper.get_ckpt_asset_dir(ckpt_prefix)

  def _find_without_checkpoint(self, folder: str) -> str | None:
    """Returns that prefix in a folder without a checkpoint, or `None`."""
    logging.info("No checkpoint found in %s", folder)
    return None

  @abc.abstractmethod
  def _find_paths(self, path_prefix: str, items: Sequence[Item]) -> Iterable[str]:
    """Returns the path of each item's files: `path_prefix` followed by its name."""

  def _restore_from_path_prefix(self, sess: tf.compat.v1.Session, path_prefix: str) -> None:
    restore_ops = {
      device: restore_op
      for device, restore_op in self._restore_op_of_device.items()
      if self._ps_monitor is None or self._ps_monitor.is_ps_uninitialized(sess, device)
    }
    assets = [asset for asset in self._assets if asset.device in restore_ops]
    if not assets:
      return
    logging.info("Restoring %d %s from %s", len(assets), self._kind, path_prefix)
    paths = self._find_paths(path_prefix, [asset.item for asset in assets])
    sess.run(
      list(restore_ops.values()),
      feed_dict={asset.path: path for asset, path in zip(assets, paths)},
      options=self._options,
    )


class AssetRestorerSaverListener(tf.compat.v1.train.CheckpointSaverListener):
  """Restores assets right after each save.

  Afterwards the content is what was saved: expired rows are gone, and so are writes since the save.

  Args:
    basename: the checkpoint's base name, `<folder>/model.ckpt`.
    restorer: restores the assets.
  """

  def __init__(self, basename: str, restorer: AssetRestorerListener[Any]):
    super().__init__()
    self._helper = checkpoint_state.SaveHelper(basename)
    self._restorer = restorer

  def after_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    """Restores the assets of the checkpoint that was just written."""
    prefix = self._helper.get_ckpt_prefix(global_step_value)
    self._restorer._restore_from_path_prefix(session, self._helper.get_ckpt_asset_dir(prefix))
