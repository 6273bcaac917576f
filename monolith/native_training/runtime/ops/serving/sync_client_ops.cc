// MonolithParameterSyncClient remembers touched rows, MonolithDummySyncClient nothing.
#include <string>

#include "monolith/native_training/runtime/ops/serving/sync_client.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

REGISTER_OP("MonolithDummySyncClient")
    .Output("handle: resource")
    .Attr("config: string = ''")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a client that remembers nothing, for tables whose updates go nowhere.

handle: For tables.
config: Unused.
)doc");

REGISTER_OP("MonolithParameterSyncClient")
    .Output("handle: resource")
    .Attr("config: string")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a client that remembers which embeddings were touched since the last push.

handle: For tables and MonolithParameterSync.
config: A serialized ClientConfig, or empty.
)doc");

template <bool is_dummy>
class SyncClientOp : public NamedResourceOp<SyncClient> {
 public:
  using NamedResourceOp<SyncClient>::NamedResourceOp;

 private:
  Status Create(OpKernelContext*, const std::string&, SyncClient** resource) override {
    *resource = new SyncClient(is_dummy);
    return OkStatus();
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithDummySyncClient").Device(DEVICE_CPU), SyncClientOp<true>);
// Tables on a GPU use it, too.
REGISTER_GUARDED_KERNEL(Name("MonolithDummySyncClient").Device(DEVICE_GPU).HostMemory("handle"),
                        SyncClientOp<true>);
REGISTER_GUARDED_KERNEL(Name("MonolithParameterSyncClient").Device(DEVICE_CPU),
                        SyncClientOp<false>);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
