"""Feature lists: files that say which features exist and what their slots are.

# a comment
column_name: uid, gid
cache_column: gid
feed_name=feed; shared=true; feature_id=1
feature_name=f_user_id; depend=uid; method=Direct; slot=312; shared=true
"""

import dataclasses
import re
import threading
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional, TypeVar, Union, cast

import tensorflow as tf

from monolith.native_training.data import utils as data_utils
from monolith.native_training.data.data_flags import get_flag

_T = TypeVar("_T")
_TRUE = frozenset({"true", "yes", "t", "y", "1"})
_PAIR_SEPARATOR = re.compile(r"[;,]\s+|[;,]$")
_VALID_FEATURES = "monolith_valid_features"

_cache: dict[tuple[str, bool], "FeatureList"] = {}
_cache_lock = threading.Lock()


def _convert(value: Any, hint: Any) -> Any:
  """Converts the text of a file to the type of a field."""
  if not isinstance(value, str):
    return value
  arguments = [t for t in typing.get_args(hint) if t is not type(None)]
  if typing.get_origin(hint) is Union and len(arguments) == 1:
    hint = arguments[0]
  if typing.get_origin(hint) is list:
    return [part.strip() for part in value.split(",") if part.strip()]
  if hint is bool:
    return value.strip().lower() in _TRUE
  if hint is int:
    return int(value)
  return value.strip()


@dataclasses.dataclass
class _TypedFields:
  """Converts textual values of the fields to their types."""

  def __post_init__(self) -> None:
    hints = typing.get_type_hints(type(self))
    for field in dataclasses.fields(self):
      setattr(self, field.name, _convert(getattr(self, field.name), hints[field.name]))


@dataclasses.dataclass
class Feed(_TypedFields):
  feed_name: Optional[str] = None
  shared: Optional[bool] = None
  feature_id: Optional[int] = None

  @property
  def name(self) -> Optional[str]:
    return self.feed_name


@dataclasses.dataclass
class Cache(_TypedFields):
  cache_column: Optional[str] = None
  cache_name: Optional[str] = None
  capacity: Optional[int] = None
  timeout: Optional[int] = None
  cache_type: Optional[str] = None
  cache_key_class: Optional[str] = None


@dataclasses.dataclass
class Feature(_TypedFields):
  feature_name: Optional[str] = None
  depend: Optional[list[str]] = None
  method: Optional[str] = None
  slot: Optional[int] = None
  args: Optional[list[str]] = None
  feature_version: Optional[int] = None
  shared: bool = False
  cache_keys: Optional[list[str]] = None
  need_raw: bool = False
  feature_id: Optional[int] = None
  input_optional: Optional[list[str]] = None
  feature_group: Optional[list[str]] = None

  @property
  def name(self) -> str:
    """The feature's name without the file's prefixes: `f_` or `fc_` of every `-` term."""
    return "-".join(_strip_prefix(term) for term in (self.feature_name or "").split("-"))


def _strip_prefix(term: str) -> str:
  for prefix in ("fc_", "f_"):
    if term.startswith(prefix):
      return term[len(prefix) :]
  return term


def new_instance(cls: type[_T], args: Mapping[str, Any]) -> _T:
  """Builds `cls` from those of `args` that are parameters of its constructor."""
  names = {field.name for field in dataclasses.fields(cast(Any, cls))}
  return cls(**{name: value for name, value in args.items() if name in names})


