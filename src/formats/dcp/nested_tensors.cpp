#include "formats/dcp/nested_tensors.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/outside_failure.h"
#include "base/size_text.h"
#include "formats/megatron/torch_dist_files.h"
#include "formats/torch_zip/saved_file_value.h"
#include "formats/torch_zip/simplifications.h"

namespace tessera::formats::dcp {
namespace {

using torch_zip::Leaf;
using torch_zip::Leaves;
using torch_zip::TensorRecord;

struct TensorRow {
  TensorEntry entry;
  std::vector<StorageInfo> places;
  std::shared_ptr<const Chunk> chunk{};  // set for parts taken out of a value
  std::uint32_t place_in_value = 0;      // of parts taken out of a value
};

struct ValueRow {
  ValueEntry entry;
  StorageInfo place;
  std::optional<std::variant<Value, Error>> content{};  // set for parts taken out of a value
  std::uint32_t place_in_value = 0;
};

/// Says whether a value must be taken apart: whether an item of it is a tensor, or something that
/// Tessera refuses to read.
bool holds_more_than_values(const std::vector<Leaf>& leaves) {
  return std::ranges::any_of(leaves, [](const Leaf& leaf) {
    return !leaf.path.empty() && !std::holds_alternative<Value>(leaf.content);
  });
}

/// Returns whether a value is an object of Megatron's that Megatron must find whole: it has tensors
/// and values only. The object in place of `common.pt` is not one, because Tessera reads its items.
bool stays_whole(const std::string& name, const StorageInfo& info, const Leaves& flattened) {
  constexpr std::uint64_t kMaxNbytes = std::uint64_t{64} << 20;
  const auto holds = [&]<class Content>(std::in_place_type_t<Content>) {
    return std::ranges::any_of(flattened.leaves, [](const Leaf& leaf) {
      return std::holds_alternative<Content>(leaf.content);
    });
  };
  return megatron::is_object(name) && !megatron::before_common_object(name) &&
         info.nbytes <= kMaxNbytes && flattened.opened_classes.empty() &&
         holds(std::in_place_type<TensorRecord>) && !holds(std::in_place_type<Error>);
}

class Parts {
 public:
  Parts(Metadata& metadata, const std::string& path) : metadata_(metadata), path_(path) {
    CheckpointContents& contents = metadata.contents;
    for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
      tensors_.push_back({std::move(contents.tensors[t]), places_of(metadata, t)});
    }
  }

  void keep(ValueEntry entry, const StorageInfo& info) {
    values_.push_back({std::move(entry), info});
  }

  void keep_as_file(ValueEntry entry, const StorageInfo& info, const Item& item) {
    std::string bytes(info.nbytes, '\0');
    item.file->read_at(info.offset, std::as_writable_bytes(std::span(bytes)));
    values_.push_back({std::move(entry), info, torch_zip::saved_file_value(std::move(bytes))});
  }

  /// Records which parts of the value `name` are read in a simplified form. `is_apart`: the value
  /// is taken apart, so its parts have their own names.
  void note(const std::string& name, const std::vector<Simplification>& simplifications,
            bool is_apart) {
    for (const auto& [kind, within, what] : simplifications) {
      const bool is_whole = within.empty() || !is_apart;
      metadata_.contents.simplifications.push_back(
          {kind, is_whole ? name : name + "." + within, what});
    }
  }

  void add(const std::string& name, const StorageInfo& info,
           const std::shared_ptr<const Item>& item, std::vector<Leaf> leaves,
           std::uint32_t dict_order) {
    note_tensors(name, item->archive, leaves);
    std::uint32_t place = 0;
    for (Leaf& leaf : leaves) {
      KeyPath key_path{name};
      key_path.insert(key_path.end(), leaf.path.begin(), leaf.path.end());
      std::string fqn = spell(key_path);
      if (auto* record = std::get_if<TensorRecord>(&leaf.content)) {
        add_tensor(std::move(fqn), std::move(key_path), info, item, std::move(*record));
        tensors_.back().entry.dict_order = dict_order;
        tensors_.back().place_in_value = ++place;
        continue;
      }
      ValueEntry entry{std::move(fqn), std::move(key_path), dict_order};
      if (auto* value = std::get_if<Value>(&leaf.content)) {
        values_.push_back({std::move(entry), info, std::move(*value), ++place});
      } else {
        const Error refusal = std::get<Error>(leaf.content).at_tensor(entry.name);
        values_.push_back({std::move(entry), info, refusal, ++place});
      }
    }
  }

  /// Moves all tensors and values back into the metadata, sorted by name, and fills `nested`.
  void finish(NestedTensors& nested) {
    number_entries();
    std::ranges::stable_sort(tensors_, {}, [](const TensorRow& row) -> const std::string& {
      return row.entry.meta.fqn;
    });
    std::ranges::stable_sort(
        values_, {}, [](const ValueRow& row) -> const std::string& { return row.entry.name; });
    require_unique_names();
    CheckpointContents& contents = metadata_.contents;
    Storage& storage = metadata_.storage;
    contents.tensors.clear();
    contents.values.clear();
    storage.pieces = {};
    storage.values.clear();
    for (TensorRow& row : tensors_) {
      if (row.chunk) nested.tensors.emplace(contents.tensors.size(), std::move(row.chunk));
      contents.tensors.push_back(std::move(row.entry));
      storage.pieces.add(row.places);
    }
    for (ValueRow& row : values_) {
      if (row.content) nested.values.emplace(contents.values.size(), std::move(*row.content));
      contents.values.push_back(std::move(row.entry));
      storage.values.push_back(row.place);
    }
  }

