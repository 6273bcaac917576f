"""Tests `join_window`, `closed_keys`, `spill_files`, `events`: what leaves a window, and when."""

import dataclasses
import errno
import resource
import tempfile
import unittest

import numpy as np
import tensorflow as tf

from idl.matrix.proto.example_pb2 import Example
from monolith.native_training.layers.logit_correction import LogitCorrection
from monolith.realtime import events
from monolith.realtime.join_window import JoinWindow, SampleRates, WindowOptions
from tests.realtime.event_making import START_MS, make_action, make_example, make_impression

_OPTIONS = WindowOptions(window_ms=20_000, lateness_ms=2_000)


def _read(samples):
  """Returns samples as `id -> (label, actions, sample_rate)`."""
  result = {}
  for sample in samples:
    example = Example.FromString(sample.value)
    line = example.line_id
    assert line.req_id not in result, line.req_id
    result[line.req_id] = (example.label[0], list(line.actions), round(line.sample_rate, 4))
  return result


class _Driver:
  """Feeds a window, with offsets as a partition gives them."""

  def __init__(self, options=_OPTIONS, partition=3):
    self.window = JoinWindow(partition, options)
    self.samples = []
    self.next = [0, 0]

  def impressions(self, *events_in):
    self._add(0, events_in)

  def actions(self, *events_in):
    self._add(1, events_in)

  def _add(self, which, events_in):
    first = self.next[which]
    self.next[which] += len(events_in)
    numbered = list(enumerate(events_in, first))
    self.samples += self.window.add(*((numbered, ()) if which == 0 else ((), numbered)))

  def advance(self, secs):
    self.samples += self.window.advance(START_MS + round(secs * 1000))

  def result(self):
    return _read(self.samples)


