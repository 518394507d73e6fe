#include "formats/torch_zip/torch_tar.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/checked_math.h"
#include "formats/pickle/pickle_end.h"
#include "formats/pickle/plain_value.h"
#include "formats/pickle/unpickler.h"
#include "formats/torch_zip/tar_members.h"
#include "formats/torch_zip/tensor_parser.h"

namespace tessera::formats::torch_zip {
namespace {

using pickle::Object;
using pickle::ObjectGraph;

constexpr std::uint64_t kMaxTarPickleNbytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kMaxSmallTarPickleNbytes = std::uint64_t{1} << 16;
constexpr std::int64_t kTarProtocol = 1000;
constexpr std::string_view kNames[] = {"sys_info", "pickle", "tensors", "storages"};

/// Reads one member of the archive from its begin to its end.
class MemberReader {
 public:
  MemberReader(const ReadableFile& file, const std::map<std::string, ByteRange>& members,
               std::string_view name)
      : file_(file), name_(name), range_(members.at(name_)), position_(range_.begin) {}

  std::uint64_t nbytes_left() const { return range_.end - position_; }

  ObjectGraph pickle(std::uint64_t max_nbytes, pickle::ForeignGlobals foreign = {}) {
    const std::uint64_t left = nbytes_left();
    const std::uint64_t end = pickle::pickle_end(
        file_, position_, std::min(max_nbytes, std::max<std::uint64_t>(left, 1)));
    if (end > range_.end) fail("a pickle", std::to_string(left) + " bytes");
    std::vector<char> bytes(static_cast<std::size_t>(end - position_));
    file_.read_at(position_, std::as_writable_bytes(std::span(bytes)));
    const std::uint64_t begin = std::exchange(position_, end);
    return pickle::unpickle(std::move(bytes), {.path = file_.path(), .file_offset = begin},
                            saved_globals(), foreign);
  }
  /// Reads a small pickle, in which classes are only names.
  ObjectGraph small_pickle() {
    return pickle(kMaxSmallTarPickleNbytes, {.policy = pickle::ForeignGlobals::Policy::record});
  }

  std::int64_t number(std::size_t nbytes) {
    std::byte bytes[sizeof(std::uint64_t)] = {};
    const std::uint64_t begin = skip(nbytes);
    file_.read_at(begin, std::span(bytes).first(nbytes));
    std::uint64_t number = 0;
    for (std::size_t i = 0; i < nbytes; ++i) {
      number |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
    }
    return static_cast<std::int64_t>(number);
  }
  /// Returns a number that counts something. Throws if it is negative.
  std::int64_t natural(std::string_view what, std::size_t nbytes = sizeof(std::int64_t)) {
    const std::int64_t found = number(nbytes);
    if (found < 0) fail("a " + std::string(what) + " of 0 or more", std::to_string(found));
    return found;
  }

  /// Skips `nbytes` bytes, and returns where they begin.
  std::uint64_t skip(std::uint64_t nbytes) {
    const std::uint64_t left = nbytes_left();
    if (nbytes > left) {
      fail(std::to_string(nbytes) + " more bytes", std::to_string(left) + " up to its end");
    }
    return std::exchange(position_, position_ + nbytes);
  }

  void require_end() const {
    if (position_ == range_.end) return;
    fail("no bytes after the last entry", std::to_string(nbytes_left()));
  }

  [[noreturn]] void fail(const std::string& expected, const std::string& found) const {
    throw Error::expected(ErrorKind::corruption,
                          {.path = file_.path(), .byte_range = ByteRange{position_, range_.end}},
                          "member '" + name_ + "'", expected, found);
  }

 private:
  const ReadableFile& file_;
  std::string name_;
  ByteRange range_;
  std::uint64_t position_;
};

/// The storages and the tensors of the archive.
class TarStorages final : public Storages {
 public:
  explicit TarStorages(const ReadableFile& file) : file_(file) {}

