"""Restoring the variables of a model whose names have changed since the checkpoint, or not at all.

`CustomRestoreListener` leaves in the graph how to restore,
`save_utils.PartialRecoverySaver.restore` does it. Names differ when a model is wrapped in another
scope, when layers are numbered anew (`dense_3` was `dense`), or when a variable is now partitioned
(`kernel/part_0`, `kernel/part_1` were `kernel`).

Differences from ByteDance's Monolith: names that cannot be parsed lead to the normal restore
instead of an error, and layers are matched by their order only if there are as many of them as in
the checkpoint.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from monolith.native_training import basic_restore_hook
from monolith.native_training.graph import export_context

# Graph collection of (ops, placeholders, alias map) that `CustomRestoreListener` reads.
CUSTOM_RESTORE_OP = "custom_restore_op"
CustomRestoreListenerKey = "CustomRestoreListener"

# Before the last `/part_<n>` of a partitioned variable, n, and after it.
PAT = re.compile(r"^(.*)/part_(\d+)(?=$|/|:)(.*)$")
# Prefix with its slash, name of the layer, one of its variables, and the rest of the name.
DensePat = re.compile(
  r"^(.*/)?((?:[^/]*_)?dense(?:_\d+)?)/(bias|kernel|trainable_kernel_norm)(?=$|/|:|_)(.*)$"
)

_NUMBERED = re.compile(r"^(.*?)(\d+)$")

_mapping_rules: dict[re.Pattern, str] = {}


def node_name(name: str) -> str:
  """Returns an op's name, without blanks, a `^` before it, a `/` or `:<digits>` after it."""
  name = name.strip().rstrip("/")
  if name.startswith("^"):
    name = name[1:]
  return re.sub(r":\d+$", "", name)


def get_new_name(name: str) -> str:
  """Returns the node name with repeated path components left out: `a/a/b:0` becomes `a/b`."""
  components: list[str] = []
  for component in node_name(name).split("/"):
    if not components or components[-1] != component:
      components.append(component)
  return "/".join(components)


def add_mapping_rules(rules: Mapping[str, str]) -> None:
  """Adds rules for `get_guess_name`.

  Args:
    rules: regular expression for a whole name -> format string, into which its groups are put.
  """
  for pattern, name_format in rules.items():
    _mapping_rules[re.compile(pattern)] = name_format


add_mapping_rules(
  {
    r"(.*)c_dot/mlp(.*)": "{}c_dot/compress_tower{}",
    r"(.*)dcn/kernel_(\d+)/trainable_norm(.*)": "{}kernel_{}_trainable_norm{}",
    r"(.*)dcn/kernel_(\d+)(.*)": "{}kernel_{}{}",
    r"(.*)dcn/bias_(\d+)/trainable_norm(.*)": "{}bias_{}_trainable_norm{}",
    r"(.*)dcn/bias_(\d+)(.*)": "{}bias_{}{}",
  }
)


def get_guess_name(name: str) -> str:
  """Returns the name that the first matching rule makes of this one, or the name itself."""
  for pattern, name_format in _mapping_rules.items():
    match = pattern.fullmatch(name)
    if match:
      return name_format.format(*[group or "" for group in match.groups()])
  return name


def split_name(name: str) -> tuple[str, int]:
  """Splits off the number at the end: `dense_12` -> (`dense_`, 12), `dense` -> (`dense`, 0)."""
  match = _NUMBERED.match(name)
  return (match.group(1), int(match.group(2))) if match else (name, 0)


def calc_reorder_info(names: Sequence[str], is_ordered: bool = True) -> tuple[bool, str]:
  """Tells whether the layers of one kind need new numbers.

  Args:
    names: their names, as `dense_3`, not empty.
    is_ordered: the names are sorted by number.

  Returns:
    (false only for a single layer with number 0 or 1, the name without number)
  """
  if not is_ordered:
    names = sorted(names, key=lambda name: split_name(name)[1])
  base, number = split_name(names[-1])
  if base.endswith("dense"):
    base += "_"
  return len(names) > 1 or number not in (0, 1), base


def infer_variable_name(names: Iterable[str]) -> set[str]:
  """Returns the names of variables of which some may be parts: `a/part_0:0` becomes `a:0`."""
  return {_merged(name) for name in names}


