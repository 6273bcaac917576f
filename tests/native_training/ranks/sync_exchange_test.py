"""Two ranks: where rows live, what arrives there, and that two train as one does."""

import glob
import pickle
import tempfile

import numpy as np
import pytest

from tests import rank_processes, sync_exchange
from tests.sync_exchange import DIMS, NUM_EXACT_STEPS, NUM_STEPS, SWITCHES, TRAININGS, make_steps

pytestmark = pytest.mark.thorough

_TIMEOUT_SECS = 900
_BASELINE = (False,) * len(SWITCHES)
_NAMES = ["-".join(name for name, on in zip(SWITCHES, t) if on) or "none" for t in TRAININGS]


def _close(a, b):
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def _run(size, engine):
  """Returns what the ranks saw: rank -> results."""
  with tempfile.TemporaryDirectory() as folder:
    command = ["-m", "tests.sync_exchange", folder]
    with rank_processes.RankProcesses(size, command, engine) as ranks:
      statuses = ranks.wait(_TIMEOUT_SECS)
      assert not any(statuses), ranks.report()
    result = {}
    for path in glob.glob(f"{folder}/*.pickle"):
      rank, _, _ = path.rpartition("/")[2].partition("_")
      with open(path, "rb") as f:
        result[int(rank)] = pickle.load(f)
    return result


@pytest.fixture(scope="module")
def alone():
  """Returns what a lone rank saw."""
  return _run(1, None)


@pytest.fixture(scope="module", params=rank_processes.ENGINES)
def results(request, alone):
  """Returns what the ranks saw: number of ranks -> rank -> results."""
  rank_processes.require_engine(request.param)
  return {1: alone, 2: _run(2, request.param)}


class TestWorkedExample:
  """Every rank sends ids 1, 1 and 2, with gradients .5, .5 and [.5, 1]."""

  @pytest.mark.parametrize(
    "size, rank, expected",
    [
      (1, 0, dict(
        output=[1, 2], shard_sizes=[2], slot_sizes=[1, 1], offsets=[0, 0, 1], ids=[1, 2],
        sizes=[1, 1], embedding_splits=[3], recv_emb_splits=[3], grad_flat=[1, 0.5, 1],
        received=[1, 0.5, 1],
      )),
      (2, 0, dict(
        output=[2, 1], shard_sizes=[1, 1], slot_sizes=[0, 1, 1, 0], offsets=[2, 2, 0], ids=[2, 2],
        sizes=[0, 1, 0, 1], embedding_splits=[2, 2], recv_emb_splits=[2, 1],
        grad_flat=[0.5, 1, 1], received=[0.5, 1, 0.5, 1],
      )),
      (2, 1, dict(
        output=[2, 1], shard_sizes=[1, 1], slot_sizes=[0, 1, 1, 0], offsets=[2, 2, 0], ids=[1, 1],
        sizes=[1, 0, 1, 0], embedding_splits=[1, 1], recv_emb_splits=[2, 1],
        grad_flat=[0.5, 1, 1], received=[1, 1],
      )),
    ],
  )  # fmt: skip
  def test_every_stage(self, results, size, rank, expected):
    seen = results[size][rank]["worked_example"]
    output, shard_sizes, slot_sizes, _, offsets = seen["reordered"]
    bundle, exchanged = seen["bundle"], seen["exchanged"]
    grad_flat, received = exchanged["fused_embedding_gradient_alltoall"]
    actual = dict(
      output=output, shard_sizes=shard_sizes, slot_sizes=slot_sizes, offsets=offsets,
      ids=bundle["id_flat_t"], sizes=bundle["id_size_flat_t"],
      embedding_splits=bundle["embedding_splits"], recv_emb_splits=bundle["recv_emb_splits"],
      grad_flat=grad_flat, received=received,
    )  # fmt: skip
    assert {name: value.tolist() for name, value in actual.items()} == expected
    assert bundle["recv_embeddings_size"] == 3

  @pytest.mark.parametrize("size, rank", [(1, 0), (2, 0), (2, 1)])
  def test_rows(self, results, size, rank):
    seen = results[size][rank]["worked_example"]
    assert seen["before"]["1"].tolist() == [[0], [0]]
    assert seen["before"]["2"].tolist() == [[0, 0]]
    assert seen["after"]["1"].tolist() == [[-size], [-size]]
    assert seen["after"]["2"].tolist() == [[-0.5 * size, -1.0 * size]]


class _Model:
  """The tables of all ranks, as dictionaries: learning rate 0.5."""

  def __init__(self):
    self.rows = [{} for _ in DIMS]

  def look_up(self, step):
    return [
      np.array([self.rows[k].get(int(i), np.zeros(dim)) for i in ids]).reshape([len(ids), dim])
      for k, (ids, dim) in enumerate(zip(step.ids, DIMS))
    ]

  def update(self, step):
    for k, (ids, grads) in enumerate(zip(step.ids, step.grads)):
      for i, grad in zip(ids, grads):
        self.rows[k][int(i)] = self.rows[k].get(int(i), 0) - 0.5 * grad.astype(np.float64)


@pytest.fixture(scope="module")
def expected_lookups():
  """Rank -> step -> rows of each table, and the tables at the end."""
  model = _Model()
  steps = [make_steps(rank) for rank in range(2)]
  lookups = [{}, {}]
  for name in steps[0]:
    for rank in range(2):
      lookups[rank][name] = model.look_up(steps[rank][name])
    for rank in range(2):
      model.update(steps[rank][name])
  return lookups, model


