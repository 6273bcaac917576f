"""Runs the tests of `modules_test.py` with tables on a GPU."""

import unittest

try:
  import torch
except ImportError:
  raise unittest.SkipTest("needs PyTorch") from None

import monolith.torch as mt
from monolith.native_training import gpu_table
from tests.torch import modules_test


@unittest.skipUnless(
  torch.cuda.is_available() and gpu_table.is_available(), "needs libmonolith_cuda.so and a GPU"
)
class GpuTest(modules_test.ModulesTest):
  device = "cuda"

  def test_tables_in_main_memory_serve_ids_on_a_gpu(self):
    one = mt.Embedding(2, **modules_test.SGD)
    ids = torch.tensor([1, 1, 2], device="cuda")
    out = one(ids)
    out.sum().backward()
    self.assertEqual((out.device.type, len(one)), ("cuda", 2))
    self.same(one(ids), [[-2, -2], [-2, -2], [-1, -1]])

  def test_admission_is_refused(self):
    with self.assertRaisesRegex(ValueError, "main memory alone"):
      mt.Embedding(2, admit_after=1, device="cuda")

  def test_streams_wait_for_one_another(self):
    one = self.embedding(16)
    ids = torch.arange(100_000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
      one(ids).sum().backward()
    with torch.cuda.stream(torch.cuda.Stream()):
      rows = one(ids)
    torch.cuda.synchronize()
    self.assertTrue(bool((rows == -1).all()))

  def test_collections_in_both_memories_learn_the_same(self):
    generator = torch.Generator().manual_seed(3)
    plain = {f"f{i}": torch.randint(-50, 50, (64,), generator=generator) for i in range(4)}
    bags = {**plain, "f1": torch.randint(-50, 50, (64, 3), generator=generator)}
    for features in (plain, bags):
      results = []
      for device in ("cpu", "cuda"):
        collection = mt.EmbeddingBagCollection(
          [
            mt.EmbeddingBagConfig(f"t{i}", 8, names, optimizer="adagrad", initializer=0.5)
            for i, names in enumerate((["f0", "f1"], ["f2"], ["f3", "f0"]))
          ],
          device=device,
        )
        own = {name: ids.to(device) for name, ids in features.items()}
        factors = torch.arange(64 * 40.0, device=device).reshape(64, 40) / 1000
        for _ in range(5):
          ((collection(own).values() - 1).square() * factors).sum().backward()
        results.append(collection(own).values().detach().cpu())
      torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)

  def test_a_step_does_not_wait_for_the_gpu(self):
    collection = mt.EmbeddingBagCollection(
      [mt.EmbeddingBagConfig(f"t{i}", 8, [f"f{i}"], optimizer="sgd") for i in range(3)],
      device="cuda",
    )
    plain = {f"f{i}": torch.arange(100, device="cuda") for i in range(3)}
    offsets = torch.arange(101, device="cuda")
    for features in (plain, {**plain, "f1": (plain["f1"], offsets)}):
      torch.cuda.set_sync_debug_mode("error")
      try:
        collection(features).values().sum().backward()
      finally:
        torch.cuda.set_sync_debug_mode("default")
    self.assertEqual([len(table) for table in collection.tables.values()], [100] * 3)

  def test_known_ids_never_wait_for_the_gpu(self):
    collection = mt.EmbeddingBagCollection(
      [mt.EmbeddingBagConfig(f"t{i}", 8, [f"f{i}"], optimizer="sgd") for i in range(3)],
      device="cuda",
    )
    features = {f"f{i}": torch.arange(1000, device="cuda") for i in range(3)}

    def waits():
      return [table.storage.stats()["waits"] for table in collection.tables.values()]

    for _ in range(5):
      collection(features).values().sum().backward()
    before = waits()
    for _ in range(20):
      # Other programs may slow the card down, and the host runs only so far ahead of it.
      torch.cuda.synchronize()
      collection(features).values().sum().backward()
    self.assertEqual(waits(), before)

  def test_both_memories_learn_the_same(self):
    rows = []
    for device in ("cpu", "cuda"):
      one = mt.EmbeddingBag(8, "adagrad", 0.5, mode="sum", learning_rate=0.1, device=device)
      generator = torch.Generator().manual_seed(3)
      for _ in range(5):
        ids = torch.randint(-50, 50, (64, 5), generator=generator).to(device)
        (one(ids) - 1).square().sum().backward()
      rows.append(one(torch.arange(-50, 50).to(device)[:, None]).detach().cpu())
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
  unittest.main()
