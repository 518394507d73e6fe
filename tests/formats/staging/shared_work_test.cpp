#include "formats/staging/shared_work.h"

#include <gmock/gmock.h>

#include <string>

#include "base/forwarding_file_system.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

/// The local file system. Before it syncs the folder `vanishing`, another process removes it.
class VanishingFolder final : public ForwardingFileSystem {
 public:
  VanishingFolder() : ForwardingFileSystem(FileSystem::posix()) {}

  std::string vanishing;

  void sync_directory(const std::string& path) override {
    if (path == vanishing) remove_all(path);
    ForwardingFileSystem::sync_directory(path);
  }
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
