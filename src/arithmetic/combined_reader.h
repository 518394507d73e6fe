#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "arithmetic/combination.h"
#include "arithmetic/tensor_sum.h"
#include "formats/partly_read.h"
#include "formats/simplified_values.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::arithmetic {

/// Marks a tensor that is read from the first source, piece by piece: it is not selected, or there
/// is a problem with it, such as a source that lacks some of its elements.
struct AsInFirst {};

/// Where the elements of a combined tensor come from: the first source, one source, or a sum.
using TensorOrigin = std::variant<AsInFirst, inspect::TensorReader, TensorSum>;

/// Where a combined value comes from: the value `index` of source number `source`.
struct ValueOrigin {
  std::size_t source = 0;
  std::size_t index = 0;
};

/// A combination as a checkpoint. Owns its sources and adapters.
class CombinedReader final : public formats::CheckpointReader,
                             public formats::PartlyRead,
                             public formats::SimplifiedValues {
 public:
  using Sources = std::vector<std::unique_ptr<formats::CheckpointReader>>;

  /// Requires: `contents` are those of the first source, except for dtypes, values, notes and
  /// `part`. `tensors` is parallel to `contents.tensors`, and `values` to `contents.values`. Both
  /// may refer to `sources`, `adapters` and `options`.
  CombinedReader(Sources sources, std::vector<LoraAdapter> adapters,
                 std::unique_ptr<const CombineOptions> options,
                 formats::CheckpointContents contents, std::vector<TensorOrigin> tensors,
                 std::vector<ValueOrigin> values);

  formats::Format format() const override { return first().format(); }
  const std::string& path() const override { return path_; }
  const formats::CheckpointContents& contents() const override { return contents_; }
  std::vector<std::vector<std::string>> dict_orders() const override {
    return first().dict_orders();
  }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override;
  Value read_value(std::size_t value_index) const override;
  std::vector<formats::Simplification> simplifications_of_value(
      std::size_t value_index) const override {
    const ValueOrigin& origin = values_[value_index];
    return formats::simplifications_of_value(*sources_[origin.source], origin.index);
  }
  formats::PieceStorage piece_storage(std::size_t tensor_index,
                                      std::size_t piece_index) const override {
    return first().piece_storage(tensor_index, piece_index);
  }
  std::vector<std::string> data_files() const override;
  formats::MissingData find_missing_data() const override;
  void check_files(const formats::FindingSink& sink) const override;
  void check_rest(const formats::RestOptions& options) const override;
  void verify(const formats::FindingSink& sink, const formats::ProgressSink& progress,
              int num_threads) const override;

 private:
  const formats::CheckpointReader& first() const { return *sources_.front(); }
  template <class Visit>
  void for_each_source(Visit visit) const;

  Sources sources_;
  std::vector<LoraAdapter> adapters_;
  std::unique_ptr<const CombineOptions> options_;
  std::string path_;
  formats::CheckpointContents contents_;
  std::vector<TensorOrigin> tensors_;  // parallel to contents_.tensors
  std::vector<ValueOrigin> values_;    // parallel to contents_.values
};

}  // namespace tessera::arithmetic
