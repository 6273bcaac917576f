"""The tables of a model, with the calls of TorchRec's collections.

`EmbeddingBagCollection` pools the vectors of a bag, `EmbeddingCollection` leaves them as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import torch

from monolith.torch import jagged, keyed, lookups, pooling, ranks, rows, side_by_side


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
  """One table of an `EmbeddingCollection`, with the names of TorchRec's fields.

  Attributes:
    name: of the table, and of its files.
    embedding_dim: length of a vector.
    feature_names: the features whose ids the table holds.
    num_embeddings: rows to have room for from the start; the table grows on. `None`: no such hint.
    optimizer, initializer, learning_rate, expire_after, admit_after, admit_capacity, seed: as
      `monolith.torch.Embedding` has them.
  """

  name: str
  embedding_dim: int
  feature_names: Sequence[str]
  num_embeddings: int | None = None
  optimizer: Any = None
  initializer: Any = "uniform"
  learning_rate: float | None = None
  expire_after: Any = None
  admit_after: int = 0
  admit_capacity: int = 1 << 22
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class EmbeddingBagConfig(EmbeddingConfig):
  """One table of an `EmbeddingBagCollection`, with the names of TorchRec's fields.

  Attributes:
    pooling: what becomes of the vectors of a bag: `sum`, `mean` or `max`.
  """

  pooling: Any = "sum"


def _own_config(config: Any, kind: type[EmbeddingConfig]) -> Any:
  """Returns a configuration of ours or of TorchRec's as ours.

  Raises:
    ValueError: it asks for what there is not.
    TypeError: it is for another kind of collection.
  """
  if isinstance(config, EmbeddingConfig):
    if type(config) is not kind:
      raise TypeError(f"table {config.name!r} is a {type(config).__name__}, want {kind.__name__}")
    return config
  pools = kind is EmbeddingBagConfig
  if hasattr(config, "pooling") is not pools:
    raise TypeError(f"table {config.name!r} is a {type(config).__name__}, want {kind.__name__}")
  data_type = getattr(config, "data_type", None)
  if getattr(data_type, "value", data_type) not in (None, "FP32"):
    raise ValueError(
      f"table {config.name!r} has data_type {data_type}, want FP32: vectors have 32 bits"
    )
  if getattr(config, "virtual_table_eviction_policy", None) is not None:
    raise ValueError(
      f"table {config.name!r} has a virtual_table_eviction_policy: write "
      f"monolith.torch.{kind.__name__}(..., expire_after='30d')"
    )
  # Not `num_embeddings`: theirs is how many rows ids are hashed to, not how many come.
  return kind(
    config.name,
    config.embedding_dim,
    config.feature_names,
    initializer=_initializer_of(config, kind),
    **({"pooling": config.pooling} if pools else {}),
  )


def _initializer_of(config: Any, kind: type[EmbeddingConfig]) -> Any:
  """Returns what rows of TorchRec's configuration begin with, which its `init_fn` says."""
  function = getattr(config, "init_fn", None)
  if function is None:
    return "uniform"
  # TorchRec makes it of `weight_init_min`, `weight_init_max` and `num_embeddings`.
  if isinstance(function, functools.partial) and function.func is torch.nn.init.uniform_:
    numbers = function.keywords
    if not function.args and set(numbers) == {"a", "b"}:
      return (float(numbers["a"]), float(numbers["b"]))
  if function is torch.nn.init.zeros_:
    return "zeros"
  if function is torch.nn.init.ones_:
    return "ones"
  raise ValueError(
    f"table {config.name!r} has an init_fn of its own, and rows are made one by one: write "
    f"monolith.torch.{kind.__name__}(..., initializer=(-0.1, 0.1))"
  )


