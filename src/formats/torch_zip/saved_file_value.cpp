#include "formats/torch_zip/saved_file_value.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/outside_failure.h"
#include "formats/torch_zip/torch_archive.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::torch_zip {
namespace {

constexpr const char* kMark = "torch.save";

/// A file whose bytes are elsewhere in memory.
class ViewedFile final : public ReadableFile {
 public:
  ViewedFile(std::string_view bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return bytes_.size(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    TESSERA_CHECK(offset <= bytes_.size() && out.size() <= bytes_.size() - offset);
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }

 private:
  std::string_view bytes_;
  const std::string& path_;
};

bool has_only_tensors_and_values(std::string_view bytes, const std::string& path) {
  try {
    const ViewedFile file(bytes, path);
    const Leaves found = TorchArchive(file, {0, bytes.size()}).flatten();
    return std::ranges::none_of(
        found.leaves, [](const Leaf& leaf) { return std::holds_alternative<Error>(leaf.content); });
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return false;  // no file of torch.save
  }
}

}  // namespace

Value saved_file_value(std::string bytes) {
  return Value::Tuple{{Value(kMark), Value(Value::Bytes{std::move(bytes)})}};
}

std::string_view saved_file_in(const Value& value, const std::string& path) {
  const auto* const tuple = value.get_if<Value::Tuple>();
  if (tuple == nullptr || tuple->items.size() != 2 || tuple->items[0] != Value(kMark)) return {};
  const auto* const bytes = tuple->items[1].get_if<Value::Bytes>();
  if (bytes == nullptr || !has_only_tensors_and_values(bytes->data, path)) return {};
  return bytes->data;
}

}  // namespace tessera::formats::torch_zip