def _merged(name: str) -> str:
  return PAT.sub(r"\1\3", name)


def update_var_name_mapping_for_dense(mapping: dict[str, str]) -> None:
  """Adds keys for dense layers counted from 0, in place.

  Layers with the same prefix are numbered anew in the order of their numbers; the first one is
  known with and without a number. Keys that exist stay.

  Args:
    mapping: variable name -> anything.
  """
  for name, spellings in _renumber_dense(mapping).items():
    for spelling in spellings:
      mapping.setdefault(spelling, mapping[name])


def _renumber_dense(names: Iterable[str]) -> dict[str, list[str]]:
  """Returns for each variable of a dense layer its names with the layer's new number."""
  groups: dict[tuple[str, str], list[re.Match]] = defaultdict(list)
  for name in sorted(names):
    match = DensePat.match(name)
    if match:
      base, _ = split_name(match.group(2))
      groups[match.group(1) or "", base.rstrip("_")].append(match)
  result = {}
  for (prefix, _), matches in groups.items():
    layers = sorted({match.group(2) for match in matches}, key=lambda layer: split_name(layer)[1])
    _, base = calc_reorder_info(layers)
    for match in matches:
      number = layers.index(match.group(2))
      spellings = [f"{base}{number}"] + ([base.rstrip("_")] if number == 0 else [])
      result[match.string] = [
        f"{prefix}{layer}/{match.group(3)}{match.group(4)}" for layer in spellings
      ]
  return result


def calc_feed_dict(
  ckpt_reader: Any,
  alias_map: Mapping[str, str],
  placeholders: Sequence[tf.Tensor],
  always: bool = False,
) -> dict[tf.Tensor, np.ndarray] | None:
  """Reads variables under their old names.

  Args:
    ckpt_reader: what `tf.train.load_checkpoint` returned.
    alias_map: new name -> name in the checkpoint. The parts of a partitioned variable all have the
      name of the whole one there.
    placeholders: one per variable, each with its new name in the attribute `origin_name`.
    always: read them also if a normal restore works for all of these.

  Returns:
    Placeholder -> value; None if the checkpoint has all the new names, so that a normal restore
    works.

  Raises:
    Exception: a placeholder has no `origin_name`.
    ValueError: a variable is not in the checkpoint, or the sizes of its parts do not fit.
  """
  by_name = {}
  for placeholder in placeholders:
    if not hasattr(placeholder, "origin_name"):
      raise Exception(f"placeholder {placeholder.name} has no attribute origin_name")
    by_name[node_name(placeholder.origin_name)] = placeholder
  alias_map = {node_name(new): node_name(old) for new, old in alias_map.items()}
  in_checkpoint = ckpt_reader.get_variable_to_shape_map()
  if not always and all(name in in_checkpoint for name in infer_variable_name(alias_map)):
    return None

  # A variable that the map does not mention keeps its name.
  alias_map.update({name: _merged(name) for name in by_name if name not in alias_map})
  olds_to_news = defaultdict(list)
  for new, old in alias_map.items():
    if new in by_name:
      olds_to_news[old].append(new)
  feed_dict = {}
  for old, news in olds_to_news.items():
    if old not in in_checkpoint:
      raise ValueError(f"variable {old}, wanted for {news[0]}, is not in the checkpoint")
    value = ckpt_reader.get_tensor(old)
    for parts in _group_parts(news):
      feed_dict.update(_split_value(old, value, [by_name[part] for part in parts]))
  return feed_dict


def _group_parts(names: list[str]) -> list[list[str]]:
  """Groups the new names of one old variable into lists of parts of one variable, in order."""
  dense = [DensePat.match(name) for name in names]
  if all(dense) and len({(match.group(1), match.group(2)) for match in dense}) > 1:
    lowest = min(dense, key=lambda match: split_name(match.group(2))[1]).group(1, 2)
    names = [match.string for match in dense if match.group(1, 2) == lowest]
  groups = defaultdict(list)
  for name in names:
    groups[_merged(name)].append(name)
  return [sorted(parts, key=_part_number) for parts in groups.values()]


def _part_number(name: str) -> int:
  match = PAT.match(name)
  return int(match.group(2)) if match else 0