 private:
  static std::vector<StorageInfo> places_of(const Metadata& metadata, std::size_t tensor) {
    const std::span<const StorageInfo> places = metadata.storage.pieces[tensor];
    return {places.begin(), places.end()};
  }

  void add_tensor(std::string fqn, KeyPath key_path, const StorageInfo& info,
                  const std::shared_ptr<const Item>& item, TensorRecord record) {
    TensorEntry entry;
    entry.meta = {.fqn = std::move(fqn), .dtype = record.dtype, .shape = record.shape};
    validate_tensor_meta(entry.meta, item->file->path());
    entry.key_path = std::move(key_path);
    entry.pieces.push_back({whole_box(record.shape), metadata_.storage.ranks[info.file]});
    tensors_.push_back(
        {std::move(entry), {info}, std::make_shared<const Chunk>(Chunk{item, std::move(record)})});
  }

  /// Numbers all entries again: the parts of a value get its place, in their own order.
  void number_entries() {
    std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t*>> numbers;
    for (TensorRow& row : tensors_) {
      numbers.emplace_back(row.entry.dict_order, row.place_in_value, &row.entry.dict_order);
    }
    for (ValueRow& row : values_) {
      numbers.emplace_back(row.entry.dict_order, row.place_in_value, &row.entry.dict_order);
    }
    std::ranges::sort(numbers);
    for (std::uint32_t i = 0; i < numbers.size(); ++i) *std::get<2>(numbers[i]) = i + 1;
  }

  void note_tensors(const std::string& name, const torch_zip::SavedObject& saved,
                    const std::vector<Leaf>& leaves) {
    std::vector<std::pair<std::string, const TensorRecord*>> tensors;
    for (const Leaf& leaf : leaves) {
      const auto* record = std::get_if<TensorRecord>(&leaf.content);
      if (record == nullptr) continue;
      tensors.emplace_back(name + "." + spell(leaf.path), record);
      torch_zip::note_flags(*record, tensors.back().first, metadata_.contents.simplifications);
    }
    torch_zip::note_shared_memory(saved, tensors, metadata_.contents.simplifications);
  }

  void require_unique_names() const {
    std::vector<std::string_view> names;
    for (const TensorRow& row : tensors_) names.emplace_back(row.entry.meta.fqn);
    for (const ValueRow& row : values_) names.emplace_back(row.entry.name);
    std::ranges::sort(names);
    const auto twice = std::ranges::adjacent_find(names);
    if (twice == names.end()) return;
    throw Error::expected(ErrorKind::unsupported, {.path = path_, .fqn = std::string(*twice)},
                          "flattened name", "one entry with this name",
                          "two entries with different key paths",
                          "save one of them under another key");
  }

  Metadata& metadata_;
  const std::string& path_;
  std::vector<TensorRow> tensors_;
  std::vector<ValueRow> values_;
};

}  // namespace

NestedTensors take_values_apart(Metadata& metadata, const std::string& path, const OpenItem& open) {
  NestedTensors nested;
  Parts parts(metadata, path);
  std::size_t num_local_tensors = 0;
  for (std::size_t v = 0; v < metadata.contents.values.size(); ++v) {
    ValueEntry& value = metadata.contents.values[v];
    const StorageInfo& info = metadata.storage.values[v];
    if (metadata.is_flattened && !megatron::is_object(value.name)) {
      parts.keep(std::move(value), info);
      continue;
    }
    const bool is_refused = metadata.refused_tensors.contains(value.name);
    std::shared_ptr<const Item> item;
    Leaves flattened;
    try {
      if (!is_refused) item = open(info);
      if (item) flattened = item->archive.flatten();
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
    }
    if (item && stays_whole(value.name, info, flattened)) {
      nested.taken_apart.push_back({value.name, info, item, {}});
      parts.keep_as_file(std::move(value), info, *item);
      continue;
    }
    if (metadata.is_flattened) {
      parts.keep(std::move(value), info);
      continue;
    }
    const bool is_apart = holds_more_than_values(flattened.leaves);
    num_local_tensors += flattened.num_local_tensors;
    parts.note(value.name, flattened.simplifications, is_apart);
    if (!is_apart) {
      parts.keep(std::move(value), info);
      continue;
    }
    parts.add(value.name, info, item, std::move(flattened.leaves), value.dict_order);
    nested.taken_apart.push_back(
        {std::move(value.name), info, std::move(item), std::move(flattened.opened_classes)});
  }
  parts.finish(nested);
  if (num_local_tensors > 0 && !metadata.contents.part) {
    metadata.contents.part =
        PartOfWhole{.form = "DCP saved with flatten_state_dict=False, the local parts of " +
                            counted(num_local_tensors, "tensor") + " in values of one rank"};
  }
  return nested;
}

}  // namespace tessera::formats::dcp
