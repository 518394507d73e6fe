#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "formats/dcp/metadata.h"
#include "formats/key_order.h"
#include "formats/pickle/pickler.h"
#include "tessera/base/dtype.h"

namespace tessera::formats::dcp {
namespace {

using pickle::Pickler;

/// Pushes texts, each of which is written once. Keeps the memo's numbers of the tensors' names in a
/// list, because the Pickler would copy each name.
class TextPickler {
 public:
  /// The arguments must outlive this object.
  TextPickler(Pickler& pickler, const CheckpointContents& contents)
      : pickler_(pickler), contents_(contents), memo_of_tensor_(contents.tensors.size(), kNotYet) {}

  void push(std::string_view text) {
    if (pickler_.get_interned(text)) return;
    if (const TensorEntry* const tensor = contents_.find_tensor(text)) {
      push_name_of(static_cast<std::size_t>(tensor - contents_.tensors.data()));
    } else {
      pickler_.interned(text);
    }
  }
  void push_name_of(std::size_t tensor) {
    const std::string& name = contents_.tensors[tensor].meta.fqn;
    std::uint32_t& memo = memo_of_tensor_[tensor];
    if (memo != kNotYet) return pickler_.get(memo);
    if (pickler_.get_interned(name)) return;
    pickler_.text(name);
    memo = static_cast<std::uint32_t>(pickler_.memoize());
  }

 private:
  static constexpr std::uint32_t kNotYet = UINT32_MAX;

  Pickler& pickler_;
  const CheckpointContents& contents_;
  std::vector<std::uint32_t> memo_of_tensor_;
};

/// Pushes an instance of a dataclass. The caller then pushes its state and calls `build`.
void new_instance(Pickler& pickler, std::string_view module, std::string_view name) {
  pickler.global(module, name);
  pickler.empty_tuple();
  pickler.new_object();
}

void pickle_size(Pickler& pickler, const Shape& sizes) {  // torch.Size
  pickler.global("torch", "Size");
  if (sizes.empty()) {
    pickler.empty_tuple();
  } else {
    pickler.mark();
    for (const std::int64_t size : sizes) pickler.integer(size);
    pickler.tuple_from_mark();
  }
  pickler.tuple1();
  pickler.reduce();
}

void pickle_properties(Pickler& pickler, TextPickler& texts, DType dtype) {
  new_instance(pickler, kMetadataModule, "TensorProperties");
  pickler.mark();
  pickler.global("torch", dtype_name(dtype));
  pickler.global("torch.serialization", "_get_layout");
  texts.push("torch.strided");
  pickler.tuple1();
  pickler.reduce();
  pickler.boolean(false);  // requires_grad
  pickler.global(kMetadataModule, "_MEM_FORMAT_ENCODING");
  pickler.integer(0);  // TORCH_CONTIGUOUS_FORMAT
  pickler.tuple1();
  pickler.reduce();
  pickler.boolean(false);  // pin_memory
  pickler.tuple_from_mark();
  pickler.build();
}

void pickle_tensor_item(Pickler& pickler, TextPickler& texts, const TensorEntry& tensor) {
  new_instance(pickler, kMetadataModule, "TensorStorageMetadata");
  pickler.empty_dict();
  pickler.mark();
  texts.push("properties");
  pickle_properties(pickler, texts, tensor.meta.dtype);
  texts.push("size");
  pickle_size(pickler, tensor.meta.shape);
  texts.push("chunks");
  pickler.empty_list();
  pickler.mark();
  for (const Piece& piece : tensor.pieces) {
    const Box& box = std::get<Box>(piece.region);
    new_instance(pickler, kMetadataModule, "ChunkStorageMetadata");
    pickler.empty_dict();
    pickler.mark();
    texts.push("offsets");
    pickle_size(pickler, box.offsets);
    texts.push("sizes");
    pickle_size(pickler, box.sizes);
    pickler.set_items_from_mark();
    pickler.build();
  }
  pickler.append_from_mark();
  pickler.set_items_from_mark();
  pickler.build();
}

/// Pushes the place of an item: an instance of `_StorageInfo`.
void pickle_storage_info(Pickler& pickler, TextPickler& texts, const Storage& storage,
                         const StorageInfo& info) {
  new_instance(pickler, kFilesystemModule, "_StorageInfo");
  pickler.empty_dict();
  pickler.mark();
  texts.push("relative_path");
  texts.push(storage.files[info.file]);
  texts.push("offset");
  pickler.integer(static_cast<std::int64_t>(info.offset));
  texts.push("length");
  pickler.integer(static_cast<std::int64_t>(info.nbytes));
  pickler.set_items_from_mark();
  pickler.build();
}

using Write = std::function<void(std::string_view)>;

/// Writes the bytes that the pickler holds if they are 1 MiB or more.
void write_if_much(Pickler& pickler, const Write& write) {
  constexpr std::size_t kMuch = std::size_t{1} << 20;
  if (pickler.num_held_bytes() >= kMuch) write(pickler.take_bytes());
}

void pickle_storage_data(Pickler& pickler, TextPickler& texts, const CheckpointContents& contents,
                         const Storage& storage, const Write& write) {
  for (std::size_t v = 0; v < contents.values.size(); ++v) {
    new_instance(pickler, kMetadataModule, "MetadataIndex");
    pickler.empty_dict();
    pickler.mark();
    texts.push("fqn");
    texts.push(contents.values[v].name);
    texts.push("index");
    pickler.none();
    pickler.set_items_from_mark();
    pickler.build();
    pickle_storage_info(pickler, texts, storage, storage.values[v]);
    write_if_much(pickler, write);
  }
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    const TensorEntry& tensor = contents.tensors[t];
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      new_instance(pickler, kMetadataModule, "MetadataIndex");
      pickler.empty_dict();
      pickler.mark();
      texts.push("fqn");
      texts.push_name_of(t);
      texts.push("index");
      pickler.integer(static_cast<std::int64_t>(p));
      texts.push("offset");
      pickle_size(pickler, std::get<Box>(tensor.pieces[p].region).offsets);
      pickler.set_items_from_mark();
      pickler.build();
      pickle_storage_info(pickler, texts, storage, storage.pieces[t][p]);
      write_if_much(pickler, write);
    }
  }
}