def _split_value(
  name: str, value: np.ndarray, placeholders: Sequence[tf.Tensor]
) -> dict[tf.Tensor, np.ndarray]:
  if len(placeholders) == 1:
    return {placeholders[0]: value}
  sizes = [placeholder.shape[0] for placeholder in placeholders]
  if sum(sizes) != value.shape[0]:
    raise ValueError(
      f"variable {name} has {value.shape[0]} rows in the checkpoint, its {len(sizes)} parts have "
      f"{sum(sizes)}"
    )
  return dict(zip(placeholders, np.split(value, np.cumsum(sizes)[:-1], axis=0)))


def get_full_prefix(short: str, prefixes: Iterable[str]) -> str:
  """Returns the longest of the prefixes that end in `short`, or `short` itself."""
  return max((prefix for prefix in prefixes if prefix.endswith(short)), key=len, default=short)


class CustomRestoreListener(basic_restore_hook.CheckpointRestorerListener):
  """Leaves in the graph, before it is finalized, how the saver shall restore variables.

  That is a tuple (ops, placeholders, alias map) in the collection `CUSTOM_RESTORE_OP`; none for the
  normal way.
  """

  def __init__(
    self,
    alias_map: Mapping[str, str] | None = None,
    clear_nn: bool = False,
    continue_training: bool = False,
    model_dir: str | None = None,
    enable_alias_map_auto_gen: bool | None = None,
    allow_new_variables: bool = False,
  ):
    """Args:
      alias_map: new name -> name in the checkpoint, for all global variables.
      clear_nn: once, initialize variables instead of restoring them.
      continue_training: with `clear_nn`, restore the global step all the same.
      model_dir: the folder of the checkpoints; a file `clear_nn` there says that it was done.
      enable_alias_map_auto_gen: find out the alias map when names are missing from the checkpoint;
        None means yes.
      allow_new_variables: initialize variables that the checkpoint has under no name, and restore
        the others; so it is when a model in training has got another feature.

    Raises:
      ValueError: both `clear_nn` and an alias map are given.
    """
    if clear_nn and alias_map is not None:
      raise ValueError("alias_map must be None when clear_nn is True")
    self._alias_map = alias_map
    self._clear_nn = clear_nn
    self._continue_training = continue_training
    self._model_dir = model_dir
    self._allow_new_variables = allow_new_variables
    self._auto_gen = enable_alias_map_auto_gen is None or enable_alias_map_auto_gen

  def begin(self) -> None:
    if export_context.is_exporting() or not self._model_dir:
      return
    state = tf.train.get_checkpoint_state(self._model_dir)
    if state is None:
      return
    if self._clear_nn:
      self._add_clear_nn()
      return
    alias_map, new = self._alias_map, frozenset()
    if alias_map is None and self._auto_gen:
      alias_map, new = _generate_alias_map(state.model_checkpoint_path, self._allow_new_variables)
    if alias_map is not None:
      self._add_renamed_restore(alias_map, new)

  def _add_clear_nn(self) -> None:
    if tf.io.gfile.exists(f"{self._model_dir.rstrip('/')}/clear_nn"):
      return
    init_op = tf.compat.v1.global_variables_initializer()
    init_op.model_dir = self._model_dir
    restore_ops, placeholders = [init_op], [None]
    if self._continue_training:
      global_step = tf.compat.v1.train.get_or_create_global_step()
      placeholder = tf.compat.v1.placeholder(global_step.dtype.base_dtype, global_step.shape)
      restore_ops.append(global_step.assign(placeholder).op)
      placeholders = [placeholder]
    tf.compat.v1.add_to_collection(CUSTOM_RESTORE_OP, (restore_ops, placeholders, None))

  def _add_renamed_restore(self, alias_map: Mapping[str, str], new: Collection[str]) -> None:
    placeholders, assigns = [], []
    for variable in tf.compat.v1.global_variables():
      if node_name(variable.name) in new:
        assigns.append(variable.initializer)
        continue
      with tf.device(variable.device):
        placeholder = tf.compat.v1.placeholder(variable.dtype.base_dtype, variable.shape)
        placeholder.origin_name = node_name(variable.name)
        placeholders.append(placeholder)
        assigns.append(variable.assign(placeholder).op)
    restore_op = tf.group(*assigns)
    # With new variables there is no normal way.
    restore_op.is_partial = bool(new)
    restore_op.new = frozenset(new)
    tf.compat.v1.add_to_collection(CUSTOM_RESTORE_OP, ([restore_op], placeholders, dict(alias_map)))


