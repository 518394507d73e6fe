#include "ckpt-inspect/standard_input.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <system_error>

#include "cli/sizes.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

class KeptFile final : public ReadableFile {
 public:
  KeptFile(std::span<const std::byte> kept, std::uint64_t nbytes) : kept_(kept), nbytes_(nbytes) {}

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return nbytes_; }

  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    const ByteRange range{offset, offset + out.size()};
    if (offset > nbytes_ || out.size() > nbytes_ - offset) {
      throw Error(ErrorKind::corruption, {.path = path_, .byte_range = range},
                  "the stream ends before, at " + counted(nbytes_, "byte"));
    }
    if (offset > kept_.size() || out.size() > kept_.size() - offset) {
      throw Error::expected(ErrorKind::unsupported, {.path = path_, .byte_range = range},
                            "standard input", "bytes among the first " + exact_size(kept_.size()),
                            "others of " + exact_size(nbytes_), "save it to a file first");
    }
    if (!out.empty()) std::memcpy(out.data(), kept_.data() + offset, out.size());
  }

 private:
  std::string path_ = kStandardInput;
  std::span<const std::byte> kept_;
  std::uint64_t nbytes_;
};

[[noreturn]] void not_there(const std::string& path) {
  throw Error(ErrorKind::not_found, {.path = path}, "nothing lies beside standard input");
}

/// Returns how many bytes were read; 0 at the stream's end.
std::size_t read_some(int descriptor, std::span<std::byte> out) {
  for (;;) {
    const ssize_t count = ::read(descriptor, out.data(), out.size());
    if (count >= 0) return static_cast<std::size_t>(count);
    if (errno == EINTR) continue;
    throw Error(ErrorKind::io, {.path = kStandardInput},
                "read: " + std::generic_category().message(errno));
  }
}

}  // namespace

StandardInput::StandardInput(int descriptor, std::uint64_t max_kept_nbytes) {
  if (::isatty(descriptor) == 1) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = kStandardInput}, "standard input",
                          "a pipe or a file", "a terminal");
  }
  std::vector<std::byte> buffer(std::size_t{1} << 20);
  while (const std::size_t count = read_some(descriptor, buffer)) {
    const auto num_kept =
        static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(count, max_kept_nbytes - kept_.size()));
    kept_.insert(kept_.end(), buffer.begin(), buffer.begin() + num_kept);
    nbytes_ += count;
  }
}

std::optional<FileKind> StandardInput::kind_of(const std::string& path) const {
  return path == kStandardInput ? std::optional(FileKind::regular) : std::nullopt;
}

std::unique_ptr<ReadableFile> StandardInput::open(const std::string& path) const {
  if (path != kStandardInput) not_there(path);
  return std::make_unique<KeptFile>(kept_, nbytes_);
}

std::vector<std::string> StandardInput::list_directory(const std::string& path) const {
  not_there(path);
}

std::string StandardInput::resolve_links(const std::string& path) const {
  if (path != kStandardInput) not_there(path);
  return path;
}

}  // namespace tessera::cli
