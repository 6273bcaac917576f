"""Sizes, counts and shapes that make no sense: each is an error, and the process lives on.

Every case here ended the process once, stopped it, or took gigabytes for a few bytes.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from idl.matrix.proto import example_pb2
from monolith.native_training.data import datasets
from monolith.native_training.runtime.ops import gen_monolith_ops as ops

pytestmark = pytest.mark.thorough

INT64_MAX = (1 << 63) - 1
NO_HEADER = dict(
  has_header=False, has_sort_id=False, lagrangex_header=False, kafka_dump_prefix=False,
  kafka_dump=False, chnids=[], datasources=[], default_datasource="",
)  # fmt: skip
ERRORS = (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError, ValueError)


def in_graph(call):
  with tf.Graph().as_default():
    outputs = call()
    with tf.compat.v1.Session() as session:
      return session.run(outputs)


def run_with_little_memory(program):
  """Runs a program in a process that can get one more gigabyte; returns what it prints."""
  begin = """
import os, resource
import tensorflow as tf
from monolith.native_training.runtime.ops import gen_monolith_ops as ops

def reduce(rows):
  return ops.monolith_reduce_sum([[0]], [[1.0]], tf.constant([rows], tf.int64))

reduce(1)  # starts threads, which need address space
with open("/proc/self/statm") as fields:
  used = int(fields.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
"""
  done = subprocess.run(
    [sys.executable, "-c", begin + program],
    capture_output=True,
    text=True,
    # Every further arena of malloc reserves address space, and a machine has one for each core.
    env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "MALLOC_ARENA_MAX": "2"},
    timeout=300,
  )
  if done.returncode != 0:
    raise AssertionError(done.stderr)
  return done.stdout


def empty(*shape, dtype=tf.float32):
  """Returns a tensor without elements; numpy does not make all of them."""
  return tf.reshape(tf.zeros([0], dtype), shape)


def layout(**features):
  proto = example_pb2.FeatureConfigs()
  for name, dims in (features or {"x": [1]}).items():
    proto.feature_configs[name].table = "t"
    proto.feature_configs[name].slice_dims.extend(dims)
  return proto.SerializeToString()


def batch_of(rows, **columns):
  """Returns a batch that says it has `rows` rows, with shared columns of one float each."""
  batch = example_pb2.ExampleBatch(batch_size=rows)
  for name, value in columns.items():
    column = batch.named_feature_list.add(name=name, type=example_pb2.SHARED)
    column.feature.add().float_list.value.append(value)
  return batch.SerializeToString()


INSTANCE_LISTS = {
  f"{kind}": []
  for kind in (
    "fidv1_features", "fidv2_features", "float_features", "float_feature_dims", "int64_features",
    "int64_feature_dims", "string_features", "string_feature_dims", "misc_float_features",
    "misc_float_dims", "misc_int64_features", "misc_int64_dims", "misc_string_features",
    "misc_string_dims",
  )
}  # fmt: skip


class OpLimitsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    ("eagerly", lambda call: call()),
    ("in_a_graph", in_graph),
  )
  def test_numbers_of_shards(self, run):
    for shards in (1 << 17, (1 << 31) - 1, 1 << 62, INT64_MAX):
      with self.assertRaises(ERRORS):
        run(
          lambda n=shards: ops.FusedReorderByIndices(
            input=[tf.constant([1], tf.int64)], num_of_shards=n, slot_embedding_dims=[1],
            rank0_empty=False,
          )
        )  # fmt: skip
      with self.assertRaises(ERRORS):
        run(
          lambda n=shards: ops.MonolithReorderByIndices(
            input=tf.constant([1], tf.int64), shard_ids=[0], num_of_shards=n
          )
        )
      with self.assertRaises(ERRORS):
        run(
          lambda n=shards: ops.ShardingSparseFidsV4(
            pb_input=[b""], ps_num=n, feature_cfgs=layout(), unique=False, input_type="example",
            parallel_flag=0,
          )
        )  # fmt: skip

  @parameterized.named_parameters(
    ("eagerly", lambda call: call()),
    ("in_a_graph", in_graph),
  )
  def test_widths_of_columns(self, run):
    for width in (1 << 31, 1 << 62, INT64_MAX):
      for op in (ops.ParseExamples, ops.ParseExampleBatch, ops.ParseExamplesV2):
        with self.assertRaises(ERRORS):
          run(
            lambda op=op, width=width: op(
              pb_input=[b""] * 4, names=["sample_rate"], shapes=[width], dtypes=[tf.float32],
              extra_names=["sample_rate"],
            )
          )  # fmt: skip
      lists = {**INSTANCE_LISTS, "misc_float_features": ["label"], "misc_float_dims": [width]}
      with self.assertRaises(ERRORS):
        run(
          lambda lists=lists: ops.MonolithParseInstances(
            serialized=[b""] * 4, N=0, M=0, O=0, P=0, Q=1, R=0, S=0, **lists
          )
        )

  def test_outputs_are_counted_kind_by_kind(self):
    lists = {
      **INSTANCE_LISTS, "misc_float_features": ["label"], "misc_float_dims": [1],
      "misc_int64_features": ["uid"], "misc_int64_dims": [1],
    }  # fmt: skip
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Q is 2"):
      ops.MonolithParseInstances(serialized=[b""], N=0, M=0, O=0, P=0, Q=2, R=0, S=0, **lists)
    got = ops.MonolithParseInstances(serialized=[b""], N=0, M=0, O=0, P=0, Q=1, R=1, S=0, **lists)
    self.assertEqual(got.misc_int64_values[0].shape, [1, 1])

  def test_rows_without_columns(self):
    indices = tf.zeros([1, 1], tf.int64)
    for op in (ops.MonolithReduceSumGradient, ops.MonolithReduceMeanGradient):
      self.assertEqual(op(id_indices=indices, grads=empty(1 << 40, 0)).shape, [1, 0])
    for op in (ops.MonolithReduceSum, ops.MonolithReduceMean, ops.MonolithReduceSquareNorm):
      got = op(id_indices=indices, id_values=empty(1, 0), id_dense_shape=[1 << 60])
      self.assertEqual(got.shape, [1 << 60, 0])

  def test_shapes_whose_product_is_no_int64(self):
    huge = empty(0, 1 << 62)
    with self.assertRaises(ERRORS):
      ops.MonolithFusedSegmentSum(
        indices=[tf.constant([0, 0, 0, 0], tf.int64)], updates=[tf.ones([4, 1])],
        shape=[tf.constant([0, 1 << 62], tf.int64)],
      )  # fmt: skip
    with self.assertRaises(ERRORS):
      ops.MonolithSplitByIndicesGradient(
        indices=tf.constant([0, 0, 0, 0], tf.int64), input=huge, grads=[huge]
      )
    with self.assertRaises(ERRORS):
      ops.MonolithFusedReduceAndSplitGPUGrad(
        splits=tf.constant([0], tf.int32), updates=[empty(0, 1)], slices=[empty(0, 1)],
        slice_dims=[(1 << 31) - 1], row_split_splits=[0, 1 << 62],
      )  # fmt: skip

  def test_shapes_that_overflow_reach_no_graph_optimizer(self):
    huge = tf.TensorShape([1 << 62, None, 1 << 40])
    with tf.Graph().as_default():
      placeholder = tf.compat.v1.placeholder(tf.float32, [4])
      (output,), _ = ops.monolith_static_reshape_n([placeholder], shapes=[huge])
      self.assertIsNone(output.shape.rank)
      with tf.compat.v1.Session() as session:
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "more elements than int64"):
          session.run(output, {placeholder: [1, 2, 3, 4]})
      (output,), _ = ops.monolith_static_reshape_n([placeholder], shapes=[[None, 2]])
      self.assertEqual(output.shape.as_list(), [None, 2])
      for dense_shape, dims in (([1 << 62], None), ([3], [3, 2])):
        reduced = ops.monolith_reduce_sum(
          tf.zeros([1, 1], tf.int64), tf.zeros([1, 2]), tf.constant(dense_shape, tf.int64)
        )
        self.assertEqual(reduced.shape.as_list() if dims else reduced.shape.rank, dims)

  def test_large_outputs_without_memory_are_refused_at_once(self):
    # TensorFlow's allocator would wait for each of them, and say so in other words.
    output = run_with_little_memory("""
memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
for rows in (memory // 5, memory, 1 << 40):
  try:
    print(reduce(rows))
  except tf.errors.ResourceExhaustedError as error:
    print("refused", str(error))
print("lives", reduce(1 << 25)[0].numpy())
""")
    self.assertEqual(output.count("which this process cannot get"), 1, output)
    self.assertEqual(output.count("that this machine has"), 2, output)
    self.assertIn("lives [1.]", output)

  def test_large_tensors_of_other_ops_are_refused_at_once(self):
    output = run_with_little_memory("""
n = 3 << 28
calls = [
  lambda: ops.monolith_fused_segment_sum([tf.constant([0])], [[1.0]], [[n]]),
  lambda: ops.monolith_unique_key_with_value_and_offset(
    tf.constant([1], tf.int64), tf.constant([0, 1], tf.int64), dims=[n], generate_buffer=True
  ),
]
for call in calls:
  try:
    print(call())
  except tf.errors.ResourceExhaustedError as error:
    print("refused", str(error))
print("lives", reduce(1 << 25)[0].numpy())
""")
    self.assertEqual(output.count("which this process cannot get"), 2, output)
    self.assertIn("lives [1.]", output)

  def test_large_outputs_leave_memory_for_others(self):
    # TensorFlow's allocator would ask for a gigabyte for each of them, in vain.
    output = run_with_little_memory("""
large = reduce(231 << 20)
print("large", large[0].numpy())
large = None
print("others", [reduce(rows)[0].numpy() for rows in (1 << 21, 1 << 23, 1 << 24, 1 << 25)])
""")
    self.assertIn("large [1.]", output)
    self.assertIn(f"others {[np.ones(1, np.float32)] * 4}", output)

  def test_ranks(self):
    with self.assertRaises(ERRORS):
      in_graph(
        lambda: ops.MonolithFusedSegmentSum(
          indices=[np.zeros(1, np.int64)], updates=[np.ones([1, 1], np.float32)],
          shape=[np.ones(255, np.int64)],
        )
      )  # fmt: skip
    with self.assertRaises(ERRORS):
      in_graph(
        lambda: ops.MonolithGatherEmbeddingsByInput(
          ids=tf.constant([1], tf.int64), embeddings=tf.ones([1, 2]),
          input=tf.reshape(tf.constant([1], tf.int64), [1] * 254),
        )
      )  # fmt: skip
    with self.assertRaises(ERRORS):
      in_graph(
        lambda: ops.MonolithGenFidMask(splits=np.int64(2), values=np.array([4], np.int64), fid=2)
      )

  @parameterized.parameters(1 << 20, (1 << 31) - 1)
  def test_rows_of_a_batch_are_believed_as_far_as_bytes_go(self, rows):
    record = batch_of(rows, label=1.0)
    self.assertLess(len(record), 50)
    parse = dict(names=["label"], shapes=[1], dtypes=[tf.float32], extra_names=[])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, f"batch_size.* is {rows}"):
      ops.ParseExampleBatch(pb_input=[record], **parse)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, f"batch_size.* is {rows}"):
      ops.StringToVariantWithTransform(
        input=[record], input_type="example_batch", output_type="example", **NO_HEADER
      )
    with self.assertRaisesRegex(tf.errors.FailedPreconditionError, f"batch_size.* is {rows}"):
      ops.MonolithDecodeMessages(
        message=[record], origin=["x"], out_type=tf.variant, input_pb_type="examplebatch",
        output_pb_type="example", feature_pruning_type=2, filter_empty=False, **NO_HEADER,
      )  # fmt: skip
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, f"batch_size.* is {rows}"):
      ops.ShardingSparseFids(
        pb_input=[record], ps_num=1, feature_cfgs=layout(), unique=False,
        input_type="examplebatch", parallel_flag=0, N=1,
      )  # fmt: skip
    path = os.path.join(self.get_temp_dir(), "bomb")
    with open(path, "wb") as file:
      file.write(len(record).to_bytes(8, "little") + record)
    with self.assertRaisesRegex(tf.errors.FailedPreconditionError, f"batch_size.* is {rows}"):
      list(
        datasets.PBDataset(
          path,
          input_pb_type=datasets.PbType.EXAMPLEBATCH,
          output_pb_type=datasets.PbType.EXAMPLE,
          has_sort_id=False,
        )
      )

  def test_rows_of_a_small_batch_need_no_proof(self):
    got = ops.ParseExampleBatch(
      pb_input=[batch_of(1000, label=1.0)], names=["label"], shapes=[1], dtypes=[tf.float32],
      extra_names=[],
    )  # fmt: skip
    self.assertAllEqual(got[0], np.ones([1000, 1]))

  def test_many_rows_with_values_are_believed(self):
    batch = example_pb2.ExampleBatch(batch_size=10000)
    column = batch.named_feature_list.add(name="label", type=example_pb2.INDIVIDUAL)
    for _ in range(10000):
      column.feature.add()
    got = ops.ParseExampleBatch(
      pb_input=[batch.SerializeToString()], names=["label"], shapes=[1], dtypes=[tf.float32],
      extra_names=[],
    )  # fmt: skip
    self.assertEqual(got[0].shape, [10000, 1])

  def test_shared_values_of_many_rows_do_not_multiply_without_bound(self):
    batch = example_pb2.ExampleBatch(batch_size=4096)
    column = batch.named_feature_list.add(name="text", type=example_pb2.SHARED)
    column.feature.add().bytes_list.value.append(b"x" * (1 << 20))
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "bytes of shared features"):
      ops.StringToVariantWithTransform(
        input=[batch.SerializeToString()], input_type="example_batch", output_type="example",
        **NO_HEADER,
      )  # fmt: skip

  def test_numbers_of_labels_copies_and_negatives(self):
    example = example_pb2.Example(label=[1.0])
    example.line_id.actions.extend([1] * 64)
    example.line_id.item_id = 3
    samples = tf.data.Dataset.from_tensors(example.SerializeToString()).map(
      lambda x: ops.StringToVariant(input=x, variant_type="example", **NO_HEADER)
    )
    variant = next(iter(samples))
    for task_num, indices in ((1 << 33, "1:0"), (1 << 62, f"1:{1 << 40}"), (3, f"1:{INT64_MAX}")):
      with self.assertRaises(tf.errors.InvalidArgumentError):
        ops.MultiLabelGen(input=variant, head_to_index=indices, task_num=task_num)
    with self.assertRaises(tf.errors.InvalidArgumentError):
      ops.ScatterLabel(input=variant, config=f"1:{1 << 33}", variant_type="example")
    for neg_num, label_index in ((1, 1 << 33), (1 << 40, 0)):
      with self.assertRaises(tf.errors.InvalidArgumentError):
        list(
          datasets.NegativeGenDataset(
            samples, neg_num=neg_num, start_num=0, positive_actions=[1], label_index=label_index,
            cache_only_pos=True,
          )
        )  # fmt: skip
    repeated = ops.InstanceReweightDataset(
      input_dataset=samples._variant_tensor, method=0, actions=[1], weights=[8], labels=[1],
      priorities=[1], variant_type="example",
    )  # fmt: skip
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "weigh"):
      list(tf.data.experimental.from_variant(repeated, samples.element_spec))

  @parameterized.parameters(0, 2)
  def test_consumers_are_one_handle(self, handles):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[])
      for op in (ops.KafkaGroupReadableNext, ops.KafkaGroupReadableNextV2):
        outputs = op(
          input=tf.fill([handles], handle), index=tf.constant(0, tf.int64),
          message_poll_timeout=tf.constant(1, tf.int64), stream_timeout=tf.constant(1, tf.int64),
        )  # fmt: skip
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "input has shape"):
          session.run([t.op for t in tf.nest.flatten(outputs)])

  def test_datasets_that_give_something_else_than_they_promise(self):
    # The shape is unknown until the element is there, and is then that of a vector.
    vectors = tf.data.Dataset.from_tensors([b"", b""]).map(
      lambda x: tf.py_function(
        lambda y: ops.StringToVariant(input=y, variant_type="example", **NO_HEADER), [x], tf.variant
      )
    )
    spec = tf.TensorSpec([], tf.variant)
    for dataset in (
      ops.InstanceReweightDataset(
        input_dataset=vectors._variant_tensor, method=0, actions=[], weights=[], labels=[],
        priorities=[], variant_type="example",
      ),
      ops.SplitFlowDataset(
        input_dataset=vectors._variant_tensor, data_flow=["a"], index=0, max_queue_size=1,
        variant_type="example",
      ),
      ops.MergeFlowDataset(
        input_datasets=[vectors._variant_tensor], data_flow=["a"], max_queue_size=1,
        variant_type="example",
      ),
    ):  # fmt: skip
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "want one scalar variant"):
        list(tf.data.experimental.from_variant(dataset, spec))

  def test_saves_with_more_files_or_delay_than_anybody_waits_for(self):
    pool = ops.ItemPoolCreate(start_num=0, max_item_num_per_channel=1)
    for nshards, sleep in ((1 << 20, 0), (1, 1 << 40)):
      with self.assertRaises(tf.errors.InvalidArgumentError):
        ops.ItemPoolSave(
          ipool=pool, global_step=tf.constant(1, tf.int64), model_path=self.get_temp_dir(),
          nshards=nshards, random_sleep_ms=sleep,
        )  # fmt: skip
    with self.assertRaises(tf.errors.InvalidArgumentError):
      ops.ItemPoolRandomFill(
        ipool=ops.ItemPoolCreate(
          start_num=1 << 40, max_item_num_per_channel=1 << 40, shared_name="large"
        )
      )

  def test_clients_that_write_nothing_start_no_threads(self):
    def threads():
      return len(os.listdir("/proc/self/task"))

    folder = self.get_temp_dir()
    clients = [
      ops.MonolithCreateDeepInsightClient(
        filename=os.path.join(folder, str(i)), shared_name=f"client_{i}"
      )
      for i in range(20)
    ]
    before = threads()
    clients += [
      ops.MonolithCreateDeepInsightClient(
        filename=os.path.join(folder, f"more_{i}"), shared_name=f"more_{i}"
      )
      for i in range(200)
    ]
    self.assertLess(threads() - before, 100)
    for client in clients:
      tf.raw_ops.DestroyResourceOp(resource=client)


if __name__ == "__main__":
  tf.test.main()
