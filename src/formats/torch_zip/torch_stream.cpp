#include "formats/torch_zip/torch_stream.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/checked_math.h"
#include "formats/pickle/pickle_end.h"
#include "formats/pickle/plain_value.h"
#include "formats/pickle/unpickler.h"
#include "formats/torch_zip/tensor_parser.h"

namespace tessera::formats::torch_zip {
namespace {

using pickle::Object;
using pickle::ObjectGraph;
using pickle::ObjectKind;

constexpr std::uint64_t kMaxStreamPickleNbytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kMaxSmallStreamPickleNbytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kNumelNbytes = 8;
constexpr std::int64_t kStreamProtocol = 1001;

// The number 0x1950a86a20f9469cfc6c, as pickles of protocol 2 and of protocol 1 write it.
constexpr std::string_view kMagicNumber("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 13);
constexpr std::string_view kMagicLine = "L119547037146038801333356L\n.";

/// The storages of a stream, and their places in the file.
class StreamStorages final : public Storages {
 public:
  explicit StreamStorages(const ReadableFile& file) : file_(file) {}

  /// Finds the storages, which follow each other from `position` on. Returns where the last ends.
  std::uint64_t place(const Object& keys, const ObjectGraph& graph, std::uint64_t position) {
    const std::map<std::string_view, StorageId> ids = storage_ids(graph);
    const std::size_t num_keys = keys.num_items("storage keys");
    for (std::size_t i = 0; i < num_keys; ++i) {
      const std::string_view key = keys.item(i).as_str("storage key");
      const auto id = ids.find(key);
      if (id == ids.end()) {
        keys.item(i).fail(ErrorKind::corruption,
                          "storage keys: expected the keys of storages that tensors use, found '" +
                              printable(key, 40) + "'");
      }
      position = place_one(id->second, position);
    }
    return position;
  }

  std::optional<std::size_t> find(std::string_view key) const override {
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? std::nullopt : std::optional(found->second);
  }
  std::string name_of(std::string_view key) const override { return "storage " + std::string(key); }
  std::string name(std::size_t storage) const override { return name_of(ranges_[storage].first); }
  std::uint64_t nbytes(std::size_t storage) const override {
    return ranges_[storage].second.nbytes();
  }
  std::uint64_t plain_nbytes() const override { return file_.nbytes(); }
  ByteRange data_range(std::size_t storage) const override { return ranges_[storage].second; }
  void read_at(std::size_t storage, std::uint64_t offset, std::span<std::byte> out) const override {
    file_.read_at(ranges_[storage].second.begin + offset, out);
  }

 private:
  /// Returns the persistent id of each storage: the first one in the pickle with the storage's key.
  static std::map<std::string_view, StorageId> storage_ids(const ObjectGraph& graph) {
    std::map<std::string_view, StorageId> ids;
    for (std::size_t i = 0; i < graph.num_objects(); ++i) {
      if (!graph.object(i).is(ObjectKind::persistent)) continue;
      const StorageId id = storage_id(graph.object(i));
      ids.emplace(id.key, id);
    }
    return ids;
  }

  /// Adds the storage that begins at `position`. Returns where the storage ends.
  std::uint64_t place_one(const StorageId& id, std::uint64_t position) {
    const std::uint64_t left = file_.nbytes() - position;
    const std::string rule = "storage '" + printable(id.key, 40) + "'";
    if (left < kNumelNbytes || left - kNumelNbytes < id.nbytes) {
      throw Error::expected(
          ErrorKind::corruption,
          {.path = file_.path(), .byte_range = ByteRange{position, position + left}}, rule,
          std::to_string(kNumelNbytes) + " bytes for its size and " + std::to_string(id.nbytes) +
              " bytes of data",
          std::to_string(left), "incomplete download?");
    }
    const std::uint64_t numel = read_numel(position);
    position += kNumelNbytes;
    if (numel != static_cast<std::uint64_t>(id.numel)) {
      throw Error::expected(
          ErrorKind::corruption,
          {.path = file_.path(), .byte_range = ByteRange{position - kNumelNbytes, position}}, rule,
          std::to_string(id.numel) + " elements, as the pickle says", std::to_string(numel));
    }
    if (!by_key_.emplace(std::string(id.key), ranges_.size()).second) {
      id.items.fail(ErrorKind::corruption, "storage keys: expected each key once, found '" +
                                               printable(id.key, 40) + "' twice");
    }
    ranges_.emplace_back(std::string(id.key), ByteRange{position, position + id.nbytes});
    return position + id.nbytes;
  }

  std::uint64_t read_numel(std::uint64_t position) const {
    std::byte bytes[kNumelNbytes];
    file_.read_at(position, bytes);
    std::uint64_t numel = 0;
    for (std::size_t i = 0; i < kNumelNbytes; ++i) {
      numel |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
    }
    return numel;
  }

  const ReadableFile& file_;
  std::vector<std::pair<std::string, ByteRange>> ranges_;  // key and bytes
  std::map<std::string, std::size_t, std::less<>> by_key_;
};

/// Reads the pickles of a stream, one after the other.
class PickleSequence {
 public:
  explicit PickleSequence(const ReadableFile& file) : file_(file) {}

  std::uint64_t position() const { return position_; }

  ObjectGraph next(std::uint64_t max_nbytes, pickle::ForeignGlobals foreign = {}) {
    const std::uint64_t end = pickle::pickle_end(file_, position_, max_nbytes);
    std::vector<char> bytes(static_cast<std::size_t>(end - position_));
    file_.read_at(position_, std::as_writable_bytes(std::span(bytes)));
    const std::uint64_t begin = std::exchange(position_, end);
    return pickle::unpickle(std::move(bytes), {.path = file_.path(), .file_offset = begin},
                            saved_globals(), foreign);
  }

 private:
  const ReadableFile& file_;
  std::uint64_t position_ = 0;
};

/// Throws for complex numbers from a big-endian machine. torch writes streams in little-endian
/// order on every machine, but a big-endian machine exchanges the two parts of complex numbers.
void refuse_exchanged_parts(const ObjectGraph& machine, const ObjectGraph& saved) {
  const auto is_little = machine.root().find("little_endian");
  if (!is_little || is_little->as_boolean("little_endian")) return;
  for (std::size_t i = 0; i < saved.num_objects(); ++i) {
    if (!saved.object(i).is(ObjectKind::persistent)) continue;
    const StorageId id = storage_id(saved.object(i));
    if (!id.type_name.starts_with("Complex")) continue;
    id.items.fail(ErrorKind::unsupported,
                  "storage: expected numbers in little-endian order, found complex numbers of a "
                  "big-endian machine (save them again with a current torch)");
  }
}

struct StreamParts {
  ObjectGraph saved;
  std::unique_ptr<StreamStorages> storages;
  std::uint64_t end = 0;  // position behind the last storage
};

StreamParts read_stream(const ReadableFile& file, std::span<const std::string> as_dict) {
  PickleSequence pickles(file);
  pickles.next(kMaxSmallStreamPickleNbytes);  // the magic number (see begins_as_stream)
  const ObjectGraph protocol = pickles.next(kMaxSmallStreamPickleNbytes);
  if (protocol.root().as_integer("protocol") != kStreamProtocol) {
    protocol.root().fail(ErrorKind::unsupported, "protocol: expected " +
                                                     std::to_string(kStreamProtocol) + ", found " +
                                                     protocol.root().describe());
  }
  const ObjectGraph machine = pickles.next(kMaxSmallStreamPickleNbytes);
  if (!machine.root().is(ObjectKind::dict)) machine.root().fail_expected("machine", "a dict");
  ObjectGraph saved =
      pickles.next(kMaxStreamPickleNbytes, {.policy = pickle::ForeignGlobals::Policy::record,
                                            .as_dict = as_dict,
                                            .has_module_ids = true});
  const ObjectGraph keys = pickles.next(kMaxStreamPickleNbytes);
  refuse_exchanged_parts(machine, saved);
  auto storages = std::make_unique<StreamStorages>(file);
  const std::uint64_t end = storages->place(keys.root(), saved, pickles.position());
  return {std::move(saved), std::move(storages), end};
}

}  // namespace

bool begins_as_stream(std::string_view first_bytes) {
  if (first_bytes.starts_with(kMagicLine)) return true;
  constexpr std::size_t kProtoNbytes = 2;
  constexpr std::size_t kFrameNbytes = 9;
  if (first_bytes.size() < kProtoNbytes || first_bytes[0] != '\x80') return false;
  first_bytes.remove_prefix(kProtoNbytes);
  if (first_bytes.starts_with('\x95')) {
    first_bytes.remove_prefix(std::min(kFrameNbytes, first_bytes.size()));
  }
  return first_bytes.starts_with(kMagicNumber);
}

TorchStream::TorchStream(const ReadableFile& file, std::span<const std::string> as_dict) {
  StreamParts parts = read_stream(file, as_dict);
  if (parts.end < file.nbytes()) {
    throw Error::expected(ErrorKind::unsupported,
                          {.path = file.path(), .byte_range = ByteRange{parts.end, file.nbytes()}},
                          "stream", "one saved object",
                          std::to_string(file.nbytes() - parts.end) + " bytes after it",
                          "several torch.save calls into one file? save each into its own file");
  }
  take(file.path(), std::move(parts.saved), std::move(parts.storages));
}

std::uint64_t end_of_stream(const ReadableFile& file) {
  return read_stream(file, {}).end;
}

}  // namespace tessera::formats::torch_zip
