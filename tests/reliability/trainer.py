"""A small training run whose whole state follows from the global step.

So a whole checkpoint can be told from a half one: after step n the variable `dense` is n, and rows
and optimizer state of a variable, of a single table and of a group of two are functions of n.
`check` compares them all.
"""

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import traceback

import numpy as np
import tensorflow as tf

from monolith.native_training import (
  basic_restore_hook,
  entry,
  hash_filter_ops,
  hash_table_ops,
  multi_hash_table_ops,
  save_utils,
)
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

v1 = tf.compat.v1

NUM_IDS = 50
DIM = 4
_ACCUMULATOR_START = 0.1
# A child that does nothing for so long is stuck.
_CHILD_SECONDS = 120


def table_config(dim: int) -> entry.HashTableConfigInstance:
  """Returns the configuration of a table with Adagrad, from zeros, in full precision."""
  config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  config.entry_config.segments.append(
    entry.CombineAsSegment(
      dim,
      entry.ZerosInitializer(),
      entry.AdagradOptimizer(initial_accumulator_value=_ACCUMULATOR_START),
      entry.Fp32Compressor(),
    )
  )
  config.slot_expire_time_config.default_expire_time = 36500
  entry.CuckooHashTableConfig().mutate_table(config)
  return entry.HashTableConfigInstance(config, [1.0])


def _adagrad(steps: int) -> "tuple[np.float32, np.float32]":
  """Returns value and accumulator after `steps` gradients of 1 with learning rate 1, from 0."""
  value, accumulator = np.float32(0), np.float32(_ACCUMULATOR_START)
  for _ in range(steps):
    accumulator += np.float32(1)
    value -= np.float32(1) / np.sqrt(accumulator)
  return value, accumulator


class Trainer:
  """Builds the graph and opens sessions in a model folder.

  Args:
    model_dir: the folder.
    max_to_keep: checkpoints.
    listeners: more listeners for the saver hook, after those of the tables.
    hook_kwargs: arguments of the saver hook, which saves every step by default.
  """

  def __init__(self, model_dir: str, max_to_keep: int = 2, listeners=(), **hook_kwargs):
    self.model_dir = model_dir
    self.basename = os.path.join(model_dir, "model.ckpt")
    self.graph = tf.Graph()
    with self.graph.as_default():
      self._build_model()
      self.saver = save_utils.PartialRecoverySaver(
        sharded=True, max_to_keep=max_to_keep, model_dir=model_dir
      )
      v1.add_to_collection(v1.GraphKeys.SAVERS, self.saver)
      hook_kwargs.setdefault("save_steps", 1)
      self.saver_hook = save_utils.NoFirstSaveCheckpointSaverHook(
        model_dir,
        saver=self.saver,
        listeners=[
          hash_table_ops.HashTableCheckpointSaverListener(self.basename),
          multi_hash_table_ops.MultiHashTableCheckpointSaverListener(
            self.basename, write_ckpt_info=False
          ),
          hash_filter_ops.HashFilterCheckpointSaverListener(self.basename, [self._filter], True),
          *listeners,
        ],
        **hook_kwargs,
      )
      # Restores tables and filters; a test may add to it until there is a session.
      self.restore_listeners = [
        hash_table_ops.HashTableCheckpointRestorerListener(self.basename),
        multi_hash_table_ops.MultiHashTableCheckpointRestorerListener(self.basename),
        hash_filter_ops.HashFilterCheckpointRestorerListener(self.basename, [self._filter], True),
      ]
      self._scaffold = v1.train.Scaffold(saver=self.saver)

  def _build_model(self) -> None:
    ids = tf.range(NUM_IDS, dtype=tf.int64)
    step = v1.train.get_or_create_global_step()
    dense = v1.get_variable("dense", initializer=np.float32(0))
    weights = v1.get_variable("weights", initializer=np.zeros([1000], np.float32))
    optimizer = v1.train.AdagradOptimizer(1.0, initial_accumulator_value=_ACCUMULATOR_START)
    train_weights = optimizer.apply_gradients([(tf.ones([1000]), weights)])
    self._filter = hash_filter_ops.create_hash_filter(1000, 7)
    single = hash_table_ops.hash_table_from_config(
      table_config(DIM), hash_filter=self._filter, name_suffix="single"
    )
    group = multi_hash_table_ops.MultiHashTable.from_configs(
      {"first": table_config(DIM), "second": table_config(DIM)}, name_suffix="group"
    )
    both = {"first": ids, "second": ids}
    gradients = tf.ones([NUM_IDS, DIM])
    updates = [
      train_weights,
      dense.assign_add(1.0),
      single.apply_gradients(ids, gradients, step).as_op(),
      group.apply_gradients({name: (ids, gradients) for name in both}, step).as_op(),
    ]
    with tf.control_dependencies(updates):
      self.train_op = v1.assign_add(step, 1)
    self._state = {
      "step": step.read_value(),
      "dense": dense.read_value(),
      "weights": weights.read_value(),
      "accumulator": optimizer.get_slot(weights, "accumulator").read_value(),
      "rows": [single.lookup(ids), *group.lookup(both).values()],
      "entries": [single.lookup_entry(ids)],
    }

  def session(self) -> v1.train.SingularMonitoredSession:
    """Opens a session: everything is restored from the newest checkpoint of the folder."""
    with self.graph.as_default():
      return v1.train.SingularMonitoredSession(
        hooks=[
          basic_restore_hook.CheckpointRestorerHook(self.restore_listeners),
          self.saver_hook,
        ],
        scaffold=self._scaffold,
        checkpoint_dir=self.model_dir,
      )

  def check(self, sess: v1.train.SingularMonitoredSession) -> int:
    """Returns the global step after comparing everything with it.

    Raises:
      AssertionError: something is from another step, or missing.
    """
    state = sess.raw_session().run(self._state)
    step = int(state["step"])
    value, accumulator = _adagrad(step)
    np.testing.assert_array_equal(state["dense"], step)
    np.testing.assert_allclose(state["weights"], np.full([1000], value), rtol=1e-4)
    np.testing.assert_allclose(state["accumulator"], np.full([1000], accumulator), rtol=1e-4)
    for rows in state["rows"]:
      np.testing.assert_allclose(rows, np.full([NUM_IDS, DIM], value), rtol=1e-4)
    for entries in state["entries"]:
      self._check_entries(entries, step, accumulator)
    return step

  def _check_entries(self, entries: np.ndarray, step: int, accumulator: np.float32) -> None:
    for serialized in entries:
      dump = embedding_hash_table_pb2.EntryDump.FromString(serialized)
      if step == 0:
        assert not dump.num
        continue
      norm = dump.opt.dump[0].adagrad.norm
      np.testing.assert_allclose(norm, np.full([DIM], accumulator), rtol=1e-4)


