// How a program without Python makes the calls of TfServingRemotePredict.
//
// The op library is loaded by dlopen: the program looks MonolithSetRemotePredictor up by name.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SERVING_REMOTE_PREDICTOR_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SERVING_REMOTE_PREDICTOR_H_

#include <cstdint>

extern "C" {

// Takes the answer of a call: with code 0 a serialized PredictResponse, else the text of an error.
// To be called once, from any thread that may compute the rest of the model.
using MonolithPredictDone = void (*)(void* context, int32_t code, const char* data, int64_t size);

// Begins a call and returns without waiting for its answer. `request` is a serialized
// PredictRequest and, like `old_name`, only there until it returns.
using MonolithPredictFunction = void (*)(void* self, const char* request, int64_t request_size,
                                         const char* old_name, int64_t old_name_size,
                                         int64_t timeout_millis, MonolithPredictDone done,
                                         void* context);

// Has the ops of this process call `function` instead of Python; null for Python again.
__attribute__((visibility("default"))) void MonolithSetRemotePredictor(
    MonolithPredictFunction function, void* self);

}  // extern "C"

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SERVING_REMOTE_PREDICTOR_H_
