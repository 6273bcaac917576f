#include "monolith/serving/native/api/reflection.h"

#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "google/protobuf/descriptor.pb.h"
#include "monolith/serving/native/api/descriptors.h"
#include "monolith/serving/native/reflection.pb.h"

namespace monolith {
namespace serving {
namespace {

namespace pb = google::protobuf;
using reflection::ServerReflectionRequest;
using reflection::ServerReflectionResponse;

class Reflection {
 public:
  Reflection() : descriptors_(MakeServiceDescriptors()) {}

  RpcReply Answer(const std::string& message) {
    RpcReply reply;
    ServerReflectionRequest request;
    if (!request.ParseFromString(message)) {
      reply.status = Status(Code::kInvalidArgument, "the message is not a ServerReflectionRequest");
      return reply;
    }
    ServerReflectionResponse response;
    response.set_valid_host(request.host());
    *response.mutable_original_request() = request;
    const Status status = Fill(request, &response);
    if (!status.ok()) {
      response.mutable_error_response()->set_error_code(static_cast<int>(status.code));
      response.mutable_error_response()->set_error_message(status.message);
    }
    reply.message = response.SerializeAsString();
    return reply;
  }

 private:
  Status Fill(const ServerReflectionRequest& request, ServerReflectionResponse* response) {
    const pb::DescriptorPool& pool = *descriptors_.pool;
    switch (request.message_request_case()) {
      case ServerReflectionRequest::kListServices:
        for (const std::string& name : descriptors_.services) {
          response->mutable_list_services_response()->add_service()->set_name(name);
        }
        return Status();
      case ServerReflectionRequest::kFileByFilename:
        return AddFile(pool.FindFileByName(request.file_by_filename()),
                       "file '" + request.file_by_filename() + "'", response);
      case ServerReflectionRequest::kFileContainingSymbol:
        return AddFile(pool.FindFileContainingSymbol(request.file_containing_symbol()),
                       "symbol '" + request.file_containing_symbol() + "'", response);
      case ServerReflectionRequest::kFileContainingExtension: {
        const auto& wanted = request.file_containing_extension();
        const pb::Descriptor* type = pool.FindMessageTypeByName(wanted.containing_type());
        const pb::FieldDescriptor* extension =
            type == nullptr ? nullptr : pool.FindExtensionByNumber(type, wanted.extension_number());
        return AddFile(extension == nullptr ? nullptr : extension->file(),
                       "extension " + std::to_string(wanted.extension_number()) + " of '" +
                           wanted.containing_type() + "'",
                       response);
      }
      case ServerReflectionRequest::kAllExtensionNumbersOfType: {
        const std::string& name = request.all_extension_numbers_of_type();
        const pb::Descriptor* type = pool.FindMessageTypeByName(name);
        if (type == nullptr) return NotFound("message '" + name + "'");
        std::vector<const pb::FieldDescriptor*> extensions;
        pool.FindAllExtensions(type, &extensions);
        auto* numbers = response->mutable_all_extension_numbers_response();
        numbers->set_base_type_name(name);
        for (const pb::FieldDescriptor* extension : extensions) {
          numbers->add_extension_number(extension->number());
        }
        return Status();
      }
      case ServerReflectionRequest::MESSAGE_REQUEST_NOT_SET:
        break;
    }
    return Status(Code::kInvalidArgument, "the ServerReflectionRequest asks for nothing");
  }

  static Status NotFound(const std::string& what) {
    return Status(Code::kNotFound, "the server has no " + what.substr(0, 200));
  }

  Status AddFile(const pb::FileDescriptor* file, const std::string& what,
                 ServerReflectionResponse* response) {
    if (file == nullptr) return NotFound(what);
    std::set<const pb::FileDescriptor*> seen;
    AddWithImports(file, &seen, response->mutable_file_descriptor_response());
    return Status();
  }

  // The file itself comes first, and each file once.
  void AddWithImports(const pb::FileDescriptor* file, std::set<const pb::FileDescriptor*>* seen,
                      reflection::FileDescriptorResponse* response) {
    if (!seen->insert(file).second) return;
    response->add_file_descriptor_proto(Describe(file));
    for (int i = 0; i < file->dependency_count(); ++i) {
      AddWithImports(file->dependency(i), seen, response);
    }
  }

  const std::string& Describe(const pb::FileDescriptor* file) {
    std::string& text = described_[file];
    if (text.empty()) {
      pb::FileDescriptorProto described;
      file->CopyTo(&described);
      text = described.SerializeAsString();
    }
    return text;
  }

  const ServiceDescriptors descriptors_;
  // Serialized descriptions. Describing a file takes long, and all sockets wait for it, so each is
  // described once. Only the thread of the sockets uses this.
  std::unordered_map<const pb::FileDescriptor*, std::string> described_;
};

}  // namespace

RpcStreamMethods MakeReflectionMethods() {
  const auto reflection = std::make_shared<Reflection>();
  RpcStreamMethod method;
  method.answer = [reflection](const std::string& message) { return reflection->Answer(message); };
  return {{"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", method},
          {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", method}};
}

}  // namespace serving
}  // namespace monolith
