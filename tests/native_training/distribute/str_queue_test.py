"""Tests of the queue of strings that lives in variables."""

import os

import tensorflow as tf

from monolith.native_training.distribute import str_queue

tf.compat.v1.disable_eager_execution()


def _init():
  return tf.compat.v1.global_variables_initializer()


class StrQueueTest(tf.test.TestCase):
  def _drain(self, sess, dequeue):
    elements = []
    while True:
      element, out_of_range = sess.run(dequeue)
      if out_of_range:
        self.assertEqual(element, b"")
        return elements
      elements.append(element)

  def test_basic(self):
    queue = str_queue.StrQueue()
    enqueue, dequeue = queue.enqueue_many(["a", "b"]), queue.dequeue()
    with self.session() as sess:
      sess.run(_init())

      self.assertEqual(sess.run(dequeue), (b"", True))
      sess.run(enqueue)
      self.assertEqual(sess.run(dequeue), (b"a", False))
      sess.run(enqueue)
      self.assertEqual(self._drain(sess, dequeue), [b"b", b"a", b"b"])

  def test_initial_elements(self):
    queue = str_queue.StrQueue(["x", "y"])
    dequeue = queue.dequeue()
    with self.session() as sess:
      sess.run(_init())
      self.assertEqual(self._drain(sess, dequeue), [b"x", b"y"])

  def test_capacity(self):
    queue = str_queue.StrQueue(["a", "b"], capacity=3)
    placeholder = tf.compat.v1.placeholder(tf.string, [None])
    enqueue, dequeue = queue.enqueue_many(placeholder), queue.dequeue()
    with self.session() as sess:
      sess.run(_init())
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "cannot hold so many"):
        sess.run(enqueue, {placeholder: ["c", "d"]})
      self.assertEqual(sess.run(dequeue)[0], b"a")
      sess.run(enqueue, {placeholder: ["c", "d"]})  # reuses the room of dequeued elements
      self.assertEqual(self._drain(sess, dequeue), [b"b", b"c", b"d"])
    with self.assertRaisesRegex(ValueError, "has 4 elements, the capacity is 3"):
      str_queue.StrQueue(["a"] * 4, capacity=3)

  def test_auto_enqueue(self):
    calls = tf.compat.v1.get_variable("calls", initializer=0, use_resource=True)

    def auto_enqueue():
      # Every second call returns nothing. The sixth ends the queue and returns nothing.
      number = calls.assign_add(1, read_value=True)
      text = tf.strings.as_string(number)
      elements = tf.cond(
        tf.equal(number % 2, 0), lambda: tf.stack([text, text]), lambda: tf.zeros([0], tf.string)
      )
      return elements, number >= 6

    queue = str_queue.StrQueue(auto_enqueue_fn=auto_enqueue)
    dequeue = queue.dequeue()
    with self.session() as sess:
      sess.run(_init())
      self.assertEqual(self._drain(sess, dequeue), [b"2", b"2", b"4", b"4"])
      self.assertEqual(sess.run(dequeue), (b"", True))

  def test_queue_filled_from_another(self):
    for shared in (True, False):
      with self.subTest(shared=shared), tf.Graph().as_default():
        source = str_queue.StrQueue(["1", "2"], name="source")

        def fill(source=source):
          element, out_of_range = source.dequeue()
          elements = tf.stack([element + "a", element + "b"])
          return elements[: tf.where(out_of_range, 0, 2)], out_of_range

        queue = str_queue.StrQueue(
          critical_section=source.critical_section if shared else None,
          auto_enqueue_fn=fill,
          name="sink",
        )
        self.assertEqual(queue.critical_section is source.critical_section, shared)
        dequeue = queue.dequeue()
        with tf.compat.v1.Session() as sess:
          sess.run(_init())
          self.assertEqual(self._drain(sess, dequeue), [b"1a", b"1b", b"2a", b"2b"])

  def test_concurrent_dequeues_share_the_elements(self):
    names = [str(i).encode() for i in range(100)]
    queue = str_queue.StrQueue(names)
    dequeues = [queue.dequeue() for _ in range(10)]
    with self.session() as sess:
      sess.run(_init())
      taken = [element for _ in range(10) for element, _ in sess.run(dequeues)]
      self.assertCountEqual(taken, names)
      self.assertEqual(sess.run(dequeues[0]), (b"", True))

  def test_checkpoint(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "model.ckpt")
    dequeue = str_queue.StrQueue(["a", "b", "c"]).dequeue()
    saver = tf.compat.v1.train.Saver()
    with self.session() as sess:
      sess.run(_init())
      sess.run(dequeue)
      saver.save(sess, path)
      self.assertEqual(self._drain(sess, dequeue), [b"b", b"c"])
      saver.restore(sess, path)
      self.assertEqual(self._drain(sess, dequeue), [b"b", b"c"])


if __name__ == "__main__":
  tf.test.main()
