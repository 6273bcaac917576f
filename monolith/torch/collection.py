"""`EmbeddingBagCollection`: the tables of a model, with the call of TorchRec's."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from monolith.torch import jagged, lookups, pooling, rows, side_by_side


@dataclasses.dataclass(frozen=True)
class EmbeddingBagConfig:
  """One table of a collection, with the names of TorchRec's fields.

  Attributes:
    name: of the table, and of its files.
    embedding_dim: length of a vector.
    feature_names: the features whose ids the table holds.
    pooling: what becomes of the vectors of a bag: `sum`, `mean` or `max`.
    num_embeddings: rows to have room for from the start; the table grows on. `None`: no such hint.
    optimizer, initializer, learning_rate, expire_after, admit_after, admit_capacity, seed: as
      `monolith.torch.Embedding` has them.
  """

  name: str
  embedding_dim: int
  feature_names: Sequence[str]
  pooling: Any = "sum"
  num_embeddings: int | None = None
  optimizer: Any = None
  initializer: Any = "uniform"
  learning_rate: float | None = None
  expire_after: Any = None
  admit_after: int = 0
  admit_capacity: int = 1 << 22
  seed: int = 0


def _own_config(config: Any) -> EmbeddingBagConfig:
  """Returns a configuration of ours or of TorchRec's as ours.

  Raises:
    ValueError: it asks for what there is not.
  """
  if isinstance(config, EmbeddingBagConfig):
    return config
  of_first = ("init_fn", "weight_init_min", "weight_init_max")
  if any(getattr(config, name, None) is not None for name in of_first):
    raise ValueError(
      f"table {config.name!r} has first values of its own: write "
      "monolith.torch.EmbeddingBagConfig(..., initializer=(-0.1, 0.1))"
    )
  return EmbeddingBagConfig(
    config.name,
    config.embedding_dim,
    config.feature_names,
    config.pooling,
    config.num_embeddings,
  )


class EmbeddingBagCollection(torch.nn.Module):
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
    super().__init__()
    self._weighted = is_weighted
    self._configs = tuple(map(_own_config, tables))
    if not self._configs:
      raise ValueError("tables is empty, want a configuration for each table")
    names = [config.name for config in self._configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
      raise ValueError(f"tables {twice} are there twice")
    # Tables of one length and pooling form a group, which is pooled together. `_into` has the group
    # of each table, `_modes` and `_names` have the pooling and the features of each group, and
    # `_places` has the group of each feature and its number there.
    alike = [(c.embedding_dim, pooling.check_mode(c.pooling)) for c in self._configs]
    groups = list(dict.fromkeys(alike))
    self._into = [groups.index(one) for one in alike]
    self._modes = [mode for _, mode in groups]
    self._names: list[list[str]] = [[] for _ in groups]
    self._places: list[tuple[int, int]] = []
    self.tables = torch.nn.ModuleDict()
    for config in self._configs:
      if isinstance(config.feature_names, str) or not config.feature_names:
        raise ValueError(
          f"feature_names of table {config.name!r} is {config.feature_names!r}, want a list"
        )
      self.tables[config.name] = rows.RowTable(
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
        initial_capacity=max(1, config.num_embeddings or 1),
      )
    for config, group in zip(self._configs, self._into):
      for name in config.feature_names:
        self._places.append((group, len(self._names[group])))
        self._names[group].append(name)
    self._used = used = [name for config in self._configs for name in config.feature_names]
    self._side: side_by_side.SideBySide | None = None
    # As TorchRec names a feature of several tables.
    self._keys = [
      f"{name}@{config.name}" if used.count(name) > 1 else name
      for config in self._configs
      for name in config.feature_names
    ]
    self._dims = [c.embedding_dim for c in self._configs for _ in c.feature_names]
    self._features = list(dict.fromkeys(used))

  def embedding_bag_configs(self) -> tuple[EmbeddingBagConfig, ...]:
    """Returns the configurations of the tables."""
    return self._configs

  def is_weighted(self) -> bool:
    """Returns whether each id has to have a weight."""
    return bool(self._weighted)

  def forward(self, features: Any) -> jagged.KeyedTensor:
    """Returns the pooled vectors of all features.

    Args:
      features: a `KeyedJaggedTensor`, ours or TorchRec's; or a mapping of names to ids `[batch]`,
        `[batch, n]`, a nested tensor of PyTorch, or a pair of ids and offsets.

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
        return jagged.KeyedTensor(self._keys, self._dims, side.look_up(plain))
    bags = jagged.split(features, self._features)
    if self._weighted and (bare := [name for name, one in bags.items() if one.weights is None]):
      raise ValueError(f"features {bare} have no weights, which is_weighted=True asks for")
    if self._weighted is False:
      bags = {name: one._replace(weights=None) for name, one in bags.items()}
    keys = {name: rows.as_ids(one.ids, one.ids.device) for name, one in bags.items()}
    tables: list[Any] = list(self.tables.values())
    if lookups.can_look_up_side_by_side(tables[0]) and all(
      one.offsets is None and one.weights is None for one in bags.values()
    ):
      values = lookups.look_up_side_by_side(self._side_by_side, [keys[name] for name in self._used])
      return jagged.KeyedTensor(self._keys, self._dims, values)
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
    return jagged.KeyedTensor(self._keys, self._dims, values)

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