class JoinWindowTest(unittest.TestCase):
  def test_action_makes_a_positive_at_once(self):
    driver = _Driver()

    driver.impressions(make_impression("a", 0), make_impression("b", 1))
    driver.actions(make_action("b", 2, action=7))

    self.assertEqual(driver.result(), {"3:1:p": (1.0, [7], 1.0)})
    self.assertEqual(driver.window.num_open, 1)
    self.assertEqual(driver.window.oldest_open_offset(), 0)

  def test_window_without_action_makes_a_negative_when_the_watermark_passes(self):
    driver = _Driver()
    driver.impressions(make_impression("a", 0))

    driver.advance(19.9)
    before = driver.result()
    driver.advance(21.5)

    self.assertEqual(before, {})
    self.assertEqual(driver.result(), {"3:0:n": (0.0, [], 1.0)})
    self.assertIsNone(driver.window.oldest_open_offset())

  def test_action_before_its_impression_waits(self):
    driver = _Driver()

    driver.actions(make_action("a", 1))
    waiting = driver.window.oldest_waiting_offset()
    driver.impressions(make_impression("a", 0))

    self.assertEqual(waiting, 0)
    self.assertEqual(driver.result(), {"3:0:p": (1.0, [1], 1.0)})
    self.assertIsNone(driver.window.oldest_waiting_offset())

  def test_late_actions_are_counted_and_dropped(self):
    driver = _Driver()
    driver.impressions(make_impression("a", 0), make_impression("b", 100))
    driver.actions(make_action("b", 121))  # outside the window of b
    driver.advance(60)

    driver.actions(make_action("a", 5))  # a's window has passed
    driver.actions(make_action("never shown", 50))
    driver.advance(200)

    self.assertEqual(set(driver.result()), {"3:0:n", "3:1:n"})
    self.assertEqual(driver.window.counters.late, 2)
    self.assertEqual(driver.window.counters.unmatched, 1)

  def test_second_action_makes_no_second_sample(self):
    driver = _Driver()
    driver.impressions(make_impression("a", 0))

    driver.actions(make_action("a", 1), make_action("a", 2))
    driver.advance(100)

    self.assertEqual(set(driver.result()), {"3:0:p"})

  def test_an_impression_repeated_after_its_positive_makes_no_second_sample(self):
    driver = _Driver()
    driver.impressions(make_impression("a", 0), make_impression("b", 0))
    driver.actions(make_action("a", 1))

    driver.impressions(make_impression("a", 0), make_impression("b", 0))
    driver.actions(make_action("a", 2))
    driver.impressions(make_impression("a", 0))
    remembered = driver.window.oldest_needed_offset()
    driver.advance(100)

    self.assertEqual(driver.result(), {"3:0:p": (1.0, [1], 1.0), "3:1:n": (0.0, [], 1.0)})
    self.assertEqual(driver.window.counters.repeated, 4)
    self.assertEqual(remembered, 0)
    self.assertIsNone(driver.window.oldest_needed_offset())
    self.assertEqual(driver.window.memory_bytes, 0)

  def test_an_impression_repeated_while_it_is_in_a_file_makes_no_second_sample(self):
    for emit in ("first_action", "window_end"):
      with tempfile.TemporaryDirectory() as folder, self.subTest(emit):
        driver = _Driver(
          dataclasses.replace(_OPTIONS, emit=emit, memory_bytes=10_000, spill_folder=folder)
        )
        shown = [make_impression(f"{i}", 0) for i in range(100)]
        driver.impressions(*shown)
        self.assertGreater(driver.window.counters.spilled_bytes, 0)
        driver.impressions(*shown[:5])
        driver.actions(make_action("1", 1), make_action("1", 2), make_action("99", 1))
        driver.impressions(*shown[:5])
        driver.advance(100)
        driver.window.close()

        labels = [label for label, _, _ in driver.result().values()]
        self.assertEqual((len(labels), sum(labels)), (100, 2))

  def test_a_restarted_window_knows_what_is_repeated(self):
    driver = _Driver()
    driver.window.know(0, [0])  # the positive of a is in the topic

    driver.impressions(make_impression("a", 0), make_impression("a", 0))
    driver.advance(100)

    self.assertEqual(driver.result(), {})
    self.assertEqual(driver.window.counters.repeated, 1)

  def test_memory_of_what_has_left_is_bounded(self):
    driver = _Driver(dataclasses.replace(_OPTIONS, memory_bytes=100_000))
    for second in range(0, 20, 2):
      keys = [f"{second}.{i}" for i in range(50)]
      driver.impressions(*(make_impression(key, second) for key in keys))
      driver.actions(*(make_action(key, second) for key in keys))

    window = driver.window
    self.assertLessEqual(window.memory_bytes, 25_000)
    self.assertGreater(window.counters.forgotten, 0)
    # The oldest went first.
    driver.impressions(make_impression("0.1", 0), make_impression("18.1", 18))
    self.assertEqual((window.num_open, window.counters.repeated), (1, 1))

  def test_window_end_collects_all_actions(self):
    driver = _Driver(dataclasses.replace(_OPTIONS, emit="window_end"))
    driver.actions(make_action("a", 0, action=5))
    driver.impressions(make_impression("a", 0), make_impression("b", 0))

    driver.actions(make_action("a", 1, action=6), make_action("a", 2, action=7))
    before = driver.result()
    driver.advance(100)

    self.assertEqual(before, {})
    self.assertEqual(driver.result(), {"3:0:w": (1.0, [5, 6, 7], 1.0), "3:1:w": (0.0, [], 1.0)})

  def test_slower_stream_holds_the_watermark_back_until_it_has_ended(self):
    driver = _Driver()
    driver.impressions(make_impression("a", 100))
    driver.actions(make_action("x", 10))
    window = driver.window

    def watermark(impressions_until_secs, actions_until_secs):
      until = [START_MS + 1000 * s for s in (impressions_until_secs, actions_until_secs)]
      return window.watermark(impressions_until=until[0], actions_until=until[1]) - START_MS

    self.assertEqual(watermark(0, 0), 8000)
    self.assertEqual(watermark(0, 100), 98000)
    self.assertEqual(watermark(10, 100), 98000)
    # Actions had ended when impressions had come to 40 s; those since may have actions to be read.
    self.assertEqual(watermark(10, 40), 38000)

  def test_sampling_is_decided_by_the_request_and_its_rate_is_told(self):
    rates = SampleRates(0.1, by_channel={3: 1.0}, by_slot={9: 0.0})
    options = dataclasses.replace(_OPTIONS, rates=rates)
    results = []
    for _ in range(2):
      driver = _Driver(options)
      driver.impressions(
        *(make_impression(f"r{i}", 0) for i in range(2000)),
        make_impression("kept", 0, channel=3, item=9 << 48),
        make_impression("dropped", 0, item=9 << 48),
      )
      driver.advance(100)
      results.append(driver.result())

    self.assertEqual(results[0], results[1])
    self.assertEqual(results[0]["3:2000:n"], (0.0, [], 1.0))
    self.assertNotIn("3:2001:n", results[0])
    sampled = len(results[0]) - 1
    self.assertTrue(140 < sampled < 260, sampled)
    self.assertEqual(results[0][next(iter(results[0]))][2], 0.1)

  def test_known_samples_are_not_made_again(self):
    driver = _Driver()
    driver.window.know(0, [0, 2, -1])

    driver.impressions(*(make_impression(key, 0) for key in "abc"))
    driver.actions(make_action("a", 1), make_action("b", 1))
    driver.advance(100)

    self.assertEqual(set(driver.result()), {"3:1:p"})
    self.assertEqual(driver.window.counters.known, 2)

  def test_spilled_impressions_are_joined_like_others(self):
    for emit in ("first_action", "window_end"):
      results = []
      for memory in (1 << 30, 2000):
        with tempfile.TemporaryDirectory() as folder:
          options = dataclasses.replace(
            _OPTIONS, emit=emit, memory_bytes=memory, spill_folder=folder
          )
          driver = _Driver(options)
          for second in range(30):
            driver.impressions(
              *(make_impression(f"{second}.{i}", second + i / 100) for i in range(50))
            )
            driver.actions(
              *(make_action(f"{second // 2}.{i}", second + 0.9, action=i + 1) for i in range(3)),
              make_action(f"{second // 2}.1", second + 0.9, action=99),
            )
            driver.advance(second)
          self.assertEqual(driver.window.counters.spilled_bytes > 0, memory == 2000)
          self.assertEqual(driver.window.oldest_open_offset(), min(_open_offsets(driver)))
          driver.advance(1000)
          results.append(driver.result())
          self.assertEqual(driver.window.num_open, 0)
          driver.window.close()

      self.assertEqual(results[0], results[1])
      self.assertEqual(len(results[0]), 1500)

  def test_full_disk_is_an_error(self):
    with tempfile.TemporaryDirectory() as folder:
      driver = _Driver(dataclasses.replace(_OPTIONS, memory_bytes=1000, spill_folder=folder))
      limits = resource.getrlimit(resource.RLIMIT_FSIZE)
      resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
      try:
        with self.assertRaises(OSError) as raised:
          driver.impressions(*(make_impression(f"{i}", 0) for i in range(100)))
      finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    self.assertEqual(raised.exception.errno, errno.EFBIG)

  def test_bad_options_are_named(self):
    with self.assertRaisesRegex(ValueError, "emit is 'never'"):
      WindowOptions(emit="never")
    with self.assertRaisesRegex(ValueError, "window of 0 ms"):
      WindowOptions(window_ms=0)
    with self.assertRaisesRegex(ValueError, "sample rate is 1.5"):
      SampleRates(1.5)


