#include "formats/safetensors/header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <limits>
#include <tuple>

#include "base/checked_math.h"
#include "base/json.h"
#include "base/json_events.h"
#include "tessera/base/error.h"

namespace tessera::formats::detail {
namespace {

constexpr std::string_view kMetadataKey = "__metadata__";

struct DTypeName {
  std::string_view name;
  DType dtype;
};
constexpr DTypeName kDTypeNames[] = {
    {"BOOL", DType::boolean},
    {"U8", DType::uint8},
    {"I8", DType::int8},
    {"U16", DType::uint16},
    {"I16", DType::int16},
    {"U32", DType::uint32},
    {"I32", DType::int32},
    {"U64", DType::uint64},
    {"I64", DType::int64},
    {"F16", DType::float16},
    {"BF16", DType::bfloat16},
    {"F32", DType::float32},
    {"F64", DType::float64},
    {"C64", DType::complex64},
    {"F8_E4M3", DType::float8_e4m3fn},
    {"F8_E5M2", DType::float8_e5m2},
    {"F8_E4M3FNUZ", DType::float8_e4m3fnuz},
    {"F8_E5M2FNUZ", DType::float8_e5m2fnuz},
    {"F8_E8M0", DType::float8_e8m0fnu},
    {"F4", DType::float4_e2m1fn_x2},
};

/// Names of safetensors dtypes that torch does not have. Each element has 6 bits.
constexpr std::string_view kForeignDTypeNames[] = {"F6_E2M3", "F6_E3M2"};
constexpr std::uint64_t kForeignElementBits = 6;

/// The shape of a 4-bit tensor counts elements in safetensors, and bytes (of two elements each) in
/// torch.
constexpr std::int64_t kF4PerByte = 2;

/// One entry of the header, unchecked.
struct Entry {
  std::string name;
  std::optional<std::string> dtype{};
  std::optional<Shape> shape{};
  std::optional<std::vector<std::int64_t>> data_offsets{};
};

/// Takes an entry once it is read completely.
using EntrySink = std::function<void(Entry&)>;

/// Reads the header's JSON without building a tree: 10,000 entries must be cheap. Passes each entry
/// to `sink`. Tracks its position by the depth of objects and arrays, and skips the content of
/// unknown fields.
class HeaderEvents final : public tessera::detail::JsonEvents {
 public:
  HeaderEvents(const std::string& path, EntrySink sink) : path_(path), sink_(std::move(sink)) {}

  Metadata& metadata() { return metadata_; }
  std::set<std::string>& unknown_fields() { return unknown_fields_; }

  void on_object_begin() override {
    if (depth_ == 0) {
      place_ = Place::header;
    } else if (place_ == Place::header) {
      place_ = in_metadata_ ? Place::metadata : Place::entry;
    } else if (place_ != Place::unknown_field) {
      refuse("an object");
    }
    ++depth_;
  }

  void on_key(std::string& key) override {
    switch (place_) {
      case Place::header:
        in_metadata_ = key == kMetadataKey;
        if (!in_metadata_) entry_ = {.name = std::move(key)};
        break;
      case Place::metadata:
        metadata_.emplace_back(std::move(key), std::string());
        break;
      case Place::entry:
        field_ = key;
        if (key == "dtype") {
          place_ = Place::dtype;
        } else if (key == "shape") {
          place_ = Place::shape;
        } else if (key == "data_offsets") {
          place_ = Place::data_offsets;
        } else {
          place_ = Place::unknown_field;
          unknown_fields_.insert(field_);
        }
        break;
      default:
        break;  // inside an unknown field
    }
  }

  void on_object_end() override {
    --depth_;
    if (depth_ == kHeaderDepth) {
      place_ = Place::header;
      if (!in_metadata_) sink_(entry_);
    }
    leave_field();
  }

  void on_array_begin() override {
    if (place_ == Place::shape && depth_ == kEntryDepth) {
      entry_.shape.emplace();
    } else if (place_ == Place::data_offsets && depth_ == kEntryDepth) {
      entry_.data_offsets.emplace();
    } else if (place_ != Place::unknown_field) {
      refuse("an array");
    }
    ++depth_;
  }

  void on_array_end() override {
    --depth_;
    leave_field();
  }

  void on_string(std::string& text) override {
    if (place_ == Place::metadata) {
      metadata_.back().second = std::move(text);
    } else if (place_ == Place::dtype) {
      entry_.dtype = std::move(text);
    } else if (place_ != Place::unknown_field) {
      refuse("a string");
    }
    leave_field();
  }

