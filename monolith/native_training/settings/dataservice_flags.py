"""The two flags of tf.data service.

They have a module of their own because the datasets, the training configuration and `mlp_utils`
all need them, and absl lets only one module define a flag.
"""

from absl import flags

flags.DEFINE_string("data_service_dispatcher", "", "address of the tf.data service dispatcher")
flags.DEFINE_bool("dataset_use_dataservice", False, "whether to read data through tf.data service")
