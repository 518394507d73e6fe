#include "formats/open_files.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/live_file.h"
#include "base/lock_while_forking.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

class KeptFile;
using OpenFile = std::shared_ptr<const ReadableFile>;

/// The open files of all readers. If there are too many, the least recently read file is closed
/// first, once no reader uses it any more (shared_ptr). Thread-safe.
class OpenFiles {
 public:
  static OpenFiles& of_process() {
    static auto& files = *new OpenFiles;  // never destroyed: threads may read until the end
    return files;
  }

  OpenFile find(const KeptFile* owner) {
    const std::scoped_lock lock(mutex_);
    const auto place = places_.find(owner);
    if (place == places_.end()) return nullptr;
    newest_first_.splice(newest_first_.begin(), newest_first_, place->second);
    return place->second->second;
  }

  void add(const KeptFile* owner, OpenFile file) {
    const std::scoped_lock lock(mutex_);
    if (places_.contains(owner)) return;  // another thread added it first
    newest_first_.emplace_front(owner, std::move(file));
    places_.emplace(owner, newest_first_.begin());
    while (newest_first_.size() > num_files_kept_open()) {
      places_.erase(newest_first_.back().first);
      newest_first_.pop_back();
    }
  }

  void remove(const KeptFile* owner) {
    const std::scoped_lock lock(mutex_);
    const auto place = places_.find(owner);
    if (place == places_.end()) return;
    newest_first_.erase(place->second);
    places_.erase(place);
  }

 private:
  using List = std::list<std::pair<const KeptFile*, OpenFile>>;

  static std::mutex& mutex_of_process() { return of_process().mutex_; }

  OpenFiles() { tessera::detail::lock_while_forking<mutex_of_process>(); }

  std::mutex mutex_;
  List newest_first_;
  std::unordered_map<const KeptFile*, List::iterator> places_;
};

class KeptFile final : public ReadableFile {
 public:
  KeptFile(const FileSystem& fs, const std::string& path) : fs_(fs), path_(path) {
    OpenFile file = fs_.open(path_);
    nbytes_ = file->nbytes();
    version_ = file->version();
    OpenFiles::of_process().add(this, std::move(file));
  }
  ~KeptFile() override { OpenFiles::of_process().remove(this); }
  KeptFile(const KeptFile&) = delete;
  KeptFile& operator=(const KeptFile&) = delete;

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return nbytes_; }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    OpenFile file = OpenFiles::of_process().find(this);
    if (!file) file = open_again();
    file->read_at(offset, out);
    // The file may have been overwritten in place: torch.save and safetensors do that.
    const auto* const live = dynamic_cast<const tessera::detail::LiveFile*>(file.get());
    if (live == nullptr || live->is_as_opened()) return;
    throw Error::expected(ErrorKind::mismatch, {.path = path_}, "file",
                          "the file as it was when it was opened: " + version_,
                          "one that was written since then", "does another program write it?");
  }

 private:
  OpenFile open_again() const {
    OpenFile file = fs_.open(path_);
    if (file->nbytes() != nbytes_) {
      throw Error::expected(ErrorKind::corruption, {.path = path_}, "file size",
                            std::to_string(nbytes_) + " bytes, as when it was opened",
                            std::to_string(file->nbytes()) + " bytes",
                            "did another program write it meanwhile?");
    }
    if (const std::string version = file->version(); version != version_) {
      throw Error::expected(ErrorKind::mismatch, {.path = path_}, "file",
                            "the file that was opened: " + version_, version,
                            "did another program write it meanwhile?");
    }
    OpenFiles::of_process().add(this, file);
    return file;
  }

  const FileSystem& fs_;
  std::string path_;
  std::uint64_t nbytes_ = 0;
  std::string version_;
};

}  // namespace

std::size_t num_files_kept_open() {
  constexpr rlim_t kLeast = 4;
  constexpr rlim_t kMost = 128;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kLeast;
  return static_cast<std::size_t>(std::clamp(limit.rlim_cur / 8, kLeast, kMost));
}

std::unique_ptr<ReadableFile> open_kept(const FileSystem& fs, const std::string& path) {
  return std::make_unique<KeptFile>(fs, path);
}

}  // namespace tessera::formats