@pytest.mark.parametrize("kind", ["steps", "native_steps"])
class TestSteps:
  @pytest.mark.parametrize("rank", [0, 1])
  @pytest.mark.parametrize("name", list(make_steps(0)))
  def test_rows_of_a_step(self, results, expected_lookups, kind, name, rank):
    looked_up = results[2][rank][kind]["looked_up"][name]
    for rows, expected in zip(looked_up, expected_lookups[0][rank][name]):
      assert rows.shape == expected.shape
      _close(rows, expected)

  def test_rows_at_the_end(self, results, expected_lookups, kind):
    shards = [results[2][rank][kind]["shard"] for rank in range(2)]
    for k, ids in enumerate(sync_exchange.all_ids(2)):
      for i, row_0, row_1 in zip(ids, shards[0][k], shards[1][k]):
        owner, other = (row_0, row_1) if i % 2 == 0 else (row_1, row_0)
        _close(owner, expected_lookups[1].rows[k][int(i)])
        assert not other.any()


class TestOwnership:
  def test_each_id_is_stored_on_exactly_one_rank(self, results):
    stored = [results[2][rank]["steps"]["stored"] for rank in range(2)]
    for k, ids in enumerate(sync_exchange.all_ids(2)):
      assert len(ids) > 20
      for i, on_0, on_1 in zip(ids, stored[0][k], stored[1][k]):
        # Floor modulo: negative ids, the extreme ones too, have one home.
        assert (on_0, on_1) == ((True, False) if int(i) % 2 == 0 else (False, True)), i


class TestAccumulation:
  def test_adagrad(self, results):
    for size in (1, 2):
      for rank in range(size):
        seen = results[size][rank]["accumulation"]
        # One step per rank: 1 / sqrt(2), then 1 / sqrt(3). Of the sum: 2 / sqrt(1 + 4).
        per_rank = -sum(1 / np.sqrt(1 + n) for n in range(1, size + 1))
        _close(seen["per_rank"], [[per_rank]])
        _close(seen["summed"], [[-size / np.sqrt(1 + size**2)]])


class TestDenseAverage:
  @pytest.mark.parametrize("fusion", ["one", "grouped", "none"])
  def test_all_kinds(self, results, fusion):
    for rank in range(2):
      dense, slices, scalar = results[2][rank]["allreduce"][fusion]
      _close(dense, [[0.75, 1.25]])
      _close(slices, [[0.25], [0.5], [0.0]])
      _close(scalar, 2.5)


class TestTraining:
  """Two ranks with half of each batch, against one with all of it."""

  def _alone(self, results):
    return results[1][0]["trainings"][_BASELINE]

  def _pair(self, results, switches):
    return [results[2][rank]["trainings"][switches] for rank in range(2)]

  def _sum_rows(self, pair, key, *index):
    rows = [rank[key] for rank in pair]
    for i in index:
      rows = [r[i] for r in rows]
    return [a + b for a, b in zip(*rows)]

  @pytest.mark.parametrize("switches", TRAININGS, ids=_NAMES)
  def test_ranks_have_the_same_dense_weights(self, results, switches):
    pair = self._pair(results, switches)
    assert len(pair[0]["kernels"]) == len(pair[1]["kernels"]) == NUM_STEPS
    np.testing.assert_array_equal(pair[0]["kernels"], pair[1]["kernels"])

  @pytest.mark.parametrize("switches", TRAININGS, ids=_NAMES)
  def test_equal_while_no_id_comes_twice(self, results, switches):
    """A pipeline makes rows older by some steps, which does not matter here."""
    alone, pair = self._alone(results), self._pair(results, switches)
    for step in range(NUM_EXACT_STEPS):
      loss = np.mean([rank["losses"][step] for rank in pair])
      _close(loss, alone["losses"][step])
      _close(pair[0]["kernels"][step], alone["kernels"][step])
    is_exact = sync_exchange.trained_ids() >= 100
    for rows, expected in zip(self._sum_rows(pair, "final_rows"), alone["final_rows"]):
      assert expected[is_exact].any()
      _close(rows[is_exact], expected[is_exact])

  @pytest.mark.parametrize(
    "switches",
    [t for t in TRAININGS if not any(t[:2])],
    ids=[name for name, t in zip(_NAMES, TRAININGS) if not any(t[:2])],
  )
  def test_equal_step_by_step(self, results, switches):
    """Without pipelining all is the same; pushing embeddings later has no effect here."""
    alone, pair = self._alone(results), self._pair(results, switches)
    for step in range(NUM_STEPS):
      _close(np.mean([rank["losses"][step] for rank in pair]), alone["losses"][step])
      _close(pair[0]["kernels"][step], alone["kernels"][step])
      for rows, expected in zip(self._sum_rows(pair, "rows", step), alone["rows"][step]):
        _close(rows, expected)

  @pytest.mark.parametrize("switches", TRAININGS, ids=_NAMES)
  def test_loss_falls(self, results, switches):
    losses = np.mean([rank["losses"] for rank in self._pair(results, switches)], axis=0)
    learned = losses[NUM_EXACT_STEPS:]
    assert np.mean(learned[-6:]) < 0.5 * np.mean(learned[:6]), learned

  def test_alone_learns_too(self, results):
    learned = self._alone(results)["losses"][NUM_EXACT_STEPS:]
    assert np.mean(learned[-6:]) < 0.5 * np.mean(learned[:6]), learned
