"""`monolith.torch`: tables as modules, stepped by autograd or by an optimizer of PyTorch.

Tests `torch/collection.py`, `torch/following.py`, `torch/jagged.py`, `torch/keyed.py`,
`torch/lookups.py`, `torch/pooling.py`, `torch/rows.py` and `torch/storage.py`. `gpu_test.py` runs
the same on a GPU, and tests `torch/side_by_side.py`, which works there alone.
"""

import copy
import functools
import logging
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import types
import unittest
import warnings
from unittest import mock

try:
  import torch
except ImportError:
  raise unittest.SkipTest("needs PyTorch") from None

import numpy as np  # noqa: E402

import monolith.torch as mt  # noqa: E402
from monolith import table as tables  # noqa: E402
from monolith.torch import rows as row_tables  # noqa: E402

_LEAST, _MOST = -(2**63), 2**63 - 1
SGD = {"optimizer": "sgd", "initializer": "zeros", "learning_rate": 1.0}


def config(name, dim, features, **options):
  return mt.EmbeddingBagConfig(name, dim, features, **{**SGD, **options})


class ModulesTest(unittest.TestCase):
  """Everything that holds on every device.

  Attributes:
    device: of rows and ids.
  """

  device = "cpu"

  def ids(self, *values):
    return torch.tensor(*values, device=self.device)

  def embedding(self, dim, **options):
    return mt.Embedding(dim, **{**SGD, "device": self.device, **options})

  def same(self, tensor, values):
    torch.testing.assert_close(
      tensor.detach().cpu(), torch.tensor(values, dtype=torch.float32), rtol=1e-6, atol=1e-6
    )

  def test_backward_steps_once_per_id(self):
    one = self.embedding(2)
    ids = self.ids([[7, _LEAST], [7, _MOST]])
    out = one(ids)
    self.assertEqual((out.shape, len(one)), ((2, 2, 2), 0))
    (out * torch.arange(8.0, device=self.device).reshape(2, 2, 2)).sum().backward()
    self.assertEqual(len(one), 3)
    self.same(one(ids), [[[-4, -6], [-2, -3]], [[-4, -6], [-6, -7]]])

  def test_a_table_follows_the_optimizer_of_pytorch(self):
    for make in (
      lambda p: torch.optim.SGD(p, lr=0.5),
      lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
      lambda p: torch.optim.Adagrad(p, lr=0.5),
      lambda p: torch.optim.Adagrad(p, lr=0.5, initial_accumulator_value=0.1),
      lambda p: torch.optim.Adam(p, lr=0.1),
      lambda p: torch.optim.Adadelta(p, lr=1.0),
    ):
      ours = self.embedding(3, optimizer=None, learning_rate=None)
      theirs = torch.nn.Embedding(4, 3, device=self.device)
      torch.nn.init.zeros_(theirs.weight)
      all_ids = self.ids([0, 1, 2, 3])
      optimizers = [make(one.parameters()) for one in (ours, theirs)]
      schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in optimizers]
      # With momentum, the two disagree about steps whose rate has changed since.
      is_constant = bool(optimizers[0].defaults.get("momentum"))
      goal = torch.arange(12.0, device=self.device).reshape(4, 3)
      for _ in range(4):
        for one, optimizer in zip((ours, theirs), optimizers):
          optimizer.zero_grad()
          ((one(all_ids) - goal) ** 2).sum().backward()
          optimizer.step()
        for schedule in schedules[: 0 if is_constant else 2]:
          schedule.step()
      with self.subTest(repr(optimizers[0])):
        torch.testing.assert_close(ours(all_ids), theirs(all_ids), rtol=1e-4, atol=1e-5)

  def test_gradients_that_were_zeroed_do_not_step(self):
    for set_to_none in (True, False):
      one = self.embedding(1, optimizer=None, learning_rate=None)
      sgd = torch.optim.SGD(one.parameters(), lr=1.0)
      ids = self.ids([5])
      one(ids).sum().backward()
      sgd.zero_grad(set_to_none=set_to_none)
      one(ids).sum().backward()
      sgd.step()
      self.same(one(ids), [[-1]])
      sgd.step()
      self.same(one(ids), [[-1]])
      # Accumulated over two batches, with two lookups in one of them.
      sgd.zero_grad(set_to_none=set_to_none)
      (one(ids) + one(ids)).sum().backward()
      one(ids).sum().backward()
      sgd.step()
      self.same(one(ids), [[-4]])
      one(ids).sum().backward()
      sgd.zero_grad()
      sgd.step()
      self.same(one(ids), [[-4]])

  def test_training_goes_on_where_it_was_stopped(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    ids, goal = self.ids([0, 1, 2]), torch.arange(6.0, device=self.device).reshape(3, 2)

    def step(one, optimizer, with_closure):
      def closure():
        optimizer.zero_grad()
        loss = (one(ids) - goal).square().sum()
        loss.backward()
        return loss

      if with_closure:
        optimizer.step(closure)
      else:
        closure()
        optimizer.step()

    for make in (
      lambda p: torch.optim.Adam(p, lr=0.1),
      lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
      lambda p: torch.optim.Adagrad(p, lr=0.5),
    ):
      for with_files in (False, True):
        one, other = (self.embedding(2, optimizer=None, learning_rate=None) for _ in range(2))
        optimizer, other_optimizer = (make(table.parameters()) for table in (one, other))
        for i in range(20):
          step(one, optimizer, i % 2)
        if with_files:
          one.save(folder / "going_on")
          other.load(folder / "going_on")
        else:
          other.load_state_dict(one.state_dict())
        other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for i in range(4):
          step(one, optimizer, i % 2)
          step(other, other_optimizer, i % 2)
        with self.subTest(type(optimizer).__name__, with_files=with_files):
          torch.testing.assert_close(other(ids), one(ids), rtol=0, atol=0)

  def test_an_adam_of_the_table_goes_on_where_it_was_stopped(self):
    path = pathlib.Path(os.environ["TEST_TMPDIR"]) / "own_adam"
    adam = tables.Optimizer("adam", decay_by_step=True)
    one, other = (self.embedding(2, optimizer=adam, learning_rate=0.1) for _ in range(2))
    ids = self.ids([1, 2])
    for _ in range(5):
      one(ids).square().sum().backward()
      (one(ids) * self.ids([[1.0, 2.0], [3.0, -4.0]])).sum().backward()
    one.save(path)
    other.load(path)
    for _ in range(2):
      for table in (one, other):
        (table(ids[:1]) * self.ids([[-1.0, 2.0]])).sum().backward()
    torch.testing.assert_close(other(ids), one(ids))

  def test_parameters_that_were_replaced_are_followed(self):
    def overwrite(one):
      torch.__future__.set_overwrite_module_params_on_conversion(True)
      try:
        one.to(torch.float64)
      finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)

    for replace in (
      lambda one: one.load_state_dict(one.state_dict(), assign=True),
      overwrite,
    ):
      one = self.embedding(1, optimizer=None, learning_rate=None)
      before = one.table.rows
      replace(one)
      self.assertIsNot(one.table.rows, before)
      sgd = torch.optim.SGD(one.parameters(), lr=1.0)
      for _ in range(2):
        sgd.zero_grad()
        one(self.ids([5])).sum().backward()
        sgd.step()
      self.same(one(self.ids([5])), [[-2]])

  def test_frozen_tables_keep_rows_and_no_gradients(self):
    one = mt.EmbeddingBagCollection(
      [config(name, 1, [name], optimizer=None, learning_rate=None) for name in "ab"],
      device=self.device,
    )
    one.tables["a"].requires_grad_(False)
    sgd = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=1.0)
    features = {"a": self.ids([1]), "b": self.ids([1])}
    for _ in range(3):
      sgd.zero_grad()
      one(features).values().sum().backward()
      sgd.step()
    self.same(one(features).values(), [[0, -3]])
    self.assertEqual(dict(row_tables._backwards), {})

  def test_vectors_have_32_bits_whatever_pytorch_makes_by_default(self):
    tensors = {"x": self.ids([1, 2])}
    for dtype in (torch.float64, torch.bfloat16):
      torch.set_default_dtype(dtype)
      try:
        one = mt.EmbeddingBagCollection([config("a", 3, ["x"])], device=self.device)
        self.assertEqual(one(tensors).values().dtype, torch.float32)
        one(tensors).values().sum().backward()
        self.same(one(tensors).values(), [[-1, -1, -1], [-1, -1, -1]])
      finally:
        torch.set_default_dtype(torch.float32)

  def test_gradients_that_were_changed_are_said_not_to_reach_rows(self):
    one = self.embedding(1, optimizer=None, learning_rate=None)
    sgd = torch.optim.SGD(one.parameters(), lr=1.0)
    with self.assertLogs("monolith", "WARNING") as logs:
      for is_clipped in (False, True, True):
        sgd.zero_grad()
        for _ in range(2):
          one(self.ids([5])).sum().backward()
        if is_clipped:
          torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        else:
          self.assertEqual(logs.output, [])
        sgd.step()
    self.assertEqual(len(logs.output), 1)
    self.assertIn("gradient of table 'table' was changed before SGD has stepped", logs.output[0])
    self.same(one(self.ids([5])), [[-6]])

  def test_gradients_that_no_optimizer_takes_are_told(self):
    one = self.embedding(1, optimizer=None, learning_rate=None)
    sgd = torch.optim.SGD(one.parameters(), lr=1.0)

    def train(batches):
      for _ in range(batches):
        one(self.ids([5])).sum().backward()

    with self.assertLogs("monolith", "WARNING") as logs:
      train(99)
      sgd.step()
      train(99)
      self.assertEqual(logs.output, [])
      train(2)
    self.assertEqual(len(logs.output), 1)
    self.assertIn("Gradients of 100 backward passes wait for an optimizer", logs.output[0])

  def test_numbers_that_change_in_each_step_are_told(self):
    one = self.embedding(1, optimizer=None, learning_rate=None)
    adam = torch.optim.Adam(one.parameters())
    for cycles in (False, True):
      schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, 9, cycle_momentum=cycles)
      with self.assertLogs("monolith", "WARNING") as logs:
        for _ in range(8):
          adam.zero_grad()
          one(self.ids([5])).sum().backward()
          adam.step()
          schedule.step()
        # assertLogs wants at least one.
        logging.getLogger("monolith").warning("end")
      with self.subTest(cycles=cycles):
        told = [line for line in logs.output if "cycle_momentum=False" in line]
        self.assertEqual(len(told), cycles)

  def test_a_default_device_of_pytorch_does_not_matter(self):
    keyed = mt.KeyedJaggedTensor(["x", "y"], self.ids([1, 2, 3, 4]), lengths=self.ids([1, 1, 0, 2]))
    pairs = {"x": self.ids([1, 2]), "y": (self.ids([3, 4]), self.ids([0, 0, 2]))}
    one_each = mt.KeyedJaggedTensor(["x", "y"], keyed.values(), lengths=self.ids([1, 1, 1, 1]))
    for features in (keyed, pairs, one_each.to("cpu")):
      one = mt.EmbeddingBagCollection([config("a", 1, ["x", "y"])], device=self.device)
      with torch.device("meta"):
        one(features).values().sum().backward()
      self.assertEqual(len(one.tables["a"]), 4)

  def test_closures_step_rows_in_the_same_call(self):
    for make in (
      lambda p: torch.optim.SGD(p, lr=0.5),
      lambda p: torch.optim.Adagrad(p, lr=0.5),
      lambda p: torch.optim.Adam(p, lr=0.1),
    ):
      ours = self.embedding(3, optimizer=None, learning_rate=None)
      theirs = torch.nn.Embedding(4, 3, device=self.device)
      torch.nn.init.zeros_(theirs.weight)
      ids = self.ids([0, 1, 2, 3])
      goal = torch.arange(12.0, device=self.device).reshape(4, 3)
      for one in (ours, theirs):
        optimizer = make(one.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

        def closure(one=one, optimizer=optimizer, ids=ids, goal=goal):
          optimizer.zero_grad()
          loss = ((one(ids) - goal) ** 2).sum()
          loss.backward()
          return loss

        for step in range(4):
          # Gradients from before go, as the closure zeroes them.
          one(ids).sum().backward()
          if step % 2:
            optimizer.zero_grad()
          optimizer.step(closure) if step < 2 else optimizer.step(closure=closure)
          schedule.step()
      with self.subTest(type(optimizer).__name__):
        torch.testing.assert_close(ours(ids), theirs(ids), rtol=1e-4, atol=1e-5)

  def test_closures_of_several_optimizers(self):
    users, items = (self.embedding(1, optimizer=None, learning_rate=None) for _ in range(2))
    first, second = (torch.optim.SGD(one.parameters(), lr=1.0) for one in (users, items))
    ids = self.ids([5])

    def closure():
      for _ in range(2):
        (users(ids) + 10 * items(ids)).sum().backward()

    first.step(closure)
    self.same(torch.cat([users(ids), items(ids)]), [[-2], [0]])
    second.step()
    self.same(torch.cat([users(ids), items(ids)]), [[-2], [-20]])
    first.zero_grad()
    first.step(lambda: None)
    self.same(users(ids), [[-2]])

  def test_closures_that_rows_cannot_follow_do_not_run(self):
    class Twice(torch.optim.SGD):
      def step(self, closure=None):
        closure()
        return super().step(closure)

    for make in (torch.optim.LBFGS, torch.optim.Rprop, Twice):
      one = self.embedding(1, optimizer=None, learning_rate=None)
      optimizer = make(one.parameters())
      with self.assertRaisesRegex(ValueError, f"cannot follow the optimizer {make.__name__}"):
        optimizer.step(self.fail)

  def test_rows_of_two_optimizers_are_refused(self):
    one = self.embedding(1, optimizer=None, learning_rate=None)
    first, second = (torch.optim.SGD(one.parameters(), lr=1.0) for _ in range(2))
    one(self.ids([5])).sum().backward()
    first.step()
    with self.assertRaisesRegex(ValueError, "Two optimizers, SGD and SGD, .* one of them"):
      second.step()
    # One after the other is well.
    first.zero_grad()
    one(self.ids([5])).sum().backward()
    second.step()
    self.same(one(self.ids([5])), [[-2]])

  def test_ids_that_were_overwritten_do_not_step_other_rows(self):
    for make in (
      lambda ids: self.embedding(1)(ids),
      lambda ids: mt.EmbeddingBag(1, **SGD, device=self.device)(ids[:, None]),
      lambda ids: mt.EmbeddingBagCollection([config("a", 1, ["x"])], device=self.device)(
        {"x": ids}
      ).values(),
    ):
      ids = self.ids([1, 2])
      out = make(ids)
      ids.copy_(self.ids([7, 8]))
      with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
        out.sum().backward()

  def test_buffers_may_be_filled_anew_between_backward_and_step(self):
    one = self.embedding(1, optimizer=None, learning_rate=None)
    sgd = torch.optim.SGD(one.parameters(), lr=1.0)
    ids, upstream = self.ids([1, 2]), torch.ones(2, 1, device=self.device)
    one(ids).backward(upstream)
    ids.fill_(9)
    upstream.fill_(100.0)
    sgd.step()
    self.same(one(self.ids([1, 2, 9])), [[-1], [-1], [0]])

  def test_backward_runs_once(self):
    one = self.embedding(1)
    loss = one(self.ids([1])).sum()
    loss.backward()
    with self.assertRaisesRegex(RuntimeError, "second time"):
      loss.backward()
    self.same(one(self.ids([1])), [[-1]])

  def test_gradients_of_a_backward_that_did_not_arrive_do_not_step(self):
    one = self.embedding(1, optimizer=None, learning_rate=None)
    sgd = torch.optim.SGD(one.parameters(), lr=1.0)
    torch.autograd.grad(one(self.ids([1])).sum(), list(one.parameters()))
    one(self.ids([2])).sum().backward()
    sgd.step()
    self.same(one(self.ids([1, 2])), [[0], [-1]])

  def test_threads_that_run_backward_at_the_same_time_lose_nothing(self):
    one = mt.Embedding(1, initializer="zeros", device=self.device)
    sgd = torch.optim.SGD(one.parameters(), lr=1.0)
    steps, threads = 100, 3
    barrier = threading.Barrier(threads)

    def work(number):
      # Several gradients, so that those of other backwards come between them.
      loss = one(self.ids([number])).sum() + one(self.ids([number])).sum()
      barrier.wait()
      loss.backward()

    before = sys.getswitchinterval()
    self.addCleanup(sys.setswitchinterval, before)
    sys.setswitchinterval(1e-6)
    for _ in range(steps):
      sgd.zero_grad()
      running = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
      for thread in running:
        thread.start()
      for thread in running:
        thread.join()
      sgd.step()
    found = one(torch.arange(threads, device=self.device))
    self.same(found, [[-2.0 * steps]] * threads)

  def test_backwards_inside_of_one_lose_nothing(self):
    one = self.embedding(1, optimizer=None, learning_rate=None)
    sgd = torch.optim.SGD(one.parameters(), lr=1.0)

    def inside(vector):
      return vector + one(self.ids([2]))

    for _ in range(2):
      sgd.zero_grad()
      vector = one(self.ids([1]))
      for _ in range(2):
        vector = torch.utils.checkpoint.checkpoint(inside, vector, use_reentrant=True)
      # Its gradient comes first, and waits while the others run backwards of their own.
      (vector + one(self.ids([3]))).sum().backward()
      sgd.step()
    self.same(one(self.ids([1, 2, 3])), [[-2], [-4], [-2]])
    self.assertEqual(dict(row_tables._backwards), {})

  def test_nothing_stays_of_a_backward_that_failed(self):
    class Fails(torch.autograd.Function):
      @staticmethod
      def forward(ctx, vector):
        return vector.clone()

      @staticmethod
      def backward(ctx, upstream):
        raise RuntimeError("no gradient")

    one = self.embedding(1, optimizer=None, learning_rate=None)
    sgd = torch.optim.SGD(one.parameters(), lr=1.0)
    # The first of the two gradients has arrived when the second one fails.
    loss = (Fails.apply(one(self.ids([1]))) + one(self.ids([2]))).sum()
    with self.assertRaisesRegex(RuntimeError, "no gradient"):
      loss.backward()
    self.assertEqual(dict(row_tables._backwards), {})
    one(self.ids([3])).sum().backward()
    sgd.step()
    self.same(one(self.ids([1, 2, 3])), [[0], [0], [-1]])

  def test_what_cannot_be_followed_is_said(self):
    for make, text in (
      (lambda p: torch.optim.Rprop(p), "cannot follow the optimizer Rprop: give the table one"),
      (lambda p: torch.optim.RMSprop(p), "cannot follow the optimizer RMSprop"),
      (lambda p: torch.optim.SGD(p, lr=1.0, maximize=True), "maximize=True"),
      (lambda p: torch.optim.Adagrad(p, lr=1.0, lr_decay=0.1), "lr_decay=0.1"),
    ):
      one = self.embedding(1, optimizer=None, learning_rate=None)
      optimizer = make(one.parameters())
      one(self.ids([5])).sum().backward()
      with self.assertRaisesRegex(ValueError, text):
        optimizer.step()
    one = self.embedding(1, optimizer=None, learning_rate=None)
    adam = torch.optim.AdamW(one.parameters(), lr=1.0, weight_decay=0.1)
    one(self.ids([5])).sum().backward()
    with self.assertLogs("monolith", "WARNING") as logs:
      adam.step()
    self.assertIn("weight_decay=0.1", logs.output[0])
    one = self.embedding(1, optimizer=None, learning_rate=None)
    adagrad = torch.optim.Adagrad(one.parameters(), lr=1.0, eps=0.5)
    one(self.ids([5])).sum().backward()
    with self.assertLogs("monolith", "WARNING") as logs:
      adagrad.step()
    self.assertIn("eps=0.5", logs.output[0])

  def test_a_model_learns_with_defaults(self):
    torch.manual_seed(0)
    ids = torch.randint(0, 500, (4096, 2), device=self.device)
    labels = ((ids.sum(1) % 4) == 0).float()
    one = mt.Embedding(16, device=self.device)
    model = torch.nn.Sequential(
      one, torch.nn.Flatten(), torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    ).to(self.device)
    adam = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(120):
      adam.zero_grad()
      loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids)[:, 0], labels)
      loss.backward()
      adam.step()
      losses.append(loss.item())
    self.assertLess(losses[-1], 0.5 * losses[0])

  def test_bags_are_those_of_pytorch(self):
    rows = torch.randn(10, 4, device=self.device)
    ids, offsets = self.ids([1, 2, 2, 9, 4, 1]), self.ids([0, 3, 3, 4])
    weights = torch.rand(6, device=self.device)
    for mode in ("sum", "mean", "max"):
      for factors in (None, weights) if mode == "sum" else (None,):
        with self.subTest(mode, weighted=factors is not None):
          ours = mt.EmbeddingBag(4, **SGD, mode=mode, device=self.device)
          ours.table.assign(torch.arange(10), rows)
          theirs = torch.nn.EmbeddingBag(10, 4, mode=mode, _weight=rows.clone())
          goal = torch.randn(4, 4, device=self.device)
          results, of_weights = [], []
          for one in (ours, theirs):
            own = None if factors is None else factors.clone().requires_grad_()
            out = one(ids, offsets, own)
            (out * goal).sum().backward()
            results.append(out)
            of_weights.append(None if own is None else own.grad)
          torch.testing.assert_close(*results)
          if factors is not None:
            torch.testing.assert_close(*of_weights)
          after = rows - theirs.weight.grad
          torch.testing.assert_close(ours(self.ids([[i] for i in range(10)])), after)

  def test_bags_of_other_forms(self):
    one = mt.EmbeddingBag(1, **SGD, mode="sum", include_last_offset=True, device=self.device)
    one.table.assign([1, 2, 3], [[1.0], [2.0], [4.0]])
    self.same(one(self.ids([1, 2, 3]), self.ids([0, 1, 3])), [[1], [6]])
    self.same(one(self.ids([[1, 2], [3, 3]])), [[3], [8]])
    self.same(one(torch.zeros(0, dtype=torch.int64, device=self.device), self.ids([0, 0])), [[0]])
    self.same(one(torch.zeros([2, 0], dtype=torch.int64, device=self.device)), [[0], [0]])
    for arguments, text in (
      ((self.ids([1, 2]),), "without offsets"),
      ((self.ids([[1, 2]]), self.ids([0])), "with offsets"),
      ((self.ids(1),), "without offsets"),
      ((self.ids([1, 2]), self.ids([[0, 2]])), r"offsets have shape \(1, 2\)"),
      ((self.ids([[1, 2]]), None, torch.ones(2, device=self.device)), "per_sample_weights"),
    ):
      with self.assertRaisesRegex(ValueError, text):
        one(*arguments)
    for offsets, text in ((self.ids([0.0, 1.5, 2.0]), "dtype torch.float32"), ([0, 2], "a list")):
      with self.assertRaisesRegex(TypeError, text):
        one(self.ids([1, 2]), offsets)
    if self.device == "cpu":
      for offsets in ([0, 5], [1, 2], [0, 2, 1, 2], [0, 1]):
        with self.assertRaisesRegex(ValueError, "offsets are"):
          one(self.ids([1, 2]), self.ids(offsets))

  def test_collections_take_torchrecs_and_plain_features(self):
    def make():
      return mt.EmbeddingBagCollection(
        [config("user", 2, ["u", "friend"]), config("item", 1, ["i"], pooling="mean")],
        device=self.device,
      )

    keyed = mt.KeyedJaggedTensor(
      ["u", "i", "friend", "unused"],
      self.ids([1, 2, 2, 9, 9, 8, 3, 5]),
      lengths=self.ids([2, 0, 3, 1, 0, 1, 0, 1]),
    )
    plain = {
      "u": (self.ids([1, 2]), self.ids([0, 2, 2])),
      "i": (self.ids([2, 9, 9, 8]), self.ids([0, 3, 4])),
      "friend": torch.nested.nested_tensor_from_jagged(self.ids([3]), self.ids([0, 0, 1])),
    }
    results = []
    for features in (keyed, plain):
      one = make()
      out = one(features)
      self.assertEqual(out.keys(), ["u", "friend", "i"])
      self.assertEqual(out.length_per_key(), [2, 2, 1])
      self.assertEqual(out.values().shape, (2, 5))
      (out.values() * torch.arange(10.0, device=self.device).reshape(2, 5)).sum().backward()
      results.append(one(features).values())
      self.assertEqual([len(table) for table in one.tables.values()], [3, 3])
    torch.testing.assert_close(*results)
    # u: ids 1 and 2 get (0, 1) each; friend: id 3 gets (7, 8); i: 2 gets 4/3, 9 8/3, 8 gets 9.
    self.same(results[0], [[0, -2, 0, 0, -(4 / 3 + 16 / 3) / 3], [0, 0, -7, -8, -9]])
    self.same(make()(keyed)["i"], [[0], [0]])

  def test_nested_tensors_with_gaps_between_bags(self):
    one = mt.EmbeddingBagCollection([config("a", 1, ["x"])], device=self.device)
    one.tables["a"].assign(range(1, 7), 2.0 ** torch.arange(6))
    whole = self.ids([[1, 2, 3], [4, 5, 6]])
    for lengths, expected in (([1, 3], [[1], [56]]), ([1, 2], [[1], [24]])):
      features = torch.nested.narrow(whole, 1, 0, self.ids(lengths), layout=torch.jagged)
      self.same(one({"x": features}).values(), expected)

  def test_keyed_tensors_have_the_calls_of_torchrecs(self):
    weights = torch.arange(4.0, device=self.device)
    keyed = mt.KeyedJaggedTensor(
      ["u", "i"], self.ids([1, 2, 3, 4]), weights, lengths=self.ids([2, 0, 1, 1])
    )
    self.assertEqual(keyed["i"].values().tolist(), [3, 4])
    self.assertEqual(list(keyed.to_dict()), ["u", "i"])
    copied = keyed.to("cpu", non_blocking=True)["u"]
    if self.device == "cuda":
      torch.cuda.synchronize()  # as after every copy that does not block
    for one in (keyed["u"], keyed.to(self.device)["u"], copied):
      self.assertEqual([bag.tolist() for bag in one.to_dense()], [[1, 2], []])
      self.assertEqual((one.lengths().tolist(), one.offsets().tolist()), ([2, 0], [0, 2, 2]))
      self.assertEqual(one.weights().tolist(), [0.0, 1.0])
    self.assertEqual(keyed.to("cpu").device().type, "cpu")
    bare = mt.KeyedJaggedTensor(["u"], self.ids([1]), lengths=self.ids([1]))
    for one in (bare, bare["u"]):
      self.assertIsNone(one.weights_or_none())
      with self.assertRaisesRegex(ValueError, "no weights"):
        one.weights()
    one, other = (
      mt.KeyedTensor(keys, lengths, torch.arange(6.0).reshape(2, 3))
      for keys, lengths in ((["a", "b"], [1, 2]), (["c"], [3]))
    )
    self.assertEqual((one.key_dim(), one.offset_per_key()), (1, [0, 1, 3]))
    self.same(one.to(self.device)["b"], [[1, 2], [4, 5]])
    parts = list(one.to_dict().values())
    self.same(mt.KeyedTensor.from_tensor_list(["a", "b"], parts)["b"], [[1, 2], [4, 5]])
    self.same(mt.KeyedTensor.regroup_as_dict([one], [["b"]], ["g"])["g"], [[1, 2], [4, 5]])
    with self.assertRaisesRegex(ValueError, "1 keys for 2 groups"):
      mt.KeyedTensor.regroup_as_dict([one], [["a"], ["b"]], ["g"])
    first, second = mt.KeyedTensor.regroup([one, other], [["b", "c"], ["a"]])
    self.same(first, [[1, 2, 0, 1, 2], [4, 5, 3, 4, 5]])
    self.same(second, [[0], [3]])
    if torch.cuda.is_available():
      self.assertTrue(keyed.to("cpu").pin_memory().values().is_pinned())

  def test_keyed_features_are_cut_joined_and_put_in_order(self):
    weights = torch.arange(5.0, device=self.device)
    whole = mt.KeyedJaggedTensor(
      ["a", "b", "c"], self.ids([1, 2, 3, 4, 5]), weights, self.ids([1, 0, 0, 2, 1, 1])
    )
    self.assertEqual(whole.length_per_key(), [1, 2, 2])
    self.assertEqual(whole.offset_per_key(), [0, 1, 3, 5])
    self.assertEqual(whole.stride_per_key(), [2, 2, 2])

    def contents(keyed):
      return {
        key: [
          list(zip(*(some.tolist() for some in bag)))
          for bag in zip(one.to_dense(), one.to_dense_weights())
        ]
        for key, one in keyed.to_dict().items()
      }

    expected = contents(whole)
    self.assertEqual(expected["b"], [[], [(2, 1.0), (3, 2.0)]])
    parts = whole.split([1, 0, 2])
    self.assertEqual([part.keys() for part in parts], [["a"], [], ["b", "c"]])
    self.assertEqual({**contents(parts[0]), **contents(parts[2])}, expected)
    self.assertEqual(contents(mt.KeyedJaggedTensor.concat([parts[0], parts[2]])), expected)
    self.assertEqual(contents(mt.KeyedJaggedTensor.from_jt_dict(whole.to_dict())), expected)
    turned = whole.permute([2, 0])
    self.assertEqual(turned.keys(), ["c", "a"])
    self.assertEqual(contents(turned), {key: expected[key] for key in ("c", "a")})
    self.assertIn("'a': JaggedTensor([tensor([1]", repr(whole.to("cpu")))
    none = mt.KeyedJaggedTensor.empty(is_weighted=True)
    self.assertEqual((none.keys(), none.stride(), none.to_dict()), ([], 0, {}))

    bare = mt.KeyedJaggedTensor(["d"], self.ids([1, 2]), lengths=self.ids([1, 1]))
    for make, text in (
      (lambda: whole.split([1, 1]), r"segments are \[1, 1\], want 3 features"),
      (lambda: whole.split([4, -1]), "want 3 features"),
      (lambda: mt.KeyedJaggedTensor.concat([whole, bare]), "others have none"),
      (
        lambda: mt.KeyedJaggedTensor.concat([bare, mt.KeyedJaggedTensor.empty()]),
        "different batch sizes",
      ),
      (lambda: mt.JaggedTensor(self.ids([1])), "lengths or offsets"),
    ):
      with self.subTest(text), self.assertRaisesRegex(ValueError, text):
        make()

    jagged = mt.JaggedTensor.from_dense([self.ids([1]), self.ids([2, 3, 4])])
    self.assertEqual(jagged.to_padded_dense(2, -1).tolist(), [[1, -1], [2, 3]])
    self.assertIsNone(jagged.to_padded_dense_weights())
    padded = self.ids([[1, 0], [2, 3]])
    again = mt.JaggedTensor.from_dense_lengths(padded, self.ids([1, 2]), padded.float())
    self.assertEqual(again.to("cpu").to_padded_dense().tolist(), padded.tolist())
    self.same(again.to_padded_dense_weights(), [[1, 0], [2, 3]])
    one = mt.EmbeddingBagCollection([config("t", 1, ["x"])], device=self.device)
    one.tables["t"].assign([1, 2, 3], torch.ones(3, 1))
    self.same(one({"x": again}).values(), [[1], [5]])

  def test_weights_are_taken_asked_for_or_left_out(self):
    keyed = mt.KeyedJaggedTensor(
      ["x"], self.ids([1, 2]), torch.tensor([2.0, 3.0], device=self.device), self.ids([2])
    )
    bare = mt.KeyedJaggedTensor(["x"], self.ids([1, 2]), lengths=self.ids([2]))
    for is_weighted, expected in ((None, -13), (True, -13), (False, -2)):
      one = mt.EmbeddingBagCollection(
        [config("a", 1, ["x"])], device=self.device, is_weighted=is_weighted
      )
      self.assertEqual(one.is_weighted(), is_weighted is True)
      one(keyed).values().sum().backward()
      self.same(one(keyed).values(), [[expected]])
      if is_weighted:
        with self.assertRaisesRegex(ValueError, r"\['x'\] have no weights"):
          one(bare)

  def test_configurations_of_torchrec_are_taken(self):
    # With the fields of TorchRec's class, which has no optimizer.
    theirs = types.SimpleNamespace(
      name="a",
      embedding_dim=2,
      feature_names=["x"],
      num_embeddings=100,
      pooling=types.SimpleNamespace(value="MEAN"),
      init_fn=None,
      weight_init_min=None,
    )
    one = mt.EmbeddingBagCollection([theirs], device=self.device)
    sgd = torch.optim.SGD(one.parameters(), lr=1.0)
    before = one({"x": self.ids([[1, 2]])})
    before.values().sum().backward()
    sgd.step()
    self.assertEqual(
      (len(one.tables["a"]), one.embedding_bag_configs()[0].pooling.value), (2, "MEAN")
    )
    first = functools.partial(torch.nn.init.uniform_, a=0.5, b=0.5)  # as TorchRec makes it
    for function, expected in ((first, -0.5), (torch.nn.init.zeros_, -1.0)):
      other = types.SimpleNamespace(**{**vars(theirs), "init_fn": function, "data_type": "FP32"})
      one = mt.EmbeddingBagCollection([other], device=self.device)
      sgd = torch.optim.SGD(one.parameters(), lr=1.0)
      one({"x": self.ids([3])}).values().sum().backward()
      sgd.step()
      self.same(one({"x": self.ids([3])}).values(), [[expected, expected]])
    for name, value, text in (
      ("init_fn", torch.nn.init.xavier_uniform_, "'a' has an init_fn of its own"),
      ("data_type", types.SimpleNamespace(value="FP16"), "'a' has data_type .*, want FP32"),
      ("virtual_table_eviction_policy", object(), "expire_after="),
    ):
      other = types.SimpleNamespace(**{**vars(theirs), name: value})
      with self.subTest(name), self.assertRaisesRegex(ValueError, text):
        mt.EmbeddingBagCollection([other], device=self.device)
    with self.assertRaisesRegex(TypeError, "'a' is a SimpleNamespace, want EmbeddingConfig"):
      mt.EmbeddingCollection([theirs])
    with self.assertRaisesRegex(TypeError, "'a' is a EmbeddingConfig, want EmbeddingBagConfig"):
      mt.EmbeddingBagCollection([mt.EmbeddingConfig("a", 2, ["x"])])

  def test_room_that_there_is_not_is_named_as_it_was_asked_for(self):
    for number in (10**11, -1, 2.5):
      with self.assertRaisesRegex(ValueError, f"num_embeddings of table 'a' is {number}"):
        mt.EmbeddingBagCollection(
          [config("a", 64, ["x"], num_embeddings=number)], device=self.device
        )

  def test_sequences_keep_a_vector_for_each_id(self):
    one = mt.EmbeddingCollection(
      [mt.EmbeddingConfig("a", 2, ["x", "y"], **SGD), mt.EmbeddingConfig("b", 1, ["x"], **SGD)],
      device=self.device,
      need_indices=True,
    )
    keyed = mt.KeyedJaggedTensor(["y", "x"], self.ids([7, 8, 9, 7]), lengths=self.ids([1, 1, 0, 2]))
    found = one(keyed)
    self.assertEqual(list(found), ["x@a", "y", "x@b"])
    self.assertEqual([v.values().shape for v in found.values()], [(2, 2), (2, 2), (2, 1)])
    sum(vectors.values().sum() for vectors in found.values()).backward()

    found = one(keyed)
    self.same(found["x@a"].to_padded_dense(), [[[0, 0], [0, 0]], [[-1, -1], [-2, -2]]])
    self.same(found["y"].to_padded_dense(2), [[[-2, -2], [0, 0]], [[-1, -1], [0, 0]]])
    self.same(found["x@b"].to_padded_dense(1, 5), [[[5]], [[-1]]])
    self.assertEqual(found["x@a"].weights().tolist(), [9, 7])
    plain = {"x": self.ids([9, 7]), "y": self.ids([[7, 8], [8, 7]])}
    self.assertEqual(one(plain)["y"].lengths().tolist(), [2, 2])
    self.same(one(plain)["x@b"].values(), [[-1], [-1]])
    if self.device == "cpu":
      with self.assertRaisesRegex(ValueError, "want them to rise"):
        one({**plain, "x": (self.ids([1, 2]), self.ids([0, 2, 1]))})
    vectors = found["y"].to_padded_dense()
    vectors.sum().backward()
    self.same(one(keyed)["y"].values(), [[-3, -3], [-2, -2]])

  def test_features_with_one_id_each(self):
    one = mt.EmbeddingBagCollection(
      [config("a", 1, ["x"]), config("b", 2, ["x", "y"])], device=self.device
    )
    plain = {"x": self.ids([1, 2, 1]), "y": self.ids([[2], [3], [3]])}
    keyed = mt.KeyedJaggedTensor.from_lengths_sync(
      ["x", "y"], self.ids([1, 2, 1, 2, 3, 3]), torch.ones(6, dtype=torch.int64).to(self.device)
    )
    one(plain).values().sum().backward()
    self.assertEqual(one(plain).keys(), ["x@a", "x@b", "y"])
    expected = [[-2, -2, -2, -2, -2], [-1, -2, -2, -2, -2], [-2, -2, -2, -2, -2]]
    self.same(one(plain).values(), expected)
    self.same(one(keyed).values(), expected)

  def test_tables_of_any_dims_and_optimizers_are_side_by_side(self):
    follows = {"optimizer": None, "learning_rate": None}
    collection = mt.EmbeddingBagCollection(
      [config("a", 2, ["x", "y"]), config("b", 3, ["x"], **follows), config("c", 1, ["y"])],
      device=self.device,
    )
    sgd = torch.optim.SGD(collection.parameters(), lr=2.0)
    features = {"x": self.ids([1, 2, 1]), "y": self.ids([2, 5, 5])}
    upstream = torch.arange(24.0, device=self.device).reshape(3, 8)
    for _ in range(2):
      sgd.zero_grad()
      collection(features).values().backward(upstream)
      sgd.step()
    # Gradients of an id are those of all its examples, of both features of table a.
    row = {1: [16, 18], 2: [8 + 2, 9 + 3], 5: [10 + 18, 11 + 19]}
    b = {1: [4 + 20, 5 + 21, 6 + 22], 2: [12, 13, 14]}
    c = {2: [7], 5: [15 + 23]}
    expected = [
      [-2 * v for v in row[x] + row[y]] + [-4 * v for v in b[x]] + [-2 * v for v in c[y]]
      for x, y in ((1, 2), (2, 5), (1, 5))
    ]
    self.same(collection(features).values(), expected)

  def test_tables_that_are_alike_are_pooled_together(self):
    features = {
      "a": self.ids([1, 2, 1]),
      "b": (self.ids([5, 6, 7, 5]), self.ids([0, 2, 2, 4])),
      "c": self.ids([[1, 2], [2, 2], [3, 1]]),
      "d": self.ids([4, 4, 4]),
    }
    places = [("a", 2, "sum"), ("b", 3, "mean"), ("c", 2, "sum"), ("d", 3, "mean")]
    places += [("b", 2, "max"), ("c", 3, "mean")]
    together = mt.EmbeddingBagCollection(
      [config(f"t{i}", dim, [name], pooling=mode) for i, (name, dim, mode) in enumerate(places)],
      device=self.device,
    )
    apart = [
      mt.EmbeddingBagCollection([config("t", dim, [name], pooling=mode)], device=self.device)
      for name, dim, mode in places
    ]
    factors = torch.arange(45.0, device=self.device).reshape(3, 15) - 20
    for _ in range(3):
      out = together(features).values()
      expected = torch.cat([one(features).values() for one in apart], 1)
      torch.testing.assert_close(out, expected)
      for one in (out, expected):
        ((one - 1).square() * factors).sum().backward()
    self.assertGreater(float(out.detach().abs().max()), 0)
    self.assertEqual(
      [len(table) for table in together.tables.values()],
      [len(one.tables["t"]) for one in apart],
    )

  def test_wrong_features_are_named(self):
    one = mt.EmbeddingBagCollection([config("a", 1, ["x", "y"])], device=self.device)
    ids = self.ids([1, 2])

    def keyed(offsets, batch=1):
      # As TorchRec's, which may have a stride for each key.
      return types.SimpleNamespace(
        keys=lambda: ["x", "y"],
        values=lambda: ids,
        weights_or_none=lambda: None,
        offsets=lambda: self.ids(offsets),
        stride=lambda: batch,
      )

    for features, error, text in (
      ({"x": ids}, KeyError, "'y'"),
      (ids, TypeError, "features is a Tensor, want a KeyedJaggedTensor"),
      (mt.KeyedJaggedTensor(["x"], ids, offsets=self.ids([0, 2])), KeyError, "'y'"),
      ({"x": ids, "y": self.ids([1])}, ValueError, "batch sizes"),
      ({"x": ids, "y": ids.float()}, TypeError, "dtype torch.float32"),
      ({"x": ids, "y": [1, 2]}, TypeError, "'y' is a list"),
      ({"x": ids, "y": ids[None, None]}, ValueError, "'y' has shape"),
      ({"x": ids, "y": (ids[None], self.ids([0, 1, 2]))}, ValueError, r"'y' have shape \(1, 2\)"),
      ({"x": ids, "y": ([1, 2], self.ids([0, 1, 2]))}, TypeError, "'y' are a list"),
      ({"x": ids, "y": (ids, self.ids([0, 0.5, 2]))}, TypeError, "'y' have dtype torch.float32"),
      (keyed([0, 1, 1]), ValueError, "begin at 0 and end at 1, want 0 and 2"),
      (keyed([1, 1, 2]), ValueError, "begin at 1 and end at 2, want 0 and 2"),
      (keyed([0, 1, 2, 2], batch=2), ValueError, "4 offsets for 2 features of 2 bags"),
    ):
      with self.subTest(text), self.assertRaisesRegex(error, text):
        one(features)
    for make, text in (
      (lambda: mt.EmbeddingBagCollection([config("a", 1, ["x"])] * 2), "twice"),
      (lambda: mt.EmbeddingBagCollection([config("a", 1, "x")]), "want a list"),
      (lambda: mt.EmbeddingBagCollection([]), "tables is empty"),
      (lambda: mt.EmbeddingBagCollection([config("a", 1, ["x"], pooling="min")]), "pooling"),
      (lambda: mt.KeyedJaggedTensor(["x"], ids), "lengths or offsets"),
      (lambda: mt.KeyedJaggedTensor(["x", "y"], ids, lengths=self.ids([1, 1, 0])), "3 bags for 2"),
      (lambda: mt.Embedding(4, learning_rate=0.1), "no optimizer of its own"),
      (lambda: mt.Embedding(4, device="meta"), "want 'cpu' or 'cuda'"),
      (lambda: mt.Embedding(4, process_group="all"), "process_group"),
      (lambda: mt.Embedding(4, "sgd", learning_rate=float("nan")), "learning_rate is nan"),
      (lambda: mt.Embedding(2).table.assign([1, 2, 3], torch.ones(2, 3)), r"shape \(2, 3\)"),
    ):
      with self.subTest(text), self.assertRaisesRegex(ValueError, text):
        make()
    for make, text in (
      (lambda: mt.Embedding(4, padding_idx=0), "Embedding has no argument 'padding_idx'"),
      (lambda: mt.Embedding(4)([1, 2]), "ids is a list, want a tensor"),
      (lambda: mt.EmbeddingBag(4)([[1, 2]]), "input is a list, want a tensor"),
    ):
      with self.subTest(text), self.assertRaisesRegex(TypeError, text):
        make()
    with self.assertRaisesRegex(ValueError, "name is 'a.b'"):
      mt.EmbeddingBagCollection([config("a.b", 1, ["x"])])
    for make in (lambda: mt.Embedding(1000, 16), lambda: mt.Embedding(1000, embedding_dim=16)):
      with self.assertRaisesRegex(TypeError, r"no num_embeddings.*Embedding\(16\)"):
        make()

  def test_rows_that_are_not_finite_are_refused(self):
    one = self.embedding(1)
    with self.assertRaisesRegex(ValueError, "Table 'table'.*NaN.*2 rows: ids 8, 9"):
      (one(self.ids([8, 9])) * float("nan")).sum().backward()
      # A GPU has told when it was waited for; the next step fails and does nothing.
      self.assertEqual(len(one), 0)
      one(self.ids([8, 9])).sum().backward()
    self.assertEqual(len(one), 0)
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="ignore"):
      (one(self.ids([8, 9])) * float("nan")).sum().backward()
    self.assertEqual(len(one), 2)

  def test_state_dict_carries_rows_and_state(self):
    path = pathlib.Path(os.environ["TEST_TMPDIR"]) / "state.pt"
    ids = self.ids([_LEAST, 3, _MOST])

    def make():
      return torch.nn.Sequential(
        mt.Embedding(4, "adam", device=self.device), torch.nn.Linear(4, 1).to(self.device)
      )

    one, other = make(), make()
    one(ids).sum().backward()
    torch.save(one.state_dict(), path)
    other.load_state_dict(torch.load(path, weights_only=True))
    for _ in range(2):
      torch.testing.assert_close(other(ids), one(ids), rtol=0, atol=0)
      for model in (one, other):
        model(ids).sum().backward()
    narrow = torch.nn.Sequential(mt.Embedding(2, "adam", device=self.device), torch.nn.Linear(4, 1))
    with self.assertRaisesRegex((RuntimeError, ValueError), "dim"):
      narrow.load_state_dict(one.state_dict())
    for make_copy in (copy.deepcopy, pickle.dumps):
      with self.assertRaisesRegex(TypeError, "cannot be"):
        make_copy(one)

  def test_state_dict_of_a_follower_has_the_state_of_its_optimizer(self):
    ids = self.ids([1, 2])

    def make():
      one = self.embedding(2, optimizer=None, learning_rate=None)
      return one, torch.optim.Adagrad(one.parameters(), lr=0.5)

    def step(one, adagrad):
      adagrad.zero_grad()
      one(ids).sum().backward()
      adagrad.step()

    one, adagrad = make()
    step(one, adagrad)
    other, other_adagrad = make()
    other.load_state_dict(one.state_dict())
    step(one, adagrad)
    step(other, other_adagrad)
    torch.testing.assert_close(other(ids), one(ids), rtol=0, atol=0)

  def test_files_keep_the_state_of_a_follower(self):
    path = pathlib.Path(os.environ["TEST_TMPDIR"]) / f"follower_{self.device}"
    ids = self.ids([1, 2])

    def step(one, optimizer):
      optimizer.zero_grad()
      (one(ids) - 1).square().sum().backward()
      optimizer.step()

    for make in (
      lambda p: torch.optim.Adagrad(p, lr=0.5),
      lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
      lambda p: torch.optim.SGD(p, lr=0.5),
    ):
      one, other = (self.embedding(2, optimizer=None, learning_rate=None) for _ in range(2))
      optimizer = make(one.parameters())
      step(one, optimizer)
      one.save(path)
      other.load(path)
      step(one, optimizer)
      step(other, make(other.parameters()))
      torch.testing.assert_close(other(ids), one(ids), rtol=0, atol=0)

  def test_state_dict_of_another_optimizer_is_refused(self):
    one, other = self.embedding(2, optimizer="adagrad"), self.embedding(2)
    with self.assertRaisesRegex((RuntimeError, ValueError), "state of optimizer 'adagrad'.*'sgd'"):
      other.load_state_dict(one.state_dict())

  def test_files_are_those_of_other_tables(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    ids = np.random.default_rng(1).integers(_LEAST, _MOST, 1000)
    one = mt.Embedding(4, "adagrad", (-1.0, 1.0), device=self.device)
    for _ in range(2):
      (one(torch.tensor(ids, device=self.device)) ** 2).sum().backward()
    self.assertEqual(one.save(folder / "one"), 1000)
    table = tables.HashTable(4, "adagrad")
    table.load(folder / "one")
    rows = one(torch.tensor(ids, device=self.device)).detach().cpu().numpy()
    np.testing.assert_array_equal(table.lookup(ids), rows)
    table.save(folder / "table")
    other = mt.Embedding(4, "adagrad", device=self.device)
    other.load(folder / "table")
    torch.testing.assert_close(other(torch.tensor(ids)).cpu(), torch.tensor(rows), rtol=0, atol=0)
    with self.assertRaises(ValueError):
      other.load(folder / "nothing")
    self.assertEqual(len(other), 1000)

  def test_autocast_and_other_devices_of_ids(self):
    one = self.embedding(8)
    with torch.autocast(self.device, torch.bfloat16):
      out = torch.nn.Linear(8, 1, device=self.device)(one(self.ids([1, 2])))
    out.float().sum().backward()
    self.assertEqual((len(one), one(self.ids([1])).dtype), (2, torch.float32))
    self.assertEqual(one(torch.tensor([1])).device.type, "cpu")

  def test_no_gradient_no_row(self):
    one = self.embedding(2)
    with torch.no_grad():
      self.assertFalse(one(self.ids([1])).requires_grad)
    one(self.ids([1]))
    self.assertEqual(len(one), 0)
    self.assertEqual(one(torch.zeros([0], dtype=torch.int64, device=self.device)).shape, (0, 2))
    self.assertTrue(one)

  def test_erase_evict_and_expiry(self):
    one = self.embedding(1, expire_after="1d")
    one.table.assign([1, 2], [[1.0], [2.0]])
    one.table.erase([1])
    self.assertEqual((len(one), one.table.evict()), (1, 0))
    with mock.patch("time.time", return_value=__import__("time").time() + 2 * 86400):
      one.table.assign([3], [[1.0]])
    self.assertEqual((one.table.evict(), len(one)), (1, 1))

  def test_compiled_models_break_the_graph_with_a_reason(self):
    one = self.embedding(2)
    model = torch.nn.Sequential(one, torch.nn.ReLU())
    ids = self.ids([1, 2])
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      reasons = torch._dynamo.explain(model)(ids).break_reasons
      self.assertTrue(reasons)
      for reason in reasons:
        self.assertIn("monolith.torch looks rows up", reason.reason)
      compiled = torch.compile(model, backend="eager")
      compiled(ids).sum().backward()
    self.assertEqual(len(one), 2)

  def test_transforms_that_cannot_look_up_are_named(self):
    one, ids = self.embedding(2), self.ids([1, 2])
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      for make, text in (
        (lambda: torch.vmap(one)(ids), "torch.func"),
        (lambda: torch.jit.trace(one, ids), "torch.jit.trace"),
        (lambda: torch.export.export(one, (ids,)), "torch.export"),
      ):
        with self.subTest(text), self.assertRaisesRegex(RuntimeError, f"which .*{text}.* cannot"):
          make()

  def test_compiled_models_do_not_warn(self):
    one = self.embedding(2)
    getattr(torch._dynamo.utils, "warn_once_cache", set()).clear()
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      torch.compile(torch.nn.Sequential(one, torch.nn.ReLU()), backend="eager")(self.ids([1, 2]))
    self.assertFalse([w for w in caught if "lookups.py" in str(w.message)])


class HostTest(unittest.TestCase):
  def test_admission(self):
    one = mt.Embedding(1, **SGD, admit_after=1)
    for expected in (0, 1):
      one(torch.tensor([5])).sum().backward()
      self.assertEqual(len(one), expected)

  def test_gradients_add_up_over_batches_under_distributed_data_parallel(self):
    store = pathlib.Path(os.environ["TEST_TMPDIR"]) / "store"
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    self.addCleanup(torch.distributed.destroy_process_group)
    one = mt.Embedding(1, initializer="zeros")
    model = torch.nn.parallel.DistributedDataParallel(one)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    ids = torch.tensor([5])
    for set_to_none in (True, False):
      for _ in range(3):
        model(ids).sum().backward()
      sgd.step()
      sgd.zero_grad(set_to_none=set_to_none)
    model(ids).sum().backward()
    sgd.step()
    torch.testing.assert_close(one(ids).detach(), torch.tensor([[-7.0]]))

  def test_ids_of_all_small_integers_are_ids(self):
    one = mt.Embedding(1, **SGD)
    for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32"):
      dtype = getattr(torch, name, None)
      if dtype is not None:
        most = torch.iinfo(dtype).max
        one.table.assign([most], [[7.0]])
        self.assertEqual(one(torch.tensor([most], dtype=dtype)).tolist(), [[7.0]], name)

  def test_files_that_cannot_be_loaded_are_named(self):
    path = pathlib.Path(os.environ["TEST_TMPDIR"]) / "damaged"
    wide = mt.Embedding(4, "adagrad")
    wide.table.assign([1], [[1.0, 2.0, 3.0, 4.0]])
    wide.save(path)
    file = path.with_name(f"{path.name}-00000-of-00001")
    one = mt.Embedding(2)
    with self.assertRaisesRegex(ValueError, f"dim 2.*{file}"):
      one.load(path)
    whole = file.read_bytes()
    for damaged in (b"\xff" * 8 + whole[8:], whole[:20] + b"\xff" + whole[21:], whole[:-1]):
      file.write_bytes(damaged)
      with self.assertRaisesRegex(tables.TableError, str(file)):
        one.load(path)

  def test_groups_of_the_driver_are_loaded_and_written(self):
    path = pathlib.Path(os.environ["TEST_TMPDIR"]) / "group"
    ids = torch.arange(5)
    source = {name: tables.HashTable(2, "adagrad") for name in ("user", "item")}
    for i, table in enumerate(source.values()):
      table.update(ids, np.full([5, 2], i + 1.0))
    tables.save_group(source, path)
    modules = {name: mt.Embedding(2, "adagrad") for name in source}
    self.assertEqual(tables.load_group(modules, path), {"user": 5, "item": 5})
    for name, module in modules.items():
      module(ids).sum().backward()
      source[name].update(ids, np.ones([5, 2]))
    tables.save_group(modules, path)
    back = {name: tables.HashTable(2, "adagrad") for name in source}
    tables.load_group(back, path)
    for name, table in back.items():
      np.testing.assert_array_equal(table.lookup(ids), source[name].lookup(ids))

  def test_import_loads_little_beside_pytorch(self):
    program = (
      "import sys, numpy, torch\nbefore = set(sys.modules)\nimport monolith.torch\n"
      "print(*sorted({name.partition('.')[0] for name in sys.modules if name not in before}"
      " - sys.stdlib_module_names))\nprint('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    self.assertEqual(done.stdout, "monolith\nFalse\n", done.stderr)


if __name__ == "__main__":
  unittest.main()
