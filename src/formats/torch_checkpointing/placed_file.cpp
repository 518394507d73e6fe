#include "formats/torch_checkpointing/placed_file.h"

#include <utility>

namespace tessera::formats::torch_checkpointing {

using torch_zip::SharedPlace;

PlacedFile::PlacedFile(std::unique_ptr<CheckpointReader> base, std::vector<SharedPlace> places,
                       std::vector<KeyPath> key_paths)
    : base_(std::move(base)), places_(std::move(places)), contents_(base_->contents()) {
  for (std::size_t i = 0; i < key_paths.size(); ++i) {
    contents_.tensors[i].key_path = std::move(key_paths[i]);
  }
}

PlacedFile::PlacedFile(std::unique_ptr<torch_zip::TorchFileReader> base,
                       std::vector<SharedPlace> places)
    : places_(std::move(places)), contents_(base->contents()) {
  torch_ = base.get();
  base_ = std::move(base);
}

void PlacedFile::drop_key_paths() {
  if (torch_ != nullptr) torch_->drop_key_paths();
  for (TensorEntry& tensor : contents_.tensors) tensor.key_path = KeyPath();
  for (Alias& alias : contents_.aliases) alias.key_path = KeyPath();
  for (ValueEntry& value : contents_.values) value.key_path = KeyPath();
}

std::unique_ptr<PlacedFile> PlacedFile::of_empty_dict(
    std::unique_ptr<torch_zip::TorchFileReader> base) {
  auto file = std::make_unique<PlacedFile>(std::move(base), std::vector<SharedPlace>());
  file->contents_.values.push_back({"value", {}});
  file->is_empty_dict_ = true;
  return file;
}

}  // namespace tessera::formats::torch_checkpointing
