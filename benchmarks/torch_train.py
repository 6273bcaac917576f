"""A whole training step in PyTorch: 26 features in our tables, and in those of PyTorch or TorchRec.

  python benchmarks/torch_train.py
  python benchmarks/torch_train.py --device cuda
  python benchmarks/torch_train.py --against torchrec

Both models have the same dense part, the same ids, a table for each feature, and Adagrad; steps of
both take turns. `torch.nn.EmbeddingBag` has `sparse=True` and sparse gradients, and a matrix that
holds every id there is. TorchRec's tables (`torchrec` and `fbgemm-gpu-cpu`) are fused: they step
in backward(), as ours do. The last line is the other's median time divided by ours. CPU time is
that of all threads, which tells more on a machine that does other work.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import ratio_table
import torch

import monolith.torch as mt
from monolith.table import Optimizer


class Ours(torch.nn.Module):
  """Features in tables of Monolith, which step in backward()."""

  def __init__(self, options: argparse.Namespace):
    super().__init__()
    self.tables = mt.EmbeddingBagCollection(
      [
        mt.EmbeddingBagConfig(
          f"t{i}",
          options.dim,
          [f"f{i}"],
          optimizer=Optimizer("adagrad", initial_accumulator_value=0.1),
          learning_rate=0.05,
        )
        for i in range(options.features)
      ],
      device=options.device,
    )
    self.dense = dense(options)

  def forward(self, ids: torch.Tensor) -> torch.Tensor:
    """ids [features, batch] -> logits [batch]."""
    features = {f"f{i}": one for i, one in enumerate(ids)}
    return self.dense(self.tables(features).values())[:, 0]


class Theirs(torch.nn.Module):
  """Features in matrices of PyTorch, with sparse gradients."""

  def __init__(self, options: argparse.Namespace):
    super().__init__()
    self.bags = torch.nn.ModuleList(
      torch.nn.EmbeddingBag(
        options.ids, options.dim, mode="sum", sparse=True, device=options.device
      )
      for _ in range(options.features)
    )
    self.dense = dense(options)

  def forward(self, ids: torch.Tensor) -> torch.Tensor:
    """ids [features, batch] -> logits [batch]."""
    vectors = [bag(one[:, None]) for bag, one in zip(self.bags, ids)]
    return self.dense(torch.cat(vectors, 1))[:, 0]


class TorchRec(torch.nn.Module):
  """Features in matrices of TorchRec, with its fused Adagrad."""

  def __init__(self, options: argparse.Namespace):
    super().__init__()
    import torchrec
    from torchrec.modules import fused_embedding_modules

    self._keyed = torchrec.KeyedJaggedTensor.from_lengths_sync
    self.features = [f"f{i}" for i in range(options.features)]
    self.tables = fused_embedding_modules.FusedEmbeddingBagCollection(
      [
        torchrec.EmbeddingBagConfig(
          name=f"t{i}",
          embedding_dim=options.dim,
          num_embeddings=options.ids,
          feature_names=[feature],
        )
        for i, feature in enumerate(self.features)
      ],
      torch.optim.Adagrad,
      {"lr": 0.05},
      device=torch.device(options.device),
    )
    self.dense = dense(options)

  def forward(self, ids: torch.Tensor) -> torch.Tensor:
    """ids [features, batch] -> logits [batch]."""
    lengths = torch.ones(ids.numel(), dtype=torch.int32, device=ids.device)
    keyed = self._keyed(self.features, ids.reshape(-1), lengths)
    return self.dense(self.tables(keyed).values())[:, 0]


def dense(options: argparse.Namespace) -> torch.nn.Module:
  """Returns the dense part."""
  return torch.nn.Sequential(
    torch.nn.Linear(options.features * options.dim, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
  ).to(options.device)


def draw(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
  """Returns ids [batches, features, batch], some of them often, and labels [batches, batch]."""
  rng = np.random.default_rng(0)
  shape = (options.batches, options.features, options.batch_size)
  ids = (options.ids ** rng.random(shape)).astype(np.int64) % options.ids
  labels = rng.integers(0, 2, (options.batches, options.batch_size)).astype(np.float32)
  return torch.tensor(ids).to(options.device), torch.tensor(labels).to(options.device)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--device", default="cpu")
  parser.add_argument("--features", type=int, default=26)
  parser.add_argument("--dim", type=int, default=16)
  parser.add_argument("--ids", type=int, default=100_000, help="of each feature")
  parser.add_argument("--batch_size", type=int, default=4096)
  parser.add_argument("--batches", type=int, default=20)
  parser.add_argument("--rounds", type=int, default=60)
  parser.add_argument("--against", choices=("torch", "torchrec"), default="torch")
  options = parser.parse_args()
  ids, labels = draw(options)
  their_name = {"torch": "torch.nn.EmbeddingBag", "torchrec": "TorchRec"}[options.against]
  theirs = Theirs(options) if options.against == "torch" else TorchRec(options)
  models = {"monolith.torch": Ours(options), their_name: theirs}
  steps = {}
  for name, model in models.items():
    if isinstance(model, Theirs):
      parameters = list(model.parameters())
    else:
      parameters = list(model.dense.parameters())
    steps[name] = torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)
  wait = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
  times: dict[str, list[float]] = {name: [] for name in models}
  cpu_times: dict[str, list[float]] = {name: [] for name in models}
  for number in range(options.rounds + options.batches):
    batch = number % options.batches
    for name, model in models.items():
      wait()
      begin, cpu_begin = time.perf_counter(), time.process_time()
      steps[name].zero_grad()
      loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids[batch]), labels[batch])
      loss.backward()
      steps[name].step()
      wait()
      # The first time through all batches makes the rows.
      if number >= options.batches:
        times[name].append(time.perf_counter() - begin)
        cpu_times[name].append(time.process_time() - cpu_begin)
  medians = {name: statistics.median(some) for name, some in times.items()}
  for name, seconds in medians.items():
    print(
      f"{name}: {1e3 * seconds:.2f} ms a step, {options.batch_size / seconds:,.0f} samples/s, "
      f"CPU time {1e3 * statistics.median(cpu_times[name]):.2f} ms"
    )
  ratio = medians[their_name] / medians["monolith.torch"]
  print(f"ratio {ratio:.2f}")
  if options.device == "cpu":
    ratio_table.record([("a step in PyTorch", their_name, ratio)])


if __name__ == "__main__":
  main()
