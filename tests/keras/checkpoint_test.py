"""Tests of `monolith.keras.checkpoint` and `groups`: rows in files, to graph mode and back."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

import monolith.keras
from monolith.keras import settings
from monolith.keras.layers import Embedding, EmbeddingGroup, Feature
from monolith.native_training import entry, hash_table_ops, multi_hash_table_ops
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.keras_versions import (
  IS_KERAS_3,
  export,
  load_weights,
  needs_keras_2,
  needs_keras_3,
  weights_path,
)

pytestmark = pytest.mark.thorough

IDS = np.arange(12).reshape(4, 3)
LABELS = np.array([[0], [1], [1], [0]], np.float32)


def make_model(name: str | None = None) -> tf.keras.Model:
  model = tf.keras.Sequential(
    [
      tf.keras.Input([3], dtype=tf.int64),
      Embedding(4, "adam", combiner="sum", learning_rate=0.1, name=name),
      tf.keras.layers.Dense(1),
    ]
  )
  model.compile(tf.keras.optimizers.Adam(0.1), "mse")
  return model


def train(model: tf.keras.Model, epochs: int = 3) -> np.ndarray:
  """Returns what the model predicts after a few steps."""
  model.fit(IDS, LABELS, epochs=epochs, verbose=0, shuffle=False)
  return model.predict(IDS, verbose=0)


class Lazy(tf.keras.Model):
  """Has no layer before its first call."""

  def build(self, input_shape):
    self.embedding = Embedding(4, combiner="sum")
    self.dense = tf.keras.layers.Dense(1)

  def call(self, inputs):
    return self.dense(self.embedding(inputs))


class CheckpointTest(tf.test.TestCase):
  def path(self, *names: str) -> str:
    return os.path.join(self.get_temp_dir(), *names)

  def test_training_goes_on_as_if_it_had_not_stopped(self):
    def rebuild(load) -> tf.keras.Model:
      model = make_model()
      load(model)
      return model

    cases = [
      ("model.keras", lambda m, path: m.save(path), tf.keras.models.load_model),
      (
        "checkpoint",
        lambda m, path: tf.train.Checkpoint(model=m).write(path),
        lambda path: rebuild(lambda m: tf.train.Checkpoint(model=m).read(path)),
      ),
      (
        "weights",
        lambda m, path: m.save_weights(path),
        lambda path: rebuild(lambda m: m.load_weights(path)),
      ),
    ]
    # Keras 3 reads the optimizer from weights only if it is built by then.
    for name, save, load in cases[:2] if IS_KERAS_3 else cases:
      with self.subTest(name):
        model = make_model()
        train(model)
        save(model, self.path(name))

        other = load(self.path(name))

        self.assertAllClose(train(other), train(model))

  def test_a_checkpoint_brings_back_what_the_model_predicts(self):
    model, other = make_model(), make_model()
    predictions = train(model)
    tf.train.Checkpoint(model=model).write(self.path("checkpoint"))

    tf.train.Checkpoint(model=other).read(self.path("checkpoint")).expect_partial()

    self.assertAllClose(other.predict(IDS, verbose=0), predictions)
    self.assertEqual(
      sorted(other.layers[0].table.entries()), sorted(model.layers[0].table.entries())
    )

  def test_weights_in_hdf5_hold_the_optimizer_of_the_table(self):
    model, other = make_model(), make_model()
    predictions = train(model)
    model.save_weights(self.path("x.weights.h5"))

    other(IDS)  # creates the dense weights
    other.load_weights(self.path("x.weights.h5"))

    self.assertAllClose(other.predict(IDS, verbose=0), predictions)
    self.assertEqual(
      sorted(other.layers[0].table.entries()), sorted(model.layers[0].table.entries())
    )

  def test_exports_carry_rows(self):
    model = make_model("users")
    predictions = train(model)
    export(model, self.path("export"))
    tf.saved_model.save(model, self.path("saved"))
    if not IS_KERAS_3:  # whose `export` looks for variables and Keras's own lookup tables
      with self.assertRaisesRegex(AssertionError, r"(?s)untracked.*HashTable\(dim=4"):
        model.export(self.path("refused"))
    train(model)

    ids = tf.constant(IDS, tf.int64)
    for name in ("export", "saved"):
      signature = tf.saved_model.load(self.path(name)).signatures["serving_default"]
      (given,) = signature.structured_input_signature[1]
      (result,) = signature(**{given: ids}).values()
      self.assertAllClose(result, predictions)

  @needs_keras_2
  def test_saved_models_carry_rows(self):
    model = make_model("users")
    predictions = train(model)
    model.save(self.path("model"))
    train(model)

    loaded = tf.saved_model.load(self.path("model"))
    keras = tf.keras.models.load_model(self.path("model"))

    self.assertAllClose(loaded(tf.constant(IDS, tf.int64)), predictions)
    self.assertAllClose(keras.predict(IDS, verbose=0), predictions)
    # Both have tables of their own.
    self.assertNotAllClose(train(keras), predictions)
    self.assertAllClose(loaded(tf.constant(IDS, tf.int64)), predictions)
    # A loaded model can be saved again.
    tf.saved_model.save(loaded, self.path("again"))
    again = tf.saved_model.load(self.path("again"))
    self.assertAllClose(again(tf.constant(IDS, tf.int64)), predictions)

  def test_sessions_serve_saved_models(self):
    model = make_model("users")
    predictions = train(model)
    export(model, self.path("model"))

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      meta = tf.compat.v1.saved_model.load(session, ["serve"], self.path("model"))
      signature = meta.signature_def["serving_default"]
      (given,), (result,) = signature.inputs.values(), signature.outputs.values()
      served = session.run(result.name, {given.name: IDS})

    self.assertAllClose(served, predictions)

  def test_lazily_built_models_get_their_rows_when_they_are_built(self):
    model = Lazy()
    model.compile("adam", "mse")
    predictions = train(model)
    tf.train.Checkpoint(model=model).write(self.path("checkpoint"))

    other = Lazy()
    tf.train.Checkpoint(model=other).read(self.path("checkpoint"))

    self.assertAllClose(other.predict(IDS, verbose=0), predictions)

  def test_groups_and_shared_tables(self):
    def make() -> tuple[tf.keras.Model, EmbeddingGroup]:
      group = EmbeddingGroup(
        {"a": 2, "b": Feature(3, "ftrl", admit_after=1), "c": Feature(table="b")}
      )
      inputs = {name: tf.keras.Input([], dtype=tf.int64, name=name) for name in "abc"}
      model = tf.keras.Model(inputs, tf.keras.layers.Concatenate()(list(group(inputs).values())))
      return model, group

    model, group = make()
    for i, table in enumerate(group.tables.values()):
      for _ in range(2):  # the first time is not enough for b
        table.assign([1, 2 + i], np.full([2, table.dim], i + 1.0))
    ids = {name: np.array([1, 2, 3]) for name in "abc"}
    for name in ("checkpoint", "weights", "model.keras", *([] if IS_KERAS_3 else ["model"])):
      with self.subTest(name):
        if name == "checkpoint":
          other, _ = make()
          tf.train.Checkpoint(model=model).write(self.path(name))
          tf.train.Checkpoint(model=other).read(self.path(name)).assert_consumed()
        elif name == "weights":
          other, _ = make()
          model.save_weights(weights_path(self.path(), name))
          other.load_weights(weights_path(self.path(), name))
        else:
          model.save(self.path(name))
          other = tf.keras.models.load_model(self.path(name))
        self.assertAllEqual(other.predict(ids, verbose=0), model.predict(ids, verbose=0))
        self.assertAllEqual(other.predict(ids, verbose=0)[0], [1, 1, 2, 2, 2, 2, 2, 2])

  def test_managers_delete_rows_with_their_checkpoints(self):
    model = make_model()
    train(model)
    manager = tf.train.CheckpointManager(
      tf.train.Checkpoint(model=model), self.path("checkpoints"), max_to_keep=2
    )
    os.makedirs(self.path("checkpoints", "ckpt-0.assets"))  # of somebody else

    for _ in range(6):
      manager.save()

    files = os.listdir(self.path("checkpoints"))
    folders = sorted(name for name in files if name.endswith(".assets"))
    # The manager deletes after it has saved; the next save sees that.
    self.assertEqual(folders, ["ckpt-0.assets", *(f"ckpt-{i}.assets" for i in (4, 5, 6))])
    other = make_model()
    tf.train.Checkpoint(model=other).restore(manager.checkpoints[0]).expect_partial()
    self.assertLen(other.layers[0].table, 12)

  def test_model_checkpoint_keeps_the_best(self):
    model = make_model()
    callback = tf.keras.callbacks.ModelCheckpoint(
      weights_path(self.path(), "best"), save_weights_only=True, save_best_only=True, monitor="loss"
    )
    model.fit(IDS, LABELS, epochs=3, verbose=0, callbacks=[callback])

    other = make_model()
    load_weights(other, weights_path(self.path(), "best"))

    self.assertAllClose(other.predict(IDS, verbose=0).shape, [4, 1])
    self.assertLen(other.layers[0].table, 12)


# Loads the weights of its first argument, trains on, and writes those of its second;
# rows of another model follow its optimizer.
_OTHER_KERAS = """
import sys
import numpy as np
from tests.keras import checkpoint_test

