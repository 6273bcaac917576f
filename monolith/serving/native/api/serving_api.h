// The calls of TensorFlow Serving, whichever way they come in: gRPC and REST share this.
#ifndef MONOLITH_SERVING_NATIVE_API_SERVING_API_H_
#define MONOLITH_SERVING_NATIVE_API_SERVING_API_H_

#include <string>
#include <utility>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/base/worker_pool.h"
#include "monolith/serving/native/http2/rpc.h"
#include "monolith/serving/native/metrics.h"
#include "monolith/serving/native/model/model_manager.h"
#include "monolith/serving/native/model/predict.h"

namespace monolith {
namespace serving {

inline constexpr char kPredictPath[] = "/tensorflow.serving.PredictionService/Predict";

class ServingApi {
 public:
  // None of them is owned.
  ServingApi(ModelManager* models, Metrics* metrics, const PredictLimits& limits, Runner runner)
      : models_(models), metrics_(metrics), limits_(limits), runner_(std::move(runner)) {}

  Status Predict(const api::PredictRequest& request, MemoryLease* lease,
                 api::PredictResponse* response);
  Status Classify(const api::ClassificationRequest& request, MemoryLease* lease,
                  api::ClassificationResponse* response);
  Status Regress(const api::RegressionRequest& request, MemoryLease* lease,
                 api::RegressionResponse* response);
  Status MultiInference(const api::MultiInferenceRequest& request, MemoryLease* lease,
                        api::MultiInferenceResponse* response);
  Status GetModelMetadata(const api::GetModelMetadataRequest& request,
                          api::GetModelMetadataResponse* response);
  Status GetModelStatus(const api::GetModelStatusRequest& request,
                        api::GetModelStatusResponse* response);
  Status Reload(const api::ReloadConfigRequest& request, Clock::time_point deadline,
                api::ReloadConfigResponse* response);
  Status CheckHealth(const api::HealthCheckRequest& request, api::HealthCheckResponse* response);

  // Returns the method that tells a client of every change of a model's health.
  RpcStreamMethods MakeHealthMethods();

  // Counts a request that began at `start`.
  void Count(const std::string& model, const char* method, Code code, Clock::time_point start);

  // Runs a gRPC call in the calling thread.
  RpcReply Handle(const RpcCall& call);

  // Runs a call of Predict if that does not take long, as far as is known; else returns false.
  bool PredictIfShort(const std::string& message, RpcReply* reply);

  ModelManager* models() const { return models_; }
  Metrics* metrics() const { return metrics_; }
  const PredictLimits& limits() const { return limits_; }
  const Runner& runner() const { return runner_; }

 private:
  Status PredictOn(Servable* servable, const Signature& signature, int64_t version,
                   const api::PredictRequest& request, MemoryLease* lease,
                   api::PredictResponse* response);
  // Describes a call for the metrics.
  struct Counted {
    std::string model;
    // Null if it is not counted.
    const char* method = nullptr;
  };
  RpcReply HandleUncounted(const RpcCall& call, Counted* counted);
  // Returns false for a call of another service, or one that runs no model.
  bool HandlePrediction(const RpcCall& call, Counted* counted, RpcReply* reply);

  ModelManager* const models_;
  Metrics* const metrics_;
  const PredictLimits limits_;
  const Runner runner_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_API_SERVING_API_H_