def _open_offsets(driver):
  """Returns offsets of impressions that have no sample, found the slow way."""
  done = {events.parse_sample_id(name)[1] for name in driver.result()}
  return [offset for offset in range(driver.next[0]) if offset not in done]


class CalibrationTest(unittest.TestCase):
  def test_a_tenth_of_the_negatives_gives_the_same_calibration(self):
    num_genres, num_impressions = 4, 100_000
    draw = np.random.default_rng(0)
    genres = draw.integers(0, num_genres, num_impressions)
    clicks = draw.random(num_impressions) < np.array([0.05, 0.1, 0.2, 0.4])[genres]
    calibrations = []

    for rate in (1.0, 0.1):
      window = JoinWindow(0, dataclasses.replace(_OPTIONS, rates=SampleRates(rate)))
      samples = []
      for first in range(0, num_impressions, 10_000):
        some = range(first, first + 10_000)
        samples += window.add(
          [(i, make_impression(f"{i}", item=int(genres[i]))) for i in some],
          [(i, make_action(f"{i}")) for i in some if clicks[i]],
        )
      samples += window.advance(START_MS + 100_000)
      # Each genre's logit, fitted in closed form: the share of clicks among its samples is the
      # sigmoid of the corrected logit.
      examples = [Example.FromString(sample.value) for sample in samples]
      labels = np.array([example.label[0] for example in examples])
      rates = {example.line_id.sample_rate for example in examples}
      offsets = [events.parse_sample_id(example.line_id.req_id)[1] for example in examples]
      shares = np.array([labels[genres[offsets] == g].mean() for g in range(num_genres)])
      corrected = np.log(shares / (1 - shares))
      (sample_rate,) = rates
      correction = LogitCorrection.get_sample_logits(0.0, tf.constant(sample_rate), False).numpy()
      predictions = 1 / (1 + np.exp(-(corrected - correction)))
      calibrations.append(predictions[genres].mean() / clicks.mean())

    self.assertAlmostEqual(calibrations[0], 1, delta=1e-3)
    self.assertLess(abs(calibrations[1] / calibrations[0] - 1), 0.02)


