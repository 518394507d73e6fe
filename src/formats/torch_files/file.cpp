#include "formats/torch_files/file.h"

#include <algorithm>
#include <numeric>

#include "formats/open_files.h"
#include "tessera/base/error.h"

namespace tessera::formats::torch_files {

const PathPool::Item& PathPool::find_or_add(const KeyPath& keys) {
  const auto [item, is_new] = items_.try_emplace(keys);
  if (is_new) {
    item->second.reserve(keys.size());
    for (const Key& key : keys) item->second.push_back(spell({key}));
  }
  return *item;
}

File::File(const FileSystem& fs, const std::string& directory, std::string name,
           const std::vector<std::string>& as_dict, std::shared_ptr<PathPool> paths)
    : name_(std::move(name)),
      paths_(std::move(paths)),
      reader_(torch_zip::read_torch_zip(open_kept(fs, join_path(directory, name_)), as_dict,
                                        torch_zip::Pieces::left_out)) {
  add_entries();
  reader_->drop_key_paths();  // the entries have them
}

void File::add_entry(const std::string& name, const KeyPath& path, Entry::Kind kind,
                     std::uint32_t dict_order, std::size_t index) {
  const auto& [keys, texts] = paths_->find_or_add(path.empty() ? KeyPath{name} : path);
  entries_.push_back({texts, keys, kind, dict_order, index});
}

void File::add_entries() {
  const CheckpointContents& contents = reader_->contents();
  entries_.reserve(contents.tensors.size() + contents.aliases.size() + contents.values.size());
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const TensorEntry& tensor = contents.tensors[i];
    add_entry(tensor.meta.fqn, tensor.key_path, Entry::Kind::tensor, tensor.dict_order, i);
  }
  for (const Alias& alias : contents.aliases) {
    const TensorEntry* const target = contents.find_tensor(alias.target);
    TESSERA_CHECK(target != nullptr);
    add_entry(alias.fqn, alias.key_path, Entry::Kind::tensor, alias.dict_order,
              static_cast<std::size_t>(target - contents.tensors.data()));
  }
  std::vector<std::pair<std::size_t, std::size_t>> values;  // (order in the pickle, index)
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    values.emplace_back(reader_->order_of(i), i);
  }
  std::ranges::sort(values);
  for (const auto& [place, i] : values) {
    const ValueEntry& value = contents.values[i];
    add_entry(value.name, value.key_path, Entry::Kind::value, value.dict_order, i);
  }
  by_path_.resize(entries_.size());
  std::iota(by_path_.begin(), by_path_.end(), std::uint32_t{0});
  std::ranges::sort(by_path_, {}, [&](std::size_t i) -> const auto& { return entries_[i].path; });
}

std::vector<const Entry*> in_dict_order(std::vector<const Entry*> entries) {
  std::ranges::stable_sort(entries, {}, &Entry::dict_order);
  return entries;
}

std::vector<const Entry*> File::below(const std::vector<std::string>& keys) const {
  const auto path_of = [&](std::size_t i) -> const auto& { return entries_[i].path; };
  auto next = std::ranges::upper_bound(by_path_, keys, {}, path_of);
  std::vector<std::size_t> found;
  for (; next != by_path_.end(); ++next) {
    const std::vector<std::string>& path = entries_[*next].path;
    if (path.size() < keys.size() || !std::equal(keys.begin(), keys.end(), path.begin())) break;
    found.push_back(*next);
  }
  std::ranges::sort(found);
  std::vector<const Entry*> entries;
  for (const std::size_t i : found) entries.push_back(&entries_[i]);
  return entries;
}

const Entry* File::find(const std::vector<std::string>& path) const {
  const auto path_of = [&](std::size_t i) -> const auto& { return entries_[i].path; };
  const auto found = std::ranges::lower_bound(by_path_, path, {}, path_of);
  if (found == by_path_.end() || entries_[*found].path != path) return nullptr;
  return &entries_[*found];
}

std::optional<Value> File::value_of(const Entry& entry) const {
  if (entry.kind != Entry::Kind::value || reader_->refusal_of(entry.index) != nullptr) return {};
  return reader_->read_value(entry.index);
}

std::optional<Value> File::value_at(const std::vector<std::string>& path) const {
  const Entry* const entry = find(path);
  return entry == nullptr ? std::nullopt : value_of(*entry);
}

std::optional<std::int64_t> File::number_at(const std::vector<std::string>& path) const {
  const auto value = value_at(path);
  const auto* const number = value ? value->get_if<std::int64_t>() : nullptr;
  return number == nullptr ? std::nullopt : std::optional(*number);
}

}  // namespace tessera::formats::torch_files