  void read_storages(MemberReader member) {
    const std::int64_t num_storages = count_of(member);
    for (std::int64_t i = 0; i < num_storages; ++i) {
      const ObjectGraph entry = member.small_pickle();
      const Object items = items_of(entry, 3);
      const Object type = items.item(2);
      const std::string type_name(type.global_name("storage type"));
      const auto dtype = dtype_of_storage(type_name);
      if (!dtype) type.fail_expected("storage type", "a storage class, such as torch.FloatStorage");
      const auto numel = static_cast<std::uint64_t>(member.natural("size"));
      const auto nbytes = checked_mul(numel, itemsize(*dtype));
      if (!nbytes) member.fail("a size below 2^64 bytes", std::to_string(numel) + " elements");
      const std::uint64_t begin = member.skip(*nbytes);
      add(items.item(0), {stored_.size(), *dtype, 0, static_cast<std::int64_t>(numel)});
      stored_.push_back({key_of(items.item(0)), {begin, begin + *nbytes}});
    }
    read_views(member.pickle(kMaxTarPickleNbytes));
    member.require_end();
  }

  void read_tensors(MemberReader member) {
    const std::int64_t num_tensors = count_of(member);
    for (std::int64_t i = 0; i < num_tensors; ++i) {
      const ObjectGraph entry = member.small_pickle();
      const Object items = items_of(entry, 3);
      const View& view = view_of(items.item(1));
      SavedTensor tensor{.storage = view.storage, .dtype = view.dtype};
      const std::int64_t num_dims = member.natural("number of dimensions", 4);
      if (num_dims > static_cast<std::int64_t>(kMaxDims)) {
        member.fail("at most " + std::to_string(kMaxDims) + " dimensions",
                    std::to_string(num_dims));
      }
      member.skip(4);
      for (std::int64_t d = 0; d < num_dims; ++d) tensor.shape.push_back(member.natural("size"));
      for (std::int64_t d = 0; d < num_dims; ++d)
        tensor.strides.push_back(member.natural("stride"));
      const auto offset = checked_add(view.begin, member.natural("offset"));
      if (!offset) member.fail("an offset below 2^63", "a larger one");
      tensor.storage_offset = *offset;
      tensor.stored_nbytes = static_cast<std::uint64_t>(view.end) * itemsize(view.dtype);
      if (!tensors_.emplace(key_of(items.item(0)), std::move(tensor)).second) {
        items.item(0).fail_expected("number of a tensor", "each number once");
      }
    }
    member.require_end();
  }

  const SavedTensor* saved_tensor(std::string_view id) const override {
    const auto found = tensors_.find(id);
    return found == tensors_.end() ? nullptr : &found->second;
  }

  std::optional<std::size_t> find(std::string_view) const override { return std::nullopt; }
  std::string name_of(std::string_view key) const override { return "storage " + std::string(key); }
  std::string name(std::size_t storage) const override { return name_of(stored_[storage].key); }
  std::uint64_t nbytes(std::size_t storage) const override {
    return stored_[storage].range.nbytes();
  }
  std::uint64_t plain_nbytes() const override { return file_.nbytes(); }
  ByteRange data_range(std::size_t storage) const override { return stored_[storage].range; }
  void read_at(std::size_t storage, std::uint64_t offset, std::span<std::byte> out) const override {
    file_.read_at(stored_[storage].range.begin + offset, out);
  }

 private:
  struct Stored {
    std::string key;
    ByteRange range;
  };
  /// A storage, or a part of one. Units: elements.
  struct View {
    std::size_t storage;
    DType dtype;
    std::int64_t begin;
    std::int64_t end;
  };

  static std::int64_t count_of(MemberReader& member) {
    const ObjectGraph graph = member.small_pickle();
    const std::int64_t count = graph.root().as_integer("number of entries");
    const auto max_count = static_cast<std::int64_t>(member.nbytes_left());
    if (count < 0 || count > max_count) {
      graph.root().fail(ErrorKind::corruption,
                        "number of entries: expected 0 to " + std::to_string(max_count) +
                            ", the number of bytes after it, found " + std::to_string(count));
    }
    return count;
  }
  static Object items_of(const ObjectGraph& graph, std::size_t num_items) {
    const Object items = graph.root();
    if (items.num_items("entry") != num_items) {
      items.fail_expected("entry", std::to_string(num_items) + " items");
    }
    return items;
  }
  static std::string key_of(Object number) {
    return std::to_string(number.as_integer("number of a storage or a tensor"));
  }

