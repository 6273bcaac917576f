"""Messages of samples, generated from `proto/idl/matrix/proto`."""
