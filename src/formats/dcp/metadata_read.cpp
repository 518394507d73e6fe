#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>

#include "base/checked_math.h"
#include "formats/dcp/metadata.h"
#include "formats/file_names.h"
#include "formats/pickle/foreign_object.h"
#include "formats/pickle/plain_value.h"
#include "formats/pickle/unpickler.h"
#include "formats/piece_pool.h"
#include "tessera/base/error.h"

namespace tessera::formats::dcp {
namespace {

using pickle::AllowedGlobal;
using pickle::Object;
using pickle::ObjectKind;
using pickle::ValueGlobal;

enum class MetadataGlobal : std::uint32_t {
  metadata = 0x300,
  tensor_storage,
  bytes_storage,
  tensor_properties,
  chunk_storage,
  metadata_index,
  storage_info,
  storage_meta,
  memory_format,
  enum_by_name,  // some Pythons (3.11.2) pickle an Enum as getattr(class, name)
  windows_path,
  quantized_dtype,  // refused as a tensor's dtype; the other tensors can be read
};

constexpr std::uint32_t number(MetadataGlobal global) {
  return static_cast<std::uint32_t>(global);
}

constexpr std::string_view kShardedTensorModule =  // up to torch 2.2
    "torch.distributed._shard.sharded_tensor.metadata";

constexpr AllowedGlobal kMetadataGlobals[] = {
    {kMetadataModule, "Metadata", number(MetadataGlobal::metadata)},
    {kMetadataModule, "TensorStorageMetadata", number(MetadataGlobal::tensor_storage)},
    {kMetadataModule, "BytesStorageMetadata", number(MetadataGlobal::bytes_storage)},
    {kMetadataModule, "TensorProperties", number(MetadataGlobal::tensor_properties)},
    {kShardedTensorModule, "TensorProperties", number(MetadataGlobal::tensor_properties)},
    {kMetadataModule, "ChunkStorageMetadata", number(MetadataGlobal::chunk_storage)},
    {kMetadataModule, "MetadataIndex", number(MetadataGlobal::metadata_index)},
    {kFilesystemModule, "_StorageInfo", number(MetadataGlobal::storage_info)},
    {kMetadataModule, "StorageMeta", number(MetadataGlobal::storage_meta)},
    {kMetadataModule, "_MEM_FORMAT_ENCODING", number(MetadataGlobal::memory_format)},
    {kShardedTensorModule, "MEM_FORMAT_ENCODING", number(MetadataGlobal::memory_format)},
    {"builtins", "getattr", number(MetadataGlobal::enum_by_name)},
    {"pathlib", "WindowsPath", number(MetadataGlobal::windows_path)},
    {"torch", "qint8", number(MetadataGlobal::quantized_dtype)},
    {"torch", "quint8", number(MetadataGlobal::quantized_dtype)},
    {"torch", "qint32", number(MetadataGlobal::quantized_dtype)},
    {"torch", "quint4x2", number(MetadataGlobal::quantized_dtype)},
    {"torch", "quint2x4", number(MetadataGlobal::quantized_dtype)},
};

const pickle::AllowList& metadata_globals() {
  static const pickle::AllowList allowed{pickle::value_globals(), kMetadataGlobals};
  return allowed;
}

bool is_instance(Object object, MetadataGlobal of) {
  return object.is(ObjectKind::call) && object.meaning("object") == number(of);
}

constexpr std::string_view kNewerTorch = " (written by a newer PyTorch?)";
constexpr std::size_t kMaxNames = 1000;

bool is_class_of_dcp(Object object) {
  return pickle::is_foreign(object) &&
         pickle::foreign_name(object).starts_with("torch.distributed.checkpoint.");
}

/// Returns the names of a dict's attributes as `a, b`. Leaves out the names in `known`, and the
/// attributes that carry no information: None, False, and empty containers.
std::string names_but(Object dict, std::span<const std::string_view> known) {
  constexpr std::size_t kMaxShown = 20;
  std::string names;
  std::size_t num_shown = 0;
  for (std::size_t i = 0; i < dict.num_entries("attributes") && num_shown < kMaxShown; ++i) {
    const Object key = dict.entry_key(i);
    if (!key.is(ObjectKind::str)) continue;
    const std::string_view name = key.as_text("attribute");
    if (std::ranges::find(known, name) != known.end()) continue;
    const Object value = dict.entry_value(i);
    const bool says_nothing = value.is(ObjectKind::none) ||
                              (value.is(ObjectKind::boolean) && !value.as_boolean(name)) ||
                              ((value.is(ObjectKind::list) || value.is(ObjectKind::tuple)) &&
                               value.num_items(name) == 0) ||
                              (value.is(ObjectKind::dict) && value.num_entries(name) == 0);
    if (says_nothing) continue;
    names += (names.empty() ? "" : ", ") + printable(name, 40);
    ++num_shown;
  }
  return names;
}

[[noreturn]] void refuse_class_of_newer_torch(Object object, std::string_view rule,
                                              std::string_view expected) {
  std::string found = "class " + pickle::foreign_name(object);
  const auto state = object.is(ObjectKind::call) ? object.call_state(rule) : std::nullopt;
  if (state && state->is(ObjectKind::dict)) {
    const std::string names = names_but(*state, {});
    if (!names.empty()) found += " with the attributes " + names;
  }
  object.fail(ErrorKind::unsupported, std::string(rule) + ": expected " + std::string(expected) +
                                          ", found " + found + std::string(kNewerTorch));
}

/// Returns the attributes of an instance of a dataclass.
Object attributes(Object object, MetadataGlobal of, std::string_view rule,
                  std::string_view class_name) {
  if (!is_instance(object, of)) {
    if (is_class_of_dcp(object)) refuse_class_of_newer_torch(object, rule, class_name);
    object.fail_expected(rule, class_name);
  }
  const auto state = object.call_state(rule);
  if (!state || !state->is(ObjectKind::dict)) object.fail_expected(rule, "attributes");
  return *state;
}

Object attribute(Object state, std::string_view name) {
  if (const auto found = state.find(name)) return *found;
  state.fail_expected(name, "an attribute of that name");
}

/// Reads the attributes of the instances of a dataclass, whose only attributes are `names`. A
/// pickle has millions of instances, and Python stores each name once. So this class compares the
/// names of an instance only if they are not the same bytes in the pickle as the names of the
/// previous instance.
template <std::size_t kNumNames>
class Dataclass {
 public:
  Dataclass(MetadataGlobal global, std::string_view class_name,
            std::array<std::string_view, kNumNames> names)
      : global_(global), class_name_(class_name), names_(names) {}

