"""Every op with a GPU kernel on GPU:0 against CPU:0: values, determinism, bad input."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from idl.matrix.proto.example_pb2 import FeatureConfigs, OutType, PoolingType
from monolith.native_training import distribution_ops
from monolith.native_training.runtime.ops import gen_monolith_ops as gen

pytestmark = pytest.mark.skipif(
  not tf.config.list_physical_devices("GPU"), reason="TensorFlow finds no GPU here"
)

_DIMS = (1, 5, 13, 16, 64)
_SHARED = 1 << 31


def _floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
  return rng.standard_normal(shape).astype(np.float32)


class GpuOpsTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    # Ops of constants would be computed on the CPU when a graph is optimized.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    self.rng = np.random.default_rng(7)

  def run_on(self, device: str, call) -> list[np.ndarray]:
    with tf.device(device):
      outputs = tf.nest.flatten(call())
    return [output.numpy() for output in outputs]

  def compare(self, call, tolerance: float = 0.0) -> list[np.ndarray]:
    """Checks `call()` on the GPU against the CPU (0: to the bit), and against itself."""
    on_cpu = self.run_on("/CPU:0", call)
    on_gpu = self.run_on("/GPU:0", call)
    again = self.run_on("/GPU:0", tf.function(lambda: call(), autograph=False))
    self.assertEqual(len(on_cpu), len(on_gpu))
    for want, got, same in zip(on_cpu, on_gpu, again):
      self.assertEqual(want.shape, got.shape)
      np.testing.assert_array_equal(got, same)
      if tolerance:
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
      else:
        np.testing.assert_array_equal(got, want)
    return on_gpu

  def assert_refused(self, call, *words: str) -> None:
    """Checks that `call()` fails on the GPU as on the CPU, and that the GPU works on."""
    for device in ("/CPU:0", "/GPU:0"):
      with self.assertRaises(tf.errors.InvalidArgumentError) as caught:
        self.run_on(device, call)
      for word in words:
        self.assertIn(word, str(caught.exception))
    with tf.device("/GPU:0"):
      self.assertAllEqual(tf.constant([1.0, 2.0]) * 2.0, [2.0, 4.0])

  # Optimizers.

  def step(self, op, slots: int, device: str, n: int, **attributes) -> list[np.ndarray]:
    rng = np.random.default_rng(n)
    with tf.device(device):
      variables = [tf.Variable(np.abs(_floats(rng, n)) + 0.1) for _ in range(slots)]
      scalars = [tf.constant(v) for v in (0.1, 0.9, 0.99, 1e-6, 0.01)]
      for _ in range(3):
        grad = tf.constant(_floats(rng, n))
        op(*(v.handle for v in variables), *scalars, grad, **attributes)
      return [v.numpy() for v in variables]

  def test_optimizers_equal_the_cpu_to_the_bit(self):
    for op, slots in ((gen.resource_apply_rmsprop, 3), (gen.resource_apply_adamom, 4)):
      for use_v2 in (False, True):
        for n in (1, 5, 256, 100003):
          with self.subTest(op=op.__name__, use_v2=use_v2, n=n):
            want = self.step(op, slots, "/CPU:0", n, use_v2=use_v2)
            got = self.step(op, slots, "/GPU:0", n, use_v2=use_v2)
            for a, b in zip(want, got):
              np.testing.assert_array_equal(a, b)

  def test_a_reader_keeps_its_values(self):
    with tf.device("/GPU:0"):
      variables = [tf.Variable([1.0, 2.0]) for _ in range(3)]
      before = variables[0].read_value()
      gen.resource_apply_rmsprop(
        *(v.handle for v in variables), 0.1, 0.9, 0.99, 1e-6, 0.0, tf.constant([1.0, 1.0])
      )

    self.assertAllEqual(before, [1.0, 2.0])
    self.assertNotAllEqual(variables[0], [1.0, 2.0])

  def test_adamom_without_slots(self):
    for device in ("/CPU:0", "/GPU:0"):
      with tf.device(device):
        variables = [tf.Variable([1.0, 2.0]) for _ in range(3)] + [tf.Variable([1.0, 0.0])]
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "c holds 0"):
          gen.resource_apply_adamom(
            *(v.handle for v in variables),
            *(0.1, 0.9, 0.99, 1e-6, 0.0),
            tf.constant([1.0, 1.0]),
            update_slots=False,
          )
          variables[0].numpy()
      self.assertAllEqual(variables[0], [1.0, 2.0])
    for use_v2 in (False, True):
      want = self.step(gen.resource_apply_adamom, 4, "/CPU:0", 1000, update_slots=False)
      got = self.step(gen.resource_apply_adamom, 4, "/GPU:0", 1000, update_slots=False)
      for a, b in zip(want, got):
        np.testing.assert_array_equal(a, b, f"use_v2={use_v2}")

  def test_optimizer_shapes_are_checked(self):
    def step():
      variables = [tf.Variable([1.0, 2.0]) for _ in range(3)]
      return gen.resource_apply_rmsprop(
        *(v.handle for v in variables), 0.1, 0.9, 0.99, 1e-6, 0.0, tf.constant([1.0])
      )

    for device in ("/CPU:0", "/GPU:0"):
      with tf.device(device), self.assertRaises(tf.errors.InvalidArgumentError):
        step()

  # Clipping and flat buffers.

  def tensors(self) -> list[np.ndarray]:
    shapes = [(0,), (1,), (3, 5), (16,), (4097,), (70, 1000)]
    return [_floats(self.rng, *shape) for shape in shapes]

  def test_clip_by_global_norm(self):
    inputs = self.tensors()
    for norm, limit in ((10.0, 1.0), (1.0, 10.0), (5.0, 0.0), (float("inf"), 1.0)):
      self.compare(lambda n=norm, m=limit: gen.monolith_clip_by_global_norm(inputs, n, m))
    self.assert_refused(lambda: gen.monolith_clip_by_global_norm(inputs, 1.0, -1.0), "clip_norm")

  def test_clip_by_its_own_norm(self):
    inputs = self.tensors()
    for limit in (0.5, 1e9, 0.0):
      self.compare(lambda m=limit: gen.monolith_clip_by_global_norm_fused(inputs, m), 1e-6)
    inputs[1][:] = np.inf
    self.compare(lambda: gen.monolith_clip_by_global_norm_fused(inputs, 1.0), 1e-6)
    self.assert_refused(lambda: gen.monolith_clip_by_global_norm_fused(inputs, -1.0), "clip_norm")

  def test_global_l2_reduce(self):
    self.compare(lambda: gen.global_l2_reduce(self.tensors_of(11)), 1e-6)
    self.compare(lambda: gen.global_l2_reduce([np.full(10, 1e30, np.float32)]), 1e-6)
    self.compare(lambda: gen.global_l2_reduce([np.zeros((0,), np.float32)]))

  def tensors_of(self, seed: int) -> list[np.ndarray]:
    self.rng = np.random.default_rng(seed)
    return self.tensors()

  def test_hundreds_of_tensors(self):
    inputs = [_floats(self.rng, 1 + i % 37) for i in range(2500)]
    self.compare(lambda: gen.monolith_clip_by_global_norm(inputs, 10.0, 1.0))
    self.compare(lambda: gen.monolith_aligned_flat_concat(inputs, 0.5))

  def test_aligned_flat_concat_and_split(self):
    inputs = self.tensors()
    flat = self.compare(lambda: gen.monolith_aligned_flat_concat(inputs, 0.5))[0]
    self.compare(lambda: gen.monolith_aligned_flat_split(inputs, flat))
    self.assert_refused(lambda: gen.monolith_aligned_flat_split(inputs, flat[:-1]), "flat")

  # FFM.

  def test_ffm_equals_the_cpu_to_the_bit(self):
    for dim in _DIMS:
      for int_type in ("dot", "multiply"):
        left, right = _floats(self.rng, 9, 3 * dim), _floats(self.rng, 9, 4 * dim)
        out = self.compare(lambda d=dim, t=int_type, x=left, y=right: gen.ffm(x, y, d, t))[0]
        grad = _floats(self.rng, *out.shape)
        self.compare(lambda d=dim, t=int_type, g=grad, x=left, y=right: gen.ffm_grad(g, x, y, d, t))

  def test_ffm_bad_input(self):
    ones = np.ones((2, 4), np.float32)
    self.assert_refused(lambda: gen.ffm(ones, ones, 3, "dot"), "dim_size")
    self.assert_refused(lambda: gen.ffm(ones, ones[:1], 2, "dot"), "batch size")
    self.assert_refused(lambda: gen.ffm_grad(ones, ones, ones, 1, "dot"), "not match")
    self.compare(lambda: gen.ffm(np.zeros((0, 4), np.float32), np.zeros((0, 6), np.float32), 2, ""))

  # Gather.

  def gather_inputs(self, dims, rows: int = 300):
    offsets, size = [], 0
    for dim in dims:
      offsets.append((size + self.rng.integers(0, 50, rows) * dim).astype(np.int32))
      size += 50 * dim
    return _floats(self.rng, size), offsets

  def test_fused_gather_and_its_gradient(self):
    for dims in (_DIMS, (16, 64, 4), (16,)):
      fused, offsets = self.gather_inputs(dims)
      offsets[0] = offsets[0][:0] if len(dims) > 1 else offsets[0]
      self.compare(
        lambda f=fused, o=offsets, d=dims: gen.monolith_fused_gather_embeddings_by_input(f, o, d)
      )
      grads = [_floats(self.rng, len(o), d) for o, d in zip(offsets, dims)]
      for scale in (1.0, 0.25):
        self.compare(
          lambda f=fused, g=grads, o=offsets, s=scale, d=dims: (
            gen.monolith_fused_gather_embeddings_by_input_gradient(f.size, g, o, s, d)
          ),
          1e-6,
        )

  def test_fused_gather_without_rows(self):
    empty = np.zeros((0,), np.int32)
    self.compare(
      lambda: gen.monolith_fused_gather_embeddings_by_input(_floats(self.rng, 8), [empty], [4])
    )
    self.compare(
      lambda: gen.monolith_fused_gather_embeddings_by_input_gradient(
        8, [np.zeros((0, 4), np.float32)], [empty], 1.0, [4]
      )
    )

  def test_fused_gather_gradient_of_one_hot_row(self):
    offsets = np.zeros(5000, np.int32)
    grads = np.ones((5000, 16), np.float32)
    out = self.compare(
      lambda: gen.monolith_fused_gather_embeddings_by_input_gradient(
        32, [grads], [offsets], 1.0, [16]
      )
    )[0]
    self.assertAllEqual(out, [5000.0] * 16 + [0.0] * 16)

  def test_fused_gather_gradient_of_hot_rows_of_two_widths(self):
    offsets = [np.zeros(5000, np.int32), np.full(3000, 16, np.int32)]
    grads = [np.ones((5000, 1), np.float32), np.ones((3000, 64), np.float32)]
    out = self.compare(
      lambda: gen.monolith_fused_gather_embeddings_by_input_gradient(
        96, grads, offsets, 1.0, [1, 64]
      )
    )[0]
    self.assertAllEqual(out, [5000.0] + [0.0] * 15 + [3000.0] * 64 + [0.0] * 16)

  def test_fused_gather_bad_offsets(self):
    fused = np.ones(32, np.float32)
    for wrong in (-1, 29, 2**31 - 1):
      offsets = np.array([0, wrong, 4], np.int32)
      self.assert_refused(
        lambda o=offsets: gen.monolith_fused_gather_embeddings_by_input(fused, [o], [4]),
        f"embedding_offsets[0][1] is {wrong}",
      )
      self.assert_refused(
        lambda o=offsets: gen.monolith_fused_gather_embeddings_by_input_gradient(
          32, [np.ones((3, 4), np.float32)], [o], 1.0, [4]
        ),
        f"embedding_offsets[0][1] is {wrong}",
      )
    self.assert_refused(
      lambda: gen.monolith_fused_gather_embeddings_by_input_gradient(
        -1, [np.ones((3, 4), np.float32)], [np.zeros(3, np.int32)], 1.0, [4]
      ),
      "fused_embeddings_size",
    )

  # Segments.

  def test_fused_segment_sum(self):
    for dtype in (np.int32, np.int64):
      indices, updates, shapes = [], [], []
      for dim, rows, count in zip((*_DIMS, 4), (10, 1, 300, 20, 5, 3), (100, 33, 1000, 2, 64, 0)):
        indices.append(np.sort(self.rng.integers(0, rows, count)).astype(dtype))
        updates.append(_floats(self.rng, count, dim))
        shapes.append(np.array([rows, dim], dtype))
      self.compare(lambda i=indices, u=updates, s=shapes: gen.monolith_fused_segment_sum(i, u, s))

  def test_fused_segment_sum_bad_indices(self):
    def call(indices):
      return gen.monolith_fused_segment_sum(
        [np.array(indices, np.int32)], [np.ones((3, 2), np.float32)], [np.array([3, 2], np.int32)]
      )

    self.assert_refused(lambda: call([0, 1, 3]), "indices[0][2] is 3, want a value in [0, 3)")
    self.assert_refused(lambda: call([-1, 1, 2]), "indices[0][0] is -1")
    self.assert_refused(lambda: call([0, 1]), "updates[0]")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "must not decrease on a GPU"):
      self.run_on("/GPU:0", lambda: call([0, 2, 1]))

  def reduce_inputs(self, batch: int = 40):
    slice_dims = [[16, 4], [13], [1, 8, 5]]
    splits = [
      np.concatenate([[0], np.cumsum(self.rng.integers(0, 5, batch))]).astype(np.int32)
      for _ in slice_dims
    ]
    embeddings = [_floats(self.rng, s[-1], sum(d)) for s, d in zip(splits, slice_dims)]
    return splits, embeddings, slice_dims

  def test_fused_reduce_and_split_and_its_gradient(self):
    splits, embeddings, slice_dims = self.reduce_inputs()

    def call():
      inputs = [tf.identity(e) for e in embeddings]
      with tf.GradientTape() as tape:
        tape.watch(inputs)
        slices = distribution_ops.fused_reduce_and_split_gpu(
          [tf.constant(s) for s in splits], inputs, slice_dims
        )
        total = tf.add_n([tf.reduce_sum(s * s) for s in slices])
      return slices + tape.gradient(total, inputs)

    self.compare(call)

  def test_pooling_of_packed_ids_and_its_gradient(self):
    ones = np.arange(8, dtype=np.int32)
    dims = [[3], [4, 1], [2], [5], [3], [16, 8], [1]]
    for one_each in ("1111111", "0000000", "1011001", "0100110"):
      flags = [flag == "1" for flag in one_each]
      splits = [
        ones
        if flag
        else np.concatenate([[0], np.cumsum(self.rng.integers(0, 5, 7))]).astype(np.int32)
        for flag in flags
      ]
      embeddings = [_floats(self.rng, s[-1], sum(d)) for s, d in zip(splits, dims)]

      def call(splits=splits, embeddings=embeddings, flags=flags):
        inputs = [tf.identity(e) for e in embeddings]
        with tf.device("/device:CPU:0"):
          has_one_each = tf.constant(flags)
        with tf.GradientTape() as tape:
          tape.watch(inputs)
          slices = distribution_ops.fused_reduce_and_split_gpu(
            [tf.constant(s) for s in splits], inputs, dims, has_one_each=has_one_each
          )
          total = tf.add_n([tf.reduce_sum(s * s) for s in slices])
        return slices + tape.gradient(total, inputs)

      self.compare(call)

  def test_a_flag_of_packed_ids_that_does_not_fit_the_rows_is_refused(self):
    def call():
      with tf.device("/device:CPU:0"):
        has_one_each = tf.constant([True])
      return gen.monolith_pool_packed_ids(
        np.array([0, 1, 3], np.int32),
        [np.ones((3, 2), np.float32)],
        has_one_each,
        num_slices=1,
        slice_dims=[2],
        row_split_splits=[0, 3],
      )

    with tf.device("/device:GPU:0"):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"has_one_each\[0\] is true"):
        call()

  def test_fused_reduce_and_split_bad_splits(self):
    for splits in ([1, 2, 3], [0, 1, 2], [0, 4, 3], [0, -1, 3]):
      for grad in (False, True):

        def call(splits=splits, grad=grad):
          values = [np.ones((3, 2), np.float32)]
          arguments = dict(slice_dims=[2], row_split_splits=[0, 3])
          splits = np.array(splits, np.int32)
          if grad:
            return gen.monolith_fused_reduce_and_split_gpu_grad(
              splits, values, [np.ones((2, 2), np.float32)], **arguments
            )
          return gen.monolith_fused_reduce_and_split_gpu(splits, values, num_slices=1, **arguments)

        self.assert_refused(call, "splits")

  # Layout.

  def layout_config(self, unit: int) -> FeatureConfigs:
    configs = FeatureConfigs()
    features = {
      "fa": ("t", PoolingType.SUM, 3, 0),
      "fb": ("t", PoolingType.MEAN, 3, 0),
      "fc": ("u", PoolingType.MEAN, 2, 0),
      "fs": ("t", PoolingType.FIRSTN, 2, 2),
    }
    for name, (table, pooling, units, length) in features.items():
      config = configs.feature_configs[name]
      config.table, config.pooling_type, config.max_sequence_length = table, pooling, length
      config.slice_dims.extend([unit] * units)
    layouts = {
      "bias": (OutType.ADDN, [("fa", 0, 1), ("fb", 0, 1), ("fc", 1, 2)], [[-1, unit]]),
      "none": (OutType.NONE, [("fb", 1, 3), ("fa", 0, 1)], [[-1, 2 * unit], [-1, unit]]),
      "seq": (OutType.NONE, [("fs", 0, 2)], [[-1, 2, 2 * unit]]),
      "stk": (OutType.STACK, [("fa", 1, 3), ("fc", 0, 2)], [[-1, 2, 2 * unit]]),
      "vec": (OutType.CONCAT, [("fa", 1, 3), ("fb", 1, 3)], [[-1, 4 * unit]]),
    }
    for name, (out_type, slices, shapes) in layouts.items():
      config = configs.out_configs[name]
      config.out_type = out_type
      for feature, start, end in slices:
        config.slice_configs.add(feature_name=feature, start=start * unit, end=end * unit)
      for shape in shapes:
        config.shape.add(dims=shape)
    return configs

  def layout_request(self, unit: int, batch: int):
    """Returns lists, fid_offset, feature_offset, nfl_offset of a random batch with one ps."""
    sizes, ids, rows, starts = {"t": 0, "u": 0}, [], [0], []
    for table, units, shared in (("t", 3, False), ("t", 3, True), ("u", 2, False), ("t", 2, False)):
      starts.append(len(rows) - 1 | (_SHARED if shared else 0))
      for _ in range(1 if shared else batch):
        for _ in range(self.rng.integers(0, 6)):
          position = sizes[table] + self.rng.integers(0, 20) * units * unit
          ids.append((0 if table == "t" else 1) << 32 | int(position))
        rows.append(len(ids))
      sizes[table] += 20 * units * unit
    lists = [_floats(self.rng, sizes["t"]), _floats(self.rng, sizes["u"])]
    starts.append(len(rows))
    return lists, np.array(ids, np.uint64), np.array(rows, np.int32), np.array(starts, np.uint32)

  def layout(self, version: int, configs: FeatureConfigs, requests: list):
    """Returns a call that gives layout tensors, then gradients of the embeddings."""
    batch = [batch for batch, _ in requests]
    parts = [request for _, request in requests]
    lists = [np.concatenate([p[0][j] for p in parts]) for j in range(2)]
    ids, rows, starts = (np.concatenate([p[k] for p in parts]) for k in (1, 2, 3))
    sizes = {}
    if version == 5:
      sizes = dict(
        nfl_size=np.array([len(p[3]) for p in parts], np.int32),
        feature_size=np.array([len(p[2]) for p in parts], np.int32),
        fid_size=np.array([len(p[1]) for p in parts], np.int32),
        emb_size=np.array([len(p[0][j]) for p in parts for j in range(2)], np.int32),
      )
    if version == 4:
      sizes = dict(fid_list_emb_row_lenth=np.array([len(x) for x in lists], np.int32))
      lists = [np.concatenate(lists)]
    arguments = dict(
      fid_list_row_split=None,
      fid_offset=ids,
      feature_offset=rows,
      nfl_offset=starts,
      batch_size=np.array(batch, np.int32),
      variant_type="example",
      feature_cfgs=configs,
      ps_num=1,
      version=version,
    )

    def call():
      embeddings = [tf.constant(values) for values in lists]
      tensors = distribution_ops.fused_embedding_to_layout(embeddings, **arguments, **sizes)
      if len(requests) > 1:
        return tensors
      # V5 has the gradient of V3, which knows no size vectors.
      grads = distribution_ops.fused_embedding_to_layout_grad(
        embeddings_list=embeddings,
        layout_tensors_grad=[t * 0.5 + 1.0 for t in tensors],
        **{**arguments, "version": 3 if version == 5 else version},
        **(sizes if version == 4 else {}),
      )
      return [*tensors, *grads]

    return call

  def test_layout_and_its_gradient(self):
    for unit in (1, 4, 5, 16):
      configs = self.layout_config(unit)
      for version in (3, 4, 5):
        for batch in (1, 33, 300):
          with self.subTest(unit=unit, version=version, batch=batch):
            request = (batch, self.layout_request(unit, batch))
            self.compare(self.layout(version, configs, [request]), 1e-6)

  def test_layout_of_several_requests(self):
    configs = self.layout_config(4)
    requests = [(b, self.layout_request(4, b)) for b in (5, 1, 40)]
    self.compare(self.layout(5, configs, requests), 1e-6)

  def test_layout_bad_offsets(self):
    configs = self.layout_config(4)
    for part, position, value, word in (
      (1, 0, 2**40, "fid_offset[0]"),
      (1, 0, 10**6, "fid_offset[0]"),
      (2, 2, 10**6, "feature_offset[2]"),
      (3, 1, 10**6, "nfl_offset[1]"),
    ):
      request = self.layout_request(4, 3)
      while request[1].size == 0 or request[2][1] == 0:
        request = self.layout_request(4, 3)
      request[part][position] = value
      self.assert_refused(self.layout(3, configs, [(3, request)]), word)

  # The library.

  def test_a_missing_library_is_named(self):
    program = (
      "import tensorflow as tf\n"
      "from monolith.native_training.runtime.ops import gen_monolith_ops as gen\n"
      "with tf.device('/GPU:0'):\n"
      "  try:\n"
      "    gen.global_l2_reduce([tf.ones(3)])\n"
      "  except tf.errors.FailedPreconditionError as error:\n"
      "    print('refused:', error)\n"
      "with tf.device('/CPU:0'):\n"
      "  print('cpu:', gen.global_l2_reduce([tf.ones(3)]).numpy())\n"
    )
    environment = {**os.environ, "MONOLITH_CUDA_LIBRARY": "/nowhere/libmonolith_cuda.so"}

    result = subprocess.run(
      [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )

    self.assertRegex(result.stdout, r"refused: .*make gpu")
    self.assertIn("/nowhere/libmonolith_cuda.so", result.stdout)
    self.assertIn("cpu: 3.0", result.stdout)


if __name__ == "__main__":
  tf.test.main()
