"""Saving and restoring variables: a saver that restores only what was lost, and its hook.

The code is in `checkpoints/`; this module publishes it. A name that is replaced here, say `time`,
is replaced for the saver too.

What a killed or failed save can leave, and what happens to it, is in `checkpoints/files.py`. In
short: the `checkpoint` state file only ever names checkpoints that are complete, because it is
written last.

Differences from ByteDance's Monolith: a save of the step that is the newest checkpoint already
never leaves half a checkpoint (the state names another one meanwhile); the forced save at the end
uses barrier and retry; a retry does not repeat what listeners did after a save (an export); the
session's first save is skipped in every session, not only in the first one; a damaged file is
named, together with a checkpoint that is intact; a `checkpoint` or `monolith_checkpoint` file that
cannot be read stops the start instead of being replaced.
"""

from __future__ import annotations

import time

from monolith import _facades
from monolith.native_training.checkpoints import saver
from monolith.native_training.checkpoints.saver import (
  PartialRecoverySaver,
  PsMonitor,
  SaverBuilder,
)
from monolith.native_training.checkpoints.saver_hook import (
  NoFirstSaveCheckpointSaverHook,
  SecondOrStepTimerWithTideSetting,
)
from monolith.native_training.checkpoints.state import (
  MONOLITH_CKPT_STATE_FILE_NAME,
  SaveHelper,
  _ckpt_state_cache_map,
  get_latest_checkpoint_state,
  get_monolith_checkpoint_state,
)

__all__ = [
  "MONOLITH_CKPT_STATE_FILE_NAME",
  "NoFirstSaveCheckpointSaverHook",
  "PartialRecoverySaver",
  "PsMonitor",
  "SaveHelper",
  "SaverBuilder",
  "SecondOrStepTimerWithTideSetting",
  "_ckpt_state_cache_map",
  "get_latest_checkpoint_state",
  "get_monolith_checkpoint_state",
  "time",
]

_facades.forward_assignments(__name__, saver)