  void add(Object number, const View& view) {
    if (views_.emplace(key_of(number), view).second) return;
    number.fail_expected("number of a storage", "each number once");
  }
  const View& view_of(Object number) const {
    const auto found = views_.find(key_of(number));
    if (found == views_.end()) number.fail_expected("number of a storage", "one of this archive");
    return found->second;
  }

  void read_views(const ObjectGraph& graph) {
    const Object views = graph.root();
    const std::size_t num_views = views.num_items("storage views");
    for (std::size_t i = 0; i < num_views; ++i) {
      const Object items = views.item(i);
      if (items.num_items("storage view") != 4) items.fail_expected("storage view", "4 items");
      View view = view_of(items.item(1));
      const auto begin = checked_add(view.begin, items.item(2).as_integer("offset"));
      const std::int64_t numel = items.item(3).as_integer("size");
      const auto end = begin && numel >= 0 ? checked_add(*begin, numel) : std::nullopt;
      if (!end || *begin < view.begin || *end > view.end) {
        items.fail(ErrorKind::corruption, "storage view: expected a part of its storage of " +
                                              std::to_string(view.end - view.begin) +
                                              " elements, found one outside of it");
      }
      view.begin = *begin;
      view.end = *end;
      add(items.item(0), view);
    }
  }

  const ReadableFile& file_;
  std::vector<Stored> stored_;
  std::map<std::string, View> views_;
  std::map<std::string, SavedTensor, std::less<>> tensors_;
};

/// Throws for a tar archive of something else, such as an archive of a whole model folder.
std::map<std::string, ByteRange> members_of(const ReadableFile& file) {
  std::map<std::string, ByteRange> members = tar_members(file);
  for (const std::string_view name : kNames) {
    if (members.contains(std::string(name))) continue;
    throw Error::expected(
        ErrorKind::unsupported, {.path = file.path()}, "tar archive",
        "the members sys_info, pickle, tensors and storages of PyTorch 0.1",
        "no '" + std::string(name) + "'",
        members.empty() ? "" : "unpack it, and give the path of a checkpoint in it");
  }
  return members;
}

void check_machine(const ObjectGraph& graph) {
  const Object info = graph.root();
  const auto protocol = info.find("protocol_version");
  if (!protocol || protocol->as_integer("protocol_version") != kTarProtocol) {
    info.fail(ErrorKind::unsupported, "protocol_version: expected " + std::to_string(kTarProtocol) +
                                          ", found " + (protocol ? protocol->describe() : "none"));
  }
  const auto is_little = info.find("little_endian");
  if (is_little && is_little->as_boolean("little_endian")) return;
  info.fail(ErrorKind::unsupported,
            "little_endian: expected True, found a file of a big-endian machine");
}

}  // namespace

TorchTar::TorchTar(const ReadableFile& file, std::span<const std::string> as_dict) {
  const std::map<std::string, ByteRange> members = members_of(file);
  check_machine(MemberReader(file, members, "sys_info").small_pickle());
  auto storages = std::make_unique<TarStorages>(file);
  storages->read_storages(MemberReader(file, members, "storages"));
  storages->read_tensors(MemberReader(file, members, "tensors"));
  MemberReader object(file, members, "pickle");
  ObjectGraph saved =
      object.pickle(kMaxTarPickleNbytes, {.policy = pickle::ForeignGlobals::Policy::record,
                                          .as_dict = as_dict,
                                          .has_module_ids = true});
  object.require_end();
  for (const auto& [name, range] : members) {
    if (std::ranges::find(kNames, name) == std::end(kNames)) other_members_.push_back(name);
  }
  take(file.path(), std::move(saved), std::move(storages));
}

}  // namespace tessera::formats::torch_zip
