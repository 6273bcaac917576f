// Tests what gRPC writes into headers.
#include "monolith/serving/native/http2/rpc.h"

#include <gtest/gtest.h>

#include <string>

#include "monolith/serving/native/flags.h"

namespace monolith {
namespace serving {
namespace {

TEST(RpcTest, ReadsTimeouts) {
  EXPECT_EQ(ParseGrpcTimeout("5S"), std::chrono::seconds(5));
  EXPECT_EQ(ParseGrpcTimeout("250m"), std::chrono::milliseconds(250));
  EXPECT_EQ(ParseGrpcTimeout("99999999n"), std::chrono::nanoseconds(99'999'999));
  EXPECT_EQ(ParseGrpcTimeout("99999999H"), std::chrono::hours(1000));
  for (const char* text : {"", "S", "5", "-5S", "5x", "123456789S", "5 S", "0x5S"}) {
    EXPECT_FALSE(ParseGrpcTimeout(text).has_value()) << text;
  }
  EXPECT_EQ(FormatGrpcTimeout(std::chrono::milliseconds(30)), "30m");
  EXPECT_EQ(FormatGrpcTimeout(std::chrono::milliseconds(-3)), "1m");
}

TEST(RpcTest, MessagesReadBackAsTheSame) {
  const std::string text = "50% of\n\"\xc3\xa4\"";

  EXPECT_EQ(EncodeGrpcMessage(text), "50%25 of%0A\"%C3%A4\"");
  EXPECT_EQ(DecodeGrpcMessage(EncodeGrpcMessage(text)), text);
  EXPECT_EQ(DecodeGrpcMessage("a%zz%4"), "a%zz%4");
}

TEST(RpcTest, PrefixHasTheLength) {
  for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{70'000}, int64_t{4'000'000'000}}) {
    const std::string prefix = GrpcPrefix(size);
    ASSERT_EQ(prefix.size(), 5u);
    EXPECT_EQ(GrpcMessageBytes(prefix), size);
  }
}

TEST(FlagsTest, TakesTheFormsOfTensorFlowServing) {
  Flags flags;
  const Status status =
      ParseFlags({"--port=9", "--model_base_path", "/m", "--enable_model_warmup=false",
                  "--allow_growth", "--tensorflow_session_parallelism=3",
                  "--grpc_channel_arguments=grpc.max_receive_message_length=77"},
                 &flags);

  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_EQ(flags.port, 9);
  EXPECT_EQ(flags.model_base_path, "/m");
  EXPECT_FALSE(flags.enable_model_warmup);
  EXPECT_EQ(flags.tensorflow_inter_op_parallelism, 3);
  EXPECT_EQ(flags.max_receive_message_bytes, 77);
}

TEST(FlagsTest, RefusesWhatItWouldNotDo) {
  for (const char* flag :
       {"--port=70000", "--port=x", "--port=", "--unknown=1", "word",
        "--batching_parameters_file=x", "--row_log_servers=x", "--row_log_interval_secs=1",
        "--row_log_interval_secs=inf", "--per_process_gpu_memory_fraction=2",
        "--allow_growth=maybe", "--grpc_channel_arguments=grpc.unknown=1", "--model_config_file=x",
        "--rest_api_port"}) {
    Flags flags;
    const Status status = ParseFlags({"--model_base_path=/m", flag}, &flags);
    EXPECT_EQ(status.code, Code::kInvalidArgument) << flag;
  }
  Flags flags;
  EXPECT_FALSE(ParseFlags({}, &flags).ok());
  EXPECT_FALSE(ParseFlags({"--model_base_path=/m", "--port=0"}, &flags).ok());
}

}  // namespace
}  // namespace serving
}  // namespace monolith
