"""The dense optimizers a configuration can name."""

import tensorflow as tf

AdagradOptimizer = tf.compat.v1.train.AdagradOptimizer
MomentumOptimizer = tf.compat.v1.train.MomentumOptimizer
RMSPropOptimizer = tf.compat.v1.train.RMSPropOptimizer
AdamOptimizer = tf.compat.v1.train.AdamOptimizer

optimizers = {
  "adagrad": AdagradOptimizer,
  "momentum": MomentumOptimizer,
  "rmsprop": RMSPropOptimizer,
  "adam": AdamOptimizer,
}
