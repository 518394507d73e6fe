#include "base/read_only_file_system.h"

#include <gmock/gmock.h>

#include <functional>

#include "support/memory_files.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

TEST(ReadOnlyFileSystemTest, EverythingThatWouldWriteIsRefusedByName) {
  test::MemoryFiles files("/d", {{"a", "bytes"}});
  FileSystem& fs = files;
  const std::function<void()> writes[] = {
      [&] { fs.create("/d/b"); },           [&] { fs.open_for_update("/d/b"); },
      [&] { fs.make_directory("/d/b"); },   [&] { fs.rename("/d/b", "/d/c"); },
      [&] { fs.exchange("/d/b", "/d/a"); }, [&] { fs.remove_all("/d/b"); },
      [&] { fs.sync_directory("/d/b"); },
  };
  for (const auto& write : writes) {
    try {
      write();
      FAIL() << "written";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io);
      EXPECT_STREQ(error.what(), "/d/b: cannot be written: this FileSystem is read-only");
    }
  }
  EXPECT_EQ(files.files().size(), 1U);
}

}  // namespace
}  // namespace tessera