def _generate_alias_map(
  checkpoint: str, allow_new: bool = False
) -> tuple[dict[str, str] | None, frozenset[str]]:
  """Finds out under which names the global variables are in a checkpoint.

  Args:
    checkpoint: its prefix.
    allow_new: whether variables may be missing from it.

  Returns:
    New name -> old name; None if all have their names there, or (with a warning) if some were not
    found. And the names of those that are new, if they may be.

  Raises:
    ValueError: a variable has another shape in the checkpoint, and all have their names there or
      may be new.
  """
  olds = {name: tuple(shape) for name, shape in tf.train.list_variables(checkpoint)}
  variables = {node_name(v.name): v for v in tf.compat.v1.global_variables()}
  news = infer_variable_name(variables)
  changed = {
    name: (olds[name], tuple(variable.shape.as_list()))
    for name, variable in variables.items()
    if name in olds and variable.shape.is_fully_defined()
    if olds[name] != tuple(variable.shape.as_list())
  }
  if news.issubset(olds):
    _check_no_change(changed, checkpoint)
    return None, frozenset()
  candidates = _CandidateNames(news, olds)
  alias_map, unknown = {}, []
  for name, variable in variables.items():
    merged = _merged(name)
    fits = [
      old
      for old in candidates.of(merged)
      if name != merged or tuple(variable.shape.as_list()) == olds[old]
    ]
    if fits:
      alias_map[name] = fits[0]
    else:
      unknown.append(name)
  # A model of which nothing is known is not this one with another feature.
  if unknown and allow_new and (len(alias_map) > 1 or len(olds) == 1):
    _check_no_change({name: changed[name] for name in unknown if name in changed}, checkpoint)
    unused = sorted(set(olds) - set(alias_map.values()))
    logging.warning(
      "The checkpoint %s does not have %s: initialized. All else is restored%s.",
      checkpoint, unknown, f", except {unused}, which the model does not have" if unused else "",
    )  # fmt: skip
    return alias_map, frozenset(unknown)
  if unknown:
    logging.warning(
      "No variable in %s seems to be what is now called %s. Trying the normal restore.",
      checkpoint,
      unknown,
    )
    return None, frozenset()
  logging.info("Variables are restored from %s under other names: %s", checkpoint, alias_map)
  return alias_map, frozenset()


def _check_no_change(
  changed: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], checkpoint: str
) -> None:
  if not changed:
    return
  shapes = ", ".join(
    f"{name} has shape {old} in the checkpoint and {new} in the model"
    for name, (old, new) in sorted(changed.items())
  )
  raise ValueError(
    f"{checkpoint} cannot be restored: {shapes}. Has a feature been added or removed? "
    "RunConfig(clear_nn=True, continue_training=True) initializes all dense variables once, and "
    "keeps the rows of the tables and the step; or give the model another model_dir."
  )


class _CandidateNames:
  """Returns names that a variable may have had in a checkpoint, the most likely first."""

  def __init__(self, news: Iterable[str], olds: Iterable[str]):
    self._olds = set(olds)
    self._short_to_old = {get_new_name(old): old for old in self._olds}
    shorts = {get_new_name(new) for new in news}
    self._new_dense = {name: s[0] for name, s in _renumber_dense(shorts).items()}
    old_dense = {name: s[0] for name, s in _renumber_dense(self._short_to_old).items()}
    self._dense_to_old = {number: self._short_to_old[name] for name, number in old_dense.items()}
    # Layers are told apart by their order alone, which is worth nothing if some come or go.
    self._same_dense = set(self._new_dense.values()) == set(self._dense_to_old)

  def of(self, new: str) -> list[str]:
    short = get_new_name(new)
    found = []
    if short in self._new_dense and self._same_dense:
      found.append(self._dense_to_old[self._new_dense[short]])
    if new in self._olds:
      found.append(new)
    for name in (short, get_guess_name(short)):
      if name in self._short_to_old:
        found.append(self._short_to_old[name])
    return found
