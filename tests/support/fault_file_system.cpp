#include "support/fault_file_system.h"

#include <utility>

#include "tessera/base/error.h"

namespace tessera::test {

class FaultFileSystem::FaultReadableFile final : public ReadableFile {
 public:
  FaultReadableFile(const FaultFileSystem& fs, std::unique_ptr<ReadableFile> base)
      : fs_(fs), base_(std::move(base)) {}
  const std::string& path() const override { return base_->path(); }
  std::uint64_t nbytes() const override { return base_->nbytes(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    fs_.count_read(path());
    base_->read_at(offset, out);
    fs_.num_bytes_read_ += out.size();
  }

 private:
  const FaultFileSystem& fs_;
  std::unique_ptr<ReadableFile> base_;
};

class FaultFileSystem::FaultWritableFile final : public WritableFile {
 public:
  FaultWritableFile(FaultFileSystem& fs, std::unique_ptr<WritableFile> base)
      : fs_(fs), base_(std::move(base)) {}
  const std::string& path() const override { return base_->path(); }
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) override {
    try {
      fs_.count_change(path(), "write " + fs_.shown(path()) + " [" + std::to_string(offset) + ", " +
                                   std::to_string(offset + bytes.size()) + ")");
    } catch (const Error&) {
      if (fs_.fault() == Fault::short_write) {
        base_->write_at(offset, bytes.first(bytes.size() / 2));
      }
      throw;
    }
    base_->write_at(offset, bytes);
  }
  void resize(std::uint64_t nbytes) override {
    fs_.count_change(path(), "resize " + fs_.shown(path()) + " " + std::to_string(nbytes));
    base_->resize(nbytes);
  }
  void sync() override { fs_.count_change(path(), "sync " + fs_.shown(path())); }
  void close() override {
    const std::unique_ptr<WritableFile> closing = std::move(base_);
    const std::string path = closing->path();
    fs_.count_change(path, "close " + fs_.shown(path));
    closing->close();
  }

 private:
  FaultFileSystem& fs_;
  std::unique_ptr<WritableFile> base_;
};

FaultFileSystem::FaultFileSystem(FileSystem& base, std::string root)
    : base_(base), root_(std::move(root)) {}

void FaultFileSystem::fail_operation(std::int64_t index, Fault fault) {
  const std::scoped_lock lock(mutex_);
  failing_index_ = index;
  fault_ = fault;
  num_operations_ = 0;
  has_failed_ = false;
  transcript_.clear();
}

std::int64_t FaultFileSystem::num_operations() const {
  const std::scoped_lock lock(mutex_);
  return num_operations_;
}

bool FaultFileSystem::has_failed() const {
  const std::scoped_lock lock(mutex_);
  return has_failed_;
}

FaultFileSystem::Fault FaultFileSystem::fault() const {
  const std::scoped_lock lock(mutex_);
  return fault_;
}

std::string FaultFileSystem::transcript() const {
  const std::scoped_lock lock(mutex_);
  return transcript_;
}

bool FaultFileSystem::is_next_to_fail() const {
  const std::int64_t index = num_operations_++;
  const bool fails =
      failing_index_ >= 0 &&
      (fault_ == Fault::from_then_on ? index >= failing_index_ : index == failing_index_);
  has_failed_ = has_failed_ || fails;
  return fails;
}

void FaultFileSystem::count_read(const std::string& path) const {
  const std::scoped_lock lock(mutex_);
  if (is_next_to_fail()) throw Error(ErrorKind::io, {.path = path}, "injected failure");
}

void FaultFileSystem::count_change(const std::string& path, const std::string& line) {
  const std::scoped_lock lock(mutex_);
  const bool fails = is_next_to_fail();
  transcript_ += line + (fails ? " FAILED\n" : "\n");
  if (fails) throw Error(ErrorKind::io, {.path = path}, "injected failure");
}

std::string FaultFileSystem::shown(const std::string& path) const {
  if (path == root_) return ".";
  return path.starts_with(root_ + "/") ? path.substr(root_.size() + 1) : path;
}

std::optional<FileKind> FaultFileSystem::kind_of(const std::string& path) const {
  count_read(path);
  return base_.kind_of(path);
}

std::unique_ptr<ReadableFile> FaultFileSystem::open(const std::string& path) const {
  count_read(path);
  return std::make_unique<FaultReadableFile>(*this, base_.open(path));
}

std::unique_ptr<WritableFile> FaultFileSystem::create(const std::string& path) {
  count_change(path, "create " + shown(path));
  return std::make_unique<FaultWritableFile>(*this, base_.create(path));
}

std::unique_ptr<WritableFile> FaultFileSystem::open_for_update(const std::string& path) {
  count_change(path, "open_for_update " + shown(path));
  return std::make_unique<FaultWritableFile>(*this, base_.open_for_update(path));
}

void FaultFileSystem::make_directory(const std::string& path) {
  count_change(path, "make_directory " + shown(path));
  base_.make_directory(path);
}

std::vector<std::string> FaultFileSystem::list_directory(const std::string& path) const {
  count_read(path);
  return base_.list_directory(path);
}

std::string FaultFileSystem::resolve_links(const std::string& path) const {
  count_read(path);
  return base_.resolve_links(path);
}

void FaultFileSystem::rename(const std::string& from, const std::string& to) {
  count_change(from, "rename " + shown(from) + " " + shown(to));
  base_.rename(from, to);
}

void FaultFileSystem::exchange(const std::string& a, const std::string& b) {
  count_change(a, "exchange " + shown(a) + " " + shown(b));
  base_.exchange(a, b);
}

void FaultFileSystem::remove_all(const std::string& path) {
  count_change(path, "remove_all " + shown(path));
  base_.remove_all(path);
}

void FaultFileSystem::sync_directory(const std::string& path) {
  count_change(path, "sync_directory " + shown(path));
}

}  // namespace tessera::test