class FeatureList:
  """The content of a feature list.

  Args:
    column_name: raw columns.
    feeds: name -> `Feed`.
    caches: name -> `Cache`.
    features: name -> `Feature`.
  """

  def __init__(
    self,
    column_name: Sequence[str],
    feeds: Mapping[str, Feed],
    caches: Mapping[str, Cache],
    features: Mapping[str, Feature],
  ):
    self.column_name = list(column_name)
    self.feeds = dict(feeds)
    self.caches = dict(caches)
    self.features = dict(features)
    self._by_slot: dict[int, list[Feature]] = {}
    for feature in self.features.values():
      if feature.slot is not None:
        self._by_slot.setdefault(feature.slot, []).append(feature)

  def __len__(self) -> int:
    return len(self.features)

  def __iter__(self) -> Iterator[Feature]:
    return iter(self.features.values())

  def __contains__(self, item: Union[int, str]) -> bool:
    return self._find(item) is not None

  def __getitem__(self, item: Union[int, str]) -> Feature:
    feature = self._find(item)
    if feature is None:
      raise Exception(f"there is no feature {item}")
    return feature

  def get(self, item: Union[int, str], default: Optional[Feature] = None) -> Optional[Feature]:
    """Returns the feature of that slot (the first one) or name, else `default`."""
    feature = self._find(item)
    return default if feature is None else feature

  def get_with_slot(self, slot: int) -> list[Feature]:
    """Returns all features of that slot."""
    return list(self._by_slot.get(slot, []))

  def _find(self, item: Union[int, str]) -> Optional[Feature]:
    if isinstance(item, int):
      return next(iter(self._by_slot.get(item, [])), None)
    if item in self.features:
      return self.features[item]
    for prefix in ("f_", "fc_"):
      name = "-".join(
        term if term.startswith(prefix) else prefix + term for term in item.split("-")
      )
      if name in self.features:
        return self.features[name]
    return None

  @classmethod
  def parse(cls, fname: Optional[str] = None, use_old_name: bool = True) -> "FeatureList":
    """Reads a feature list; files are read once per process.

    Args:
      fname: the file, by default the flag `feature_list`.
      use_old_name: key features by the name in the file; otherwise by `Feature.name`.

    Raises:
      ValueError: neither a file nor the flag is given, or a line cannot be read.
    """
    fname = fname or get_flag("feature_list")
    if not fname:
      raise ValueError("fname is None and the flag feature_list is not set")
    with _cache_lock:
      key = (fname, use_old_name)
      if key not in _cache:
        _cache[key] = cls._read(fname, use_old_name)
      return _cache[key]

  @classmethod
  def _read(cls, fname: str, use_old_name: bool) -> "FeatureList":
    columns: list[str] = []
    feeds: dict[str, Feed] = {}
    caches: dict[str, Cache] = {}
    features: dict[str, Feature] = {}
    cache_column = None
    with tf.io.gfile.GFile(fname) as stream:
      lines = stream.read().splitlines()
    for number, line in enumerate(lines, start=1):
      line = line.strip()
      if not line or line.startswith("#"):
        continue
      header = re.match(r"^(column_name|cache_column)\s*:(.*)$", line)
      if header and header.group(1) == "column_name":
        columns += [name.strip() for name in header.group(2).split(",") if name.strip()]
      elif header:
        cache_column = header.group(2).strip()
      else:
        pairs = _parse_pairs(line, f"{fname}:{number}")
        if "feature_name" in pairs:
          feature = new_instance(Feature, pairs)
          features[pairs["feature_name"] if use_old_name else feature.name] = feature
        elif "feed_name" in pairs:
          feeds[pairs["feed_name"]] = new_instance(Feed, pairs)
        elif any(name.startswith("cache") for name in pairs):
          cache = new_instance(Cache, {"cache_column": cache_column, **pairs})
          caches[cache.cache_name or str(len(caches))] = cache
        else:
          raise ValueError(f"{fname}:{number}: neither a feature, a feed nor a cache: {line!r}")
    return cls(columns, feeds, caches, features)


def _parse_pairs(line: str, where: str) -> dict[str, str]:
  pairs = {}
  for pair in _PAIR_SEPARATOR.split(line):
    if not pair.strip():
      continue
    name, separator, value = pair.partition("=")
    if not separator:
      raise ValueError(f"{where}: {pair!r} is not name=value")
    pairs[name.strip()] = value.strip()
  return pairs


def _default_list() -> Optional[FeatureList]:
  return FeatureList.parse() if get_flag("feature_list") else None


def get_feature_name_and_slot(item: Union[int, str, Any]) -> tuple[str, int]:
  """Returns name and slot of a feature given by either.

  Args:
    item: a slot, a name, or an object with the attributes `feature_name` and `slot`.
  """
  features = _default_list()
  if isinstance(item, int):
    feature = features.get(item) if features is not None else None
    named = feature.feature_name if feature else None
    return named or data_utils.get_slot_feature_name(item), item
  if isinstance(item, str):
    feature = features.get(item) if features is not None else None
    if feature is not None and feature.slot is not None:
      return item, feature.slot
    return item, data_utils.get_slot_from_feature_name(item)
  return item.feature_name, item.slot


def add_feature(feature: Union[str, Sequence[str]]) -> None:
  """Notes that a feature is used, so that readers of ExampleBatch can leave others out."""
  names = [feature] if isinstance(feature, str) else feature
  tf.compat.v1.add_to_collections(_VALID_FEATURES, list(names))


def add_feature_by_fids(
  fids: Union[int, Sequence[int]], feature_list: Optional[FeatureList] = None
) -> None:
  """Notes that the features these ids belong to are used.

  Args:
    fids: v1 or v2 ids.
    feature_list: where their slots are looked up, by default the list that the flag names.

  Raises:
    Exception: no feature has the slot of an id.
  """
  feature_list = feature_list or _default_list()
  for fid in [fids] if isinstance(fids, int) else fids:
    fid &= (1 << 64) - 1
    found = None
    for slot in ((fid >> 48) & 0x7FFF, fid >> 54):
      found = found or (feature_list.get(slot) if feature_list is not None else None)
    if found is None:
      raise Exception(f"there is no feature for fid {fid}")
    add_feature(found.feature_name or found.name)


def get_valid_features() -> list[str]:
  """Returns the names that `add_feature` collected in the default graph, sorted."""
  collected = tf.compat.v1.get_collection(_VALID_FEATURES)
  return sorted({name for names in collected for name in names})


def is_example_batch() -> bool:
  """Returns whether the flag `data_type` says that samples come as ExampleBatch."""
  data_type = get_flag("data_type")
  return bool(data_type) and data_type.lower() in ("example_batch", "examplebatch")
