"""`monolith.torch.ranks`: two processes on Gloo train what one process trains, each row once."""

import os
import pathlib
import unittest

try:
  import torch
except ImportError:
  raise unittest.SkipTest("needs PyTorch") from None

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as processes  # noqa: E402

import monolith.torch as mt  # noqa: E402

_RANKS, _STEPS, _BATCH = 2, 5, 64


def _collection(process_group=None, **options):
  options = {"optimizer": "sgd", "learning_rate": 0.5, "initializer": "zeros", **options}
  return mt.EmbeddingBagCollection(
    [
      mt.EmbeddingBagConfig("a", 4, ["x"], **options),
      mt.EmbeddingBagConfig("b", 2, ["y", "z"], pooling="mean", **options),
    ],
    process_group=process_group,
  )


def _batch(step, rank):
  generator = torch.Generator().manual_seed(step * _RANKS + rank)
  ids = torch.randint(-20, 20, (3, _BATCH), generator=generator)
  ids[0, 0], ids[1, 0] = -(2**63), 2**63 - 1
  return dict(zip("xyz", ids))


class _Model(torch.nn.Module):
  def __init__(self, process_group=None, **options):
    super().__init__()
    self.tables = _collection(process_group, **options)
    self.dense = torch.nn.Linear(8, 1)
    torch.nn.init.ones_(self.dense.weight)
    torch.nn.init.zeros_(self.dense.bias)

  def forward(self, features):
    return (self.dense(self.tables(features).values()) - 1).square().mean()


def _rows(table):
  ids, values = table.storage.table.items()
  return dict(zip(ids.tolist(), values.tolist()))


def _train(rank, folder, follows):
  dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=_RANKS)
  options = {"optimizer": None, "learning_rate": None} if follows else {}
  model = torch.nn.parallel.DistributedDataParallel(_Model(**options))
  sgd = torch.optim.SGD(model.parameters(), lr=0.5)
  for step in range(_STEPS):
    sgd.zero_grad()
    model(_batch(step, rank)).backward()
    sgd.step()
  tables = model.module.tables.tables
  torch.save({name: _rows(table) for name, table in tables.items()}, f"{folder}/rows_{rank}")
  model.module.tables.save(f"{folder}/saved")
  dist.barrier()
  other = _collection(**options)
  other.load(f"{folder}/saved")
  with torch.no_grad():
    same = torch.equal(other(_batch(0, 1 - rank)).values(),
                       model.module.tables(_batch(0, 1 - rank)).values())  # fmt: skip
  assert same
  _check_states(rank, folder, model.module.tables, options)
  if not follows:
    # Rows that one process has saved go home.
    other.load(f"{folder}/alone")
    assert sorted(_rows(other.tables["a"])) == list(range(-20 + rank, 20, _RANKS))
  group = dist.new_group([0])
  try:
    mt.Embedding(1, process_group=group)
  except ValueError as error:
    assert rank == 1 and "this process is not in it" in str(error), error
  else:
    assert rank == 0
  # Tables of their own, though there are ranks.
  own = _collection(mt.LOCAL)
  if rank == 0:
    own(_batch(0, 0)).values().sum().backward()
  assert (len(own.tables["a"]) > 0) == (rank == 0)
  dist.destroy_process_group()


def _check_states(rank, folder, tables, options):
  torch.save(tables.state_dict(), f"{folder}/state_{rank}")
  dist.barrier()
  other = _collection(**options)
  other.load_state_dict(torch.load(f"{folder}/state_{rank}"))
  assert _rows(other.tables["a"]) == _rows(tables.tables["a"])
  try:
    other.load_state_dict(torch.load(f"{folder}/state_{1 - rank}"))
  except (RuntimeError, ValueError) as error:
    assert f"rank {1 - rank} of 2, and this is rank {rank} of 2" in str(error), error
  else:
    raise AssertionError("rows of another rank were taken")


class RanksTest(unittest.TestCase):
  def test_rows_are_those_of_one_process_and_have_one_home(self):
    for follows in (False, True):
      with self.subTest(follows=follows):
        folder = pathlib.Path(os.environ["TEST_TMPDIR"]) / str(follows)
        folder.mkdir()
        before = _collection()
        for name, table in before.tables.items():
          table.assign(torch.arange(-20, 20), torch.ones(40, table.dim))
          table.save(folder / "alone" / name)
        processes.spawn(_train, (str(folder), follows), nprocs=_RANKS)
        shards = [torch.load(folder / f"rows_{rank}") for rank in range(_RANKS)]

        # One process takes the rows of both ranks.
        after = _collection()
        after.load(folder / "saved")
        for name, table in after.tables.items():
          self.assertEqual(_rows(table), {**shards[0][name], **shards[1][name]})
        with self.assertRaisesRegex((RuntimeError, ValueError), "rank 0 of 2, and this is rank 0"):
          after.load_state_dict(torch.load(folder / "state_0"))
        (folder / "saved" / "a.rank_00001_of_00002-00000-of-00001").unlink()
        with self.assertRaisesRegex(ValueError, r"no files of rank \[1\] of 2"):
          after.load(folder / "saved")

        alone = _Model()
        sgd = torch.optim.SGD(alone.dense.parameters(), lr=0.5)
        for step in range(_STEPS):
          sgd.zero_grad()
          batches = [_batch(step, rank) for rank in range(_RANKS)]
          whole = {name: torch.cat([one[name] for one in batches]) for name in "xyz"}
          alone(whole).backward()
          sgd.step()
        for name, table in alone.tables.tables.items():
          for rank in range(_RANKS):
            self.assertTrue(all(key % _RANKS == rank for key in shards[rank][name]))
          joined = {**shards[0][name], **shards[1][name]}
          expected = _rows(table)
          self.assertEqual(sorted(joined), sorted(expected))
          for key, row in expected.items():
            torch.testing.assert_close(
              torch.tensor(joined[key]), torch.tensor(row), rtol=1e-4, atol=1e-5
            )


if __name__ == "__main__":
  unittest.main()
