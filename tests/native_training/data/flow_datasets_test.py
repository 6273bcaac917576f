"""Tests of flows, which split samples by data source and merge them again."""

import gc
import os
import struct
import threading
import time
from unittest import mock

import pytest
import tensorflow as tf
from absl.testing import parameterized

from idl.matrix.proto import example_pb2, proto_parser_pb2
from monolith.native_training.checkpoints import ckpt_hooks
from monolith.native_training.data import datasets, feature_utils, parsers
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.native_training.data.data_test_utils import (
  frame,
  make_example,
  make_instance,
  proto_of,
)

pytestmark = pytest.mark.thorough

PbType = datasets.PbType
FLOWS = ["pc", "mobile", "cloud"]
KEYS = {"pc": 914176, "mobile": 1250992640, "cloud": 2782803200}


def samples(sources, variant_type="example", bad_at=()):
  """Returns samples with uid 0, 1, ... from the sources; those at `bad_at` cannot be parsed."""
  make = make_example if variant_type == "example" else make_instance
  rows = [
    b"\xff" if i in bad_at else make(chnid=FLOWS.index(source), uid=i).SerializeToString()
    for i, source in enumerate(sources)
  ]
  return tf.data.Dataset.from_tensor_slices(tf.constant(rows, tf.string)).map(
    lambda row: feature_utils.string_to_variant(
      row, variant_type, chnids=[0, 1, 2], datasources=FLOWS, default_datasource="pc"
    )
  )


def split(dataset, flows=FLOWS, variant_type="example", **kwargs):
  return [
    dataset.split_flow(flows, i, variant_type=variant_type, **kwargs) for i in range(len(flows))
  ]


def merge(flows, variant_type="example", **kwargs):
  return flows[0].merge_flow(flows[1:], variant_type=variant_type, **kwargs)


def parse(dataset, batch_size=64, extra=("uid",)):
  return dataset.batch(batch_size).map(
    lambda x: parsers.parse_examples(x, [], extra_features=list(extra))
  )


def uids(dataset):
  return [int(uid) for batch in parse(dataset) for uid in batch["uid"].numpy().flatten()]


def wait_for(event, sample):
  """Passes `sample` on when `event` is set."""

  def wait():
    event.wait()
    return True

  with tf.control_dependencies([tf.py_function(wait, [], tf.bool)]):
    return tf.identity(sample)


def cycle(n):
  return [FLOWS[i % 3] for i in range(n)]


def run_threads(functions):
  """Runs functions at the same time and raises their errors."""
  errors = []

  def guarded(function):
    try:
      function()
    except BaseException as error:  # noqa: BLE001  (raised below)
      errors.append(error)

  threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(240)
    assert not thread.is_alive(), "a thread hangs"
  for error in errors:
    raise error