class EventsTest(unittest.TestCase):
  def test_poisoned_messages_are_named(self):
    newest = START_MS + 1000
    good = make_impression("a", 0)
    for change, message in (
      (lambda e: e.ClearField("request_id"), "request_id is empty"),
      (lambda e: e.ClearField("event_time_ms"), "event_time_ms is 0"),
      (lambda e: setattr(e, "event_time_ms", newest + 1), "event_time_ms is"),
      (lambda e: setattr(e, "example", b"\xff\xff"), "no Example"),
    ):
      event = events.Impression.FromString(good.SerializeToString())
      change(event)
      with self.assertRaisesRegex(events.PoisonedMessageError, message):
        events.parse_impression(event.SerializeToString(), newest)
    with self.assertRaisesRegex(events.PoisonedMessageError, "no Action"):
      events.parse_action(b"\xff", newest)
    self.assertEqual(events.parse_impression(good.SerializeToString(), newest), good)

  def test_samples_are_what_protobuf_would_write(self):
    for actions, rate in (([], 0.1), ([1], 1.0), ([-3, 300, 2**31 - 1], 0.5)):
      value = events.make_sample(
        make_example(), identity="7:1234567:w", event_time_ms=START_MS, actions=actions,
        sample_rate=rate,
      )  # fmt: skip

      expected = Example.FromString(make_example())
      expected.label.append(1.0 if actions else 0.0)
      expected.line_id.req_time = START_MS // 1000
      expected.line_id.actions.extend(actions)
      expected.line_id.sample_rate = rate
      expected.line_id.req_id = "7:1234567:w"
      self.assertEqual(Example.FromString(value), expected)

  def test_sample_ids_are_read_as_they_are_written(self):
    self.assertEqual(events.parse_sample_id(events.sample_id(3, 17, "n")), (3, 17, "n"))
    for bad in ("", "1:2", "1:2:x", "a:2:p", "1:-2:p"):
      with self.assertRaisesRegex(ValueError, "sample id"):
        events.parse_sample_id(bad)


if __name__ == "__main__":
  unittest.main()