  void on_integer(std::int64_t number) override {
    if (place_ == Place::shape && depth_ == kArrayDepth) {
      entry_.shape->push_back(number);
    } else if (place_ == Place::data_offsets && depth_ == kArrayDepth) {
      entry_.data_offsets->push_back(number);
    } else if (place_ != Place::unknown_field) {
      refuse(std::to_string(number));
    }
    leave_field();
  }

  void on_big_integer(std::string_view decimal) override { skip_or_refuse(decimal); }
  void on_float(double number) override { skip_or_refuse(value_to_string(number)); }
  void on_bool(bool value) override { skip_or_refuse(value ? "true" : "false"); }
  void on_null() override {
    // Some writers write null if there is no `__metadata__`.
    if (place_ == Place::header && depth_ == kHeaderDepth && in_metadata_) return;
    skip_or_refuse("null");
  }

 private:
  enum class Place { before, header, metadata, entry, dtype, shape, data_offsets, unknown_field };
  static constexpr int kHeaderDepth = 1;
  static constexpr int kEntryDepth = 2;
  static constexpr int kArrayDepth = 3;

  void leave_field() {
    if (depth_ == kEntryDepth && place_ != Place::metadata) place_ = Place::entry;
  }

  void skip_or_refuse(std::string_view found) {
    if (place_ != Place::unknown_field) refuse(found);
    leave_field();
  }

  [[noreturn]] void refuse(std::string_view found) const {
    ErrorWhere where{.path = path_};
    std::string rule = "header";
    std::string_view expected = "an object";
    switch (place_) {
      case Place::before:
        break;
      case Place::header:
        rule = in_metadata_ ? kMetadataKey : "entry";
        if (!in_metadata_) where.fqn = entry_.name;
        break;
      case Place::metadata:
        rule = std::string(kMetadataKey) + " '" + printable(metadata_.back().first) + "'";
        expected = "a string";
        break;
      default:
        where.fqn = entry_.name;
        rule = field_;
        if (place_ == Place::dtype) {
          expected = "a string";
        } else {
          expected = depth_ == kEntryDepth ? "an array of integers" : "an integer of 64 bits";
        }
    }
    throw Error::expected(ErrorKind::corruption, where, rule, expected, found);
  }

  const std::string& path_;
  const EntrySink sink_;
  Entry entry_;  // that is being read
  Metadata metadata_;
  std::set<std::string> unknown_fields_;
  Place place_ = Place::before;
  bool in_metadata_ = false;
  std::string field_;
  int depth_ = 0;
};

/// Turns entries of the header into tensors. Checks the numbers of an entry before it computes with
/// them.
class EntryChecker {
 public:
  EntryChecker(const std::string& path, std::uint64_t data_begin, std::uint64_t data_nbytes)
      : path_(path), data_begin_(data_begin), data_nbytes_(data_nbytes) {}

  HeaderTensor check(Entry& entry) const {
    if (!entry.dtype) refuse(entry, "dtype", "a dtype", "none");
    if (!entry.shape) refuse(entry, "shape", "a shape", "none");
    if (!entry.data_offsets) refuse(entry, "data_offsets", "[begin, end]", "none");
    HeaderTensor tensor;
    if (is_foreign(*entry.dtype)) {
      tensor.foreign_dtype = *entry.dtype;
    } else {
      tensor.meta.dtype = dtype_of(entry);
    }
    if (tensor.meta.dtype == DType::float4_e2m1fn_x2) {
      Shape& shape = *entry.shape;
      if (shape.empty() || shape.back() % kF4PerByte != 0) {
        refuse(entry, "shape of F4", "an even last size, because a byte holds two elements",
               shape_to_string(shape));
      }
      shape.back() /= kF4PerByte;
    }
    tensor.byte_range = byte_range_of(entry);
    tensor.meta.fqn = std::move(entry.name);
    tensor.meta.shape = *std::move(entry.shape);
    validate_tensor_meta(tensor.meta, path_);
    check_nbytes(tensor);
    return tensor;
  }

