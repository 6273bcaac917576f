"""What `modules_test.py` asks of tables in main memory, of tables on a GPU."""

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
