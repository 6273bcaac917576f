"""Promise: a damaged checkpoint is never restored as if it were whole; the bad file is named.

Every file of a checkpoint is damaged in every way (a bit flipped at its start, in the middle, at
its end; cut to nothing, in half, by one byte; removed), one at a time. A restore must then raise an
error that names the file, and an older checkpoint that is intact; only where the byte means nothing
may it restore, and then everything.
"""

import os
import re
import shutil

import tensorflow as tf

from tests.reliability import trainer

tf.compat.v1.disable_eager_execution()


def _flip(position):
  def damage(path):
    with open(path, "r+b") as f:
      size = f.seek(0, os.SEEK_END)
      if size == 0:
        return False
      f.seek(min(size - 1, int(size * position)))
      byte = f.read(1)
      f.seek(-1, os.SEEK_CUR)
      f.write(bytes([byte[0] ^ 0x10]))
    return True

  return damage


def _cut(keep):
  def damage(path):
    size = os.path.getsize(path)
    if size == 0:
      return False
    os.truncate(path, keep(size))
    return True

  return damage


def _remove(path):
  os.remove(path)
  return True


_DAMAGES = {
  "first byte flipped": _flip(0),
  "byte in the first quarter flipped": _flip(0.2),
  "middle byte flipped": _flip(0.5),
  "last byte flipped": _flip(1),
  "emptied": _cut(lambda size: 0),
  "cut in half": _cut(lambda size: size // 2),
  "cut by one byte": _cut(lambda size: size - 1),
  "removed": _remove,
}


class CorruptionTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    self.good = self.dir + ".good"
    # Checkpoints of step 1 and 2; no save while the damage is looked at.
    saving = trainer.Trainer(self.dir)
    with saving.session() as sess:
      for _ in range(2):
        sess.run(saving.train_op)
    shutil.copytree(self.dir, self.good)
    self.training = trainer.Trainer(self.dir, save_steps=1000000)

  def _restore(self):
    """Returns the restored step, or the error."""
    try:
      with self.training.session() as sess:
        return self.training.check(sess)
    except (tf.errors.OpError, ValueError) as e:
      return e

  def _check(self, name, may_restore=False, older=True):
    """Damages one file in all ways."""
    path = os.path.join(self.dir, name)
    for kind, damage in _DAMAGES.items():
      shutil.rmtree(self.dir)
      shutil.copytree(self.good, self.dir)
      if not damage(path):
        continue
      with self.subTest(file=name, damage=kind):
        result = self._restore()
        if may_restore and result == 2:
          continue
        self.assertIsInstance(result, Exception, f"restored as step {result}")
        self.assertIn(name if kind != "removed" else re.split("-000|.index", name)[0], str(result))
        if older:
          self.assertIn(os.path.join(self.dir, "model.ckpt-1"), str(result))

  def _find(self, start, end=""):
    names = []
    for folder, _, files in os.walk(self.good):
      names += [os.path.relpath(os.path.join(folder, name), self.good) for name in files]
    found = [name for name in sorted(names) if name.startswith(start) and name.endswith(end)]
    self.assertNotEmpty(found, f"no file {start}*{end} in {sorted(names)}")
    return found[0]

  def test_index(self):
    self._check("model.ckpt-2.index")

  def test_data_shard(self):
    self._check(self._find("model.ckpt-2.data-"))

  def test_table(self):
    self._check(self._find("model.ckpt-2.assets/MonolithHashTable_single-"))

  def test_table_cut_between_two_records(self):
    name = self._find("model.ckpt-2.assets/MonolithHashTable_single-")
    path = os.path.join(self.dir, name)
    records = list(tf.compat.v1.io.tf_record_iterator(path))
    framing = 16
    os.truncate(path, sum(len(record) + framing for record in records[:-1]))
    self.assertLen(list(tf.compat.v1.io.tf_record_iterator(path)), len(records) - 1)

    result = self._restore()

    self.assertIsInstance(result, tf.errors.DataLossError)
    self.assertIn(path, str(result))
    self.assertIn("model.ckpt-1", str(result))

  def test_group_of_tables(self):
    self._check(self._find("model.ckpt-2.assets/MonolithMultiHashTable_group-"))

  def test_metadata_of_a_group(self):
    self._check(self._find("model.ckpt-2.assets/MonolithMultiHashTable_group.meta-"))

  def test_hash_filter(self):
    self._check(self._find("model.ckpt-2.assets/hash_filter_0-"))

  def test_manifest(self):
    self._check("model.ckpt-2.manifest", may_restore=True)

  def test_meta_graph_is_not_needed(self):
    self._check("model.ckpt-2.meta", may_restore=True)

  def test_monolith_checkpoint(self):
    self._check("monolith_checkpoint", may_restore=True, older=False)

  def test_state_file(self):
    path = os.path.join(self.dir, "checkpoint")
    for kind, damage in _DAMAGES.items():
      if kind == "removed":
        # Deleting it means to start anew.
        continue
      with self.subTest(damage=kind):
        shutil.rmtree(self.dir)
        shutil.copytree(self.good, self.dir)
        damage(path)
        result = self._restore()
        if isinstance(result, Exception):
          self.assertIn(self.dir, str(result))
          self.assertIn("intact checkpoint", str(result))
        else:
          # The end of the list of all checkpoints was hit, not the name of the newest.
          self.assertEqual(result, 2)


if __name__ == "__main__":
  tf.test.main()