 private:
  [[noreturn]] void refuse(const Entry& entry, std::string_view rule, std::string_view expected,
                           std::string_view found, std::string_view likely_cause = {}) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_, .fqn = entry.name}, rule, expected,
                          found, likely_cause);
  }

  void check_nbytes(const HeaderTensor& tensor) const {
    std::uint64_t nbytes = 0;
    if (tensor.foreign_dtype.empty()) {
      nbytes = tensor.meta.nbytes();
    } else {
      const auto num_bits =
          checked_mul(static_cast<std::uint64_t>(tensor.meta.numel()), kForeignElementBits);
      nbytes = num_bits ? (*num_bits + 7) / 8 : std::numeric_limits<std::uint64_t>::max();
    }
    if (tensor.byte_range.nbytes() == nbytes) return;
    throw Error::expected(
        ErrorKind::corruption, {.path = path_, .fqn = tensor.meta.fqn}, "data_offsets",
        std::to_string(nbytes) + " bytes for " + shape_to_string(tensor.meta.shape) + " of " +
            (tensor.foreign_dtype.empty() ? std::string(dtype_name(tensor.meta.dtype))
                                          : tensor.foreign_dtype),
        std::to_string(tensor.byte_range.nbytes()) + " bytes");
  }

  static bool is_foreign(std::string_view dtype) {
    return std::ranges::find(kForeignDTypeNames, dtype) != std::ranges::end(kForeignDTypeNames);
  }

  DType dtype_of(const Entry& entry) const {
    for (const DTypeName& known : kDTypeNames) {
      if (known.name == *entry.dtype) return known.dtype;
    }
    refuse(entry, "dtype", "a dtype that safetensors has", "'" + printable(*entry.dtype, 40) + "'",
           "of a newer version of safetensors?");
  }

  ByteRange byte_range_of(const Entry& entry) const {
    const std::vector<std::int64_t>& offsets = *entry.data_offsets;
    if (offsets.size() != 2) {
      refuse(entry, "data_offsets", "[begin, end]", std::to_string(offsets.size()) + " numbers");
    }
    if (offsets[0] < 0 || offsets[1] < offsets[0]) {
      refuse(entry, "data_offsets", "0 <= begin <= end", shape_to_string(offsets));
    }
    const auto end = static_cast<std::uint64_t>(offsets[1]);
    if (end > data_nbytes_) {
      refuse(entry, "data_offsets",
             "an end of at most " + std::to_string(data_nbytes_) +
                 ", the number of bytes after the header",
             shape_to_string(offsets), "incomplete download?");
    }
    return {data_begin_ + static_cast<std::uint64_t>(offsets[0]), data_begin_ + end};
  }

  const std::string& path_;
  std::uint64_t data_begin_;
  std::uint64_t data_nbytes_;
};

/// Throws unless the tensors cover `data_range` without gaps and overlaps. Requires: `tensors` is
/// sorted by byte ranges.
void check_cover(const std::vector<HeaderTensor>& tensors, ByteRange data_range,
                 const std::string& path) {
  std::uint64_t covered_end = data_range.begin;
  const HeaderTensor* previous = nullptr;
  for (const HeaderTensor& tensor : tensors) {
    if (tensor.byte_range.begin != covered_end) {
      const std::string after = previous == nullptr
                                    ? std::string(", the first byte after the header")
                                    : ", the end of '" + printable(previous->meta.fqn) + "'";
      throw Error::expected(
          ErrorKind::corruption, {.path = path, .fqn = tensor.meta.fqn},
          tensor.byte_range.begin < covered_end ? "overlap" : "hole",
          "data_offsets to begin at " + std::to_string(covered_end - data_range.begin) + after,
          std::to_string(tensor.byte_range.begin - data_range.begin));
    }
    covered_end = tensor.byte_range.end;
    previous = &tensor;
  }
  if (covered_end != data_range.end) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "file size",
                          std::to_string(covered_end) + " bytes, the end of the last tensor",
                          std::to_string(data_range.end) + " bytes", "appended to?");
  }
}

std::uint64_t read_header_nbytes(const ReadableFile& file) {
  if (file.nbytes() < kHeaderLengthNbytes) {
    throw Error::expected(ErrorKind::corruption, {.path = file.path()}, "file size",
                          "at least 8 bytes, the length of the header",
                          std::to_string(file.nbytes()) + " bytes", "incomplete download?");
  }
  std::array<std::byte, kHeaderLengthNbytes> bytes{};
  file.read_at(0, bytes);
  std::uint64_t nbytes = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) {
    nbytes = nbytes << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  }
  if (nbytes > kMaxHeaderNbytes) {
    throw Error::expected(ErrorKind::corruption, {.path = file.path()}, "header length",
                          "at most " + std::to_string(kMaxHeaderNbytes) + " bytes",
                          std::to_string(nbytes) + " bytes", "not a safetensors file?");
  }
  if (nbytes > file.nbytes() - kHeaderLengthNbytes) {
    throw Error::expected(ErrorKind::corruption, {.path = file.path()}, "header length",
                          "at most " + std::to_string(file.nbytes() - kHeaderLengthNbytes) +
                              " bytes, the rest of the file",
                          std::to_string(nbytes) + " bytes", "incomplete download?");
  }
  return nbytes;
}