  /// Makes `find` and `get` read `object`. Throws if it is no instance of the class, or has unknown
  /// attributes (but not empty ones: `names_but`), which may change how the bytes are stored.
  void open(Object object, std::string_view rule) {
    state_ = attributes(object, global_, rule, class_name_);
    if (has_same_keys()) return;
    if (const std::string others = names_but(*state_, names_); !others.empty()) {
      object.fail(ErrorKind::unsupported,
                  std::string(rule) + ": expected a " + std::string(class_name_) +
                      " of known attributes, found also " + others + std::string(kNewerTorch));
    }
    note_keys();
  }

  /// Returns the attribute `names[number]`; nothing if the instance does not have it.
  std::optional<Object> find(std::size_t number) const {
    if (places_[number] == kNone) return std::nullopt;
    return state_->entry_value(places_[number]);
  }
  Object get(std::size_t number) const {
    if (const auto found = find(number)) return *found;
    state_->fail_expected(names_[number], "an attribute of that name");
  }

 private:
  static constexpr std::size_t kNone = SIZE_MAX;

  bool has_same_keys() const {
    if (keys_.empty() || state_->num_entries("attributes") != keys_.size()) return false;
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      const Object key = state_->entry_key(i);
      if (!key.is(ObjectKind::str)) return false;
      const std::string_view name = key.as_text("attribute");
      if (name.data() != keys_[i].data() || name.size() != keys_[i].size()) return false;
    }
    return true;
  }

  /// Fills `places_`, and also `keys_` if all attributes are known.
  void note_keys() {
    keys_.clear();
    places_.fill(kNone);
    bool are_all_known = true;
    for (std::size_t i = 0; i < state_->num_entries("attributes"); ++i) {
      const Object key = state_->entry_key(i);
      const std::string_view name =
          key.is(ObjectKind::str) ? key.as_text("attribute") : std::string_view();
      const auto known = std::ranges::find(names_, name);
      if (known == names_.end()) {
        are_all_known = false;
        continue;
      }
      places_[static_cast<std::size_t>(known - names_.begin())] = i;
      keys_.push_back(name);
    }
    if (!are_all_known) keys_.clear();
  }

  const MetadataGlobal global_;
  const std::string_view class_name_;
  const std::array<std::string_view, kNumNames> names_;
  std::optional<Object> state_;                  // the attributes of the instance that is read
  std::array<std::size_t, kNumNames> places_{};  // of the attributes in `state_`
  std::vector<std::string_view>
      keys_;  // of `state_`: only their addresses are used; empty: compare all names
};

std::int64_t non_negative(Object object, std::string_view rule) {
  if (!object.is(ObjectKind::integer) || object.as_integer(rule) < 0) {
    object.fail_expected(rule, "an int from 0 to 2^63 - 1");
  }
  return object.as_integer(rule);
}

/// Makes the contents from the entries of `.metadata`. It takes the entries of
/// `state_dict_metadata` and `storage_data` while the pickle is read, so that a million pieces are
/// never in a graph together. [Note: Entries taken early]
///
/// Life cycle: give it to `unpickle`, then call `parse` once. Not thread-safe.
class Parser final : public pickle::EntryTaker {
 public:
  Parser(const std::string& path, std::uint64_t pickle_nbytes)
      : path_(path), budget_(pickle_nbytes) {}

  bool wants(Object root, std::string_view name, Object dict) override {
    if (!is_instance(root, MetadataGlobal::metadata)) return false;
    if (name == kItems && !are_items_complete_) {
      require_same_dict(dict, taken_items_, kItems);
      taken_items_ = dict.id();
      is_taking_items_ = true;
      return true;
    }
    if (name != kPlaces || !taken_items_) return false;
    require_same_dict(dict, taken_places_, kPlaces);
    if (!are_items_complete_) complete_items();
    taken_places_ = dict.id();
    is_taking_items_ = false;
    return true;
  }
  void take(Object key, Object value) override {
    is_taking_items_ ? add_item(key, value) : add_place(key, value);
  }

