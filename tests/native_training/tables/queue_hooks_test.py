"""A group's queue hooks, and those of the groups inside it."""

import copy

import tensorflow as tf

from monolith.native_training.tables import queue_hooks


def _hooks(*names: str) -> list[tf.compat.v1.train.SessionRunHook]:
  return [type(name, (tf.compat.v1.train.SessionRunHook,), {})() for name in names]


class QueueHooksTest(tf.test.TestCase):
  def test_own_hooks_come_before_those_of_the_groups_inside(self):
    own, inner, first, second = _hooks("own", "inner", "first", "second")
    group, table = queue_hooks.QueueHooks(), queue_hooks.QueueHooks()
    tables = [queue_hooks.QueueHooks(), queue_hooks.QueueHooks()]
    for owner, hook in ((tables[1], second), (tables[0], first), (table, inner), (group, own)):
      owner.add_queue_hook(hook)

    group._table, group._tables = table, tables

    self.assertEqual(group.get_queue_hooks(), [own, inner, first, second])

  def test_a_copy_shares_the_hooks_that_were_there(self):
    before, after = _hooks("before", "after")
    group = queue_hooks.QueueHooks()
    group.add_queue_hook(before)

    copy.copy(group).add_queue_hook(after)

    self.assertEqual(group.get_queue_hooks(), [before, after])

  def test_groups_do_not_share_hooks(self):
    queue_hooks.QueueHooks().add_queue_hook(_hooks("hook")[0])

    self.assertEmpty(queue_hooks.QueueHooks().get_queue_hooks())

  def test_what_has_no_hooks_is_passed_over(self):
    group = queue_hooks.QueueHooks()
    group._tables = [object()]

    self.assertEmpty(group.get_queue_hooks())


if __name__ == "__main__":
  tf.test.main()
