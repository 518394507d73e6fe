#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/derived_reader.h"
#include "formats/known_ranges.h"
#include "formats/simplified_values.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::reshard {

/// Reads a checkpoint, and shows other names for some of its entries. A derived class says which,
/// may also change tensors and values, and calls `rename_entries` at the end of its constructor.
class RenamedEntries : public formats::DerivedReader,
                       public formats::KnownRanges,
                       public formats::SimplifiedValues {
 public:
  void add_note(formats::Finding note) { contents_.opening_findings.push_back(std::move(note)); }

  std::vector<std::vector<std::string>> dict_orders() const override;
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override;
  Value read_value(std::size_t value_index) const override;
  std::vector<formats::Simplification> simplifications_of_value(
      std::size_t value_index) const override {
    return formats::simplifications_of_value(base(), values_[value_index]);
  }
  formats::PieceStorage piece_storage(std::size_t tensor_index,
                                      std::size_t piece_index) const override;
  std::optional<formats::KnownRange> known_range(std::size_t tensor_index,
                                                 std::size_t piece_index) const override;
  formats::MissingData find_missing_data() const override;

 protected:
  explicit RenamedEntries(std::unique_ptr<formats::CheckpointReader> source)
      : DerivedReader(std::move(source)) {}

  /// Renames all entries. Throws: Error(mismatch) with `expected` and `found` if two entries then
  /// have one name.
  void rename_entries(std::string_view expected, std::string_view found);

 private:
  /// Changes a name and its path. Returns whether it has changed them.
  virtual bool rename(std::string& name, formats::SharedKeyPath& path) const = 0;
  /// Returns the new name for a name that comes without its key path.
  virtual std::string renamed_text(const std::string& name) const = 0;
  /// Sets the kind and the parameter of a renamed tensor, which is plain state of no parameter.
  /// `tensor_in_source`: its index there. Without it, classify_state finds both by the new name.
  virtual void set_role(std::size_t /*tensor_in_source*/, formats::TensorEntry& /*tensor*/) const {}
  /// Changes a tensor before it is renamed.
  virtual void change(formats::TensorEntry& /*tensor*/) const {}
  /// Returns what a value of the source becomes. `value_in_source`: its index there.
  virtual Value changed(std::size_t value_in_source, Value value) const = 0;

  void rename_tensors();
  void rename_values();
  void check_no_name_twice(std::string_view expected, std::string_view found) const;

  std::vector<std::size_t> tensors_;  // one per tensor of contents_: its index in the source
  std::vector<std::size_t> values_;   // one per value of contents_: its index in the source
};

}  // namespace tessera::reshard