class _Collection(torch.nn.Module):
  """The base of collections.

  Attributes:
    tables: name -> `RowTable`.
  """

  def __init__(self, configs: Sequence[EmbeddingConfig], device: Any, process_group: Any):
    super().__init__()
    self._configs = tuple(configs)
    if not self._configs:
      raise ValueError("tables is empty, want a configuration for each table")
    names = [config.name for config in self._configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
      raise ValueError(f"tables {twice} are there twice")
    self.tables = torch.nn.ModuleDict()
    for config in self._configs:
      if isinstance(config.feature_names, str) or not config.feature_names:
        raise ValueError(
          f"feature_names of table {config.name!r} is {config.feature_names!r}, want a list"
        )
      if not config.name or "." in config.name:
        raise ValueError(f"name is {config.name!r}, want a text without dots, as modules have it")
      self.tables[config.name] = _make_table(config, device, process_group)
    used = self._used = [name for config in self._configs for name in config.feature_names]
    # As TorchRec names a feature of several tables.
    self._keys = [
      f"{name}@{config.name}" if used.count(name) > 1 else name
      for config in self._configs
      for name in config.feature_names
    ]
    self._features = list(dict.fromkeys(used))

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes each table's rows to `<folder>/<name>-00000-of-00001` and so on."""
    tables: dict[str, Any] = dict(self.tables.items())
    for name, table in tables.items():
      table.save(pathlib.Path(folder) / name)

  def load(self, folder: str | os.PathLike[str]) -> None:
    """Replaces each table's rows by what `save` wrote; tables are replaced one after another."""
    tables: dict[str, Any] = dict(self.tables.items())
    for name, table in tables.items():
      table.load(pathlib.Path(folder) / name)


def _make_table(config: EmbeddingConfig, device: Any, process_group: Any) -> rows.RowTable:
  number = config.num_embeddings
  if number is not None and not (isinstance(number, int) and number >= 0):
    raise ValueError(f"num_embeddings of table {config.name!r} is {number!r}, want a whole number")
  # Each rank has its share.
  capacity = -(-(number or 0) // ranks.place(process_group)[1])
  try:
    return rows.RowTable(
      config.embedding_dim,
      config.optimizer,
      config.initializer,
      learning_rate=config.learning_rate,
      device=device,
      process_group=process_group,
      name=config.name,
      expire_after=config.expire_after,
      admit_after=config.admit_after,
      admit_capacity=config.admit_capacity,
      seed=config.seed,
      initial_capacity=max(1, capacity),
    )
  except ValueError as error:
    # Tables in main memory and on a GPU have a word of their own for it.
    if not re.search(r"\b(initial_)?capacity\b", str(error)):
      raise
    raise ValueError(
      f"num_embeddings of table {config.name!r} is {number}, for which there is no room. Leave it "
      f"out: tables grow as ids come ({error})"
    ) from error


def _as_ids(bags: dict[str, jagged.Bags]) -> dict[str, torch.Tensor]:
  return {name: rows.as_ids(one.ids, one.ids.device) for name, one in bags.items()}


class EmbeddingBagCollection(_Collection):
  """Vectors of the bags of many features, looked up in all tables at once.

  Args:
    tables: their configurations, ours or TorchRec's own.
    device: where rows are, `"cpu"` or `"cuda"`.
    is_weighted: each id has a weight, which a `KeyedJaggedTensor` has to bring; weights of others
      are left out, as TorchRec does it. `None`: weights are taken where there are some.
    process_group: which ranks share the tables: by default all of `torch.distributed`, if that is
      initialized; `monolith.torch.LOCAL`: none.

  Attributes:
    tables: name -> `RowTable`.

  Raises:
    ValueError, TypeError: there is no table, two have one name, or a configuration is not as
      described.
  """

  def __init__(
    self,
    tables: Sequence[Any],
    device: Any = None,
    *,
    is_weighted: bool | None = None,
    process_group: Any = None,
  ):
    configs = [_own_config(config, EmbeddingBagConfig) for config in tables]
    super().__init__(configs, device, process_group)
    self._weighted = is_weighted
    # Tables of one length and pooling form a group, which is pooled together. `_into` has the group
    # of each table, `_modes` and `_names` have the pooling and the features of each group, and
    # `_places` has the group of each feature and its number there.
    alike = [(c.embedding_dim, pooling.check_mode(c.pooling)) for c in configs]
    groups = list(dict.fromkeys(alike))
    self._into = [groups.index(one) for one in alike]
    self._modes = [mode for _, mode in groups]
    self._names: list[list[str]] = [[] for _ in groups]
    self._places: list[tuple[int, int]] = []
    for config, group in zip(self._configs, self._into):
      for name in config.feature_names:
        self._places.append((group, len(self._names[group])))
        self._names[group].append(name)
    self._side: side_by_side.SideBySide | None = None
    self._dims = [c.embedding_dim for c in self._configs for _ in c.feature_names]

  def embedding_bag_configs(self) -> tuple[EmbeddingBagConfig, ...]:
    """Returns the configurations of the tables."""
    configs: Any = self._configs
    return configs

  def is_weighted(self) -> bool:
    """Returns whether each id has to have a weight."""
    return bool(self._weighted)

  def forward(self, features: Any) -> keyed.KeyedTensor:
    """Returns the pooled vectors of all features.

    Args:
      features: a `KeyedJaggedTensor`, ours or TorchRec's; or a mapping of names to ids `[batch]`,
        `[batch, n]`, a nested tensor of PyTorch, a `JaggedTensor`, or a pair of ids and offsets.

    Returns:
      A vector for each feature of each table, in their order, float32 on the device of the ids.

    Raises:
      KeyError: a feature is missing.
      ValueError, TypeError: one is not as described.
    """
    if type(features) is dict and not self._weighted and not torch.compiler.is_compiling():
      # One id each, on the GPU of the tables: nothing has to be looked at more closely.
      plain: list[Any] = [features.get(name) for name in self._used]
      if (side := self._side_by_side()) is not None and side.takes(plain):
        return keyed.KeyedTensor(self._keys, self._dims, side.look_up(plain))
    bags = jagged.split(features, self._features)
    if self._weighted and (bare := [name for name, one in bags.items() if one.weights is None]):
      raise ValueError(f"features {bare} have no weights, which is_weighted=True asks for")
    if self._weighted is False:
      bags = {name: one._replace(weights=None) for name, one in bags.items()}
    keys = _as_ids(bags)
    tables: list[Any] = list(self.tables.values())
    if lookups.can_look_up_side_by_side(tables[0]) and all(
      one.offsets is None and one.weights is None for one in bags.values()
    ):
      values = lookups.look_up_side_by_side(self._side_by_side, [keys[name] for name in self._used])
      return keyed.KeyedTensor(self._keys, self._dims, values)
    ids = []
    for config in self._configs:
      parts = [keys[name] for name in config.feature_names]
      ids.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    found = lookups.look_up(tables, ids, self._into)
    pooled = [
      pooling.pool_many(vectors, [bags[name] for name in names], mode)
      for vectors, names, mode in zip(found, self._names, self._modes)
    ]
    if len(pooled) == 1:
      values = pooled[0].transpose(0, 1).reshape(-1, sum(self._dims))
    else:
      values = torch.cat([pooled[group][number] for group, number in self._places], 1)
    return keyed.KeyedTensor(self._keys, self._dims, values)

  def _side_by_side(self) -> side_by_side.SideBySide | None:
    """Returns what writes vectors that need no pooling to where they belong, where that works."""
    modules: Any = self.tables._modules
    tables = tuple(modules.values())
    if not lookups.can_look_up_side_by_side(tables[0]):
      return None
    if self._side is None or self._side.tables != tables:
      counts = [len(config.feature_names) for config in self._configs]
      self._side = side_by_side.SideBySide(tables, counts)
    return self._side


class EmbeddingCollection(_Collection):
  """The vectors of the ids of many features, one for each id, looked up in all tables at once.

  Args:
    tables: their configurations, ours or TorchRec's own.
    device: where rows are, `"cpu"` or `"cuda"`.
    need_indices: whether the ids come back with their vectors.
    process_group: which ranks share the tables: by default all of `torch.distributed`, if that is
      initialized; `monolith.torch.LOCAL`: none.

  Attributes:
    tables: name -> `RowTable`.

  Raises:
    ValueError, TypeError: there is no table, two have one name, or a configuration is not as
      described.
  """

  def __init__(
    self,
    tables: Sequence[Any],
    device: Any = None,
    need_indices: bool = False,
    *,
    process_group: Any = None,
  ):
    configs = [_own_config(config, EmbeddingConfig) for config in tables]
    super().__init__(configs, device, process_group)
    self._need_indices = need_indices

  def embedding_configs(self) -> tuple[EmbeddingConfig, ...]:
    """Returns the configurations of the tables."""
    return self._configs

  def need_indices(self) -> bool:
    """Returns whether the ids come back with their vectors."""
    return self._need_indices

  def forward(self, features: Any) -> dict[str, keyed.JaggedTensor]:
    """Returns the vectors of each feature.

    Args:
      features: as an `EmbeddingBagCollection` takes them; weights are left out.

    Returns:
      For each feature of each table, in their order, float32 `[n, dim]` in bags as the ids were, on
      their device. Where ids come back, they are the weights.

    Raises:
      KeyError: a feature is missing.
      ValueError, TypeError: one is not as described.
    """
    bags = jagged.split(features, self._features)
    keys = _as_ids(bags)
    ids = [torch.cat([keys[name] for name in config.feature_names]) for config in self._configs]
    tables: list[Any] = list(self.tables.values())
    vectors: list[torch.Tensor] = []
    for config, found in zip(self._configs, lookups.look_up(tables, ids)):
      vectors += found.split([len(keys[name]) for name in config.feature_names])
    result = {}
    for key, name, values in zip(self._keys, self._used, vectors):
      offsets = bags[name].offsets
      if offsets is None:
        offsets = torch.arange(len(values) + 1, device=values.device)
      else:
        pooling.check_rising(offsets, len(values))
      weights = keys[name] if self._need_indices else None
      result[key] = keyed.JaggedTensor(values, weights, offsets=offsets)
    return result
