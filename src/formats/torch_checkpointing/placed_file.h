#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/part_of_check.h"
#include "formats/torch_zip/torch_zip_reader.h"

namespace tessera::formats::torch_checkpointing {

/// A reader of one rank's file (torch.save or safetensors). The caller gives the places of its
/// parts in the whole tensors, because the file states only some of these places, or none.
class PlacedFile final : public torch_zip::TorchFileReader {
 public:
  /// `places`: one for each tensor; null for a tensor that is not known to be a part of another.
  /// `key_paths`: one for each tensor.
  PlacedFile(std::unique_ptr<CheckpointReader> base, std::vector<torch_zip::SharedPlace> places,
             std::vector<KeyPath> key_paths);
  /// Shows a file of torch.save with `places` instead of its own places.
  PlacedFile(std::unique_ptr<torch_zip::TorchFileReader> base,
             std::vector<torch_zip::SharedPlace> places);

  /// Returns a reader of a torch.save file whose object is `{}`. The reader has one value, the
  /// empty dict. (Without this value, the file would have no entries.)
  static std::unique_ptr<PlacedFile> of_empty_dict(
      std::unique_ptr<torch_zip::TorchFileReader> base);

  const torch_zip::SharedPlace& place_of(std::size_t tensor_index) const override {
    return places_[tensor_index];
  }
  std::optional<std::uint32_t> crc32_of(std::size_t tensor_index) const override {
    return torch_ == nullptr ? std::nullopt : torch_->crc32_of(tensor_index);
  }
  const Error* refusal_of(std::size_t value_index) const override {
    return torch_ == nullptr || is_empty_dict_ ? nullptr : torch_->refusal_of(value_index);
  }
  std::size_t order_of(std::size_t value_index) const override {
    return torch_ == nullptr || is_empty_dict_ ? value_index : torch_->order_of(value_index);
  }
  std::string saved_name() const override {
    return torch_ == nullptr ? std::string() : torch_->saved_name();
  }
  bool has_sole_object() const override {
    return is_empty_dict_ || (torch_ != nullptr && torch_->has_sole_object());
  }

  std::vector<std::string> foreign_names() const override {
    return torch_ == nullptr ? std::vector<std::string>() : torch_->foreign_names();
  }
  std::shared_ptr<torch_zip::StorageChecks> checks() const override {
    return torch_ == nullptr ? nullptr : torch_->checks();
  }
  void continue_checks(std::shared_ptr<torch_zip::StorageChecks> checks) override {
    if (torch_ != nullptr) torch_->continue_checks(std::move(checks));
  }
  void check_rest(const RestOptions& options) const override {
    formats::check_rest(*base_, options);
  }
  void drop_key_paths() override;

  Format format() const override { return base_->format(); }
  const std::string& path() const override { return base_->path(); }
  const CheckpointContents& contents() const override { return contents_; }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    base_->read_piece(tensor_index, piece_index, range, out);
  }
  Value read_value(std::size_t value_index) const override {
    return is_empty_dict_ ? Value(Value::Dict{}) : base_->read_value(value_index);
  }
  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override {
    return base_->piece_storage(tensor_index, piece_index);
  }
  std::vector<std::string> data_files() const override { return base_->data_files(); }
  void check_files(const FindingSink& sink) const override { base_->check_files(sink); }
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override {
    formats::verify_part(*base_, sink, progress, num_threads, part);
  }

 private:
  std::unique_ptr<CheckpointReader> base_;
  torch_zip::TorchFileReader* torch_ = nullptr;  // base_, if that is of torch.save; else null
  std::vector<torch_zip::SharedPlace> places_;
  CheckpointContents contents_;
  bool is_empty_dict_ = false;
};

}  // namespace tessera::formats::torch_checkpointing