/// Reads the header into `events`, and returns where it ends.
std::uint64_t read_header_text(const ReadableFile& file, HeaderEvents& events) {
  const std::uint64_t header_nbytes = read_header_nbytes(file);
  std::string text(static_cast<std::size_t>(header_nbytes), '\0');
  file.read_at(kHeaderLengthNbytes, std::as_writable_bytes(std::span(text)));
  if (!text.starts_with('{')) {
    throw Error::expected(ErrorKind::corruption, {.path = file.path()}, "header",
                          "to begin with '{'",
                          text.empty() ? "no header" : "'" + printable(text.substr(0, 1)) + "'",
                          "not a safetensors file?");
  }
  tessera::detail::read_json(text, file.path(), {.max_nbytes = kMaxHeaderNbytes}, events);
  return kHeaderLengthNbytes + header_nbytes;
}

}  // namespace

std::uint64_t read_laid_out_nbytes(const ReadableFile& file) {
  std::uint64_t data_nbytes = 0;
  HeaderEvents events(file.path(), [&](const Entry& entry) {
    if (!entry.data_offsets || entry.data_offsets->empty()) return;
    const std::int64_t end = std::max<std::int64_t>(0, entry.data_offsets->back());
    data_nbytes = std::max(data_nbytes, static_cast<std::uint64_t>(end));
  });
  return read_header_text(file, events) + data_nbytes;
}

Header read_header(const ReadableFile& file) {
  const std::uint64_t data_begin = kHeaderLengthNbytes + read_header_nbytes(file);
  const EntryChecker checker(file.path(), data_begin, file.nbytes() - data_begin);
  Header header{.tensors = {}, .metadata = {}, .data_range = {data_begin, file.nbytes()}};
  HeaderEvents events(file.path(),
                      [&](Entry& entry) { header.tensors.push_back(checker.check(entry)); });
  read_header_text(file, events);
  header.metadata = std::move(events.metadata());
  header.unknown_fields = std::move(events.unknown_fields());
  std::ranges::sort(header.tensors, [](const HeaderTensor& a, const HeaderTensor& b) {
    return std::tie(a.byte_range.begin, a.byte_range.end, a.meta.fqn) <
           std::tie(b.byte_range.begin, b.byte_range.end, b.meta.fqn);
  });
  check_cover(header.tensors, header.data_range, file.path());
  return header;
}

std::optional<std::string_view> safetensors_dtype(DType dtype) {
  for (const DTypeName& known : kDTypeNames) {
    if (known.dtype == dtype) return known.name;
  }
  return std::nullopt;
}

std::string format_header(const std::vector<PlacedTensor>& tensors, const Metadata& metadata) {
  constexpr std::size_t kTextNbytesBesideName = 96;  // an estimate
  std::size_t expected_nbytes = 0;
  for (const PlacedTensor& tensor : tensors) {
    expected_nbytes += tensor.meta->fqn.size() + kTextNbytesBesideName;
  }
  std::string header;
  header.reserve(expected_nbytes);
  header.append(kHeaderLengthNbytes, '\0');  // the length of the JSON, which is not known yet
  header += '{';
  const auto begin_entry = [&](std::string_view name) {
    if (header.back() != '{') header += ',';
    header += json_quote(name) + ':';
  };
  if (!metadata.empty()) {
    begin_entry(kMetadataKey);
    char separator = '{';
    for (const auto& [key, text] : metadata) {
      header += separator + json_quote(key) + ":" + json_quote(text);
      separator = ',';
    }
    header += '}';
  }
  for (const auto& [meta, begin] : tensors) {
    const auto dtype = safetensors_dtype(meta->dtype);
    TESSERA_CHECK(dtype.has_value());
    begin_entry(meta->fqn);
    ((header += "{\"dtype\":\"") += *dtype) += "\",\"shape\":[";
    for (std::size_t d = 0; d < meta->shape.size(); ++d) {
      const bool is_packed = meta->dtype == DType::float4_e2m1fn_x2 && d + 1 == meta->shape.size();
      if (d > 0) header += ',';
      header += std::to_string(meta->shape[d] * (is_packed ? kF4PerByte : 1));
    }
    header += "],\"data_offsets\":[" + std::to_string(begin) + "," +
              std::to_string(begin + meta->nbytes()) + "]}";
  }
  header += '}';
  header.append(round_up(header.size(), kHeaderLengthNbytes) - header.size(), ' ');
  const std::size_t json_nbytes = header.size() - kHeaderLengthNbytes;
  for (std::size_t i = 0; i < kHeaderLengthNbytes; ++i) {
    header[i] = static_cast<char>(json_nbytes >> (8 * i) & 0xFF);
  }
  return header;
}

}  // namespace tessera::formats::detail