/// Pushes one entry of the mapping from which DCP restores nested dicts and lists: a name and its
/// path. The root of a state dict in DCP is always a dict. So if the root was a list, its positions
/// become keys.
void pickle_key_path(Pickler& pickler, TextPickler& texts, const std::string& name,
                     const KeyPath& path) {
  texts.push(name);
  pickler.mark();
  if (path.empty()) texts.push(name);
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (const auto* position = std::get_if<std::int64_t>(&path[i]); position && i > 0) {
      pickler.integer(*position);
    } else {
      texts.push(spell({path[i]}));
    }
  }
  pickler.tuple_from_mark();
}

}  // namespace

void pickle_metadata(const CheckpointContents& contents, const Storage& storage,
                     const Write& write) {
  Pickler pickler(4);
  TextPickler texts(pickler, contents);
  new_instance(pickler, kMetadataModule, "Metadata");
  pickler.empty_dict();
  pickler.mark();

  texts.push("state_dict_metadata");
  pickler.empty_dict();
  pickler.mark();
  // DCP builds the state dict in the order of this dict.
  for (const std::uint32_t number : entries_in_dict_order(contents)) {
    if (number < contents.tensors.size()) {
      texts.push_name_of(number);
      pickle_tensor_item(pickler, texts, contents.tensors[number]);
      write_if_much(pickler, write);
    } else {
      texts.push(contents.values[number - contents.tensors.size()].name);
      new_instance(pickler, kMetadataModule, "BytesStorageMetadata");
    }
  }
  pickler.set_items_from_mark();

  texts.push("planner_data");
  pickler.empty_dict();
  pickler.mark();
  for (const TensorEntry& tensor : contents.tensors) {
    pickle_key_path(pickler, texts, tensor.meta.fqn, tensor.key_path);
    write_if_much(pickler, write);
  }
  for (const ValueEntry& value : contents.values) {
    pickle_key_path(pickler, texts, value.name, value.key_path);
  }
  pickler.set_items_from_mark();

  texts.push("storage_data");
  pickler.empty_dict();
  pickler.mark();
  pickle_storage_data(pickler, texts, contents, storage, write);
  pickler.set_items_from_mark();

  texts.push("version");
  texts.push("1.0.0");
  pickler.set_items_from_mark();
  pickler.build();
  write(std::move(pickler).finish());
}

std::string pickle_metadata(const CheckpointContents& contents, const Storage& storage) {
  std::string metadata;
  pickle_metadata(contents, storage, [&](std::string_view part) { metadata += part; });
  return metadata;
}

}  // namespace tessera::formats::dcp
