"""`EmbeddingBagCollection`: the tables of a model, with the call of TorchRec's."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from monolith.torch import jagged, pooling, rows


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


class EmbeddingBagCollection(torch.nn.Module):
  """Vectors of the bags of many features, looked up in all tables at once.

  Args:
    tables: their configurations.
    device: where rows are, `"cpu"` or `"cuda"`.
    process_group: which ranks share the tables: by default all of `torch.distributed`, if that is
      initialized; `monolith.torch.LOCAL`: none.

  Attributes:
    tables: name -> `RowTable`.

  Raises:
    ValueError, TypeError: two tables have one name, or a configuration is not as described.
  """

  def __init__(
    self,
    tables: Sequence[EmbeddingBagConfig],
    device: Any = None,
    *,
    process_group: Any = None,
  ):
    super().__init__()
    self._configs = tuple(tables)
    names = [config.name for config in self._configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
      raise ValueError(f"tables {twice} are there twice")
    self._modes = [pooling.check_mode(config.pooling) for config in self._configs]
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
    used = [name for config in self._configs for name in config.feature_names]
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
    bags = jagged.split(features, self._features)
    keys = {name: rows.as_ids(one.ids, one.ids.device) for name, one in bags.items()}
    ids = []
    for config in self._configs:
      parts = [keys[name] for name in config.feature_names]
      ids.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    found = rows.look_up(list(self.tables.values()), ids)
    pooled = []
    for config, mode, vectors in zip(self._configs, self._modes, found):
      sizes = [len(keys[name]) for name in config.feature_names]
      for name, part in zip(config.feature_names, vectors.split(sizes)):
        pooled.append(pooling.pool(part, bags[name], mode))
    return jagged.KeyedTensor(self._keys, self._dims, torch.cat(pooled, 1))

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes each table's rows to `<folder>/<name>-00000-of-00001` and so on."""
    for name, table in self.tables.items():
      table.save(pathlib.Path(folder) / name)

  def load(self, folder: str | os.PathLike[str]) -> None:
    """Replaces each table's rows by what `save` wrote; tables are replaced one after another."""
    for name, table in self.tables.items():
      table.load(pathlib.Path(folder) / name)