class MultiFlowTest(tf.test.TestCase, parameterized.TestCase):
  def write(self, n, make):
    path = os.path.join(os.environ["TEST_TMPDIR"], "flows")
    with open(path, "wb") as stream:
      for i, source in enumerate(cycle(n)):
        header = struct.pack("<Q", KEYS[source] | int(make is make_example))
        stream.write(frame(make(uid=i).SerializeToString(), header))
    return path

  @parameterized.parameters("example", "instance")
  def test_split_and_merge(self, name):
    is_example = name == "example"
    path = self.write(4096, make_example if is_example else make_instance)
    pb_type = PbType[name.upper()]

    def build():
      dataset = datasets.PBDataset(
        path, input_pb_type=pb_type, output_pb_type=pb_type, lagrangex_header=True
      )
      # Flows take the sample type from their source.
      flows = [dataset.split_flow(FLOWS, i) for i in range(3)]
      merged = flows[0].merge_flow([flows[1], flows[2]]).batch(512, drop_remainder=True)
      if is_example:
        return merged.map(lambda x: parsers.parse_examples(x, [], extra_features=["uid"]))
      return merged.map(lambda x: parsers.parse_instances(x, extra_features=["uid"]))

    eager = [batch["uid"].numpy().flatten().tolist() for batch in build()]
    self.assertLen(eager, 8)
    self.assertEqual(sorted(sum(eager, [])), list(range(4096)))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      following = tf.compat.v1.data.make_one_shot_iterator(build()).get_next()
      graph = [session.run(following)["uid"].flatten().tolist() for _ in range(8)]
      with self.assertRaises(tf.errors.OutOfRangeError):
        session.run(following)
    self.assertEqual(sorted(sum(graph, [])), list(range(4096)))

  def test_split_keeps_the_order_of_a_flow(self):
    flows = split(samples(cycle(100)))
    # Reads flow after flow: samples that were read for a flow wait for it.
    self.assertEqual([uids(flow) for flow in flows], [list(range(i, 100, 3)) for i in range(3)])
    self.assertEqual([uids(flow) for flow in flows], [list(range(i, 100, 3)) for i in range(3)])

  def test_empty_input_and_empty_flow(self):
    self.assertEqual(uids(merge(split(samples([])))), [])
    flows = split(samples(["pc", "pc"]))
    self.assertEqual([uids(flow) for flow in flows], [[0, 1], [], []])
    self.assertEqual(uids(merge(split(samples(["cloud"])))), [0])

  @parameterized.parameters(
    ("example", example_pb2.Example), ("instance", proto_parser_pb2.Instance)
  )
  def test_merge_names_the_data_source(self, variant_type, proto_class):
    source = samples(FLOWS, variant_type).cache()
    merged = list(merge(split(source, variant_type=variant_type), variant_type))
    protos = [proto_of(sample, proto_class) for sample in merged]
    self.assertEqual(
      {(proto.line_id.uid, proto.line_id.data_source_name) for proto in protos},
      {(i, f"data_source{KEYS[name]}") for i, name in enumerate(FLOWS)},
    )

  def test_merge_does_not_change_samples_that_others_hold(self):
    cached = samples(cycle(6)).cache()
    self.assertLen(uids(cached), 6)
    both = cached.merge_flow(cached, variant_type="example")
    self.assertEqual(sorted(uids(both)), sorted(2 * list(range(6))))
    for sample in cached:
      self.assertEqual(proto_of(sample, example_pb2.Example).line_id.data_source_name, "")

  def test_merge_takes_turns(self):
    # Ends only when the longest flow does; the short ones come in between.
    parts = [samples(["pc"] * n) for n in (1, 50, 400)]
    self.assertLen(uids(merge(parts)), 451)
    self.assertLen(uids(merge(parts, max_queue_size=1)), 451)

  def test_small_queues(self):
    sources = ["pc"] * 300 + ["mobile"] * 300 + ["cloud"] * 300
    flows = split(samples(sources), max_queue_size=1)
    self.assertEqual(sorted(uids(merge(flows, max_queue_size=1))), list(range(900)))

  def test_reading_waits_for_slow_flows(self):
    read = []

    def generate():
      for i, source in enumerate(cycle(3000)):
        read.append(i)
        yield make_example(uid=i, chnid=FLOWS.index(source)).SerializeToString()

    dataset = tf.data.Dataset.from_generator(
      generate, output_signature=tf.TensorSpec([], tf.string)
    ).map(lambda row: feature_utils.string_to_variant(row, chnids=[0, 1, 2], datasources=FLOWS))
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    iterator = iter(split(dataset, max_queue_size=4)[0].with_options(options))
    next(iterator)
    # Takes time in which an unbounded reader would read on.
    self.assertLen(uids(merge(split(samples(cycle(2000))))), 2000)
    # Allows three full queues, a sample that was taken, one in hand and the generator one ahead.
    self.assertLessEqual(len(read), 3 * 4 + 3)

  def test_error_of_the_input_reaches_all_flows(self):
    flows = split(samples(cycle(9), bad_at=[4]))
    iterators = [iter(flow) for flow in flows]
    rest = []
    for iterator in iterators:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Failed to parse the Example"):
        for _ in range(9):
          next(iterator)
      rest.append([proto_of(x, example_pb2.Example).line_id.uid for x in iterator])
    # Reading goes on behind the error.
    self.assertEqual(rest, [[6], [7], [5, 8]])
    merged = merge(split(samples(cycle(9), bad_at=[4])))
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Failed to parse the Example"):
      list(merged)
    self.assertEqual(sorted(uids(merged.ignore_errors())), [0, 1, 2, 3, 5, 6, 7, 8])

  def test_unknown_data_source(self):
    flows = split(samples(cycle(9)), flows=["pc", "cloud"])
    for flow in flows:
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError,
        r"data_source_key 1250992640, want .* pc \(914176\), cloud \(2782803200\)",
      ):
        list(flow)
    self.assertEqual(sorted(uids(merge(flows).ignore_errors())), [0, 2, 3, 5, 6, 8])

  def test_wrong_variant_type(self):
    flow = split(samples(cycle(3)), variant_type="instance")[0]
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "monolith::Example, want"):
      next(iter(flow))
    merged = merge(split(samples(cycle(3))), variant_type="instance")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "monolith::Example, want"):
      next(iter(merged))

  def test_merged_flow_that_is_not_read_to_its_end(self):
    sources = cycle(6000)
    for short in range(3):
      flows = split(samples(sources), max_queue_size=8)
      flows[short] = flows[short].take(5)
      read = uids(merge(flows, max_queue_size=8))
      self.assertLen(read, 4005)
      self.assertLen([uid for uid in read if uid % 3 == short], 5)
    # No flow is read to its end: the merged dataset still ends.
    flows = [flow.take(2) for flow in split(samples(sources), max_queue_size=8)]
    self.assertLen(uids(merge(flows)), 6)

  def test_index_0_is_closed_early(self):
    flows = split(samples(cycle(300)), max_queue_size=2)
    first, second = iter(flows[0]), iter(flows[1])
    next(first), next(second)
    del first
    gc.collect()
    with self.assertRaisesRegex(tf.errors.FailedPreconditionError, "closed before the end"):
      for _ in range(300):
        next(second)

  def test_other_index_is_closed_early(self):
    flows = split(samples(cycle(6000)), max_queue_size=2)
    first, second, third = (iter(flow) for flow in flows)
    next(second), next(third)
    del second, third
    gc.collect()
    self.assertLen(list(first), 2000)

  def test_closed_with_full_queues(self):
    for _ in range(20):
      flows = split(samples(cycle(600)), max_queue_size=1)
      iterator = iter(merge(flows, max_queue_size=1))
      next(iterator)
      del iterator
      gc.collect()
      iterators = [iter(flow) for flow in flows]
      next(iterators[1])
      del iterators
      gc.collect()
    del flows
    unread = iter(merge(split(samples(cycle(9)))))
    del unread

  def test_repeat(self):
    flows = split(samples(cycle(30)))
    self.assertEqual(sorted(uids(merge(flows).repeat(3))), sorted(3 * list(range(30))))
    repeated = [flow.repeat(3) for flow in flows]
    self.assertEqual(sorted(uids(merge(repeated))), sorted(3 * list(range(30))))

  def test_a_flow_has_no_more_passes_than_index_0(self):
    flows = split(samples(cycle(60)), max_queue_size=2)
    for repeated in (1, 2):
      again = [flow.repeat(3) if i == repeated else flow for i, flow in enumerate(flows)]
      self.assertEqual(sorted(uids(merge(again))), list(range(60)))
    endless = [flows[0], flows[1].repeat(), flows[2].take(2).repeat(2)]
    read = uids(merge(endless))
    self.assertEqual(sorted(uid for uid in read if uid % 3 == 1), list(range(1, 60, 3)))
    self.assertEqual([uid for uid in read if uid % 3 == 2], [2, 5])
    # The second pass's other flows are not read.
    more = [flows[0].repeat(2), flows[1], flows[2]]
    self.assertEqual(sorted(uids(merge(more))), sorted([*range(60), *range(0, 60, 3)]))

  def test_a_flow_that_another_thread_opens_late_is_complete(self):
    # All threads of the merger wait before the thread of `prefetch` opens flow 1: nothing tells
    # them that it will.
    sources = ["mobile"] * 3 + ["pc", "mobile"] * 17 + ["pc"] * 4
    flows = split(samples(sources), flows=["pc", "mobile"], max_queue_size=2)

    def wait(sample):
      with tf.control_dependencies([tf.py_function(lambda: time.sleep(0.5), [], [])]):
        return tf.identity(sample)

    # The first sample starts the thread, which then goes on by itself.
    late = samples(["pc"]).concatenate(samples(["pc"]).map(wait).skip(1)).concatenate(flows[1])
    both = tf.data.Dataset.zip((late.prefetch(1), flows[0]))
    mobile = both.map(lambda from_prefetch, _: from_prefetch)
    wanted = [i for i, source in enumerate(sources) if source == "mobile"]
    # Otherwise TensorFlow reads in more threads, and the merger cannot tell that all of them wait.
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    merged = merge([mobile, samples([])]).with_options(options)
    self.assertEqual(uids(merged), [0, *wanted])

  def test_flows_without_index_0_are_an_error(self):
    flows = split(samples(cycle(30)))
    with mock.patch.dict(os.environ, {"MONOLITH_FLOW_PATIENCE_SECONDS": "1"}):
      with self.assertRaisesRegex(tf.errors.FailedPreconditionError, "waits for an iterator over"):
        uids(merge(flows[1:]))

  def test_iterators_at_the_same_time(self):
    merged = merge(split(samples(cycle(30)), max_queue_size=2))
    first, second = iter(parse(merged, 10)), iter(parse(merged, 10))
    read = {0: [], 1: []}
    for _ in range(3):
      read[0] += next(first)["uid"].numpy().flatten().tolist()
      read[1] += next(second)["uid"].numpy().flatten().tolist()
    self.assertEqual(sorted(read[0]), list(range(30)))
    self.assertEqual(sorted(read[1]), list(range(30)))

  def test_many_threads(self):
    merged = merge(split(samples(cycle(300)), max_queue_size=4), max_queue_size=4)
    zipped = tf.data.Dataset.zip(tuple(split(samples(cycle(300)))))

    def read_merged():
      for _ in range(3):
        self.assertEqual(sorted(uids(merged)), list(range(300)))

    def read_zipped():
      for _ in range(3):
        self.assertLen(list(zipped), 100)

    run_threads([read_merged] * 4 + [read_zipped] * 4)

  def test_every_flow_in_a_thread(self):
    flows = split(samples(cycle(3000)), max_queue_size=3)
    read = [None] * 3

    def read_flow(i):
      read[i] = uids(flows[i])

    # Index 0 last: the others wait for it.
    run_threads([lambda i=i: read_flow(i) for i in (2, 1, 0)])
    self.assertEqual(read, [list(range(i, 3000, 3)) for i in range(3)])

  def test_flows_give_up_on_iterators_that_are_never_made(self):
    with mock.patch.dict(os.environ, {"MONOLITH_FLOW_PATIENCE_SECONDS": "1"}):
      flows = split(samples(cycle(300)), max_queue_size=3)
      with self.assertRaisesRegex(
        tf.errors.FailedPreconditionError, r"flow 1 \('mobile'\) waits for an iterator over index 0"
      ):
        next(iter(flows[1]))
      with self.assertRaisesRegex(
        tf.errors.FailedPreconditionError, "has 3 samples waiting and no iterator takes them"
      ):
        list(flows[0])
    # Giving up leaves nothing behind: the same flows can be read together. With more patience: a
    # busy machine may need a second to make all iterators.
    self.assertEqual(sorted(uids(merge(flows))), list(range(300)))

  def test_flows_wait_while_index_0_is_read(self):
    with mock.patch.dict(os.environ, {"MONOLITH_FLOW_PATIENCE_SECONDS": "1"}):
      go_on = threading.Event()
      slow = samples(cycle(30)).map(lambda x: wait_for(go_on, x))
      flows = split(slow)
      first, second = iter(flows[0]), iter(flows[1])
      threading.Timer(3, go_on.set).start()
      next(second)
      next(first)

  def test_order_of_merged_flows(self):
    flows = split(samples(cycle(90)))
    self.assertEqual(sorted(uids(merge(flows[::-1]))), list(range(90)))
    inner = merge(flows[1:])
    self.assertEqual(sorted(uids(merge([inner, flows[0]]))), list(range(90)))
    other = split(samples(cycle(30)))
    self.assertLen(uids(merge([flows[0], other[0], flows[1], other[1]])), 80)

  def test_the_input_is_written_once_per_flow(self):
    flows = [split(samples(cycle(90)))[i] for i in range(3)]
    self.assertEqual(sorted(uids(merge(flows))), list(range(90)))

  def test_split_again(self):
    merged = merge(split(samples(cycle(90))))
    self.assertEqual(sorted(uids(merge(split(merged)))), list(range(90)))

  def test_inside_of_interleave(self):
    dataset = tf.data.Dataset.range(6).interleave(
      lambda _: merge(split(samples(cycle(60)), max_queue_size=2)),
      cycle_length=3,
      num_parallel_calls=3,
    )
    self.assertEqual(sorted(uids(dataset)), sorted(6 * list(range(60))))

  def test_between_other_stages(self):
    flows = split(samples(cycle(90)))
    flows = [
      flows[0].shuffle(8).prefetch(2),
      flows[1].filter(
        lambda x: feature_utils.filter_by_value(x, "uid", "lt", 40, variant_type="example")
      ),
      flows[2].map(
        lambda x: feature_utils.label_upper_bound(x, [1.0], variant_type="example"),
        num_parallel_calls=2,
      ),
    ]
    wanted = [uid for uid in range(90) if uid % 3 != 1 or uid < 40]
    self.assertEqual(sorted(uids(merge(flows))), wanted)

  def test_data_service(self):
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [service.WorkerServer(service.WorkerConfig(address)) for _ in range(2)]
    flows = split(samples(cycle(300)))
    read = []
    for batch in datasets.distribute(parse(merge(flows), 50), dispatcher.target, job_name="a"):
      read += batch["uid"].numpy().flatten().tolist()
    self.assertEqual(sorted(read), list(range(300)))
    other = samples(["pc"])
    with self.assertRaisesRegex(tf.errors.UnimplementedError, "are flows of one dataset"):
      list(datasets.distribute(parse(merge([flows[0], other])), dispatcher.target, job_name="b"))
    del workers

  def test_initializable_iterator(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      dataset = parse(merge(split(samples(cycle(90)), max_queue_size=2)), 30)
      iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
      following = iterator.get_next()
      for batches in (1, 0, 3, 3):
        session.run(iterator.initializer)
        read = [session.run(following)["uid"].flatten().tolist() for _ in range(batches)]
        if batches == 3:
          self.assertEqual(sorted(sum(read, [])), list(range(90)))
          with self.assertRaises(tf.errors.OutOfRangeError):
            session.run(following)

  def test_cancelled_while_waiting(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      # No iterator over index 0 reads for flow 1.
      flow = split(samples(cycle(90)))[1]
      zeros = tf.compat.v1.data.make_one_shot_iterator(
        flow.map(feature_utils.variant_to_zeros)
      ).get_next()
      soon = tf.compat.v1.RunOptions(timeout_in_ms=200)
      with self.assertRaises((tf.errors.DeadlineExceededError, tf.errors.CancelledError)):
        session.run(zeros, options=soon)

  def test_cancelled_while_a_merger_waits(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:

      def wait_forever(_):
        return split(samples(cycle(9)))[1]

      # The flow is read in its own thread, and no iterator over index 0 reads for it.
      lonely = tf.data.Dataset.range(1).flat_map(wait_forever).prefetch(1)
      merged = merge([lonely, lonely]).map(feature_utils.variant_to_zeros)
      zeros = tf.compat.v1.data.make_one_shot_iterator(merged).get_next()
      soon = tf.compat.v1.RunOptions(timeout_in_ms=200)
      with self.assertRaises((tf.errors.DeadlineExceededError, tf.errors.CancelledError)):
        session.run(zeros, options=soon)

  def test_position_is_not_saved(self):
    for dataset in (split(samples(cycle(9)))[0], merge(split(samples(cycle(9))))):
      iterator = iter(dataset)
      next(iterator)
      with self.assertRaisesRegex(tf.errors.UnimplementedError, "cannot be saved"):
        tf.train.Checkpoint(iterator=iterator).save(os.path.join(os.environ["TEST_TMPDIR"], "ckpt"))
    with tf.Graph().as_default():
      self.assertTrue(ckpt_hooks._get_meta().enable_iter_save_restore)
      split(samples(cycle(9)))
      self.assertFalse(ckpt_hooks._get_meta().enable_iter_save_restore)

  def test_bad_arguments(self):
    dataset = samples(cycle(3))
    for kwargs, message in (
      ({"index": 3}, "index is 3, but data_flow has 3 names"),
      ({"index": -1}, "index is -1, but data_flow has 3 names"),
      ({"data_flow": []}, "index is 0, but data_flow has 0 names"),
      ({"data_flow": ["pc", "x", "pc"]}, "data_flow has 'pc' and 'pc'"),
      ({"max_queue_size": 0}, "max_queue_size is 0, want at least 1"),
      ({"variant_type": "example_batch"}, "variant_type is 'example_batch'"),
      ({"variant_type": "no"}, "variant_type is 'no'"),
    ):
      arguments = {"data_flow": FLOWS, "index": 0, "variant_type": "example", **kwargs}
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        datasets.SplitFlowDataset(dataset, **arguments)
    numbers = tf.data.Dataset.range(3)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "of type int64, want one scalar"):
      datasets.SplitFlowDataset(numbers, FLOWS, 0)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "of type int64, want one scalar"):
      datasets.MergeFlowDataset(numbers, numbers)
    with self.assertRaisesRegex(ValueError, r"dataset_to_merge\[0\] has elements"):
      datasets.MergeFlowDataset(dataset, [numbers])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "max_queue_size is -1"):
      datasets.MergeFlowDataset(dataset, dataset, max_queue_size=-1)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "1 names for 2 inputs"):
      gen_monolith_ops.merge_flow_dataset(
        [dataset._variant_tensor] * 2, data_flow=["a"], max_queue_size=1, variant_type="example"
      )
    with self.assertRaisesRegex(AssertionError, "give variant_type"):
      dataset.split_flow(FLOWS, 0)


if __name__ == "__main__":
  tf.test.main()