class ChildError(Exception):
  """Holds what went wrong in a child process, with its traceback."""


def run_in_child(function, *args):
  """Returns what a function returns in a forked process.

  TensorFlow must not have run anything in this process, nor made a graph, as `tf.test.TestCase`
  does: the first graph starts a thread, and a child that is forked while it starts may inherit a
  lock that no thread opens any more.

  Raises:
    ChildError: the function raised.
  """
  return Child(function, *args).result()


class Child:
  """A forked process that runs a function and sends back objects.

  It ends itself, and leaves its stack, when it takes too long.

  Args:
    function: called with `args`; what it returns is sent.
    wants_send: it is called with a function of one object first, and sends by itself.
  """

  def __init__(self, function, *args, wants_send: bool = False):
    read_end, write_end = os.pipe()
    self._stack = tempfile.TemporaryFile()
    sys.stdout.flush()
    self.pid = os.fork()
    if self.pid == 0:
      os.close(read_end)
      faulthandler.dump_traceback_later(_CHILD_SECONDS, exit=True, file=self._stack)
      _run_child(function, args, os.fdopen(write_end, "wb"), wants_send)
    os.close(write_end)
    self._pipe = os.fdopen(read_end, "rb")

  def receive(self):
    """Returns the next object that the child sent; EOFError when it is gone."""
    try:
      kind, value = pickle.load(self._pipe)
    except EOFError:
      self._stack.seek(0)
      stack = self._stack.read().decode()
      if stack:
        raise ChildError(f"the child was stuck\n{stack}") from None
      raise
    if kind == "error":
      raise ChildError(value)
    return value

  def result(self):
    """Returns the last object, and waits for the end of the child."""
    try:
      value = self.receive()
    finally:
      self._reap()
    return value

  def kill(self) -> None:
    os.kill(self.pid, signal.SIGKILL)
    self._reap()

  def drain(self) -> list:
    """Returns what the child sent before it was killed."""
    values = []
    while True:
      try:
        values.append(self.receive())
      except (EOFError, pickle.UnpicklingError):
        return values

  def _reap(self) -> None:
    if self.pid:
      os.waitpid(self.pid, 0)
      self.pid = 0


def _run_child(function, args, pipe, wants_send: bool) -> None:
  # Never returns: the rest of the test must not run twice.
  null = os.open(os.devnull, os.O_WRONLY)
  os.dup2(null, 1)
  os.dup2(null, 2)

  def send(value, kind="value"):
    pickle.dump((kind, value), pipe)
    pipe.flush()

  status = 0
  try:
    value = function(send, *args) if wants_send else function(*args)
    if not wants_send:
      send(value)
  except BaseException:
    status = 1
    send(traceback.format_exc(), "error")
  finally:
    os._exit(status)
