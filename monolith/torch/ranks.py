"""Ids split over the ranks of `torch.distributed`, so that every row has one home.

The home of an id is its floor modulo by the number of ranks, as for servers and ranks of the
TensorFlow driver. A lookup sends each distinct id to its home and gets its vector back; gradients
go the same way, divided by the number of ranks, as `DistributedDataParallel` divides those of other
parameters. All ranks must call a module equally often, forward and backward.
"""

from __future__ import annotations

import glob
import os
import re
from typing import Any

import torch
import torch.distributed as dist

# As `process_group`: every process has a table of its own.
LOCAL = "local"


def find_group(process_group: Any) -> Any:
  """Returns the group of ranks that share tables, or `None` where there is one process.

  Args:
    process_group: a group, `None` for the default one where there is one, or `LOCAL`.

  Raises:
    ValueError: it is another text, or this process is not in the group.
  """
  if isinstance(process_group, str):
    if process_group != LOCAL:
      raise ValueError(f"process_group is {process_group!r}, want a group, None or 'local'")
    return None
  if not (dist.is_available() and dist.is_initialized()):
    return None
  group = dist.group.WORLD if process_group is None else process_group
  size = dist.get_world_size(group)
  if size < 1:
    raise ValueError("process_group has no such rank: this process is not in it")
  return group if size > 1 else None


def place(process_group: Any) -> tuple[int, int]:
  """Returns this process's rank in a group, and how many there are: 0 of 1 where it is alone."""
  group = find_group(process_group)
  return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def path_of(path: str | os.PathLike[str], rank: int, size: int) -> str:
  """Returns where a rank has its rows."""
  text = os.fspath(path)
  return text if size == 1 else f"{text}.rank_{rank:05d}_of_{size:05d}"


def saved_by(path: str | os.PathLike[str]) -> int:
  """Returns how many ranks have written a table.

  Raises:
    ValueError: there are no files, some of a rank are missing, or there are those of several
      numbers of ranks.
  """
  text = os.fspath(path)
  found: dict[int, set[int]] = {}
  for name in glob.glob(f"{glob.escape(text)}*-?????-of-?????*"):
    match = re.fullmatch(
      r"(?:\.rank_(\d{5})_of_(\d{5}))?-\d{5}-of-\d{5}(?:-tmp-\d+)?", name[len(text) :]
    )
    if match:
      found.setdefault(int(match[2] or 1), set()).add(int(match[1] or 0))
  if len(found) != 1:
    sizes = " and of ".join(map(str, sorted(found)))
    raise ValueError(
      f"{text} has files of {sizes} ranks: remove those that are not meant"
      if found
      else f"There are no files {text}-00000-of-00001 or {text}.rank_00000_of_00002-00000-of-00001"
    )
  ((size, there),) = found.items()
  if missing := sorted(set(range(size)) - there):
    raise ValueError(f"{text} has no files of rank {missing} of {size}")
  return size


class Exchange:
  """The way of one batch of ids of several tables to their homes and back.

  Attributes:
    home_ids: for each table the ids that this rank is the home of, from all ranks, int64.
  """

  def __init__(self, ids: list[torch.Tensor], dims: list[int], group: Any):
    """Sends ids to their homes.

    Args:
      ids: int64 `[n]` for each table.
      dims: the length of each table's vectors.
      group: the ranks.
    """
    self._group, self._dims = group, dims
    ranks = self._ranks = dist.get_world_size(group)
    device = ids[0].device
    self._inverse, sent, counts = [], [], []
    for one in ids:
      distinct, inverse = torch.unique(one, return_inverse=True)
      home = torch.remainder(distinct, ranks)
      order = torch.argsort(home, stable=True)
      place = torch.empty_like(order)
      place[order] = torch.arange(len(order), device=device)
      self._inverse.append(place[inverse])
      sent.append(distinct[order])
      counts.append(torch.bincount(home, minlength=ranks))
    # [ranks, tables]: how many ids of a table go to a rank, and come from it.
    to = torch.stack(counts, 1).contiguous()
    come = torch.empty_like(to)
    dist.all_to_all_single(come, to, group=group)
    self._to, self._come = to.tolist(), come.tolist()
    received = self._swap(sent, self._to, self._come, [1] * len(ids))
    self.home_ids = [one.reshape(-1) for one in received]

  def _swap(
    self,
    parts: list[torch.Tensor],
    to: list[list[int]],
    come: list[list[int]],
    widths: list[int],
  ) -> list[torch.Tensor]:
    """Sends `[sum of to[:, t], widths[t]]` for each table, by rank; returns what comes."""
    pieces = [part.reshape(-1, w).split([n[t] for n in to]) for t, (part, w) in
              enumerate(zip(parts, widths))]  # fmt: skip
    flat = torch.cat([pieces[t][rank].reshape(-1) for rank in range(self._ranks)
                      for t in range(len(parts))])  # fmt: skip
    sizes_to = [sum(n * w for n, w in zip(row, widths)) for row in to]
    sizes_come = [sum(n * w for n, w in zip(row, widths)) for row in come]
    got = flat.new_empty(sum(sizes_come))
    dist.all_to_all_single(got, flat, sizes_come, sizes_to, group=self._group)
    sizes = [come[rank][t] * widths[t] for rank in range(self._ranks) for t in range(len(parts))]
    arrived = got.split(sizes)
    return [
      torch.cat([arrived[rank * len(parts) + t] for rank in range(self._ranks)]).reshape(-1, w)
      for t, w in enumerate(widths)
    ]

  def send_rows(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sends the vectors of `home_ids` to where they were asked for; returns those of the batch."""
    distinct = self._swap(rows, self._come, self._to, self._dims)
    return [rows[inverse] for rows, inverse in zip(distinct, self._inverse)]

  def send_gradients(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sends gradients of the batch's ids to their homes; returns those of `home_ids`."""
    sums = []
    for t, (gradient, inverse) in enumerate(zip(gradients, self._inverse)):
      distinct = gradient.new_zeros(sum(row[t] for row in self._to), self._dims[t])
      sums.append(distinct.index_add_(0, inverse, gradient))
    arrived = self._swap(sums, self._to, self._come, self._dims)
    return [gradient / self._ranks for gradient in arrived]