  /// Returns the contents. `root` is the outermost object of the pickle.
  Metadata parse(Object root) {
    const Object state =
        attributes(root, MetadataGlobal::metadata, "root object", "Metadata of DCP");
    add_other_items(attribute(state, kItems));
    add_other_places(attribute(state, kPlaces));
    check_storage();
    const auto planner_data = state.find("planner_data");
    result_.is_flattened = planner_data && !planner_data->is(ObjectKind::none);
    if (planner_data) parse_key_paths(*planner_data);
    assign_ranks();
    note_other_attributes(state);
    return std::move(result_);
  }

 private:
  static constexpr std::string_view kItems = "state_dict_metadata";
  static constexpr std::string_view kPlaces = "storage_data";
  static constexpr std::array<std::string_view, 5> kMetadataAttributes{
      kItems, kPlaces, "planner_data", "storage_meta", "version"};

  [[noreturn]] void fail(std::string_view fqn, std::string_view rule, std::string_view expected,
                         std::string_view found, std::string_view likely_cause = {}) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_, .fqn = std::string(fqn)}, rule,
                          expected, found, likely_cause);
  }

  void note_other_attributes(Object state) {
    const std::string others = names_but(state, kMetadataAttributes);
    if (others.empty()) return;
    result_.contents.opening_findings.push_back(
        {.severity = Finding::Severity::note,
         .rule = "attributes",
         .where = {.path = path_},
         .expected = "a Metadata of known attributes",
         .found = "also " + others + ": left out" + std::string(kNewerTorch)});
  }

  // Tensors and values

  void add_item(Object key, Object item) {
    const std::string_view name = key.as_str("name");
    try {
      parse_item(name, item);
    } catch (const Error& error) {
      throw error.at_tensor(std::string(name));
    }
  }

  /// Adds the items that were not taken while the pickle was read.
  void add_other_items(Object items) {
    require_same_dict(items, taken_items_, kItems);
    const std::size_t num_entries = items.num_entries(kItems);
    if (are_items_complete_) {
      if (num_entries != 0) {
        items.fail_expected(kItems, "all entries of this dict before those of storage_data");
      }
      return;
    }
    for (std::size_t i = 0; i < num_entries; ++i)
      add_item(items.entry_key(i), items.entry_value(i));
    complete_items();
  }

  /// Throws if `dict`, the final value of the attribute, is not the dict from which entries were
  /// taken while the pickle was read.
  static void require_same_dict(Object dict, const std::optional<std::uint32_t>& taken,
                                std::string_view rule) {
    if (taken && *taken != dict.id()) {
      dict.fail_expected(rule, "one dict, set only once, as DCP writes it");
    }
  }

  /// Sorts the items, and lists them in `items_` for add_place. No item is added after this.
  void complete_items() {
    are_items_complete_ = true;
    sort_tensors();
    std::ranges::sort(result_.contents.values, {}, &ValueEntry::name);
    std::ranges::sort(result_.contents.simplifications, {}, &Simplification::name);
    result_.storage.values.resize(result_.contents.values.size());
    items_.resize(num_items_);
    for (std::size_t t = 0; t < result_.contents.tensors.size(); ++t) {
      items_[result_.contents.tensors[t].dict_order - 1] = {.is_value = false, .index = t};
    }
    for (std::size_t v = 0; v < result_.contents.values.size(); ++v) {
      items_[result_.contents.values[v].dict_order - 1] = {.is_value = true, .index = v};
    }
    require_different_names();
  }

  /// Sorts the tensors by name. Does not sort `storage.pieces`, because at this time it has no
  /// places yet.
  void sort_tensors() {
    std::vector<TensorEntry>& tensors = result_.contents.tensors;
    std::ranges::sort(tensors, {}, [](const TensorEntry& tensor) -> const std::string& {
      return tensor.meta.fqn;
    });
    std::size_t num_pieces = 0;
    for (const TensorEntry& tensor : tensors) num_pieces += tensor.pieces.size();
    result_.storage.pieces.reserve(tensors.size(), num_pieces);
    for (const TensorEntry& tensor : tensors) {
      result_.storage.pieces.add(tensor.pieces.size());  // not known yet
    }
  }

  /// An item of `state_dict_metadata`.
  struct Place {
    bool is_value = false;
    std::size_t index = 0;  // into contents.values or contents.tensors
  };

  const std::string& name_at(const Place& place) const {
    return place.is_value ? result_.contents.values[place.index].name
                          : result_.contents.tensors[place.index].meta.fqn;
  }

  void require_different_names() const {
    const auto refuse_repeated = [&](std::string_view name) {
      fail(name, kItems, "each name once", "an entry of the same name");
    };
    const std::string* last = nullptr;
    for (const TensorEntry& tensor : result_.contents.tensors) {
      if (last != nullptr && *last == tensor.meta.fqn) refuse_repeated(*last);
      last = &tensor.meta.fqn;
    }
    last = nullptr;
    for (const ValueEntry& value : result_.contents.values) {
      const bool is_repeated = last != nullptr && *last == value.name;
      if (is_repeated || result_.contents.find_tensor(value.name) != nullptr) {
        refuse_repeated(value.name);
      }
      last = &value.name;
    }
  }

  bool is_refused_tensor(std::string_view name) const {
    return result_.refused_tensors.find(name) != result_.refused_tensors.end();
  }

  void parse_item(std::string_view name, Object item) {
    if (is_instance(item, MetadataGlobal::bytes_storage)) {
      result_.contents.values.push_back({std::string(name), {}, ++num_items_});
      return;
    }
    enum { kProperties, kSize, kChunks };
    tensor_storage_.open(item, "item");
    const Object properties = tensor_storage_.get(kProperties);
    const Object size = tensor_storage_.get(kSize);
    if (const auto refusal = refusal_of(properties, size)) {
      result_.contents.values.push_back({std::string(name), {}, ++num_items_});
      result_.refused_tensors.emplace(name, refusal->at_tensor(std::string(name)));
      return;
    }
    TensorEntry& tensor = result_.contents.tensors.emplace_back();
    tensor.meta.fqn = name;
    tensor.dict_order = ++num_items_;
    tensor.meta.dtype = parse_dtype_of(properties);
    if (requires_grad(properties)) {
      result_.contents.simplifications.push_back(
          {Simplification::Kind::requires_grad, tensor.meta.fqn});
    }
    tensor.meta.shape = parse_sizes(size, "size");
    validate_tensor_meta(tensor.meta, path_);

    enum { kOffsets, kSizes };
    const Object chunks = tensor_storage_.get(kChunks);
    const std::size_t num_chunks = chunks.num_items("chunks");
    budget_.spend(chunks, 128 * num_chunks);
    pieces_.clear();
    for (std::size_t i = 0; i < num_chunks; ++i) {
      chunk_.open(chunks.item(i), "chunk");
      Region region = Box{parse_sizes(chunk_.get(kOffsets), "offsets of a chunk"),
                          parse_sizes(chunk_.get(kSizes), "sizes of a chunk")};
      if (const auto problem = region_error(region, tensor.meta.shape)) {
        throw Error(ErrorKind::corruption, {.path = path_, .fqn = tensor.meta.fqn},
                    "chunk: " + *problem);
      }
      pieces_.push_back({std::move(region), 0});
    }
    tensor.pieces = pool_.share_copy(pieces_);
  }

  /// Returns an error if the tensor is quantized or has too many dimensions, because Tessera does
  /// not read such tensors. Returns nothing for other tensors.
  static std::optional<Error> refusal_of(Object properties, Object size) {
    const auto sizes_of_dims = items_of_sizes(size, "size");
    if (const auto num_dims = sizes_of_dims ? sizes_of_dims->num_items("size") : 0;
        num_dims > kMaxDims) {
      return size.error(ErrorKind::unsupported,
                        "tensor: expected at most " + std::to_string(kMaxDims) +
                            " dimensions, found " + std::to_string(num_dims) + " dimensions");
    }
    if (!is_instance(properties, MetadataGlobal::tensor_properties)) return std::nullopt;
    const auto state = properties.call_state("properties");
    if (!state || !state->is(ObjectKind::tuple) || state->num_items("properties") == 0) {
      return std::nullopt;
    }
    const Object dtype = state->item(0);
    if (!dtype.is(ObjectKind::global) ||
        dtype.meaning("dtype") != number(MetadataGlobal::quantized_dtype)) {
      return std::nullopt;
    }
    const Shape sizes = parse_sizes(size, "size");
    return dtype.error(ErrorKind::unsupported,
                       "tensor: expected a dense tensor with its bytes, found a quantized tensor " +
                           std::string(dtype.global_name("dtype")) + " " + shape_to_string(sizes));
  }

  /// Checks the properties that a dense tensor must have, and returns the dtype.
  static DType parse_dtype_of(Object properties) {
    constexpr std::string_view kRule = "properties";
    if (!is_instance(properties, MetadataGlobal::tensor_properties)) {
      if (is_class_of_dcp(properties)) {
        refuse_class_of_newer_torch(properties, kRule, "TensorProperties");
      }
      properties.fail_expected(kRule, "TensorProperties");
    }
    const auto state = properties.call_state(kRule);
    // torch 2.15 adds the strides of one rank's tensor to the properties. Additional properties are
    // ignored: they do not describe the stored bytes, because each item has its own strides.
    if (!state || !state->is(ObjectKind::tuple) || state->num_items(kRule) < 5) {
      properties.fail_expected(
          kRule, "a tuple of dtype, layout, requires_grad, memory_format, pin_memory");
    }
    check_layout(state->item(1));
    check_memory_format(state->item(3));
    const Object dtype = state->item(0);
    if (!dtype.is(ObjectKind::global)) dtype.fail_expected("dtype", "a torch.dtype");
    if (const auto known = parse_dtype(dtype.global_name("dtype"));
        known && pickle::value_global(dtype) == ValueGlobal::torch_dtype) {
      return *known;
    }
    dtype.fail(ErrorKind::unsupported,
               "dtype: expected a dense dtype of torch, found " + dtype.describe());
  }

  /// Returns a tensor's requires_grad. Requires: parse_dtype_of has checked the properties.
  static bool requires_grad(Object properties) {
    const Object flag = properties.call_state("properties")->item(2);
    return flag.is(ObjectKind::boolean) && flag.as_boolean("requires_grad");
  }

  static void check_layout(Object layout) {
    const bool is_layout = (layout.is(ObjectKind::call) &&
                            pickle::value_global(layout) == ValueGlobal::torch_get_layout &&
                            layout.call_arguments("layout").num_items("layout") == 1) ||
                           (layout.is(ObjectKind::global) &&
                            pickle::value_global(layout) == ValueGlobal::torch_layout);
    if (!is_layout) layout.fail_expected("layout", "a torch.layout");
    if (layout.is(ObjectKind::global)) return;  // torch.strided is the only allowed layout
    const std::string_view name = layout.call_arguments("layout").item(0).as_str("layout");
    if (name == "torch.strided") return;
    layout.fail(ErrorKind::unsupported, "layout: expected torch.strided, found " + printable(name));
  }

  // The memory format is not needed: each item carries its strides.
  static void check_memory_format(Object format) {
    if (is_instance(format, MetadataGlobal::memory_format)) return;
    if (is_instance(format, MetadataGlobal::enum_by_name)) {
      const Object arguments = format.call_arguments("memory_format");
      if (arguments.num_items("memory_format") == 2 && arguments.item(0).is(ObjectKind::global) &&
          arguments.item(0).meaning("memory_format") == number(MetadataGlobal::memory_format)) {
        return;
      }
    }
    format.fail_expected("memory_format", "_MEM_FORMAT_ENCODING");
  }

  /// Returns the tuple or list in a torch.Size; nothing for an empty torch.Size.
  static std::optional<Object> items_of_sizes(Object object, std::string_view rule) {
    if (object.is(ObjectKind::call) && pickle::value_global(object) == ValueGlobal::torch_size) {
      const Object arguments = object.call_arguments(rule);
      if (arguments.num_items(rule) == 0) return std::nullopt;
      object = arguments.item(0);
    }
    if (!object.is(ObjectKind::tuple) && !object.is(ObjectKind::list)) {
      object.fail_expected(rule, "a torch.Size");
    }
    return object;
  }

  /// Reads a torch.Size. Limits the number of dimensions before it allocates anything.
  static Shape parse_sizes(Object object, std::string_view rule) {
    const std::optional<Object> items = items_of_sizes(object, rule);
    if (!items) return {};
    const std::size_t num_dims = items->num_items(rule);
    if (num_dims > kMaxDims) {
      items->fail_expected(rule, "at most " + std::to_string(kMaxDims) + " dimensions");
    }
    Shape sizes(num_dims);
    for (std::size_t i = 0; i < num_dims; ++i) sizes[i] = items->item(i).as_integer(rule);
    return sizes;
  }

  // Places of the items

  void add_place(Object key, Object value) {
    metadata_index_.open(key, "key of storage_data");
    const std::string_view fqn = metadata_index_.get(kFqn).as_str("fqn");
    try {
      parse_storage_entry(fqn, value);
    } catch (const Error& error) {
      throw error.at_tensor(std::string(fqn));
    }
  }

  /// Adds the places that were not taken while the pickle was read.
  void add_other_places(Object places) {
    require_same_dict(places, taken_places_, kPlaces);
    const std::size_t num_entries = places.num_entries(kPlaces);
    for (std::size_t i = 0; i < num_entries; ++i) {
      add_place(places.entry_key(i), places.entry_value(i));
    }
  }

  void parse_storage_entry(std::string_view fqn, Object value) {
    const std::optional<Place> place = find_place(fqn);
    if (!place) {
      fail(fqn, "storage_data", "the name of an item in state_dict_metadata", "no such item");
    }
    const StorageInfo info = parse_storage_info(value);
    const auto offset = metadata_index_.find(kOffset);
    const bool has_offset = offset && !offset->is(ObjectKind::none);
    if (place->is_value && is_refused_tensor(fqn)) {  // only its first chunk's place is kept
      StorageInfo& at = result_.storage.values[place->index];
      if (at.nbytes == 0) at = info;
      return;
    }
    if (place->is_value) {
      if (has_offset) fail(fqn, "storage_data", "a value without offset", offset->describe());
      put(fqn, result_.storage.values[place->index], info);
      return;
    }
    if (!has_offset) fail(fqn, "storage_data", "the offset of a chunk", "none");
    const Shape offsets = parse_sizes(*offset, "offset");
    const std::size_t tensor = place->index;
    const std::span<StorageInfo> places = result_.storage.pieces[tensor];
    const auto hint = metadata_index_.find(kIndex);
    const auto has_elements = [&](std::size_t piece) {
      return numel_of(result_.contents.tensors[tensor].pieces[piece].region) != 0;
    };
    std::optional<std::size_t> hinted;
    if (hint && hint->is(ObjectKind::integer)) {
      const std::int64_t piece = hint->as_integer("index");
      if (piece >= 0 && piece < static_cast<std::int64_t>(places.size()) &&
          offsets_of(tensor, static_cast<std::size_t>(piece)) == offsets) {
        hinted = static_cast<std::size_t>(piece);
      }
    }
    if (hinted && (places.size() == 1 || has_elements(*hinted))) {
      put(fqn, places[*hinted], info);
      return;
    }
    const std::vector<std::size_t>& by_offset = pieces_by_offset(tensor);
    const auto found = std::ranges::equal_range(
        by_offset, offsets, {}, [&](std::size_t piece) { return offsets_of(tensor, piece); });
    if (found.empty()) {
      fail(fqn, "storage_data", "a chunk at the offset of each key",
           "none at " + shape_to_string(offsets));
    }
    // An empty chunk and a full one at the same offset share a key in PyTorch's dict: the key has
    // the index of the first one, and the place is that of the last one.
    if (std::ranges::any_of(found, has_elements)) {
      for (const std::size_t piece : found | std::views::filter(has_elements)) {
        put(fqn, places[piece], info);
      }
    } else if (hinted) {
      put(fqn, places[*hinted], info);
    } else {
      for (const std::size_t piece : found) put(fqn, places[piece], info);
    }
  }

  /// Finds the item that an entry of storage_data, or of the planner's data, names. P is the item
  /// of the entry before. Most entries name P, the item after P, or the item that an earlier entry
  /// named after P (`followers_`), so these three are tried first. Otherwise looks up the name.
  /// Returns nothing if no item has the name.
  std::optional<Place> find_place(std::string_view fqn) {
    const auto is_at = [&](std::size_t item) {
      return item < items_.size() && name_at(items_[item]) == fqn;
    };
    if (is_at(last_item_)) return items_[last_item_];
    std::size_t found = last_item_ + 1;  // 0 at the start
    if (!is_at(found)) {
      if (followers_.empty()) followers_.resize(items_.size() + 1);
      std::uint32_t& follower = followers_[last_item_ + 1];
      if (!is_at(follower)) {
        const std::optional<Place> place = look_up(fqn);
        if (!place) return std::nullopt;
        const std::uint32_t number = place->is_value
                                         ? result_.contents.values[place->index].dict_order
                                         : result_.contents.tensors[place->index].dict_order;
        follower = number - 1;
      }
      found = follower;
    }
    last_item_ = found;
    return items_[found];
  }

  /// Finds an item by its name.
  std::optional<Place> look_up(std::string_view name) const {
    const CheckpointContents& contents = result_.contents;
    if (const TensorEntry* const tensor = contents.find_tensor(name)) {
      return Place{.is_value = false,
                   .index = static_cast<std::size_t>(tensor - contents.tensors.data())};
    }
    const auto value = std::ranges::lower_bound(contents.values, name, {}, &ValueEntry::name);
    if (value == contents.values.end() || value->name != name) return std::nullopt;
    return Place{.is_value = true,
                 .index = static_cast<std::size_t>(value - contents.values.begin())};
  }

  const Shape& offsets_of(std::size_t tensor, std::size_t piece) const {
    return std::get<Box>(result_.contents.tensors[tensor].pieces[piece].region).offsets;
  }

  /// Returns the tensor's chunks in the order of their offsets. Needed if the `index` of a
  /// MetadataIndex is missing or wrong.
  const std::vector<std::size_t>& pieces_by_offset(std::size_t tensor) {
    const auto [at, is_new] = by_offset_.try_emplace(tensor);
    if (is_new) {
      at->second.resize(result_.contents.tensors[tensor].pieces.size());
      for (std::size_t i = 0; i < at->second.size(); ++i) at->second[i] = i;
      std::ranges::stable_sort(at->second, {},
                               [&](std::size_t piece) { return offsets_of(tensor, piece); });
    }
    return at->second;
  }

  void put(std::string_view fqn, StorageInfo& at, const StorageInfo& info) const {
    if (at.nbytes != 0) fail(fqn, "storage_data", "one place for each chunk", "two");
    at = info;
  }

  StorageInfo parse_storage_info(Object object) {
    enum { kPath, kBegin, kLength, kDescriptors };
    storage_info_.open(object, "place in storage_data");
    if (const auto descriptors = storage_info_.find(kDescriptors);
        descriptors && !descriptors->is(ObjectKind::none)) {
      const std::size_t num = descriptors->num_items("transform_descriptors");
      if (num > 0) {
        const Object first = descriptors->item(0);
        first.fail(ErrorKind::unsupported, "transform_descriptors: expected none, found " +
                                               first.describe() +
                                               " (items written through a stream extension; load "
                                               "the checkpoint in PyTorch and save it without)");
      }
    }
    StorageInfo info;
    info.file = file_index(storage_info_.get(kPath)) & (StorageInfo::kMaxFiles - 1);
    info.offset = static_cast<std::uint64_t>(non_negative(storage_info_.get(kBegin), "offset"));
    const Object length = storage_info_.get(kLength);
    const auto nbytes = static_cast<std::uint64_t>(non_negative(length, "length"));
    if (nbytes == 0) length.fail_expected("length", "more than 0 bytes");
    if (nbytes > StorageInfo::kMaxNbytes) {
      length.fail_expected("length",
                           "at most " + std::to_string(StorageInfo::kMaxNbytes) + " bytes");
    }
    if (nbytes > std::numeric_limits<std::int64_t>::max() - info.offset) {
      length.fail_expected("length", "an end below 2^63");
    }
    info.nbytes = nbytes & StorageInfo::kMaxNbytes;
    return info;
  }

  std::uint32_t file_index(Object relative_path) {
    const std::string_view name = relative_path.as_str("relative_path");
    if (const auto found = file_index_.find(name); found != file_index_.end()) {
      return found->second;
    }
    if (!is_contained_path(std::string(name))) {
      relative_path.fail_expected("relative_path", "a path inside the checkpoint");
    }
    if (result_.storage.files.size() >= StorageInfo::kMaxFiles) {
      relative_path.fail_expected("relative_path",
                                  "at most " + std::to_string(StorageInfo::kMaxFiles) + " files");
    }
    const auto index = static_cast<std::uint32_t>(result_.storage.files.size());
    result_.storage.files.emplace_back(name);
    file_index_.emplace(file_names_.emplace_back(name), index);
    return index;
  }

  /// Throws if a value, or a chunk with elements, has no place. Removes empty chunks that have no
  /// place.
  void check_storage() {
    bool has_missing_places = false;
    for (std::size_t v = 0; v < result_.contents.values.size(); ++v) {
      if (result_.storage.values[v].nbytes != 0) continue;
      fail(result_.contents.values[v].name, "storage_data", "the place of the value", "none");
    }
    for (std::size_t t = 0; t < result_.contents.tensors.size(); ++t) {
      const TensorEntry& tensor = result_.contents.tensors[t];
      const std::span<const StorageInfo> places = result_.storage.pieces[t];
      for (std::size_t p = 0; p < places.size(); ++p) {
        if (places[p].nbytes != 0) continue;
        has_missing_places = true;
        if (numel_of(tensor.pieces[p].region) == 0) continue;
        fail(tensor.meta.fqn, "storage_data",
             "the place of chunk " + region_to_string(tensor.pieces[p].region), "none");
      }
    }
    if (has_missing_places) remove_chunks_without_place();
  }

  void remove_chunks_without_place() {
    tessera::detail::ListOfLists<StorageInfo> kept;
    std::vector<StorageInfo> places;
    for (std::size_t t = 0; t < result_.contents.tensors.size(); ++t) {
      TensorEntry& tensor = result_.contents.tensors[t];
      pieces_.clear();
      places.clear();
      for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
        const StorageInfo& place = std::as_const(result_.storage.pieces)[t][p];
        if (place.nbytes == 0) continue;
        pieces_.push_back(tensor.pieces[p]);
        places.push_back(place);
      }
      tensor.pieces = pool_.share_copy(pieces_);
      kept.add(places);
    }
    result_.storage.pieces = std::move(kept);
  }

  // Places of the items in the state dict

  void parse_key_paths(Object planner_data) {
    // A planner may store anything here. DefaultSavePlanner stores a dict from names to key paths.
    if (!planner_data.is(ObjectKind::dict)) return;
    const std::size_t num_entries = planner_data.num_entries("planner_data");
    for (std::size_t i = 0; i < num_entries; ++i) {
      const Object key = planner_data.entry_key(i);
      const Object value = planner_data.entry_value(i);
      if (!key.is(ObjectKind::str) || !value.is(ObjectKind::tuple)) continue;
      const std::string_view name = key.as_str("name");
      const std::optional<Place> place = find_place(name);
      if (!place) continue;
      try {
        key_path_at(*place) = parse_key_path(name, value);
      } catch (const Error& error) {
        throw error.at_tensor(std::string(name));
      }
    }
    for (const TensorEntry& tensor : result_.contents.tensors) {
      check_no_key_above(tensor.meta.fqn, tensor.key_path);
    }
    for (const ValueEntry& value : result_.contents.values) {
      check_no_key_above(value.name, value.key_path);
    }
  }

  SharedKeyPath& key_path_at(const Place& place) {
    return place.is_value ? result_.contents.values[place.index].key_path
                          : result_.contents.tensors[place.index].key_path;
  }

  KeyPath parse_key_path(std::string_view name, Object keys) {
    const std::size_t num_keys = keys.num_items("key path");
    KeyPath path;
    for (std::size_t i = 0; i < num_keys; ++i) {
      const Object key = keys.item(i);
      budget_.spend(key, 64);
      if (key.is(ObjectKind::str)) {
        path.emplace_back(std::string(key.as_str("key path")));
        budget_.spend(key, key.as_str("key path").size());
      } else {
        path.emplace_back(non_negative(key, "key path"));
      }
    }
    if (const std::string spelled = spell(path); spelled != name) {
      keys.fail(
          ErrorKind::corruption,
          "key path: expected keys that give the name when joined by dots, found keys that give " +
              printable(spelled));
    }
    if (path.size() == 1 && std::holds_alternative<std::string>(path.front())) path.clear();
    return path;
  }

  /// Throws if a dict or list on the item's path is an item itself, because a tensor or a value
  /// cannot contain another item.
  void check_no_key_above(std::string_view name, const KeyPath& path) {
    std::size_t nbytes = 0;
    for (std::size_t depth = 1; depth < path.size(); ++depth) {
      const auto& key = path[depth - 1];
      nbytes += (depth > 1 ? 1 : 0) + spell({key}).size();
      const std::optional<Place> above = look_up(name.substr(0, nbytes));
      if (!above) continue;
      const SharedKeyPath& path_above = key_path_at(*above);
      const bool is_prefix =
          path_above.empty() ? depth == 1 && std::holds_alternative<std::string>(key)
                             : path_above.size() == depth &&
                                   std::equal(path_above.begin(), path_above.end(), path.begin());
      if (is_prefix) {
        fail(name, "key path", "a dict or list at " + printable(name_at(*above)),
             "a tensor or value of that name");
      }
    }
  }

  // Ranks

  /// Returns the rank in `__<rank>_<n>.distcp`.
  static std::optional<int> rank_in(std::string_view file) {
    constexpr int kMaxRank = 1 << 20;
    constexpr std::string_view kPrefix = "__";
    constexpr std::string_view kSuffix = ".distcp";
    if (const auto slash = file.rfind('/'); slash != std::string_view::npos) {
      file.remove_prefix(slash + 1);
    }
    if (!file.starts_with(kPrefix) || !file.ends_with(kSuffix)) return std::nullopt;
    file.remove_prefix(kPrefix.size());
    int rank = 0;
    const auto [end, error] = std::from_chars(file.data(), file.data() + file.size(), rank);
    if (error != std::errc() || *end != '_' || rank < 0 || rank > kMaxRank) return std::nullopt;
    return rank;
  }

  void assign_ranks() {
    const std::vector<std::string>& files = result_.storage.files;
    std::vector<int> rank_of(files.size());
    bool all_named = true;
    for (std::size_t i = 0; i < files.size() && all_named; ++i) {
      const auto rank = rank_in(files[i]);
      all_named = rank.has_value();
      rank_of[i] = rank.value_or(0);
    }
    if (!all_named) {
      std::vector<std::size_t> order(files.size());
      for (std::size_t i = 0; i < files.size(); ++i) order[i] = i;
      std::ranges::sort(order, {}, [&](std::size_t i) -> const std::string& { return files[i]; });
      for (std::size_t i = 0; i < files.size(); ++i) rank_of[order[i]] = static_cast<int>(i);
    }
    // The metadata of one rank names only this rank's files: they count as those of one rank.
    if (is_name_like(last_component(path_), kMetadataOfOneRank)) std::ranges::fill(rank_of, 0);
    for (const int rank : rank_of) {
      result_.contents.world_size = std::max(result_.contents.world_size, rank + 1);
    }
    result_.storage.ranks = rank_of;
    std::vector<TensorEntry>& tensors = result_.contents.tensors;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      pieces_.assign(tensors[t].pieces.begin(), tensors[t].pieces.end());
      for (std::size_t p = 0; p < pieces_.size(); ++p) {
        pieces_[p].rank = rank_of[result_.storage.pieces[t][p].file];
      }
      tensors[t].pieces = pool_.share_copy(pieces_);
    }
  }

  const std::string& path_;
  pickle::WalkBudget budget_;
  Metadata result_;
  PiecePool pool_;
  std::vector<Piece> pieces_;  // of one tensor; a member, to reuse its memory
  // Ids of the dicts whose entries were taken
  std::optional<std::uint32_t> taken_items_;
  std::optional<std::uint32_t> taken_places_;
  std::uint32_t num_items_ = 0;
  bool is_taking_items_ = false;
  bool are_items_complete_ = false;
  std::vector<Place> items_;              // in the order of the dict
  std::size_t last_item_ = SIZE_MAX;      // that find_place has found; SIZE_MAX: none yet
  std::vector<std::uint32_t> followers_;  // by item + 1: the item that came after it; may be empty
  enum { kFqn, kOffset, kIndex };         // of a MetadataIndex
  Dataclass<3> metadata_index_{
      MetadataGlobal::metadata_index, "MetadataIndex", {"fqn", "offset", "index"}};
  Dataclass<4> storage_info_{MetadataGlobal::storage_info,
                             "_StorageInfo",
                             {"relative_path", "offset", "length", "transform_descriptors"}};
  Dataclass<3> tensor_storage_{MetadataGlobal::tensor_storage,
                               "TensorStorageMetadata or BytesStorageMetadata",
                               {"properties", "size", "chunks"}};
  Dataclass<2> chunk_{MetadataGlobal::chunk_storage, "ChunkStorageMetadata", {"offsets", "sizes"}};
  std::deque<std::string> file_names_;
  std::unordered_map<std::string_view, std::uint32_t> file_index_;  // views of file_names_
  /// Results of pieces_by_offset, by tensor.
  std::unordered_map<std::size_t, std::vector<std::size_t>> by_offset_;
};

