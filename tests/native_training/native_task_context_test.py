"""Where the code that builds a graph runs."""

from absl.testing import absltest

from monolith.native_training import native_task_context


def _context(**kwargs):
  return native_task_context.get()._replace(**kwargs)


class NativeTaskContextTest(absltest.TestCase):
  def test_contexts_nest_and_the_last_one_stays(self):
    self.assertEqual(native_task_context.get(), (0, 0, 1, 0, "", None, ""))
    outer, inner = _context(num_ps=1), _context(num_ps=2, server_type="ps")

    with native_task_context.with_ctx(outer):
      self.assertEqual(native_task_context.get(), outer)
      with native_task_context.with_ctx(inner):
        self.assertEqual(native_task_context.get(), inner)
      self.assertEqual(native_task_context.get(), outer)
    self.assertEqual(native_task_context.get(), outer)

    with self.assertRaises(KeyError), native_task_context.with_ctx(inner):
      raise KeyError
    self.assertEqual(native_task_context.get(), outer)


if __name__ == "__main__":
  absltest.main()
