"""Tests of `devices`: where tables are, as far as a machine without a GPU can tell."""

from __future__ import annotations

import os
import unittest.mock

import numpy as np
import tensorflow as tf

import monolith.keras
from monolith.keras import devices
from monolith.keras.layers import Embedding, EmbeddingGroup, Feature
from tests.keras_versions import export

_NO_GPU = "TensorFlow finds no GPU here"


def without_gpu():
  return unittest.mock.patch.object(devices, "why_not_gpu", lambda: _NO_GPU)


def pretend(layer):
  """Lets a layer treat its tables, which are in main memory, as if they were on a GPU.

  What is checked that way is that the ops of such tables are where the tables are.
  """
  for table in layer.own_tables().values():
    pretend_table(table)
  return layer


def pretend_table(table):
  table._device = devices.GPU
  table._make_config = lambda optimizer, device: monolith.HashTable._make_config(
    table, optimizer, devices.HOST
  )


def ops_of(function, op_type):
  """Returns the nodes of a type in a function and in those that it calls."""
  graph_def = function.graph.as_graph_def()
  nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
  return [node for node in nodes if node.op == op_type]


class DeviceTest(tf.test.TestCase):
  def test_names_of_devices(self):
    for text, want in (
      (None, None),
      ("cpu", "cpu"),
      ("CPU:0", "cpu"),
      ("/cpu:0", "cpu"),
      ("gpu", "gpu"),
      ("GPU:0", "gpu"),
      ("/device:GPU:0", "gpu"),
    ):
      self.assertEqual(devices.parse(text), want)
    for text in ("tpu", "gpu:1", "", "/job:worker/device:GPU:0"):
      with self.assertRaisesRegex(ValueError, "a table is in main memory or on GPU:0"):
        Embedding(4, device=text)
    with self.assertRaisesRegex(TypeError, "device is 0, want 'cpu', 'gpu' or None"):
      Embedding(4, device=0)

  def test_a_table_is_in_main_memory_by_itself(self):
    for device in (None, "cpu", "CPU:0"):
      self.assertEqual(Embedding(4, device=device).table.device, "/device:CPU:0")
      group = EmbeddingGroup({"user": 4}, device=device)
      self.assertEqual(group.tables["user"].device, "/device:CPU:0")

  def test_a_gpu_that_is_not_there(self):
    with without_gpu():
      for make in (
        lambda: Embedding(4, device="gpu", name="users"),
        lambda: monolith.HashTable(4, name="users", device="GPU:0"),
      ):
        with self.assertRaisesRegex(
          RuntimeError,
          f"table 'users' has device='(gpu|GPU:0)', but {_NO_GPU}: leave device out, which keeps "
          "the table in main memory",
        ):
          make()
      with self.assertRaisesRegex(RuntimeError, "table 'group/user' has device='gpu'"):
        EmbeddingGroup({"user": 4}, device="gpu", name="group")

  def test_a_library_that_is_not_there(self):
    gpus = unittest.mock.patch.object(tf.config, "list_logical_devices", lambda kind: [kind])
    is_available = "monolith.native_training.gpu_table.is_available"
    with gpus, unittest.mock.patch(is_available, lambda: False):
      with self.assertRaisesRegex(RuntimeError, "but libmonolith_cuda.so, which `make gpu` builds"):
        Embedding(4, device="gpu")
    with gpus, unittest.mock.patch(is_available, lambda: True):
      self.assertIsNone(devices.why_not_gpu())
      self.assertEqual(devices.resolve("gpu", "users"), devices.GPU)

  def test_a_scope_places_what_is_made_in_it(self):
    def made_in_a_function():
      found = []

      @tf.function
      def make():
        with tf.device("/device:GPU:0"):
          found.append(devices.resolve(None, "users"))

      make()
      return found[0]

    with unittest.mock.patch.object(devices, "why_not_gpu", lambda: None):
      self.assertEqual(devices.resolve(None, "users"), devices.HOST)
      self.assertEqual(made_in_a_function(), devices.GPU)
      with tf.distribute.OneDeviceStrategy("/gpu:0").scope():
        self.assertEqual(devices.resolve(None, "users"), devices.GPU)
      with tf.device("/GPU:0"):
        self.assertEqual(devices.resolve(None, "users"), devices.GPU)
        self.assertEqual(devices.resolve("cpu", "users"), devices.HOST)
        self.assertEqual(tf.function(lambda: devices.resolve(None, "users"))(), devices.GPU)
        with tf.device("/CPU:0"):
          self.assertEqual(devices.resolve(None, "users"), devices.HOST)

  def test_a_scope_without_a_gpu_warns(self):
    with without_gpu(), tf.device("GPU:0"), self.assertLogs(level="WARNING") as logs:
      layer = Embedding(4, name="users")

    self.assertEqual(layer.table.device, devices.HOST)
    self.assertIn("Table 'users' is in main memory, although tf.device says", logs.output[0])
    self.assertIn(_NO_GPU, logs.output[0])
    self.assertAllEqual(layer([1, 2]), np.zeros([2, 4]))

  def test_a_shared_table_is_where_it_is(self):
    table = monolith.HashTable(4)

    self.assertIs(Embedding(table=table, device="cpu").table, table)
    with self.assertRaisesRegex(ValueError, "the table is on /device:CPU:0: leave device out"):
      Embedding(table=table, device="gpu")

  def test_configurations(self):
    for device in (None, "cpu"):
      layer = Embedding(4, device=device)
      self.assertEqual(layer.get_config()["device"], device)
      self.assertEqual(Embedding.from_config(layer.get_config()).get_config()["device"], device)
      group = EmbeddingGroup({"user": 4, "item": Feature(table="user")}, device=device)
      self.assertEqual(group.get_config()["device"], device)
      again = EmbeddingGroup.from_config(group.get_config())
      self.assertEqual(again.get_config()["device"], device)

  def test_a_model_from_a_machine_with_a_gpu(self):
    for layer in (Embedding(4, name="users"), EmbeddingGroup({"user": 4}, name="users")):
      config = {**layer.get_config(), "device": "gpu"}
      with without_gpu(), self.assertLogs(level="WARNING") as logs:
        again = type(layer).from_config(config)
      self.assertIn("The tables of layer 'users' were on a GPU", logs.output[0])
      (table,) = again.own_tables().values()
      self.assertEqual(table.device, devices.HOST)
      with unittest.mock.patch.object(devices, "why_not_gpu", lambda: None):
        self.assertEqual(devices.restored("gpu", "users"), "gpu")
    # Files of before there were devices.
    config = Embedding(4).get_config()
    del config["device"]
    self.assertEqual(Embedding.from_config(config).table.device, devices.HOST)