/// Throws if the pickle calls a foreign function. PyTorch would run that call, so the whole file is
/// refused.
void refuse_foreign_calls(const pickle::ObjectGraph& graph) {
  for (std::size_t id = 0; id < graph.num_objects(); ++id) {
    const Object object = graph.object(id);
    if (!pickle::is_foreign_function_call(object) || is_class_of_dcp(object)) continue;
    object.fail(ErrorKind::unsupported, "foreign global " + pickle::foreign_name(object) +
                                            ": not in the allow-list; nothing was executed");
  }
}

}  // namespace

Metadata parse_metadata(pickle::PickleBytes bytes, const std::string& path) {
  if (bytes.size() == 0) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "file size", "a pickle", "0 bytes",
                          "the save did not finish?");
  }
  Parser parser(path, bytes.size());
  const pickle::ObjectGraph graph =
      pickle::unpickle(std::move(bytes), {.path = path}, metadata_globals(),
                       {.policy = pickle::ForeignGlobals::Policy::record}, {}, &parser);
  std::vector<std::string> foreign_names = pickle::foreign_names(graph, kMaxNames);
  if (!foreign_names.empty()) refuse_foreign_calls(graph);
  Metadata metadata = parser.parse(graph.root());
  metadata.foreign_names = std::move(foreign_names);
  return metadata;
}

}  // namespace tessera::formats::dcp
