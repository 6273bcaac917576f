// Marks functions that kernels on a GPU share with the engine. Only nvcc knows the difference.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_HOST_DEVICE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define MONOLITH_HOST_DEVICE __host__ __device__
#else
#define MONOLITH_HOST_DEVICE
#endif

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_HOST_DEVICE_H_
