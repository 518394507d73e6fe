#include "ckpt-inspect/standard_input.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <span>
#include <string_view>
#include <system_error>

#include "base/size_text.h"
#include "object_store/files.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/safetensors.h"

namespace tessera::cli {
namespace {

constexpr std::uint64_t kHeadNbytes = 1024;  // more than any format needs to be recognized
constexpr std::size_t kTextBeginNbytes = 4096;

class KeptFile final : public ReadableFile {
 public:
  KeptFile(std::span<const std::byte> kept, std::uint64_t nbytes) : kept_(kept), nbytes_(nbytes) {}

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return nbytes_; }

  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    const ByteRange range{offset, offset + out.size()};
    if (offset > nbytes_ || out.size() > nbytes_ - offset) {
      throw Error(ErrorKind::corruption, {.path = path_, .byte_range = range},
                  "the stream ended too early, after " + counted(nbytes_, "byte"));
    }
    if (offset > kept_.size() || out.size() > kept_.size() - offset) {
      throw Error::expected(ErrorKind::unsupported, {.path = path_, .byte_range = range},
                            "standard input",
                            "a command that reads only the first " + exact_size(kept_.size()),
                            "a read of later bytes, in a stream of " + exact_size(nbytes_),
                            "save it to a file first");
    }
    if (!out.empty()) std::memcpy(out.data(), kept_.data() + offset, out.size());
  }

 private:
  std::string path_ = kStandardInput;
  std::span<const std::byte> kept_;
  std::uint64_t nbytes_;
};

[[noreturn]] void not_there(const std::string& path) {
  throw Error(ErrorKind::not_found, {.path = path},
              "standard input is one file: a checkpoint of several files needs its path");
}

[[noreturn]] void fail_system(std::string_view action, const std::string& path) {
  throw Error(ErrorKind::io, {.path = path},
              std::string(action) + ": " + std::generic_category().message(errno));
}

/// Reads into `out`, and returns how many bytes were read; 0 at the stream's end. `path` is for
/// messages.
std::size_t read_some(int descriptor, const std::string& path, std::span<std::byte> out) {
  for (;;) {
    const ssize_t count = ::read(descriptor, out.data(), out.size());
    if (count >= 0) return static_cast<std::size_t>(count);
    if (errno != EINTR) fail_system("read", path);
  }
}

using BeginCheck = std::function<void(std::string_view)>;

std::string read_stream(int descriptor, const std::string& path, std::uint64_t max_nbytes,
                        const BeginCheck& check_begin) {
  std::string text;
  bool is_checked = false;
  const auto check = [&] {
    if (!is_checked) check_begin(std::string_view(text).substr(0, kTextBeginNbytes));
    is_checked = true;
  };
  std::vector<std::byte> buffer(std::size_t{64} << 10);
  while (const std::size_t count = read_some(descriptor, path, buffer)) {
    if (count > max_nbytes - text.size()) {
      throw Error::expected(ErrorKind::corruption, {.path = path}, "size",
                            "at most " + std::to_string(max_nbytes) + " bytes", "more");
    }
    text.append(reinterpret_cast<const char*>(buffer.data()), count);
    if (text.size() >= kTextBeginNbytes) check();
  }
  check();
  return text;
}

void refuse_terminal(int descriptor) {
  if (::isatty(descriptor) != 1) return;
  throw Error::expected(ErrorKind::invalid_argument, {.path = kStandardInput}, "standard input",
                        "a pipe or a file", "a terminal");
}

}  // namespace

StandardInput::StandardInput(int descriptor, std::uint64_t max_kept_nbytes)
    : descriptor_(descriptor), max_kept_nbytes_(max_kept_nbytes) {
  refuse_terminal(descriptor);
  read_to(kHeadNbytes);
  const formats::Format format = formats::detect_format(*this, kStandardInput);
  if (read_to(max_kept_nbytes_ + 1) == Stream::ended) return;
  const formats::FormatDriver& driver = formats::driver_of(format);
  const auto laid_out_nbytes = driver.nbytes_from_begin(*open(kStandardInput));
  if (!laid_out_nbytes) {
    throw Error::expected(ErrorKind::unsupported, {.path = kStandardInput}, "standard input",
                          "at most " + exact_size(max_kept_nbytes_) + " of " +
                              std::string(driver.description().as_file) +
                              ", whose index is at its end",
                          "a larger one", "save it to a file first");
  }
  if (read_to(*laid_out_nbytes + 1) == Stream::ended) return;
  throw Error::expected(
      ErrorKind::corruption, {.path = kStandardInput}, "standard input",
      "the end at byte " + std::to_string(*laid_out_nbytes) + ", where the last tensor ends",
      "more bytes", "is the file damaged, or are two files joined?");
}

StandardInput::Stream StandardInput::read_to(std::uint64_t nbytes) {
  std::vector<std::byte> buffer(std::min<std::uint64_t>(nbytes, std::uint64_t{1} << 20));
  while (nbytes_ < nbytes) {
    const std::size_t count = read_some(
        descriptor_, kStandardInput,
        std::span(buffer).first(std::min<std::uint64_t>(buffer.size(), nbytes - nbytes_)));
    if (count == 0) return Stream::ended;
    const auto num_kept = static_cast<std::ptrdiff_t>(
        std::min<std::uint64_t>(count, max_kept_nbytes_ - kept_.size()));
    kept_.insert(kept_.end(), buffer.begin(), buffer.begin() + num_kept);
    nbytes_ += count;
  }
  return Stream::more;
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

std::string read_text(const std::string& path, std::uint64_t max_nbytes,
                      const BeginCheck& check_begin) {
  const FileSystem& fs = object_store::files();
  if (path == kStandardInput) {
    refuse_terminal(STDIN_FILENO);
    return read_stream(STDIN_FILENO, path, max_nbytes, check_begin);
  }
  if (fs.kind_of(path) != FileKind::other) {
    const auto file = fs.open(path);
    std::string begin(std::min<std::uint64_t>(kTextBeginNbytes, file->nbytes()), '\0');
    file->read_at(0, std::as_writable_bytes(std::span(begin)));
    check_begin(begin);
    return read_file(fs, path, max_nbytes);
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(std::fopen(path.c_str(), "rbe"),
                                                             std::fclose);
  if (!pipe) fail_system("open", path);
  return read_stream(::fileno(pipe.get()), path, max_nbytes, check_begin);
}

}  // namespace tessera::cli
