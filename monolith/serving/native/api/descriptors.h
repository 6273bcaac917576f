// Describes the server's services under the names that clients know.
#ifndef MONOLITH_SERVING_NATIVE_API_DESCRIPTORS_H_
#define MONOLITH_SERVING_NATIVE_API_DESCRIPTORS_H_

#include <memory>
#include <string>
#include <vector>

#include "google/protobuf/descriptor.h"

namespace monolith {
namespace serving {

struct ServiceDescriptors {
  // Knows the services and their messages, on top of what is linked in.
  std::unique_ptr<google::protobuf::DescriptorPool> pool;
  // Full names.
  std::vector<std::string> services;
};

// The messages that the server reads and writes have other packages, and bytes where TensorFlow's
// own classes parse later. The result has names and types of TensorFlow Serving, of gRPC's health
// checks and of its reflection, as far as the server implements them. It is empty if a description
// contradicts itself, which a test would see.
ServiceDescriptors MakeServiceDescriptors();

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_API_DESCRIPTORS_H_