model = checkpoint_test.make_model("users")
model.load_weights(sys.argv[1])
np.save(sys.argv[2] + ".loaded.npy", np.array(sorted(model.layers[0].table.entries())))
np.save(sys.argv[2] + ".npy", checkpoint_test.train(model))
model.save_weights(sys.argv[2])
np.save(sys.argv[2] + ".entries.npy", np.array(sorted(model.layers[0].table.entries())))
follower = checkpoint_test.Lazy()
follower.compile("adam", "mse")
checkpoint_test.train(follower)
assert len(follower.embedding.table) == 12
"""


@needs_keras_3
class OtherKerasTest(tf.test.TestCase):
  def test_weights_go_to_keras_2_and_back_with_equal_rows(self):
    if importlib.util.find_spec("tf_keras") is None:
      self.skipTest("needs Keras 2 beside Keras 3: pip install tf-keras")
    ours, theirs = (
      os.path.join(self.get_temp_dir(), f"{name}.weights.h5") for name in ("ours", "theirs")
    )
    model = make_model("users")
    train(model)
    model.save_weights(ours)

    result = subprocess.run(
      [sys.executable, "-c", _OTHER_KERAS, ours, theirs],
      env={**os.environ, "TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
      capture_output=True,
      text=True,
    )
    self.assertEqual(result.returncode, 0, result.stderr)
    entries = np.array(sorted(model.layers[0].table.entries()))
    self.assertAllEqual(np.load(theirs + ".loaded.npy"), entries)
    model.load_weights(theirs)

    entries = np.array(sorted(model.layers[0].table.entries()))
    self.assertAllEqual(np.load(theirs + ".entries.npy"), entries)
    self.assertAllClose(model.predict(IDS, verbose=0), np.load(theirs + ".npy"))


class GraphModeTest(tf.test.TestCase):
  """Both directions between a Keras model and a table in a graph, by the same files."""

  def make_table(self) -> hash_table_ops.HashTable:
    config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
    config.entry_config.segments.append(
      entry.CombineAsSegment(
        4, entry.ZerosInitializer(), settings.optimizer("adam"), entry.Fp32Compressor()
      )
    )
    entry.CuckooHashTableConfig().mutate_table(config)
    return hash_table_ops.hash_table_from_config(
      entry.HashTableConfigInstance(config, [0.1]), name_suffix="users"
    )

  def test_graph_mode_restores_what_keras_saved(self):
    model = make_model("users")
    train(model)
    prefix = os.path.join(self.get_temp_dir(), "model.ckpt-3")
    tf.train.Checkpoint(model=model).write(prefix)
    tf.compat.v1.train.update_checkpoint_state(self.get_temp_dir(), prefix)
    ids, rows = model.layers[0].table.items()

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      table = self.make_table()
      listener = hash_table_ops.HashTableCheckpointRestorerListener(
        os.path.join(self.get_temp_dir(), "model.ckpt")
      )
      found = table.lookup(ids)
      updated = table.apply_gradients(ids, tf.ones([12, 4]), 0).lookup(ids)
      listener.before_restore(session)
      restored, trained = session.run(found), session.run(updated)

    self.assertAllEqual(restored, rows)
    # The optimizer's state came along: both make the same next step.
    model.layers[0].table.update(ids, np.ones([12, 4]))
    self.assertAllClose(trained, model.layers[0].table.items()[1])

  def test_keras_restores_what_graph_mode_saved(self):
    basename = os.path.join(self.get_temp_dir(), "model.ckpt")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      table = self.make_table()
      write = table.apply_gradients([7, 9], tf.ones([2, 4]), 0)
      rows = write.lookup([7, 9])
      listener = hash_table_ops.HashTableCheckpointSaverListener(basename)
      rows = session.run(rows)
      listener.before_save(session, 5)

    layer = Embedding(4, "adam", name="users")
    layer.table.load(f"{basename}-5.assets/MonolithHashTable_users")

    self.assertAllEqual(layer(tf.constant([7, 9])), rows)


class GroupTest(tf.test.TestCase):
  """Both directions between tables of Keras and the group that `local_train` has."""

  def make_group(self) -> multi_hash_table_ops.MultiHashTable:
    configs = {}
    for name, dim in (("user", 2), ("item", 3)):
      config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
      config.entry_config.segments.append(
        entry.CombineAsSegment(
          dim, entry.ZerosInitializer(), settings.optimizer("adam"), entry.Fp32Compressor()
        )
      )
      entry.CuckooHashTableConfig().mutate_table(config)
      configs[name] = entry.HashTableConfigInstance(config, [0.1])
    return multi_hash_table_ops.MultiHashTable.from_configs(configs)

  def make_tables(self) -> dict[str, monolith.keras.HashTable]:
    return {
      name: monolith.keras.HashTable(dim, "adam", "zeros", learning_rate=0.1)
      for name, dim in (("user", 2), ("item", 3))
    }

  def test_keras_loads_what_graph_mode_saved_and_back(self):
    path = os.path.join(self.get_temp_dir(), "MonolithMultiHashTable_")
    ids = tf.constant([1, 2], tf.int64).numpy()

    def step(group: multi_hash_table_ops.MultiHashTable) -> multi_hash_table_ops.MultiHashTable:
      gradients = {"user": (ids, tf.ones([2, 2])), "item": (ids, tf.ones([2, 3]))}
      return group.apply_gradients(gradients, tf.constant(0, tf.int64))

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      group = self.make_group()
      session.run(group.initializer)
      session.run(step(group).save(path).as_op())

    tables = self.make_tables()
    monolith.keras.load_group(tables, path)
    for table in tables.values():
      self.assertAllEqual(table.items()[0], ids)
      table.update(ids, np.ones([2, table.dim]))
    monolith.keras.save_group(tables, path + "again")

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      group = self.make_group()
      session.run(group.initializer)
      # Two steps in a row, without files.
      expected = session.run(step(step(group)).lookup({"user": ids, "item": ids}))
      restored = session.run(group.restore(path + "again").lookup({"user": ids, "item": ids}))

    for name, table in tables.items():
      self.assertAllClose(table.lookup(ids), expected[name])
      self.assertAllEqual(table.lookup(ids), restored[name])

  def test_bad_input(self):
    path = os.path.join(self.get_temp_dir(), "group")
    tables = self.make_tables()
    tables["user"].assign([1], [[1, 2]])
    monolith.keras.save_group(tables, path)
    (user, item) = tables.values()

    with self.assertRaisesRegex(tf.errors.NotFoundError, "has no table usr; it has: item user"):
      monolith.keras.load_group({"usr": user}, path)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "one table, want every table once"):
      monolith.keras.load_group({"user": user, "item": user}, path)
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, "names has user twice, want every name once"
    ):
      gen_monolith_ops.monolith_hash_table_restore_group(
        user.resource_handle, path, [item.resource_handle], names=["user", "user"]
      )
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "dim"):
      monolith.keras.load_group({"user": item}, path)
    with self.assertRaisesRegex(tf.errors.OpError, "nowhere"):
      monolith.keras.load_group(tables, path + "nowhere")
    with self.assertRaisesRegex(ValueError, "tables is empty"):
      monolith.keras.load_group({}, path)
    expiring = monolith.keras.HashTable(2, expire_after="1d")
    with self.assertRaisesRegex(ValueError, "different values of expire_after"):
      monolith.keras.save_group({"a": expiring, "b": user}, path)
    self.assertAllEqual(user.items()[1], [[1, 2]])


class BadInputTest(tf.test.TestCase):
  def path(self, *names: str) -> str:
    return os.path.join(self.get_temp_dir(), *names)

  def test_two_tables_of_one_name(self):
    checkpoint = tf.train.Checkpoint(
      a=monolith.keras.HashTable(2, name="twin"), b=monolith.keras.HashTable(2, name="twin")
    )
    with self.assertRaisesRegex(ValueError, "Two tables of one name: .*a.* and .*b.*twin"):
      checkpoint.write(self.path("checkpoint"))

  def test_another_dimension_and_missing_files(self):
    table = monolith.keras.HashTable(2, name="users")
    table.assign([1], [[1, 2]])
    tf.train.Checkpoint(table=table).write(self.path("checkpoint"))
    wide = monolith.keras.HashTable(3, name="users")
    wide.assign([5], [[1, 2, 3]])

    with self.assertRaisesRegex(ValueError, r"shape \(0, 2\).*shape \(0, 3\) and name users_rows"):
      tf.train.Checkpoint(table=wide).read(self.path("checkpoint"))
    self.assertAllEqual(wide.items()[0], [5])

    renamed = monolith.keras.HashTable(2, name="people")
    tf.train.Checkpoint(table=renamed).read(self.path("checkpoint"))
    self.assertAllEqual(renamed.items()[0], [1])

    tf.io.gfile.rmtree(self.path("checkpoint.assets"))
    with self.assertRaisesRegex(FileNotFoundError, "no files of table .*people.*copy the .assets"):
      tf.train.Checkpoint(table=renamed).read(self.path("checkpoint"))

  def test_the_old_hdf5_format_is_refused(self):
    model = make_model("users")
    train(model)
    for save in (model.save,) if IS_KERAS_3 else (model.save_weights, model.save):
      with self.assertRaisesRegex(
        NotImplementedError, r"rows of (layer users|table 'users').*\.weights\.h5"
      ):
        save(self.path("old.h5"))

  def test_a_saved_model_without_the_op_library(self):
    model = make_model("users")
    train(model)
    export(model, self.path("model"))
    program = f"""
      import tensorflow as tf
      try:
        tf.saved_model.load({self.path("model")!r})
      except Exception as error:
        print(str(error))
    """

    result = subprocess.run(
      [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )

    # Nothing of ours runs in that process; docs/keras.md says what to do about this message.
    self.assertRegex(result.stdout, "Monolith")


if __name__ == "__main__":
  tf.test.main()
