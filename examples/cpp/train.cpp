// Trains with the files of kfac_engine.export_training, in C++ with ONNX Runtime alone.
//
//   g++ -std=c++17 train.cpp -I HEADERS -L LIBRARY -l onnxruntime -o train
//   ./train FOLDER DIGITS STEPS
//
// FOLDER has training.onnx and initial.onnx of the digits CNN; DIGITS is written by
// scripts/browser_files.py: two numbers, images of 64 bytes from 0 to 16, and labels.

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

using Values = std::map<std::string, Ort::Value>;

// The names of the inputs or outputs of a session, as the runtime wants them.
struct Names {
  std::vector<std::string> texts;
  std::vector<const char*> pointers;

  Names(Ort::Session& session, bool inputs) {
    Ort::AllocatorWithDefaultOptions allocator;
    size_t count = inputs ? session.GetInputCount() : session.GetOutputCount();
    for (size_t i = 0; i < count; ++i) {
      auto name = inputs ? session.GetInputNameAllocated(i, allocator)
                         : session.GetOutputNameAllocated(i, allocator);
      texts.emplace_back(name.get());
    }
    for (auto& text : texts) pointers.push_back(text.c_str());
  }
};

// A view of a value, because a call takes the values of all inputs in one array.
Ort::Value view(Ort::Value& value) {
  auto info = value.GetTensorTypeAndShapeInfo();
  auto shape = info.GetShape();
  size_t bytes = info.GetElementCount() *
                 (info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ? 8 : 4);
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  return Ort::Value::CreateTensor(memory, value.GetTensorMutableData<void>(), bytes, shape.data(),
                                  shape.size(), info.GetElementType());
}

template <typename T>
Ort::Value tensor(std::vector<T>& data, std::vector<int64_t> shape) {
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  return Ort::Value::CreateTensor<T>(memory, data.data(), data.size(), shape.data(), shape.size());
}

int main(int count, char** arguments) {
  if (count < 4) return 1;
  std::string folder = arguments[1];
  std::ifstream file(arguments[2], std::ios::binary);
  std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(file)), {});
  uint32_t digits;
  std::memcpy(&digits, bytes.data(), 4);

  Ort::Env environment;
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(1);
  options.SetGraphOptimizationLevel(ORT_DISABLE_ALL);
  Ort::Session trainer(environment, (folder + "/training.onnx").c_str(), options);
  Ort::Session first(environment, (folder + "/initial.onnx").c_str(), options);
  Names inputs(trainer, true), outputs(trainer, false), states(first, false);

  Values state;
  auto initial = first.Run({}, nullptr, nullptr, 0, states.pointers.data(), states.texts.size());
  for (size_t i = 0; i < initial.size(); ++i) state.emplace(states.texts[i], std::move(initial[i]));

  const size_t batch = 64;
  for (int step = 0; step < std::atoi(arguments[3]); ++step) {
    std::vector<float> pixels(64 * batch), rate{1.0f};
    std::vector<int64_t> labels(batch);
    for (size_t i = 0; i < batch; ++i) {
      size_t digit = (step * batch + i) % 1400;
      for (size_t k = 0; k < 64; ++k) pixels[64 * i + k] = bytes[8 + 64 * digit + k] / 16.0f;
      labels[i] = bytes[8 + 64 * digits + digit];
    }
    Values data;
    data.emplace("image", tensor(pixels, {int64_t(batch), 1, 8, 8}));
    data.emplace("targets", tensor(labels, {int64_t(batch)}));
    data.emplace("rate", tensor(rate, {}));

    std::vector<Ort::Value> feeds;
    for (auto& name : inputs.texts) {
      feeds.push_back(view(data.count(name) ? data.at(name) : state.at(name)));
    }
    auto results = trainer.Run({}, inputs.pointers.data(), feeds.data(), feeds.size(),
                               outputs.pointers.data(), outputs.texts.size());
    for (size_t i = 0; i < results.size(); ++i) {
      const std::string& name = outputs.texts[i];
      if (name == "loss") std::cout << results[i].GetTensorData<float>()[0] << std::endl;
      // An output without entries keeps the old state.
      bool changed = results[i].GetTensorTypeAndShapeInfo().GetElementCount() > 0;
      if (name.rfind("new ", 0) == 0 && changed) state.at(name.substr(4)) = std::move(results[i]);
    }
  }
}
