// gRPC's reflection, for tools that know nothing about the server but its address.
#ifndef MONOLITH_SERVING_NATIVE_API_REFLECTION_H_
#define MONOLITH_SERVING_NATIVE_API_REFLECTION_H_

#include "monolith/serving/native/http2/rpc.h"

namespace monolith {
namespace serving {

// Returns the methods of grpc.reflection.v1 and v1alpha.
RpcStreamMethods MakeReflectionMethods();

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_API_REFLECTION_H_
