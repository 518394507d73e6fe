#include "formats/torch_zip/torch_save_layout.h"

#include <cstdio>
#include <utility>

#include "base/digest.h"
#include "formats/paged_data.h"
#include "tessera/base/error.h"

namespace tessera::formats::torch_zip {
namespace {

/// Returns the storage class that torch pickles for a dtype, such as `FloatStorage`. Returns an
/// empty text for a newer dtype without such a class: then the pickled tensor itself states the
/// dtype.
std::string_view typed_storage_class(DType dtype) {
  switch (dtype) {
    case DType::boolean:
      return "BoolStorage";
    case DType::uint8:
      return "ByteStorage";
    case DType::int8:
      return "CharStorage";
    case DType::int16:
      return "ShortStorage";
    case DType::int32:
      return "IntStorage";
    case DType::int64:
      return "LongStorage";
    case DType::float16:
      return "HalfStorage";
    case DType::bfloat16:
      return "BFloat16Storage";
    case DType::float32:
      return "FloatStorage";
    case DType::float64:
      return "DoubleStorage";
    case DType::complex64:
      return "ComplexFloatStorage";
    case DType::complex128:
      return "ComplexDoubleStorage";
    default:
      return {};
  }
}

void pickle_sizes(pickle::Pickler& pickler, std::span<const std::int64_t> sizes) {
  if (sizes.empty()) return pickler.empty_tuple();
  pickler.mark();
  for (const std::int64_t size : sizes) pickler.integer(size);
  pickler.tuple_from_mark();
}

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string decimal20(std::uint64_t value) {
  char digits[21];
  std::snprintf(digits, sizeof digits, "%020llu", static_cast<unsigned long long>(value));
  return digits;
}

constexpr std::size_t kSerializationIdNbytes = 40;
constexpr std::uint64_t kAlignmentNbytes = 64;

/// Writes into the pickle a tensor that is a view of a whole storage of `numel` elements.
void pickle_view(pickle::Pickler& pickler, DType dtype, std::span<const std::int64_t> shape,
                 std::span<const std::int64_t> strides, std::int64_t numel,
                 std::string_view storage_key) {
  const std::string_view storage_class = typed_storage_class(dtype);
  const bool typed = !storage_class.empty();
  pickler.global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  pickler.mark();
  pickler.mark();
  pickler.interned("storage");
  if (typed) {
    pickler.global("torch", storage_class);
  } else {
    pickler.global("torch.storage", "UntypedStorage");
  }
  pickler.text(storage_key);
  pickler.interned("cpu");
  // Units: elements of a typed storage, bytes of an untyped one.
  pickler.integer(typed ? numel : numel * static_cast<std::int64_t>(itemsize(dtype)));
  pickler.tuple_from_mark();
  pickler.persistent_id();
  pickler.integer(0);  // storage offset
  pickle_sizes(pickler, shape);
  pickle_sizes(pickler, strides);
  pickler.boolean(false);  // requires_grad
  pickler.global("collections", "OrderedDict");
  pickler.empty_tuple();
  pickler.reduce();  // backward hooks
  if (!typed) pickler.global("torch", dtype_name(dtype));
  pickler.tuple_from_mark();
  pickler.reduce();
}

}  // namespace

void pickle_tensor(pickle::Pickler& pickler, DType dtype, std::span<const std::int64_t> shape,
                   std::string_view storage_key) {
  pickle_view(pickler, dtype, shape, row_major_strides(shape), numel_of(shape), storage_key);
}

void pickle_repeated(pickle::Pickler& pickler, DType dtype, std::span<const std::int64_t> shape,
                     std::string_view storage_key) {
  pickle_view(pickler, dtype, shape, std::vector<std::int64_t>(shape.size(), 0), 1, storage_key);
}

TorchSaveLayout::TorchSaveLayout(std::string pickle, std::span<const std::uint64_t> storage_nbytes,
                                 LargeStorages large_storages)
    : num_storages_(storage_nbytes.size()) {
  const std::string prefix = "archive/";
  const auto add = [&](const std::string& name, std::string content) {
    layout_.add_member(prefix + name, content.size());
    contents_.push_back(std::move(content));
  };
  add("data.pkl", std::move(pickle));
  add("byteorder", "little");
  first_storage_ = layout_.num_members();
  for (std::size_t i = 0; i < num_storages_; ++i) {
    const bool is_paged =
        large_storages == LargeStorages::at_pages && storage_nbytes[i] >= kMinPagedNbytes;
    layout_.add_member(prefix + "data/" + std::to_string(i), storage_nbytes[i],
                       is_paged ? kPageNbytes : kAlignmentNbytes);
    contents_.emplace_back();
  }
  add("version", "3\n");
  add(".data/serialization_id", std::string(kSerializationIdNbytes, '0'));
  const std::vector<std::uint32_t> no_crcs(layout_.num_members());
  nbytes_ = layout_.directory_begin() + layout_.directory(no_crcs).size();
}

ByteRange TorchSaveLayout::storage_range(std::size_t storage) const {
  return layout_.data_range(first_storage_ + storage);
}

std::vector<TorchSaveLayout::Segment> TorchSaveLayout::segments_around_storages(
    std::span<const std::uint32_t> storage_crcs) const {
  TESSERA_CHECK(storage_crcs.size() == num_storages_);
  const std::size_t id_member = layout_.num_members() - 1;

  std::vector<std::uint32_t> crcs(layout_.num_members());
  std::string names;
  std::string crc_bytes;
  for (std::size_t i = 0; i < id_member; ++i) {
    const bool is_storage = i >= first_storage_ && i < first_storage_ + num_storages_;
    crcs[i] = is_storage ? storage_crcs[i - first_storage_] : crc32(0, as_bytes(contents_[i]));
    names += layout_.name(i);
    names += '\n';
    for (int shift = 0; shift < 32; shift += 8) crc_bytes += static_cast<char>(crcs[i] >> shift);
  }
  // torch's readers only require that archives with different contents have different ids.
  const std::string id =
      decimal20(xxh3_64(as_bytes(names))) + decimal20(xxh3_64(as_bytes(crc_bytes)));
  crcs[id_member] = crc32(0, as_bytes(id));

  std::vector<Segment> segments(1);
  for (std::size_t i = 0; i < layout_.num_members(); ++i) {
    segments.back().bytes += layout_.local_header(i, crcs[i]);
    if (i >= first_storage_ && i < first_storage_ + num_storages_) {
      segments.push_back({layout_.data_range(i).end, {}});
    } else {
      segments.back().bytes += i == id_member ? id : contents_[i];
    }
  }
  segments.back().bytes += layout_.directory(crcs);
  return segments;
}

TorchSaveLayout tensor_save_layout(DType dtype, std::span<const std::int64_t> shape) {
  pickle::Pickler pickler(2);
  pickle_tensor(pickler, dtype, shape, "0");
  const std::uint64_t nbytes = static_cast<std::uint64_t>(numel_of(shape)) * itemsize(dtype);
  return TorchSaveLayout(std::move(pickler).finish(), std::span(&nbytes, 1));
}

std::string torch_save_value(const Value& value) {
  pickle::Pickler pickler(2);
  pickle::pickle_value(pickler, value);
  const TorchSaveLayout archive(std::move(pickler).finish(), {});
  std::vector<TorchSaveLayout::Segment> segments = archive.segments_around_storages({});
  return std::move(segments.front().bytes);
}

}  // namespace tessera::formats::torch_zip
