"""Defines the messages between the debugging server and its client."""

# Keys and values of a reply, `{"status": "success", "msg": "<JSON>"}`.
STATUS = "status"
SUCCESS = "success"
FAIL = "fail"
MSG = "msg"

# Where to post, and the keys of the body.
VARIABLES_PATH = "/debugging/variables"
VARIABLE_NAMES = "variable_names"
FEATURES_PATH = "/debugging/features"
FEATURE_NAMES = "feature_names"
FEATURE_IDS = "feature_ids"
