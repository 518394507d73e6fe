#include "formats/staging/shared_work.h"

#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <vector>

#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

/// The local file system. Before it syncs the folder `vanishing`, another process removes it.
class VanishingFolder final : public FileSystem {
 public:
  std::string vanishing;

  std::optional<FileKind> kind_of(const std::string& path) const override {
    return base_.kind_of(path);
  }
  std::unique_ptr<ReadableFile> open(const std::string& path) const override {
    return base_.open(path);
  }
  std::unique_ptr<WritableFile> create(const std::string& path) override {
    return base_.create(path);
  }
  std::unique_ptr<WritableFile> open_for_update(const std::string& path) override {
    return base_.open_for_update(path);
  }
  void make_directory(const std::string& path) override { base_.make_directory(path); }
  std::vector<std::string> list_directory(const std::string& path) const override {
    return base_.list_directory(path);
  }
  std::string resolve_links(const std::string& path) const override {
    return base_.resolve_links(path);
  }
  void rename(const std::string& from, const std::string& to) override { base_.rename(from, to); }
  void exchange(const std::string& a, const std::string& b) override { base_.exchange(a, b); }
  void remove_all(const std::string& path) override { base_.remove_all(path); }
  void sync_directory(const std::string& path) override {
    if (path == vanishing) base_.remove_all(path);
    base_.sync_directory(path);
  }

 private:
  FileSystem& base_ = FileSystem::posix();
};

TEST(SharedWorkTest, AnotherWorkerMayFinishAsSoonAsTheLastShareIsComplete) {
  const test::TemporaryDirectory tmp;
  VanishingFolder fs;
  fs.make_directory(tmp / "out.partial");
  SharedWork work(fs, tmp / "out");
  const auto lock = work.lock();
  work.begin({{"plan", "digest"}}, 1, "command");
  work.mark_complete(0);
  EXPECT_TRUE(work.is_complete(0));
  fs.remove_all(work.journal_path(0) + ".done");
  fs.vanishing = work.path();
  EXPECT_NO_THROW(work.mark_complete(0));
  EXPECT_FALSE(fs.kind_of(work.path()));
}

}  // namespace
}  // namespace tessera::formats
