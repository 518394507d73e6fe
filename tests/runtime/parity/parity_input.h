#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "tessera/base/file_system.h"
#include "tessera/formats/detect.h"
#include "tessera/tessera.h"
#include "train_transformer/model.h"

namespace tessera::test {

/// What both languages train on: a safetensors file with the parameters, and `ids`.
class ParityInput {
 public:
  explicit ParityInput(const std::string& path)
      : reader_(formats::open_checkpoint(FileSystem::posix(), path)), ids(read("ids")) {}

  /// Returns the model with the file's values.
  std::shared_ptr<example::TransformerImpl> make_model() const {
    example::Config config;
    config.vocabulary = read("embedding.weight").size(0);
    config.width = read("embedding.weight").size(1);
    config.sequence = sequence();
    config.num_layers = 3;
    config.num_heads = 2;
    auto model = std::make_shared<example::TransformerImpl>(config);
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->named_parameters())
      parameter.value().copy_(read(parameter.key()));
    return model;
  }
  std::int64_t sequence() const { return ids.size(2) - 1; }

 private:
  /// Requires: one piece, of float32 or int64.
  at::Tensor read(const std::string& name) const {
    const auto* entry = reader_->contents().find_tensor(name);
    if (entry == nullptr) throw std::runtime_error("no tensor " + name);
    const auto index = static_cast<std::size_t>(entry - reader_->contents().tensors.data());
    const bool is_integer = entry->meta.dtype == DType::int64;
    at::Tensor tensor = torch::empty(entry->meta.shape, is_integer ? torch::kLong : torch::kFloat);
    reader_->read_piece(index, 0, {0, tensor.numel()},
                        {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
    return tensor;
  }

  std::unique_ptr<formats::CheckpointReader> reader_;

 public:
  at::Tensor ids;  // [steps, rows, sequence + 1]
};

}  // namespace tessera::test
