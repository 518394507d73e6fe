#include "reshard/renamed_entries.h"

#include <algorithm>
#include <set>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::reshard {

using formats::TensorEntry;
using formats::ValueEntry;

std::vector<std::vector<std::string>> RenamedEntries::dict_orders() const {
  std::vector<std::vector<std::string>> orders = base().dict_orders();
  for (auto& order : orders) {
    for (std::string& name : order) name = renamed_text(name);
  }
  return orders;
}

void RenamedEntries::read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                                std::span<std::byte> out) const {
  base().read_piece(tensors_[tensor_index], piece_index, range, out);
}

Value RenamedEntries::read_value(std::size_t value_index) const {
  const std::size_t origin = values_[value_index];
  return changed(origin, base().read_value(origin));
}

formats::PieceStorage RenamedEntries::piece_storage(std::size_t tensor_index,
                                                    std::size_t piece_index) const {
  return base().piece_storage(tensors_[tensor_index], piece_index);
}

std::optional<formats::KnownRange> RenamedEntries::known_range(std::size_t tensor_index,
                                                               std::size_t piece_index) const {
  const auto* const known = dynamic_cast<const formats::KnownRanges*>(&base());
  if (known == nullptr) return std::nullopt;
  return known->known_range(tensors_[tensor_index], piece_index);
}

formats::MissingData RenamedEntries::find_missing_data() const {
  formats::MissingData missing = base().find_missing_data();
  formats::MissingData found;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const auto lost = missing.pieces.find(tensors_[i]);
    if (lost != missing.pieces.end()) found.pieces.emplace(i, std::move(lost->second));
  }
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const auto lost = missing.values.find(values_[i]);
    if (lost != missing.values.end()) found.values.emplace(i, std::move(lost->second));
  }
  return found;
}

void RenamedEntries::rename_entries(std::string_view expected, std::string_view found) {
  contents_ = base().contents();
  rename_tensors();
  rename_values();
  for (formats::Alias& alias : contents_.aliases) {
    rename(alias.fqn, alias.key_path);
    alias.target = renamed_text(alias.target);
  }
  std::ranges::sort(contents_.aliases, {}, &formats::Alias::fqn);
  for (auto& simplified : contents_.simplifications) {
    simplified.name = renamed_text(simplified.name);
  }
  for (formats::Finding& finding : contents_.opening_findings) {
    finding.where.fqn = renamed_text(finding.where.fqn);
  }
  check_no_name_twice(expected, found);
}

void RenamedEntries::rename_tensors() {
  std::vector<std::pair<TensorEntry, std::size_t>> renamed;
  for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
    TensorEntry& tensor = contents_.tensors[i];
    change(tensor);
    if (rename(tensor.meta.fqn, tensor.key_path)) {
      tensor.kind = formats::StateKind::plain;
      tensor.parameter.clear();
      set_role(i, tensor);
    }
    renamed.emplace_back(std::move(tensor), i);
  }
  std::ranges::sort(renamed, {},
                    [](const auto& each) -> const std::string& { return each.first.meta.fqn; });
  for (std::size_t i = 0; i < renamed.size(); ++i) {
    contents_.tensors[i] = std::move(renamed[i].first);
    tensors_.push_back(renamed[i].second);
  }
}

void RenamedEntries::rename_values() {
  std::vector<std::pair<ValueEntry, std::size_t>> renamed;
  for (std::size_t i = 0; i < contents_.values.size(); ++i) {
    rename(contents_.values[i].name, contents_.values[i].key_path);
    renamed.emplace_back(std::move(contents_.values[i]), i);
  }
  std::ranges::sort(renamed, {},
                    [](const auto& each) -> const std::string& { return each.first.name; });
  for (std::size_t i = 0; i < renamed.size(); ++i) {
    contents_.values[i] = std::move(renamed[i].first);
    values_.push_back(renamed[i].second);
  }
}

void RenamedEntries::check_no_name_twice(std::string_view expected, std::string_view found) const {
  std::set<std::string_view> seen;
  const auto check = [&](const std::string& name) {
    if (seen.insert(name).second) return;
    throw Error::expected(ErrorKind::mismatch, {.path = path(), .fqn = name}, "names of parameters",
                          expected, found);
  };
  for (const auto& tensor : contents_.tensors) check(tensor.meta.fqn);
  for (const auto& value : contents_.values) check(value.name);
  for (const auto& alias : contents_.aliases) check(alias.fqn);
}

}  // namespace tessera::reshard
