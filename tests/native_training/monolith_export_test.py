import unittest

from monolith.native_training.monolith_export import monolith_export


class MonolithExportTest(unittest.TestCase):
  def test_marks_and_returns_the_object(self):
    class Exported:
      pass

    def function():
      return 1

    for obj in (Exported, function):
      self.assertIs(monolith_export(obj), obj)
      self.assertIsNone(getattr(obj, "__monolith_doc"))

  def test_as_decorator(self):
    @monolith_export
    def function():
      return 1

    self.assertEqual(function(), 1)
    self.assertTrue(hasattr(function, "__monolith_doc"))


if __name__ == "__main__":
  unittest.main()
