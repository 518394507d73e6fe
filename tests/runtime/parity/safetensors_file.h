#pragma once

#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "tessera/base/file_system.h"
#include "tessera/formats/detect.h"

namespace tessera::test {

/// A safetensors file of float32 and int64 tensors, read by name.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path)
      : reader_(formats::open_checkpoint(FileSystem::posix(), path)) {}

  bool contains(const std::string& name) const {
    return reader_->contents().find_tensor(name) != nullptr;
  }
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

 private:
  std::unique_ptr<formats::CheckpointReader> reader_;
};

}  // namespace tessera::test
