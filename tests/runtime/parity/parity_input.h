#pragma once

#include <memory>
#include <string>

#include "runtime/parity/safetensors_file.h"
#include "tessera/tessera.h"
#include "train_transformer/model.h"

namespace tessera::test {

/// What both languages train on: a safetensors file with the parameters, and `ids`.
class ParityInput {
 public:
  explicit ParityInput(const std::string& path) : file_(path), ids(file_.read("ids")) {}

  /// Returns the model with the file's values.
  std::shared_ptr<example::TransformerImpl> make_model() const {
    example::Config config;
    config.vocabulary = file_.read("embedding.weight").size(0);
    config.width = file_.read("embedding.weight").size(1);
    config.sequence = sequence();
    config.num_layers = 3;
    config.num_heads = 2;
    auto model = std::make_shared<example::TransformerImpl>(config);
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->named_parameters())
      parameter.value().copy_(file_.read(parameter.key()));
    return model;
  }
  std::int64_t sequence() const { return ids.size(2) - 1; }

 private:
  SafetensorsFile file_;

 public:
  at::Tensor ids;  // [steps, rows, sequence + 1]
};

}  // namespace tessera::test