class PlacementTest(tf.test.TestCase):
  """Uses tables that are said to be on a GPU, and are in main memory."""

  def make_model(self):
    inputs = {"user": tf.keras.Input([], dtype=tf.int64, name="user")}
    inputs["word"] = tf.keras.Input([], dtype=tf.string, name="word")
    group = pretend(EmbeddingGroup({"user": 4, "word": Feature(4, admit_after=1)}, name="group"))
    vectors = group(inputs)
    features = tf.keras.layers.Concatenate()([vectors["user"], vectors["word"]])
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(features))
    model.compile("adam", "mse")
    return model, group

  def make_data(self):
    data = {"user": np.arange(8), "word": np.array(["a", "b"] * 4, object)}
    return {**data, "word": tf.constant(data["word"])}, np.ones([8, 1], np.float32)

  def test_ops_are_where_the_table_is(self):
    table = monolith.HashTable(4)
    calls = {
      "MonolithHashTableLookupList": lambda: table.lookup([1, 2]),
      "MonolithHashTableOptimizeList": lambda: table.update([1], np.ones([1, 4])),
      "MonolithHashTableAssign": lambda: table.assign([1], np.ones([1, 4])),
      "MonolithHashTableErase": lambda: table.erase([1]),
      "MonolithHashTableLookupEntry": lambda: table.contains([1]),
      "MonolithHashTableSize": table.size,
      "MonolithHashTableStats": table.stats,
    }
    for device, want in ((devices.HOST, devices.HOST), (devices.GPU, "")):
      table._device = device
      for op_type, call in calls.items():
        with tf.device("/device:GPU:0"):
          function = tf.function(call).get_concrete_function()
        (node,) = ops_of(function, op_type)
        self.assertEqual(node.device, want, op_type)
        function()

  def test_fit_predict_and_export(self):
    model, group = self.make_model()
    inputs, labels = self.make_data()

    model.fit(inputs, labels, batch_size=4, epochs=3, verbose=0)

    rows = group.tables["user"].lookup(inputs["user"]).numpy()
    self.assertTrue(rows.any(axis=1).all())
    self.assertEqual([len(table) for table in group.tables.values()], [8, 2])
    folder = os.path.join(self.get_temp_dir(), "exported")
    export(model, folder)
    exported = tf.saved_model.load(folder).signatures["serving_default"]
    for op_type in ("MonolithHashTableLookupList", "MonolithHashTableOptimizeList"):
      self.assertEqual({node.device for node in ops_of(exported, op_type)} - {""}, set())
    (answer,) = exported(user=tf.constant(inputs["user"]), word=inputs["word"]).values()
    self.assertAllClose(answer, model.predict(inputs, verbose=0))

  def test_tables_in_two_places(self):
    tables = [monolith.HashTable(4, "sgd", initializer="zeros", name=name) for name in "ab"]
    pretend_table(tables[1])
    layers = [Embedding(table=table) for table in tables]
    group = EmbeddingGroup({"a": Feature(table=tables[0]), "b": Feature(table=tables[1])})

    @tf.function
    def step(ids):
      with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(vectors) for vectors in group({"a": ids, "b": ids}).values())
      optimizer.apply_gradients(
        (gradient, variable)
        for gradient, variable in zip(
          tape.gradient(loss, group.trainable_variables), group.trainable_variables
        )
      )

    optimizer = tf.keras.optimizers.SGD(1.0)
    step(tf.constant([1, 2], tf.int64))

    for layer in layers:
      self.assertAllClose(layer([1, 2, 3]).numpy() != 0, [[True] * 4, [True] * 4, [False] * 4])
    path = os.path.join(self.get_temp_dir(), "group")
    for call in (monolith.keras.save_group, monolith.keras.load_group):
      with self.assertRaisesRegex(
        ValueError, r"Tables \['b'\] are on a GPU and \['a'\] in main memory: save and load them"
      ):
        call({"a": tables[0], "b": tables[1]}, path)

  def test_train(self):
    model, _ = self.make_model()
    data = tf.data.Dataset.from_tensor_slices(self.make_data()).batch(4)
    folder = os.path.join(self.get_temp_dir(), "model")

    with self.assertRaisesRegex(ValueError, "are on a GPU, but 2 parameter servers keep rows in"):
      monolith.keras.train(model, data, folder, num_ps=2)
    if not tf.config.list_physical_devices("GPU"):
      with self.assertRaisesRegex(
        tf.errors.FailedPreconditionError, "no CUDA device for the tables of train.use_gpu_emb"
      ):
        monolith.keras.train(model, data, folder)


if __name__ == "__main__":
  tf.test.main()
